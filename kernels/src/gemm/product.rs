//! What a matrix product is, as a value, and which ones the library takes.

use core::fmt;

use super::{Matrix, Operands};
use crate::error::{Error, Result};
use crate::memory::{Element, Span};

/// Elements that share a scale where scales go by blocks.
pub const BLOCK: usize = 128;

/// How the elements of an operand are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Type {
    /// bf16.
    Bf16,
    /// FP8 with 4 exponent bits.
    E4M3,
    /// FP8 with 5 exponent bits.
    E5M2,
}

impl Type {
    /// Whether values mean nothing without a scale.
    pub const fn is_fp8(self) -> bool {
        !matches!(self, Type::Bf16)
    }
}

/// How the elements of a result are stored.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Output {
    /// bf16: activations.
    Bf16,
    /// Floats: gradients of weights.
    F32,
}

impl Output {
    /// Bytes per element.
    pub const fn size(self) -> usize {
        match self {
            Output::Bf16 => 2,
            Output::F32 => 4,
        }
    }
}

/// Which elements of an FP8 operand share a scale. Scales of a row's blocks lie as the library wants them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum BlockScale {
    /// 128 elements of one row: `[blocks of depth][rows]`.
    Vector,
    /// 128 × 128: `[blocks of rows][blocks of depth, rounded up to a multiple of 4]`.
    Square,
}

impl BlockScale {
    /// Number of scales of an operand of that many rows.
    pub const fn len(self, rows: usize, depth: usize) -> usize {
        match self {
            BlockScale::Vector => depth.div_ceil(BLOCK) * rows,
            BlockScale::Square => rows.div_ceil(BLOCK) * depth.div_ceil(BLOCK).next_multiple_of(4),
        }
    }

    /// Where the scale of a block of depth lies, for the row, or for the block of rows.
    pub const fn index(self, rows: usize, depth: usize, row: usize, block: usize) -> usize {
        match self {
            BlockScale::Vector => block * rows + row,
            BlockScale::Square => row / BLOCK * depth.div_ceil(BLOCK).next_multiple_of(4) + block,
        }
    }
}

/// How FP8 operands are scaled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scaling {
    /// One number per operand.
    Tensor,
    /// One number per block: microbatches of different scales side by side along the depth.
    Blocks {
        /// Of the left operand.
        left: BlockScale,
        /// Of the right operand.
        right: BlockScale,
    },
}

/// A matrix product, apart from where its operands lie.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Product {
    /// Rows of the left operand and of the result.
    pub rows: usize,
    /// Rows of the right operand, columns of the result.
    pub columns: usize,
    /// Terms of each sum.
    pub depth: usize,
    /// The left operand's elements.
    pub left: Type,
    /// The right operand's elements.
    pub right: Type,
    /// Whether the left operand is stored depth × rows. bf16 only.
    pub left_transposed: bool,
    /// Whether the right operand is stored depth × columns. bf16 only.
    pub right_transposed: bool,
    /// The result's elements.
    pub out: Output,
    /// Whether a bf16 bias per column is added.
    pub bias: bool,
    /// Whether FP8 sums stay in the tensor cores' own accumulators: faster, and less exact.
    pub fast: bool,
    /// Whether the depth may be split over several blocks of threads. Not for results that are accumulated into.
    pub split: bool,
    /// Whether others run beside it: its algorithm is then chosen for half of the multiprocessors. One of few rows takes
    /// the whole GPU only by cutting its result into tiles that are too small to be worked on well.
    pub beside: bool,
    /// Of FP8 operands.
    pub scaling: Scaling,
}

impl Product {
    /// An FP8 product with one scale per operand, in bf16, as forward and input gradient want it.
    pub const fn fp8(rows: usize, columns: usize, depth: usize, left: Type, right: Type) -> Product {
        Product {
            rows,
            columns,
            depth,
            left,
            right,
            left_transposed: false,
            right_transposed: false,
            out: Output::Bf16,
            bias: false,
            fast: false,
            split: true,
            beside: true,
            scaling: Scaling::Tensor,
        }
    }

