//! A token is the only right to move a state: there is no second one.

use qeffect::prelude::*;

fn fork(token: Token<Fwd>) -> (Token<Fwd>, Token<Fwd>) {
    (token.clone(), token)
}

fn main() {}
