//! Numeric kernels of the cpu device: pure functions over slices.
//!
//! Every kernel runs on the calling thread and gives the same bits on every call: sums have an order that is written
//! down (that of the GPU's kernels, where it is within reach), and nothing is contracted outside the GEMM crate. Each is compiled
//! for several vector widths, of which the widest that the processor has is taken at run time; width never changes a bit.
//!
//! Sizes are checked before anything is written.

pub mod attention;
pub mod cast;
pub mod dropout;
pub mod elementwise;
pub mod embedding;
pub mod gelu;
pub mod gemm;
mod lanes;
pub mod layer_norm;
pub mod loss;
pub mod optimizer;
pub mod real;
pub mod rms_norm;
pub mod rotary;
pub mod silu;

pub use real::{Elem, Real};

/// What a kernel refuses. Nothing has been written then.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KernelError {
    /// A slice does not fit the shape.
    #[error("{kernel}: `{operand}` has {found} elements, the shape needs {expected}")]
    Length {
        /// The kernel.
        kernel: &'static str,
        /// The operand, by the name of its parameter.
        operand: &'static str,
        /// Elements that the shape asks for.
        expected: usize,
        /// Elements that the slice has.
        found: usize,
    },
    /// A token id beyond the vocabulary.
    #[error("{kernel}: token {token} at position {position} is not below the vocabulary size {vocabulary}")]
    Token {
        /// The kernel.
        kernel: &'static str,
        /// The id.
        token: u32,
        /// Its position in the microbatch.
        position: usize,
        /// Number of token ids.
        vocabulary: usize,
    },
    /// A dimension that a rule forbids.
    #[error("{kernel}: `{dimension}` is {found}: {rule}")]
    Dimension {
        /// The kernel.
        kernel: &'static str,
        /// The dimension.
        dimension: &'static str,
        /// Its value.
        found: usize,
        /// The rule.
        rule: &'static str,
    },
    /// A dimension that must not be zero is.
    #[error("{kernel}: `{dimension}` is zero")]
    Zero {
        /// The kernel.
        kernel: &'static str,
        /// The dimension.
        dimension: &'static str,
    },
}

/// Result of a kernel.
pub type Result<T = ()> = std::result::Result<T, KernelError>;

/// Buffers that kernels reuse from call to call: one per thread and precision.
#[derive(Debug, Default)]
pub struct Scratch<A> {
    a: Vec<A>,
    b: Vec<A>,
    c: Vec<A>,
    d: Vec<A>,
    e: Vec<A>,
}

impl<A: Real> Scratch<A> {
    /// Without memory; it grows to what the largest call needs.
    pub const fn new() -> Self {
        Scratch { a: Vec::new(), b: Vec::new(), c: Vec::new(), d: Vec::new(), e: Vec::new() }
    }

    /// The bytes it holds.
    pub fn bytes(&self) -> usize {
        [&self.a, &self.b, &self.c, &self.d, &self.e].iter().map(|buffer| buffer.capacity()).sum::<usize>()
            * size_of::<A>()
    }
}

/// The first `len` elements of a buffer that grows where it must; what they hold is left over.
fn take<A: Real>(buffer: &mut Vec<A>, len: usize) -> &mut [A] {
    if buffer.len() < len {
        buffer.resize(len, A::ZERO);
    }
    &mut buffer[..len]
}

fn expect_len(kernel: &'static str, operand: &'static str, found: usize, expected: usize) -> Result {
    if found == expected { Ok(()) } else { Err(KernelError::Length { kernel, operand, expected, found }) }
}

fn expect_some(kernel: &'static str, dimension: &'static str, size: usize) -> Result {
    if size == 0 { Err(KernelError::Zero { kernel, dimension }) } else { Ok(()) }
}

/// Runs a closure compiled for the widest vectors of this processor. Mark the closure `#[inline(always)]`.
#[inline(always)]
fn simd<R>(f: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(f)
}

#[cfg(test)]
mod testing;
