//! Actions by value, for the shadow program of `schedule!`.
//!
//! The expansion of an accepted schedule holds functions that are never called and that mirror it
//! action by action with these templates: tapes, works and tokens move from one to the next. What
//! the checker proved by counting, rustc's borrow checker then confirms by its own means: a tape,
//! a work or a token that is used twice is a moved value.

pub use crate::tape::{TapeRef, WorkRef};
pub use crate::token::{Bwd, Fwd, Token};

/// Why these functions have no bodies.
#[cold]
fn never() -> ! {
    unreachable!("a shadow program is checked by the compiler and never run")
}

/// F: rolls the forward state, leaves a tape.
pub fn forward(_: Token<Fwd>) -> (TapeRef, Token<Fwd>) {
    never()
}

/// I: takes the tape, rolls the backward state, leaves work.
pub fn input_grad(_: TapeRef, _: Token<Bwd>) -> (WorkRef, Token<Bwd>) {
    never()
}

/// W: takes the work. No token in reach.
pub fn weight_grad(_: WorkRef) {
    never()
}

/// B: I then W.
pub fn full_backward(_: TapeRef, _: Token<Bwd>) -> Token<Bwd> {
    never()
}

/// R: remakes the tape from what F kept; rolls nothing.
pub fn recompute(_: TapeRef) -> TapeRef {
    never()
}

/// The end of a step: its keeper has the token back.
pub fn keep<D>(_: Token<D>) {
    never()
}
