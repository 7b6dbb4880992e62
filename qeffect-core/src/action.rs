//! Actions: what a rank does, in order.
//!
//! Text form as in PyTorch: `<stage><letter><microbatch>`, e.g. `2F7`. `F` is the forward, `I` the
//! input gradient (dI), `W` the weight gradient (dW), `B` the full backward (I then W), `R` a
//! recomputed forward. Other projects use `B` for dI alone.

use core::fmt;

use crate::ids::{Microbatch, Stage};
use crate::origin::Origin;

/// What an [`Item`] of a schedule says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Kind {
    /// `F(s, m)`: forward. Leaves a tape, rolls forward scaling state.
    Forward,
    /// `I(s, m)`: input gradient. Takes the tape, leaves work, rolls backward scaling state.
    InputGrad,
    /// `W(s, m)`: weight gradient. Takes the work, touches no scaling state.
    WeightGrad,
    /// `B(s, m)`: input and weight gradient as one action.
    FullBackward,
    /// `R(s, m)`: recompute F for the I that follows; rolls nothing.
    Recompute,
    /// `W(s, [m0, m1, ..])`: a further member of the coalesced weight gradient before it.
    WeightGradJoin,
    /// `refresh(s)`: make the weight cache of stage `s` current.
    Refresh,
    /// `reduce(s)`: finish the gradients of stage `s` (vector gradients, data parallelism).
    Reduce,
    /// `commit`: optimizer step of this rank.
    Commit,
    /// `overlap {`: the branches that follow may run at once.
    OverlapBegin,
    /// Start of a branch of the enclosing overlap.
    OverlapBranch,
    /// `}` of an overlap.
    OverlapEnd,
}

impl Kind {
    /// The letter of the text form; `None` for everything but F, I, W, B and R.
    pub const fn letter(self) -> Option<char> {
        match self {
            Kind::Forward => Some('F'),
            Kind::InputGrad => Some('I'),
            Kind::WeightGrad | Kind::WeightGradJoin => Some('W'),
            Kind::FullBackward => Some('B'),
            Kind::Recompute => Some('R'),
            _ => None,
        }
    }

    /// Whether this item computes on a microbatch.
    pub const fn is_compute(self) -> bool {
        self.letter().is_some()
    }
}

/// One entry of a rank's program: 16 bytes, `Copy`, usable in a `static`.
///
/// `microbatch` is 0 where the kind has none, `stage` too for `Commit` and overlap markers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Item {
    /// What is done.
    pub kind: Kind,
    /// On which stage.
    pub stage: Stage,
    /// For which microbatch.
    pub microbatch: Microbatch,
    /// Where it was written.
    pub origin: Origin,
}

impl Item {
    /// An item from plain numbers, for readers and expansions.
    pub const fn new(kind: Kind, stage: u32, microbatch: u32, origin: u32) -> Item {
        Item { kind, stage: Stage(stage), microbatch: Microbatch(microbatch), origin: Origin(origin) }
    }
}

impl fmt::Display for Item {
    /// The name used in messages: as it is written in `schedule!`, with values: `F(1, 3)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Refresh => write!(f, "refresh({})", self.stage),
            Kind::Reduce => write!(f, "reduce({})", self.stage),
            Kind::Commit => f.write_str("commit"),
            Kind::OverlapBegin | Kind::OverlapBranch | Kind::OverlapEnd => f.write_str("overlap"),
            kind => write!(f, "{}({}, {})", kind.letter().unwrap_or('?'), self.stage, self.microbatch),
        }
    }
}
