//! What the ledger says when it refuses.

use core::fmt;

use crate::code::Code;
use crate::ids::{Microbatch, Rank, Stage};
use crate::plan::{Node, Op};

/// An action, named as in `schedule!`: `F(1, 3)`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// A node of a plan, or an action like it.
    Node {
        /// What is done.
        op: Op,
        /// On which stage.
        stage: Stage,
        /// For which microbatch.
        microbatch: Microbatch,
    },
    /// The start of a training step.
    Step,
    /// An evaluation pass.
    Evaluation,
    /// Saving or reading of the whole state.
    Checkpoint,
    /// Reading of a weight version.
    Epoch,
}

impl Action {
    pub(super) const fn of(op: Op, stage: Stage, microbatch: Microbatch) -> Action {
        Action::Node { op, stage, microbatch }
    }
}

impl From<&Node> for Action {
    fn from(node: &Node) -> Action {
        Action::of(node.op, node.stage, node.microbatch)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Action::Node { op, stage, microbatch } = self else {
            return f.write_str(match self {
                Action::Step => "step",
                Action::Evaluation => "evaluation",
                Action::Epoch => "e_W",
                _ => "checkpoint",
            });
        };
        match op {
            Op::Forward => write!(f, "F({stage}, {microbatch})"),
            Op::InputGrad => write!(f, "I({stage}, {microbatch})"),
            Op::WeightGrad | Op::WeightGradJoin => write!(f, "W({stage}, {microbatch})"),
            Op::FullBackward => write!(f, "B({stage}, {microbatch})"),
            Op::Recompute => write!(f, "R({stage}, {microbatch})"),
            Op::SendForward => write!(f, "the send after F({stage}, {microbatch})"),
            Op::SendBackward => write!(f, "the send after I({stage}, {microbatch})"),
            Op::PostForward => write!(f, "the receive for F({stage}, {microbatch})"),
            Op::PostBackward => write!(f, "the receive for I({stage}, {microbatch})"),
            Op::WaitForward => write!(f, "the wait before F({stage}, {microbatch})"),
            Op::WaitBackward => write!(f, "the wait before I({stage}, {microbatch})"),
            Op::Refresh => write!(f, "refresh({stage})"),
            Op::Reduce => write!(f, "reduce({stage})"),
            Op::Agree => f.write_str("agree"),
            Op::Commit => f.write_str("commit"),
            Op::OverlapBegin | Op::OverlapBranch | Op::OverlapEnd => f.write_str("overlap"),
            Op::GroupBegin | Op::GroupEnd => f.write_str("group"),
        }
    }
}

/// A refusal: nothing that the action would have changed has changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LedgerError {
    /// Its code.
    pub code: Code,
    /// The rank.
    pub rank: Rank,
    /// Attempt number of the step.
    pub step: u64,
    /// The action that was refused.
    pub action: Action,
    /// What it did, continuing its name: `consumes a tape that is already consumed`.
    pub fault: String,
    /// What the contract requires.
    pub expected: String,
    /// What was found.
    pub found: String,
}

impl fmt::Display for LedgerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} [{}]", self.action, self.fault, self.code)?;
        if !self.expected.is_empty() || !self.found.is_empty() {
            write!(f, "\n  note: expected {}, found {}", self.expected, self.found)?;
        }
        write!(f, "\n  note: on rank {}, in step {}", self.rank, self.step)
    }
}

impl std::error::Error for LedgerError {}
