//! A hand-written driver that runs two input gradients of one forward.

use qeffect::prelude::*;

fn step(tape: TapeRef, token: Token<Bwd>, input_grad: impl Fn(TapeRef, Token<Bwd>) -> (WorkRef, Token<Bwd>)) {
    let (first, token) = input_grad(tape, token);
    let (second, token) = input_grad(tape, token);
    drop((first, second, token));
}

fn main() {
}