    /// A gradient of a weight: floats that may be accumulated into, without a split of the depth.
    pub const fn weight_gradient(rows: usize, columns: usize, depth: usize, left: Type, right: Type) -> Product {
        Product { out: Output::F32, split: false, beside: false, ..Product::fp8(rows, columns, depth, left, right) }
    }

    /// Whether an operand is FP8.
    pub const fn is_fp8(&self) -> bool {
        self.left.is_fp8() || self.right.is_fp8()
    }

    /// Number of scales of each operand.
    pub const fn scales(&self) -> (usize, usize) {
        match self.scaling {
            _ if !self.is_fp8() => (0, 0),
            Scaling::Tensor => (1, 1),
            Scaling::Blocks { left, right } => (left.len(self.rows, self.depth), right.len(self.columns, self.depth)),
        }
    }

    pub(super) fn refused(&self, reason: impl Into<String>) -> Error {
        Error::Product { product: self.to_string(), reason: reason.into() }
    }

    /// Whether the library takes it, as far as its rules are known; what else it refuses shows when it is planned.
    pub fn validate(&self) -> Result {
        for (name, size) in [("rows", self.rows), ("columns", self.columns), ("depth", self.depth)] {
            if size == 0 || size > i32::MAX as usize {
                return Err(self.refused(format!("`{name}` is {size}, which is no size of a matrix")));
            }
        }
        if self.left.is_fp8() != self.right.is_fp8() {
            return Err(self.refused("FP8 is multiplied with FP8 only"));
        }
        if !self.is_fp8() {
            return match self.scaling {
                Scaling::Tensor => Ok(()),
                Scaling::Blocks { .. } => Err(self.refused("only FP8 has scales")),
            };
        }
        if self.left == Type::E5M2 && self.right == Type::E5M2 {
            return Err(self.refused("E5M2 is not multiplied with E5M2"));
        }
        if self.left_transposed || self.right_transposed {
            return Err(self.refused("FP8 operands are stored with the terms of a sum side by side"));
        }
        if !self.depth.is_multiple_of(16) {
            return Err(self.refused(format!("`depth` is {}; FP8 needs a multiple of 16", self.depth)));
        }
        if let Scaling::Blocks { left, right } = self.scaling {
            if self.fast {
                return Err(self.refused("block scales need exact accumulation"));
            }
            if left == BlockScale::Square && right == BlockScale::Square {
                return Err(self.refused("at most one operand has square blocks"));
            }
        }
        Ok(())
    }

    /// Whether operands are those of the product.
    pub(super) fn check(&self, operands: &Operands, workspace: Span<u8>, needed: usize) -> Result {
        let matrix = |name, matrix: &Matrix, kind_fits: bool, len: usize| {
            if !kind_fits {
                return Err(self.refused(format!("`{name}` has elements of another type")));
            }
            if matrix.len() != len {
                return Err(self.refused(format!("`{name}` has {} elements, {len} are needed", matrix.len())));
            }
            self.aligned(name, matrix.address())
        };
        let operand = |name, matrix_of: &Matrix, of: Type, len| {
            let fits = matches!((matrix_of, of.is_fp8()), (Matrix::Bf16(_), false) | (Matrix::Codes(_), true));
            matrix(name, matrix_of, fits, len)
        };
        operand("left", &operands.left, self.left, self.rows * self.depth)?;
        operand("right", &operands.right, self.right, self.columns * self.depth)?;
        let fits = matches!((operands.out, self.out), (Matrix::Bf16(_), Output::Bf16) | (Matrix::F32(_), Output::F32));
        matrix("out", &operands.out, fits, self.rows * self.columns)?;
        let (left, right) = self.scales();
        self.optional("left_scale", operands.left_scale, left)?;
        self.optional("right_scale", operands.right_scale, right)?;
        self.optional("bias", operands.bias, if self.bias { self.columns } else { 0 })?;
        if operands.accumulate && self.split {
            return Err(self.refused("its depth may be split, so it is not accumulated"));
        }
        if workspace.len() < needed {
            return Err(self.refused(format!("the workspace has {} bytes, {needed} are needed", workspace.len())));
        }
        if needed > 0 { self.aligned("workspace", workspace.address()) } else { Ok(()) }
    }

