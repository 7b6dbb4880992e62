//! GPU architectures, by compute capability.

use core::fmt;

/// The architecture of a GPU that machine code is made for.
///
/// From compute capability 9.0 on, code is made for that very generation (`sm_90a`), whose matrix instructions have no
/// successor-compatible form, unless it is asked to be [portable](Arch::portable).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Arch {
    major: u32,
    minor: u32,
    /// Without what only this generation has.
    portable: bool,
}

impl Arch {
    /// Ada Lovelace: the first with FP8 conversions and matrix products.
    pub const SM_89: Arch = Arch { major: 8, minor: 9, portable: false };
    /// Hopper.
    pub const SM_90A: Arch = Arch { major: 9, minor: 0, portable: false };
    /// Blackwell, data centre.
    pub const SM_100A: Arch = Arch { major: 10, minor: 0, portable: false };
    /// The architectures that every kernel is compiled for in tests.
    pub const TESTED: [Arch; 3] = [Arch::SM_89, Arch::SM_90A, Arch::SM_100A];

    /// The architecture of a compute capability, if it has FP8.
    pub const fn of(major: u32, minor: u32) -> Option<Arch> {
        if major > 8 || major == 8 && minor >= 9 { Some(Arch { major, minor, portable: false }) } else { None }
    }

    /// The same without instructions that only this generation has: what later ones run, too. Slower, and the way to try on one
    /// GPU what others do.
    pub const fn portable(self) -> Arch {
        Arch { portable: true, ..self }
    }

    /// Major and minor number of the compute capability.
    pub const fn capability(self) -> (u32, u32) {
        (self.major, self.minor)
    }

    /// Whether block scales can be products' operands through cuBLASLt (Hopper only).
    pub const fn has_block_scaled_products(self) -> bool {
        self.major == 9
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.major >= 9 && !self.portable { "a" } else { "" };
        write!(f, "sm_{}{}{suffix}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_compiler() {
        assert_eq!(Arch::TESTED.map(|arch| arch.to_string()), ["sm_89", "sm_90a", "sm_100a"]);
        assert_eq!(Arch::TESTED.map(|arch| arch.portable().to_string()), ["sm_89", "sm_90", "sm_100"]);
        assert_eq!(Arch::of(8, 6), None);
        assert_eq!(Arch::of(9, 0), Some(Arch::SM_90A));
        assert_eq!(Arch::of(12, 0).unwrap().to_string(), "sm_120a");
    }
}
