//! What a rank has done, and when.

use core::time::Duration;

use crate::ids::{Microbatch, Stage};
use crate::plan::Op;

/// One node of a rank's plan, measured.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Span {
    /// What was done.
    pub op: Op,
    /// For which stage; 0 where there is none.
    pub stage: Stage,
    /// For which microbatch; 0 where there is none.
    pub microbatch: Microbatch,
    /// Start, since the start of the step on all ranks.
    pub start: Duration,
    /// End. That of a wait includes the copy of the message to its place.
    pub end: Duration,
}
