//! Where products in FP8 may be summed in fewer bits.
//!
//! Tensor cores can keep the sums of FP8 products in accumulators of their own, which hold fewer bits than an f32: faster,
//! and less exact. Transformer Engine does so in F and not in the gradients, which is the default here. The choice is part
//! of what decides the bits of a run on a GPU; on cpu every sum is that of an f32.

use core::fmt;
use core::str::FromStr;

/// Which FP8 products may take the faster sums. Those of coalesced gradients never do: with block scales there are none.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum FastAccumulation {
    /// None.
    None,
    /// Those of F.
    #[default]
    Forward,
    /// Those of F, I and W.
    All,
}

impl FastAccumulation {
    /// All of them.
    pub const ALL: [FastAccumulation; 3] = [FastAccumulation::None, FastAccumulation::Forward, FastAccumulation::All];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            FastAccumulation::None => "none",
            FastAccumulation::Forward => "forward",
            FastAccumulation::All => "all",
        }
    }

    /// Whether products of F may.
    pub const fn in_forward(self) -> bool {
        !matches!(self, FastAccumulation::None)
    }

    /// Whether products of I and W may.
    pub const fn in_gradients(self) -> bool {
        matches!(self, FastAccumulation::All)
    }
}

impl fmt::Display for FastAccumulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for FastAccumulation {
    type Err = String;

    fn from_str(text: &str) -> Result<FastAccumulation, String> {
        let found = FastAccumulation::ALL.into_iter().find(|fast| fast.name() == text);
        found.ok_or_else(|| format!("there is no fast accumulation `{text}`; one of: none, forward, all"))
    }
}
