//! Memory to try a product in, taken at start and given back at once.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use half::bf16;

use super::{Matrix, Operands, Output, Product, Type, WORKSPACE};
use crate::error::Result;
use crate::memory::{Buffer, Element, Span};

/// Where a part begins: what products ask for, with room to spare.
const ALIGNMENT: usize = 256;
/// More than the second cache of any GPU.
const FLUSH: usize = 128 << 20;

/// What a product is tried for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// That its kernels are loaded.
    Warm,
    /// For its time: with numbers in the operands, and memory to empty the second cache with.
    Search,
}

/// Operands of their own, a workspace, and what is written over to empty the second cache: one allocation.
pub(super) struct Trial {
    pub(super) operands: Operands,
    pub(super) workspace: Span<u8>,
    pub(super) flush: Span<u8>,
    _memory: Buffer<u8>,
}

/// Parts of a trial, in order.
#[derive(Clone, Copy)]
enum Part {
    Left,
    Right,
    Out,
    LeftScale,
    RightScale,
    Bias,
    Workspace,
    Flush,
}

/// Bytes of each part, in the order of [`Part`].
fn sizes(product: &Product, purpose: Purpose) -> [usize; 8] {
    let element = |of: Type| if of.is_fp8() { 1 } else { size_of::<bf16>() };
    let (left_scale, right_scale) = product.scales();
    [
        product.rows * product.depth * element(product.left),
        product.columns * product.depth * element(product.right),
        product.rows * product.columns * product.out.size(),
        left_scale * size_of::<f32>(),
        right_scale * size_of::<f32>(),
        if product.bias { product.columns * size_of::<bf16>() } else { 0 },
        WORKSPACE,
        if purpose == Purpose::Search { FLUSH } else { 0 },
    ]
}

/// Bytes of the whole allocation.
fn total(product: &Product, purpose: Purpose) -> usize {
    sizes(product, purpose).iter().map(|size| size.next_multiple_of(ALIGNMENT)).sum()
}

impl Product {
    /// Bytes of device memory that [`Products::plan`](super::Products::plan) and [`Products::warm`](super::Products::warm)
    /// take, one product after the other, and have given back when they return: at most this where the algorithm has to be
    /// searched for, less where it is known.
    pub fn trial_bytes(&self) -> usize {
        total(self, Purpose::Search)
    }
}

impl Trial {
    pub(super) fn new(context: &Arc<CudaContext>, product: &Product, purpose: Purpose) -> Result<Trial> {
        let sizes = sizes(product, purpose);
        let mut memory = Buffer::poisoned(context, total(product, purpose))?;
        let first =
            |part: Part| -> usize { sizes[..part as usize].iter().map(|size| size.next_multiple_of(ALIGNMENT)).sum() };
        if purpose == Purpose::Search {
            memory.write_at(first(Part::Left), &noise(product.left, product.rows * product.depth))?;
            memory.write_at(first(Part::Right), &noise(product.right, product.columns * product.depth))?;
        }
        for part in [Part::LeftScale, Part::RightScale] {
            let ones = 1.0f32.to_ne_bytes().repeat(sizes[part as usize] / size_of::<f32>());
            memory.write_at(first(part), &ones)?;
        }
        memory.write_at(first(Part::Bias), &vec![0; sizes[Part::Bias as usize]])?;

        let base = memory.span().address();
        let place = |part: Part| (base + first(part) as u64, sizes[part as usize]);
        let matrix = |of: Type, part| match of {
            Type::Bf16 => Matrix::Bf16(view(place(part))),
            Type::E4M3 | Type::E5M2 => Matrix::Codes(view(place(part))),
        };
        let some = |part| (sizes[part as usize] > 0).then(|| place(part));
        let operands = Operands {
            left: matrix(product.left, Part::Left),
            right: matrix(product.right, Part::Right),
            left_scale: some(Part::LeftScale).map(view),
            right_scale: some(Part::RightScale).map(view),
            bias: some(Part::Bias).map(view),
            out: match product.out {
                Output::Bf16 => Matrix::Bf16(view(place(Part::Out))),
                Output::F32 => Matrix::F32(view(place(Part::Out))),
            },
            accumulate: false,
        };
        let (workspace, flush) = (view(place(Part::Workspace)), view(place(Part::Flush)));
        Ok(Trial { operands, workspace, flush, _memory: memory })
    }
}

/// A part as elements.
fn view<T: Element>((address, bytes): (u64, usize)) -> Span<T> {
    // SAFETY: parts lie in the trial's allocation, at multiples of its alignment; any bits are an element, and views are used
    // while the trial lives.
    unsafe { Span::new(address, bytes / size_of::<T>()) }
}

/// Random bytes that are no NaN and no infinity: products of zeros can be faster than those of numbers.
fn noise(of: Type, len: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    match of {
        Type::Bf16 => {
            let mut bytes = Vec::with_capacity(2 * len + 8);
            while bytes.len() < 2 * len {
                let random = next();
                // 1 ≤ |x| < 2, either sign.
                bytes.extend([random[0] & 0x7F | 0x80, random[1] & 0x80 | 0x3F]);
                bytes.extend([random[2] & 0x7F | 0x80, random[3] & 0x80 | 0x3F]);
            }
            bytes.truncate(2 * len);
            bytes
        }
        Type::E4M3 | Type::E5M2 => {
            let mut bytes = Vec::with_capacity(len + 8);
            while bytes.len() < len {
                bytes.extend(next().map(|byte| byte & 0xBF)); // |x| < 2
            }
            bytes.truncate(len);
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_has_room_for_operands_workspace_and_flush() {
        // case: 256 · 1024 codes, 4096 · 1024 codes, 256 · 4096 bf16, two factors in 256 bytes each, 32 MiB and 128 MiB.
        let product = Product::fp8(256, 4096, 1024, Type::E4M3, Type::E4M3);
        let operands = (256 << 10) + (4096 << 10) + 2 * (256 << 12);
        assert_eq!(total(&product, Purpose::Warm), operands + 512 + (32 << 20));
        assert_eq!(product.trial_bytes(), operands + 512 + (160 << 20));
        let biased = Product { bias: true, left: Type::Bf16, right: Type::Bf16, ..product };
        assert_eq!(biased.trial_bytes(), operands + (256 << 10) + (4096 << 10) + 2 * 4096 + (160 << 20));
    }

    #[test]
    fn noise_is_finite_and_as_long_as_asked() {
        let bf16s = noise(Type::Bf16, 101);
        assert_eq!(bf16s.len(), 202);
        let finite = |pair: &[u8]| (1.0..2.0).contains(&bf16::from_le_bytes([pair[0], pair[1]]).to_f32().abs());
        assert!(bf16s.chunks(2).all(finite));
        let codes = noise(Type::E5M2, 101);
        assert!(codes.len() == 101 && codes.iter().all(|code| code & 0x40 == 0));
    }
}
