//! The schedule language: a small program that says which actions each rank runs, in which order.
//!
//! ```
//! let text = "
//!     gpipe<P, M>;
//!     ranks: P; microbatches: M; stages: P; place: |s| s;
//!     rank |r| {
//!         for m in 0..M { F(r, m); }
//!         for m in 0..M { B(r, m); }
//!     }
//! ";
//! let (program, _map) = qeffect_core::lang::read("gpipe.sched", text);
//! let schedule = qeffect_core::lang::interpret(&program?, &[2, 3])?;
//! assert_eq!(schedule.items.len(), 2 * 3 * 2);
//! # Ok::<(), qeffect_core::diag::Report>(())
//! ```

pub mod ast;
mod draft;
#[doc(hidden)]
pub mod embed;
mod interp;
mod konst;
mod lex;
mod nearest;
mod parse;
mod print;
mod resolve;
pub mod token;

pub use ast::Program;
pub use interp::{MAX_ITEMS, MAX_MICROBATCHES, MAX_RANKS, MAX_STAGES, MAX_STEPS, annotate, environment, interpret};
pub use konst::constant;
pub use lex::lex;
pub(crate) use nearest::nearest;
pub use parse::{Parsed, Signature, parse};
pub use print::print;

use crate::diag::Report;
use crate::source::SourceMap;

/// Reads a program from text; the map draws reports about it.
pub fn read(file: impl Into<String>, text: &str) -> (Result<Program, Report>, SourceMap) {
    let (tokens, map) = lex(file, text);
    (parse(&tokens).into_result(), map)
}

#[cfg(test)]
mod tests;
