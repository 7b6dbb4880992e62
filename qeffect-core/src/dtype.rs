//! Element types of buffers, with their sizes and names.

use core::fmt;

/// How an element is stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Dtype {
    /// IEEE binary64.
    F64,
    /// IEEE binary32.
    F32,
    /// The upper half of an IEEE binary32.
    Bf16,
    /// 8-bit float, 4 exponent bits, no infinity, largest 448.
    E4M3,
    /// 8-bit float, 5 exponent bits, largest finite 57344.
    E5M2,
    /// Byte: tokens of a byte model, flags.
    U8,
    /// Token ids, positions.
    U32,
    /// Counters.
    U64,
}

impl Dtype {
    /// Every type.
    pub const ALL: [Dtype; 8] =
        [Dtype::F64, Dtype::F32, Dtype::Bf16, Dtype::E4M3, Dtype::E5M2, Dtype::U8, Dtype::U32, Dtype::U64];

    /// Bytes per element; also its alignment.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F64 | Dtype::U64 => 8,
            Dtype::F32 | Dtype::U32 => 4,
            Dtype::Bf16 => 2,
            Dtype::E4M3 | Dtype::E5M2 | Dtype::U8 => 1,
        }
    }

    /// The name used in text and files.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F64 => "f64",
            Dtype::F32 => "f32",
            Dtype::Bf16 => "bf16",
            Dtype::E4M3 => "e4m3",
            Dtype::E5M2 => "e5m2",
            Dtype::U8 => "u8",
            Dtype::U32 => "u32",
            Dtype::U64 => "u64",
        }
    }

    /// The type of that name.
    pub fn parse(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Whether values are floating-point numbers.
    pub const fn is_float(self) -> bool {
        !matches!(self, Dtype::U8 | Dtype::U32 | Dtype::U64)
    }

    /// Whether values mean nothing without a `scale_inv` beside them.
    pub const fn is_fp8(self) -> bool {
        matches!(self, Dtype::E4M3 | Dtype::E5M2)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_are_distinct() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::parse(dtype.name()), Some(dtype));
        }
        assert_eq!(Dtype::parse("fp8"), None);
    }
}
