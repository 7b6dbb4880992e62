//! The proc macro behind `schedule!`: the checker of `qeffect-core`, run by the compiler.
//!
//! Users reach it through a `macro_rules!` wrapper named `schedule!`, which hands over its own
//! `$crate`, so that the expansion finds its names whatever the user calls that crate.

mod effect;
mod emit;
mod expand;
mod faults;
mod names;
mod options;
mod params;
mod report;
mod retained;
mod shadow;
mod stage;
mod tokens;

use proc_macro::TokenStream;
use proc_macro2::Span;

/// Expands `schedule!`. The wrapper passes `$crate` in front of the program.
#[doc(hidden)]
#[proc_macro]
pub fn __schedule(input: TokenStream) -> TokenStream {
    let input = proc_macro2::TokenStream::from(input);
    caught("schedule!", || expand::expand(input), proc_macro2::TokenStream::new())
}

/// Makes a stage of a function: F, I and W from its forward body.
///
/// The body is straight-line code over ops and other stages: `let` with shadowing, nested calls, tuples, `if` on the
/// configuration, `for layer in &w.layers` with an activation that is read and assigned. Parameters of type `Act` are
/// activations, the others parameters by reference or plain configuration. The function stays what it is; beside it
/// stands a type of its name that implements `Op`.
///
/// On an `impl` of `Op`, `PureOp` or `Stage`: checks F, I and W that are written by hand.
///
/// Option: `crate = path`, where the runtime is found; the default is `::qeffect::runtime`.
#[proc_macro_attribute]
pub fn stage(options: TokenStream, item: TokenStream) -> TokenStream {
    attribute("#[stage]", options, item, stage::expand)
}

/// Says which hidden state an op moves: `#[effect(read(weight), write(input, grad_output))]` on an `impl Op`.
///
/// Cells are `input`, `weight` and `grad_output`; `read` leaves them, `write` moves them in order, `fold` in any order.
/// F and I are handed a token for it and give it back; W is given none.
#[proc_macro_attribute]
pub fn effect(options: TokenStream, item: TokenStream) -> TokenStream {
    attribute("#[effect]", options, item, effect::expand)
}

/// Makes a struct retained work: consumed exactly once, with a layout from its fields.
///
/// It can be neither cloned nor copied, whoever tries to implement that; it holds no borrow.
#[proc_macro_attribute]
pub fn retained(options: TokenStream, item: TokenStream) -> TokenStream {
    attribute("#[retained]", options, item, retained::expand)
}

/// The parameters of a struct: every field is one, or a struct of them, under its own name.
///
/// `#[params(..)]` on a field: `config` (no parameter), `name = ".."`, `init = Init::..`, `precision = activation` (not
/// quantised), `decay = false`, `views(q, k, v)` (names of equal parts of its rows) or `views(q = self.heads, k = self.kv_heads)`
/// (of parts with these shares).
#[proc_macro_derive(Params, attributes(params))]
pub fn params(item: TokenStream) -> TokenStream {
    let item = proc_macro2::TokenStream::from(item);
    caught("derive(Params)", || params::expand(item), proc_macro2::TokenStream::new())
}

fn attribute(
    name: &str,
    options: TokenStream,
    item: TokenStream,
    expand: impl FnOnce(proc_macro2::TokenStream, proc_macro2::TokenStream) -> proc_macro2::TokenStream,
) -> TokenStream {
    let (options, item) = (proc_macro2::TokenStream::from(options), proc_macro2::TokenStream::from(item));
    let fallback = item.clone();
    caught(name, || expand(options, item), fallback)
}

/// A panic of ours is a message, beside what stands there without us.
fn caught(
    name: &str,
    expand: impl FnOnce() -> proc_macro2::TokenStream,
    fallback: proc_macro2::TokenStream,
) -> TokenStream {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(expand)) {
        Ok(output) => output.into(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            let message = format!(
                "`{name}` failed here; this is a bug in QEffect, not in your code\n\
                 note: {text}\n\
                 help: please report it with this item: https://github.com/qeffect/qeffect/issues"
            );
            let error = report::compile_error((Span::call_site(), Span::call_site()), &message);
            quote::quote!(#fallback #error).into()
        }
    }
}
