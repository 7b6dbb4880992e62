//! Cross-entropy.

use cudarc::driver::CudaStream;
use half::bf16;

use crate::error::Result;
use crate::memory::Span;
use crate::module::{Argument, Kernels, dimension, expect, expect_if, optional, rows_of};

impl Kernels {
    /// Mean of the cross-entropy over rows, the log-sum-exp of each, and `losses`, which is scratch of one element per row.
    /// The flag is raised if the mean is not finite.
    pub fn cross_entropy_forward(
        &self,
        stream: &CudaStream,
        logits: Span<bf16>,
        targets: Span<u32>,
        lse: Span<f32>,
        losses: Span<f32>,
        loss: Span<f32>,
        flag: Option<Span<u32>>,
    ) -> Result {
        let kernel = "loss_rows";
        let rows = dimension(kernel, "rows", targets.len())?;
        let vocabulary = rows_of(kernel, "logits", logits.len(), targets.len())?;
        expect(kernel, "logits", logits, logits.len())?;
        expect(kernel, "targets", targets, targets.len())?;
        expect(kernel, "lse", lse, targets.len())?;
        expect(kernel, "losses", losses, targets.len())?;
        expect(kernel, "loss", loss, 1)?;
        expect_if(kernel, "flag", flag, 1)?;
        let arguments: [&dyn Argument; 5] = [&logits, &targets, &lse, &losses, &vocabulary];
        self.launch(stream, kernel, [targets.len(), 1], 512, 0, &arguments)?;
        self.launch(stream, "loss_mean", [1, 1], 32, 0, &[&losses, &loss, &optional(flag), &rows])
    }
}
