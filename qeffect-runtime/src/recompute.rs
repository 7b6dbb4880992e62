//! Recomputation: F leaves its input and the scales that it used, and R makes the tape from them before I.
//!
//! R runs the same forward with those scales, stages no amax and rolls no cell, so its tape has the bytes that F's had: a
//! run with R has the bits of the run without.

use std::collections::BTreeSet;

use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::plan::{Op, Plan};
use qeffect_core::token::{Fwd, Token};

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::{Cells, Cx};
use crate::error::{Error, Result};
use crate::pool::Class;
use crate::retained::{Layout, Retained};
use crate::shard::Shard;
use crate::stage::{Role, Stage};
use crate::state::Bank;

/// The actions whose F is run again.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Recomputed(BTreeSet<(StageId, Microbatch)>);

impl Recomputed {
    /// Those of a plan, on all ranks.
    pub fn of(plan: &Plan) -> Recomputed {
        let again = plan.nodes.iter().filter(|node| node.op == Op::Recompute);
        Recomputed(again.map(|node| (node.stage, node.microbatch)).collect())
    }

    /// Whether F of this action leaves a seed.
    pub fn contains(&self, stage: StageId, microbatch: Microbatch) -> bool {
        self.0.contains(&(stage, microbatch))
    }
}

/// What F leaves of a stage.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a tape is consumed by exactly one input gradient"]
pub enum StageTape<T> {
    /// All that I needs.
    Whole(T),
    /// All that R needs to make that.
    Seed(Seed),
}

/// The input of F, and the scales of the stage's input cells at that time.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "the input of a stage is consumed by its recomputation"]
pub struct Seed {
    x: Vec<Kept>,
    scales: Option<Kept>,
}

impl<T> StageTape<T> {
    /// The tape, for I.
    ///
    /// # Errors
    ///
    /// If it was not recomputed.
    pub fn whole(self) -> Result<T> {
        match self {
            StageTape::Whole(tape) => Ok(tape),
            StageTape::Seed(_) => Err(misplaced("an input gradient finds a tape that was not recomputed")),
        }
    }

    /// What R starts from.
    ///
    /// # Errors
    ///
    /// If the tape is whole.
    pub fn seed(self) -> Result<Seed> {
        match self {
            StageTape::Seed(seed) => Ok(seed),
            StageTape::Whole(_) => Err(misplaced("a recomputation finds a whole tape")),
        }
    }
}

fn misplaced(message: &str) -> Error {
    Error::Contract { code: Code::RecomputeMisplaced, message: message.into() }
}

impl<T: Retained> Retained for StageTape<T> {
    fn layout(&self, layout: &mut Layout) {
        match self {
            StageTape::Whole(tape) => tape.layout(layout),
            StageTape::Seed(seed) => seed.layout(layout),
        }
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        match self {
            StageTape::Whole(tape) => tape.release(cx),
            StageTape::Seed(seed) => seed.release(cx),
        }
    }
}

impl Retained for Seed {
    fn layout(&self, layout: &mut Layout) {
        layout.part("x", &self.x);
        layout.part("scales", &self.scales);
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        self.x.release(cx)?;
        self.scales.release(cx)
    }
}

impl<S: Stage> Shard<S> {
    /// F of an action that will be recomputed: as [`Shard::forward`], and what it leaves is its input.
    pub fn forward_for_recompute(
        &mut self,
        stage: StageId,
        microbatch: Microbatch,
        x: &[Act],
        token: Token<Fwd>,
    ) -> Result<(Vec<Act>, Seed, Token<Fwd>)> {
        let id = stage;
        let (stage, mut cx) = self.context(stage, microbatch, true)?;
        cx.seeds = true;
        let kept = x.iter().map(|x| cx.keep(*x)).collect::<Result<_>>()?;
        // F rolls the cells at its end.
        let scales = match cx.state.bank(Role::Input).map(|bank: &Bank| (bank.scales, bank.len())) {
            Some((scales, cells)) => {
                let copy = cx.lease_as(Dtype::F32, 1, cells)?;
                cx.issue(Cmd::Copy { src: scales, dst: copy.buf })?;
                Some(Kept::new(copy))
            }
            None => None,
        };
        let result = stage.forward(&mut cx, x, token).and_then(|(y, tape, token)| {
            tape.release(&mut cx)?;
            Ok((y, Seed { x: kept, scales }, token))
        });
        let (y, seed, token) = cx.close(result)?;
        self.mark(&seed, id, Class::Input);
        Ok((y, seed, token))
    }

    /// R: the tape of that F. The output is made again, and given up.
    pub fn recompute(&mut self, id: StageId, microbatch: Microbatch, seed: Seed) -> Result<S::Tape> {
        let (stage, mut cx) = self.context(id, microbatch, true)?;
        let x: Vec<Act> = seed.x.iter().map(Kept::act).collect();
        cx.cells = Cells::Again(seed.scales.as_ref().map(Kept::act));
        // It rolls nothing: the right to do so stays with the ledger, and this token says nothing about any state.
        let result = stage.forward(&mut cx, &x, Token::first(id)).and_then(|(y, tape, _)| {
            y.into_iter().try_for_each(|y| cx.free(y))?;
            seed.release(&mut cx)?;
            Ok(tape)
        });
        let tape = cx.close(result)?;
        self.mark(&tape, id, Class::Tape);
        Ok(tape)
    }
}
