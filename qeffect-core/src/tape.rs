//! Names of retained work, and the affine references to it.
//!
//! A [`TapeKey`] names a logical action; it never names an address, so it means the same on every
//! rank, device and run. A [`TapeRef`] (from F to I) and a [`WorkRef`] (from I to W) name the physical
//! slot that holds it, at one generation. Neither can be cloned: using one twice is a moved value for
//! rustc, and whoever forges one anyway is refused by the slot pool's generation.

use core::fmt;

use crate::ids::{Microbatch, Stage, Unit};

/// The name of what one action retains.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TapeKey {
    /// Attempt number of the step. It always advances, also when a step is not committed.
    pub step: u64,
    /// The stage that ran.
    pub stage: Stage,
    /// For which microbatch.
    pub microbatch: Microbatch,
    /// The unit inside the stage; 0 for the record of the stage as a whole.
    pub unit: Unit,
    /// Which of several uses of one unit in one action.
    pub invocation: u32,
}

impl TapeKey {
    /// The key of a stage's whole record for one microbatch.
    pub const fn stage(step: u64, stage: Stage, microbatch: Microbatch) -> TapeKey {
        TapeKey { step, stage, microbatch, unit: Unit(0), invocation: 0 }
    }
}

impl fmt::Display for TapeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stage {}, microbatch {}, step {}", self.stage, self.microbatch, self.step)?;
        if self.unit.0 != 0 || self.invocation != 0 {
            write!(f, ", unit {}, use {}", self.unit, self.invocation)?;
        }
        Ok(())
    }
}

macro_rules! reference {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(PartialEq, Eq, Debug)]
        pub struct $name {
            slot: u32,
            generation: u64,
        }

        impl $name {
            pub(crate) const fn new(slot: u32, generation: u64) -> Self {
                Self { slot, generation }
            }

            /// The physical slot.
            pub const fn slot(&self) -> u32 {
                self.slot
            }

            /// The generation of the slot that this refers to.
            pub const fn generation(&self) -> u64 {
                self.generation
            }
        }
    };
}

reference!(
    /// What F retained for I: consumed by exactly one input gradient.
    ///
    /// ```compile_fail,E0382
    /// fn twice(tape: qeffect_core::tape::TapeRef) -> [qeffect_core::tape::TapeRef; 2] {
    ///     [tape, tape]
    /// }
    /// ```
    #[must_use = "a tape is consumed by exactly one input gradient"]
    TapeRef
);
reference!(
    /// What I retained for W: consumed by exactly one weight gradient.
    #[must_use = "retained work is consumed by exactly one weight gradient"]
    WorkRef
);
