//! Typed indices: a rank is never mistaken for a stage.

use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub struct $name(pub u32);

        impl $name {
            /// The index as `usize`, for slices.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A position in the pipeline group: one thread or process.
    Rank
);
id!(
    /// A contiguous part of the model. A rank holds V of them (its virtual stages).
    Stage
);
id!(
    /// One of the M slices of a step's batch.
    Microbatch
);
id!(
    /// A unit inside a stage: a sub-layer block such as attention or MLP.
    Unit
);
