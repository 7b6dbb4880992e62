//! Sums and conversions.

use core::ffi::c_void;

use bytemuck::NoUninit;
use cudarc::driver::CudaStream;
use half::bf16;

use crate::error::Result;
use crate::memory::Span;
use crate::module::{Argument, Kernels, dimension, expect, plain_arguments};

/// Slots that one launch adds.
const SLOTS: usize = 64;

/// As the kernel takes them: addresses.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Slots([u64; SLOTS]);
plain_arguments!(Slots);

/// A dropout mask: its name, beside the step, and which share it drops.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug, NoUninit)]
pub struct Mask {
    /// Of the run.
    pub seed: u64,
    /// Stands for the layer.
    pub site: u64,
    /// The microbatch.
    pub microbatch: u64,
    /// An element is dropped if its 32-bit random word is below this.
    pub threshold: u32,
    /// What the others are multiplied by.
    pub factor: f32,
}
plain_arguments!(Mask);

impl Kernels {
    /// `out = a + b`, rounded once; `out` may be one of them.
    pub fn add(&self, stream: &CudaStream, a: Span<bf16>, b: Span<bf16>, out: Span<bf16>) -> Result {
        let kernel = "add_bf16";
        let len = a.len();
        expect(kernel, "a", a, len)?;
        expect(kernel, "b", b, len)?;
        expect(kernel, "out", out, len)?;
        self.launch(stream, kernel, [len.div_ceil(256 * 8), 1], 256, 0, &[&a, &b, &out, &(len as i64)])
    }

    /// The nearest bf16 of each element.
    pub fn convert(&self, stream: &CudaStream, from: Span<f32>, to: Span<bf16>) -> Result {
        let kernel = "convert_f32_bf16";
        let len = from.len();
        expect(kernel, "from", from, len)?;
        expect(kernel, "to", to, len)?;
        self.launch(stream, kernel, [len.div_ceil(256 * 8), 1], 256, 0, &[&from, &to, &(len as i64)])
    }

    /// The floats that bf16 numbers are.
    pub fn widen(&self, stream: &CudaStream, from: Span<bf16>, to: Span<f32>) -> Result {
        let kernel = "convert_bf16_f32";
        let len = from.len();
        expect(kernel, "from", from, len)?;
        expect(kernel, "to", to, len)?;
        self.launch(stream, kernel, [len.div_ceil(256 * 8), 1], 256, 0, &[&from, &to, &(len as i64)])
    }

    /// `out = (slots[0] + slots[1] + ..) · factor`, ascending; each is as long as `out`, and there is at least one.
    pub fn sum_slots(&self, stream: &CudaStream, slots: &[Span<f32>], factor: f32, out: Span<f32>) -> Result {
        let kernel = "sum_slots";
        let len = out.len();
        dimension(kernel, "slots", slots.len())?;
        expect(kernel, "out", out, len)?;
        slots.iter().try_for_each(|slot| expect(kernel, "slots", *slot, len))?;
        let launches = slots.len().div_ceil(SLOTS);
        for (index, part) in slots.chunks(SLOTS).enumerate() {
            let mut addresses = Slots([0; SLOTS]);
            addresses.0.iter_mut().zip(part).for_each(|(address, slot)| *address = slot.address());
            let (count, carry) = (part.len() as i32, i32::from(index > 0));
            let factor = if index + 1 == launches { factor } else { 1.0 };
            let arguments: [&dyn Argument; 6] = [&addresses, &count, &carry, &factor, &out, &(len as i64)];
            self.launch(stream, kernel, [len.div_ceil(256 * 4), 1], 256, 0, &arguments)?;
        }
        Ok(())
    }

    /// `out += x`.
    pub fn accumulate(&self, stream: &CudaStream, x: Span<f32>, out: Span<f32>) -> Result {
        let kernel = "accumulate_f32";
        let len = x.len();
        expect(kernel, "x", x, len)?;
        expect(kernel, "out", out, len)?;
        self.launch(stream, kernel, [len.div_ceil(256 * 4), 1], 256, 0, &[&x, &out, &(len as i64)])
    }

    /// `y = x · factor` where the mask of `step`, one element, keeps an element, else 0. Of a gradient: the gradient.
    pub fn dropout(&self, stream: &CudaStream, mask: &Mask, step: Span<u64>, x: Span<bf16>, y: Span<bf16>) -> Result {
        let kernel = "dropout";
        let len = x.len();
        expect(kernel, "step", step, 1)?;
        expect(kernel, "x", x, len)?;
        expect(kernel, "y", y, len)?;
        self.launch(stream, kernel, [len.div_ceil(256 * 8), 1], 256, 0, &[mask, &step, &x, &y, &(len as i64)])
    }
}
