//! The lowered IR: what each rank does once communication, slots and the bookkeeping of a step are
//! explicit.
//!
//! A receive is two nodes. `Post` says, in sender order, that the next free receive buffer of the
//! edge takes the message; `Wait` stands on the compute stream right before the consumer.

use std::borrow::Cow;

use crate::ids::{Microbatch, Rank, Stage};
use crate::origin::Origin;

/// What a [`Node`] does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Op {
    /// F. `slot` is the leased slot.
    Forward,
    /// I.
    InputGrad,
    /// W.
    WeightGrad,
    /// Further member of the coalesced W before it.
    WeightGradJoin,
    /// I then W as one action.
    FullBackward,
    /// R.
    Recompute,
    /// Send the output of F to the next stage.
    SendForward,
    /// Take the output of the previous stage's F into a receive buffer.
    PostForward,
    /// Wait for it.
    WaitForward,
    /// Send dX of I to the previous stage.
    SendBackward,
    /// Take the next stage's dX into a receive buffer.
    PostBackward,
    /// Wait for it.
    WaitBackward,
    /// Make the weight cache of a stage current.
    Refresh,
    /// Finish a stage's gradients.
    Reduce,
    /// Gather norm and finite flag over all ranks.
    Agree,
    /// Optimizer step.
    Commit,
    /// Overlap markers, as in the schedule.
    OverlapBegin,
    /// Start of a branch.
    OverlapBranch,
    /// End of an overlap.
    OverlapEnd,
    /// Sends and receives up to the end of the group go on together: one blocking action on
    /// transport `rendezvous`, without meaning on the others.
    GroupBegin,
    /// End of a group.
    GroupEnd,
}

/// No slot or edge.
pub const NONE: u32 = u32::MAX;

/// One step of a rank's lowered program: 20 bytes, `Copy`, usable in a `static`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Node {
    /// What is done.
    pub op: Op,
    /// The stage at whose end this happens: a `PostForward` of stage 1 receives what stage 0 sent.
    pub stage: Stage,
    /// For which microbatch.
    pub microbatch: Microbatch,
    /// Compute nodes: the leased slot of (stage, microbatch). Communication: index of the edge.
    pub slot: u32,
    /// The action that this belongs to.
    pub origin: Origin,
}

impl Node {
    /// A node from plain numbers, for expansions.
    pub const fn new(op: Op, stage: u32, microbatch: u32, slot: u32, origin: u32) -> Node {
        Node { op, stage: Stage(stage), microbatch: Microbatch(microbatch), slot, origin: Origin(origin) }
    }
}

/// Which way messages of an edge travel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Direction {
    /// Activations, from stage s to s + 1.
    Forward,
    /// Gradients, from stage s + 1 to s.
    Backward,
}

/// A logical edge: one boundary between stages, one direction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Edge {
    /// Direction of the messages.
    pub direction: Direction,
    /// The stage that sends.
    pub from: Stage,
    /// The stage that receives.
    pub to: Stage,
    /// Rank of `from`.
    pub from_rank: Rank,
    /// Rank of `to`; equal to `from_rank`: handed over in place, without communication nodes.
    pub to_rank: Rank,
    /// Receive buffers: the peak of unconsumed messages at unit costs with unbounded buffers.
    pub buffers: u32,
}

/// What one rank needs, counted over the plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Peaks {
    /// Live microbatches over all stages of the rank, F start to W end: also its number of slots.
    pub slots: u32,
    /// Live tapes, F start to I end; where F is recomputed, from the start of R on.
    pub tapes: u32,
    /// Live works, I start to W end.
    pub works: u32,
}

/// A lowered schedule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// All nodes, rank after rank.
    pub nodes: Cow<'static, [Node]>,
    /// Start of each rank's nodes, and their total.
    pub starts: Cow<'static, [u32]>,
    /// All edges: forward ones by sending stage, then backward ones by sending stage.
    pub edges: Cow<'static, [Edge]>,
    /// Peaks per rank. Slots are numbered per rank, shared by its stages.
    pub peaks: Cow<'static, [Peaks]>,
}

impl Plan {
    /// The nodes of one rank, in program order.
    pub fn rank(&self, rank: Rank) -> &[Node] {
        &self.nodes[self.starts[rank.index()] as usize..self.starts[rank.index() + 1] as usize]
    }
}

/// A schedule that passed every check, with its plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checked {
    /// The schedule.
    pub schedule: crate::schedule::Schedule,
    /// Its lowering.
    pub plan: Plan,
    /// Whether some stage runs its F's or its I's out of microbatch order: then delayed scaling
    /// with `update = microbatch` gives other numbers than the ascending order.
    pub order_dependent: bool,
    /// Contracts that do not hold for an instance built at run time.
    pub notes: Cow<'static, [Cow<'static, str>]>,
    /// Whether the compiler proved it, or a check at start.
    pub proved: Proved,
}

/// Who checked a schedule.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Proved {
    /// `schedule!`, when the program was compiled.
    AtCompileTime,
    /// The same checker, when the program was started.
    AtStart,
}
