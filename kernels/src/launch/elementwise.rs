//! Sums and conversions.

use cudarc::driver::CudaStream;
use half::bf16;

use crate::error::Result;
use crate::memory::Span;
use crate::module::{Kernels, dimension, expect};

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

    /// `out = (slot 0 + slot 1 + ..) · factor`, ascending; slots lie one after the other, each as long as `out`.
    pub fn sum_slots(
        &self,
        stream: &CudaStream,
        slots: Span<f32>,
        count: usize,
        factor: f32,
        out: Span<f32>,
    ) -> Result {
        let kernel = "sum_slots";
        let len = out.len();
        let number = dimension(kernel, "count", count)?;
        expect(kernel, "slots", slots, count * len)?;
        expect(kernel, "out", out, len)?;
        let size = len as i64;
        self.launch(stream, kernel, [len.div_ceil(256 * 4), 1], 256, 0, &[&slots, &size, &number, &factor, &out, &size])
    }

    /// `out += x`.
    pub fn accumulate(&self, stream: &CudaStream, x: Span<f32>, out: Span<f32>) -> Result {
        let kernel = "accumulate_f32";
        let len = x.len();
        expect(kernel, "x", x, len)?;
        expect(kernel, "out", out, len)?;
        self.launch(stream, kernel, [len.div_ceil(256 * 4), 1], 256, 0, &[&x, &out, &(len as i64)])
    }
}
