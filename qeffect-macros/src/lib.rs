//! The proc macro behind `schedule!`: the checker of `qeffect-core`, run by the compiler.
//!
//! Users reach it through a `macro_rules!` wrapper named `schedule!`, which hands over its own
//! `$crate`, so that the expansion finds its names whatever the user calls that crate.

mod emit;
mod expand;
mod names;
mod report;
mod shadow;
mod tokens;

use proc_macro::TokenStream;
use proc_macro2::Span;

/// Expands `schedule!`. The wrapper passes `$crate` in front of the program.
#[doc(hidden)]
#[proc_macro]
pub fn __schedule(input: TokenStream) -> TokenStream {
    let input = proc_macro2::TokenStream::from(input);
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| expand::expand(input))) {
        Ok(output) => output.into(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            let message = format!(
                "`schedule!` failed on this schedule; this is a bug in QEffect, not in your code\n\
                 note: {text}\n\
                 help: please report it with the schedule's text: https://github.com/qeffect/qeffect/issues"
            );
            report::compile_error((Span::call_site(), Span::call_site()), &message).into()
        }
    }
}
