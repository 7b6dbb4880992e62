//! Messages between ranks.
//!
//! Every logical edge (one boundary between stages, one direction) is a FIFO of its own, so two kinds of message
//! never share an order. A message carries a [`Tag`]; the receiver says which tag it expects, and a wrong one is an
//! error before any byte is used. [`local`] connects threads of one process.

pub mod local;

/// The locks of [`local`]. Where every interleaving is tried they are others.
mod sync {
    pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;

use core::fmt;

use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::plan::Direction;

/// The name of a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag {
    /// Attempt number of the step.
    pub step: u64,
    /// Which way it travels.
    pub direction: Direction,
    /// The stage that made it.
    pub from: Stage,
    /// For which microbatch.
    pub microbatch: Microbatch,
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = match self.direction {
            Direction::Forward => 'F',
            Direction::Backward => 'I',
        };
        write!(f, "the result of {action}({}, {}) of step {}", self.from, self.microbatch, self.step)
    }
}

/// What can go wrong between ranks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The two ends of an edge disagree about the next message.
    #[error("rank {rank} expects {expected}, and the edge brings {found} [{}]", Code::FifoOrder)]
    Order {
        /// The receiver.
        rank: Rank,
        /// What it posted, or waits for.
        expected: Tag,
        /// What was sent, or lies first.
        found: Tag,
    },
    /// A wait for which no receive was posted.
    #[error("rank {rank} waits for {tag} without a posted receive [{}]", Code::MessageEarly)]
    NotPosted {
        /// The receiver.
        rank: Rank,
        /// What it waits for.
        tag: Tag,
    },
    /// The other end has ended its pass without sending, or nobody took a message.
    #[error("rank {rank}: {tag} {fate} [{}]", Code::MessageMissing)]
    Missing {
        /// The receiver.
        rank: Rank,
        /// The message.
        tag: Tag,
        /// What became of it.
        fate: &'static str,
    },
    /// A rank ended its pass without taking part in an exchange of all ranks.
    #[error("rank {rank} waits for all ranks, and rank {absent} has ended its pass [{}]", Code::MessageMissing)]
    Absent {
        /// Who waits.
        rank: Rank,
        /// Who is missing.
        absent: Rank,
    },
    /// Every rank that has not ended waits for another one.
    #[error("no rank can go on [{}]\n{}", Code::Deadlock, waiting.join("\n"))]
    Deadlock {
        /// What each rank waits for.
        waiting: Vec<String>,
    },
    /// A message has another size than its edge carries.
    #[error("{tag} has {found} bytes, its edge carries {expected}")]
    Size {
        /// The message.
        tag: Tag,
        /// Bytes of every message of the edge.
        expected: usize,
        /// Bytes that were given.
        found: usize,
    },
    /// An edge that does not connect two ranks.
    #[error("edge {edge} is not between two ranks [{}]", Code::MessageUnknown)]
    NoEdge {
        /// The edge.
        edge: u32,
    },
    /// Another rank failed; its own error says why.
    #[error("rank {rank} failed: {reason}")]
    Peer {
        /// Who failed.
        rank: Rank,
        /// In short, why.
        reason: String,
    },
    /// Nothing came for a very long time, and some rank still computes.
    #[error("rank {rank} has waited {seconds} s for {what}\n{}", doing.join("\n"))]
    Timeout {
        /// Who waits.
        rank: Rank,
        /// How long.
        seconds: u64,
        /// For what.
        what: String,
        /// What each rank does.
        doing: Vec<String>,
    },
}

impl TransportError {
    /// Its code, if it is a fault of the plan.
    pub const fn code(&self) -> Option<Code> {
        match self {
            TransportError::Order { .. } => Some(Code::FifoOrder),
            TransportError::NotPosted { .. } => Some(Code::MessageEarly),
            TransportError::Missing { .. } | TransportError::Absent { .. } => Some(Code::MessageMissing),
            TransportError::Deadlock { .. } => Some(Code::Deadlock),
            TransportError::NoEdge { .. } => Some(Code::MessageUnknown),
            _ => None,
        }
    }

    /// Whether this only echoes an error of another rank.
    pub const fn is_echo(&self) -> bool {
        matches!(self, TransportError::Peer { .. })
    }
}