    fn optional<T: Element>(&self, name: &str, span: Option<Span<T>>, expected: usize) -> Result {
        let found = span.map_or(0, |span| span.len());
        if found != expected {
            return Err(self.refused(format!("`{name}` has {found} elements, {expected} are needed")));
        }
        span.map_or(Ok(()), |span| self.aligned(name, span.address()))
    }

    fn aligned(&self, name: &str, address: u64) -> Result {
        if address.is_multiple_of(16) {
            return Ok(());
        }
        Err(self.refused(format!("`{name}` lies at {address:#x}, which is no multiple of 16")))
    }
}

impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Product { rows, columns, depth, left, right, out, .. } = self;
        write!(f, "{rows} × {columns} × {depth}, {left:?} × {right:?} → {out:?}")?;
        let flags = [
            (self.left_transposed, "left transposed"),
            (self.right_transposed, "right transposed"),
            (self.bias, "bias"),
            (self.fast, "fast"),
            (self.split, "split"),
            (self.beside, "beside others"),
        ];
        flags.into_iter().filter(|(set, _)| *set).try_for_each(|(_, name)| write!(f, ", {name}"))?;
        match self.scaling {
            Scaling::Tensor => Ok(()),
            Scaling::Blocks { left, right } => write!(f, ", block scales {left:?} × {right:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Product = Product::fp8(256, 4096, 1024, Type::E4M3, Type::E4M3);

    fn reason(product: Product) -> String {
        product.validate().unwrap_err().to_string()
    }

    #[test]
    fn what_fp8_cannot_take_is_refused_by_name() {
        assert!(GOOD.validate().is_ok());
        assert!(reason(Product { depth: 24, ..GOOD }).contains("`depth` is 24; FP8 needs a multiple of 16"));
        assert!(reason(Product { rows: 0, ..GOOD }).contains("`rows` is 0"));
        assert!(reason(Product { left: Type::E5M2, right: Type::E5M2, ..GOOD }).contains("E5M2"));
        assert!(reason(Product { left: Type::Bf16, ..GOOD }).contains("FP8 only"));
        assert!(reason(Product { right_transposed: true, ..GOOD }).contains("side by side"));
        let blocks = |left, right, fast| Product { scaling: Scaling::Blocks { left, right }, fast, ..GOOD };
        assert!(blocks(BlockScale::Vector, BlockScale::Square, false).validate().is_ok());
        assert!(reason(blocks(BlockScale::Square, BlockScale::Square, false)).contains("square"));
        assert!(reason(blocks(BlockScale::Vector, BlockScale::Vector, true)).contains("exact"));
    }

    #[test]
    fn block_scales_lie_as_measured() {
        // case: 256 rows and a depth of 512 make 4 × 256 vector scales, 2 × 4 square ones.
        assert_eq!((BlockScale::Vector.len(256, 512), BlockScale::Square.len(256, 512)), (1024, 8));
        assert_eq!(BlockScale::Square.len(130, 640), 2 * 8);
        assert_eq!(BlockScale::Vector.index(256, 512, 7, 2), 519);
        assert_eq!(BlockScale::Square.index(256, 640, 200, 3), 11);
    }

    #[test]
    fn names_tell_products_apart() {
        let all = [
            GOOD,
            Product { bias: true, ..GOOD },
            Product { fast: true, ..GOOD },
            Product { split: false, ..GOOD },
            Product { out: Output::F32, ..GOOD },
            Product { left: Type::E5M2, ..GOOD },
            Product { right: Type::E5M2, ..GOOD },
            Product { rows: 512, ..GOOD },
            Product { left_transposed: true, ..GOOD },
            Product { scaling: Scaling::Blocks { left: BlockScale::Vector, right: BlockScale::Vector }, ..GOOD },
        ];
        for (i, a) in all.iter().enumerate() {
            for (j, b) in all.iter().enumerate() {
                assert_eq!(a.to_string() == b.to_string(), i == j);
            }
        }
    }
}
