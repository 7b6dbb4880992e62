//! Tokens: the order of hidden-state transitions, as affine values.
//!
//! Each stage owns two state cells, one rolled by F and one rolled by I; [`Token<Fwd>`] and
//! [`Token<Bwd>`] are their right to be rolled. An action that rolls takes the token by value and
//! returns it; W is never given one, so it cannot touch scaling state. Tokens are not `Clone`.

use core::marker::PhantomData;

use crate::ids::Stage;

/// Marks the forward state cell of a stage (inputs and weights; rolled by F).
#[derive(Debug)]
pub enum Fwd {}
/// Marks the backward state cell of a stage (output gradients; rolled by I).
#[derive(Debug)]
pub enum Bwd {}

/// The right to roll one state cell of one stage, and the count of rolls so far.
#[must_use = "a token is the only right to move this state: return it to its keeper"]
#[derive(Debug, PartialEq, Eq)]
pub struct Token<D> {
    stage: Stage,
    rolls: u64,
    direction: PhantomData<D>,
}

impl<D> Token<D> {
    /// The first token of a cell. Whoever makes two for one cell breaks the contract; the ledger
    /// makes exactly one per stage and direction.
    pub const fn first(stage: Stage) -> Self {
        Token { stage, rolls: 0, direction: PhantomData }
    }

    /// The token of a cell that was put back to an earlier state. Only for the keeper that lost
    /// the token to a failed action.
    pub(crate) const fn restored(stage: Stage, rolls: u64) -> Self {
        Token { stage, rolls, direction: PhantomData }
    }

    /// The stage whose state this token moves.
    pub const fn stage(&self) -> Stage {
        self.stage
    }

    /// How often the state was rolled.
    pub const fn rolls(&self) -> u64 {
        self.rolls
    }

    /// The token after one roll.
    pub fn rolled(self) -> Self {
        Token { rolls: self.rolls + 1, ..self }
    }
}
