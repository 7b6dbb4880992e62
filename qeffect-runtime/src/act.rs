//! Tensors by name: [`Act`] is a handle that may be copied, [`Kept`] and [`Fp8`] are retained and may not.

use core::fmt;

use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;

use crate::cmd::Operand;
use crate::device::Buf;
use crate::groups::Grouped;

/// A tensor of some device: type, shape, buffer. It is valid as long as its buffer is leased.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Act {
    /// Where it lies.
    pub buf: Buf,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Rows: tokens, mostly.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Act {
    /// Number of elements.
    pub const fn elements(&self) -> usize {
        self.rows * self.cols
    }

    /// Number of bytes.
    pub const fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// As an operand of a product, as stored or transposed.
    pub const fn operand(&self, transposed: bool) -> Operand {
        Operand { buf: self.buf, scale_inv: None, transposed }
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}, {}]", self.dtype, self.rows, self.cols)
    }
}

/// A retained tensor: one share of a leased buffer, which is consumed once.
#[must_use = "a retained tensor holds its buffer until it is released"]
#[derive(PartialEq, Eq, Debug)]
pub struct Kept {
    act: Act,
}

impl Kept {
    pub(crate) const fn new(act: Act) -> Kept {
        Kept { act }
    }

    /// The tensor, to read.
    pub const fn act(&self) -> Act {
        self.act
    }
}

/// A retained quantised tensor. Its factor lies beside the bytes and is never recomputed from the scale in force, which
/// may have moved since.
#[must_use = "a retained tensor holds its buffers until it is released"]
#[derive(PartialEq, Eq, Debug)]
pub struct Fp8 {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// The codes `[rows, cols]`, or `[cols, rows]` if `flipped`.
    pub(crate) codes: Kept,
    pub(crate) flipped: bool,
    /// The codes the other way round, where the device asks for both.
    pub(crate) other: Option<Kept>,
    pub(crate) scale_inv: Kept,
    /// Its part of a group's region, for the weight gradient.
    pub(crate) grouped: Option<Grouped>,
}

impl Fp8 {
    /// Rows of the tensor.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the tensor.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// The format of its codes.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// Its codes, in the form that is always kept.
    pub const fn codes(&self) -> Act {
        self.codes.act()
    }

    /// The factor of its codes: one f32.
    pub const fn scale_inv(&self) -> Act {
        self.scale_inv.act()
    }

    /// Its buffers.
    pub fn view(&self) -> Fp8View {
        Fp8View {
            codes: self.codes.act().buf,
            flipped: self.flipped,
            other: self.other.as_ref().map(|kept| kept.act().buf),
            scale_inv: self.scale_inv.act().buf,
        }
    }
}

/// The buffers of a quantised tensor: of one that is retained, or of the weight cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Fp8View {
    /// The codes.
    pub codes: Buf,
    /// Whether they are stored transposed.
    pub flipped: bool,
    /// The codes stored the other way round.
    pub other: Option<Buf>,
    /// Their factor.
    pub scale_inv: Buf,
}

impl Fp8View {
    fn operand(&self, want_flipped: bool, transposed: bool) -> Operand {
        let (buf, flipped) = match self.other {
            Some(other) if self.flipped != want_flipped => (other, want_flipped),
            _ => (self.codes, self.flipped),
        };
        Operand { buf, scale_inv: Some(self.scale_inv), transposed: transposed != flipped }
    }

    /// As first operand of a product: taken as stored, where that form exists.
    pub fn first(&self, transposed: bool) -> Operand {
        self.operand(transposed, transposed)
    }

    /// As second operand of a product: stored the other way round and taken transposed, where that form exists.
    pub fn second(&self, transposed: bool) -> Operand {
        self.operand(!transposed, transposed)
    }
}
