//! Work that is dropped on the floor is a weight gradient that never runs.

#![deny(unused_must_use)]

use qeffect::prelude::*;

fn step(tape: TapeRef, input_grad: impl Fn(TapeRef) -> WorkRef) {
    input_grad(tape);
}

fn main() {}
