//! Layer norm, and RMS norm: the same without means and without a bias.

use cudarc::driver::CudaStream;
use half::bf16;

use super::cast::{ColumnScratch, Normalised, Outputs, TILE, partial_sums};
use crate::error::Result;
use crate::memory::Span;
use crate::module::{Kernels, dimension, expect, expect_if, optional};

const THREADS: usize = 256;

/// A residual connection in front of a norm.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Residual {
    /// What is added to the input.
    pub other: Span<bf16>,
    /// The sum, which is then normalised.
    pub total: Span<bf16>,
}

/// The normalised rows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Normal {
    /// Gain, one per column.
    pub gamma: Span<f32>,
    /// Bias, one per column.
    pub beta: Option<Span<f32>>,
    /// rows × columns.
    pub y: Span<bf16>,
}

/// Statistics of each row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Statistics {
    /// Mean; none for RMS norm.
    pub mean: Option<Span<f32>>,
    /// 1 / √(variance + ε).
    pub rstd: Span<f32>,
}

impl Statistics {
    fn expect(&self, kernel: &'static str, rows: usize) -> Result {
        expect_if(kernel, "mean", self.mean, rows)?;
        expect(kernel, "rstd", self.rstd, rows)
    }
}

impl Kernels {
    /// Statistics of rows; with `residual`, of the sum, which is kept; with `normal`, also the normalised rows.
    pub fn layer_norm_forward(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        (rows, columns): (usize, usize),
        residual: Option<Residual>,
        statistics: Statistics,
        normal: Option<Normal>,
    ) -> Result {
        let kernel = "layer_norm_forward";
        dimension(kernel, "rows", rows)?;
        let across = dimension(kernel, "columns", columns)?;
        expect(kernel, "x", x, rows * columns)?;
        expect_if(kernel, "residual.other", residual.map(|residual| residual.other), rows * columns)?;
        expect_if(kernel, "residual.total", residual.map(|residual| residual.total), rows * columns)?;
        expect_if(kernel, "gamma", normal.map(|normal| normal.gamma), columns)?;
        expect_if(kernel, "beta", normal.and_then(|normal| normal.beta), columns)?;
        expect_if(kernel, "y", normal.map(|normal| normal.y), rows * columns)?;
        statistics.expect(kernel, rows)?;
        let (other, total) =
            (optional(residual.map(|residual| residual.other)), optional(residual.map(|residual| residual.total)));
        let (gamma, beta) =
            (optional(normal.map(|normal| normal.gamma)), optional(normal.and_then(|normal| normal.beta)));
        let y = optional(normal.map(|normal| normal.y));
        let (mean, rstd) = (optional(statistics.mean), statistics.rstd);
        let arguments: [&dyn crate::module::Argument; 9] =
            [&x, &other, &total, &gamma, &beta, &y, &mean, &rstd, &across];
        self.launch(stream, kernel, [rows, 1], THREADS, 0, &arguments)
    }

    /// Statistics of rows, as [`layer_norm_forward`](Kernels::layer_norm_forward) makes them, and E4M3 codes of the
    /// normalised rows, as [`cast_norm`](Kernels::cast_norm) does: in one pass up to 4,096 columns, else by those two. With
    /// `residual`, `x.x` is the sum of both, and written.
    pub fn layer_norm_cast(
        &self,
        stream: &CudaStream,
        x: &Normalised,
        (rows, columns): (usize, usize),
        residual: Option<[Span<bf16>; 2]>,
        outputs: &Outputs,
    ) -> Result {
        let statistics = Statistics { mean: x.mean, rstd: x.rstd };
        let kernel = if columns <= 2048 { "layer_norm_cast_2048" } else { "layer_norm_cast_4096" };
        let sink = outputs.sink(kernel, rows, columns)?;
        let whole = rows.is_multiple_of(4) && columns.is_multiple_of(8) && sink.in_words();
        if outputs.codes.is_none() || outputs.column_sums.is_some() || columns > 4096 || !whole {
            let (source, residual) = match residual {
                None => (x.x, None),
                Some([source, other]) => (source, Some(Residual { other, total: x.x })),
            };
            self.layer_norm_forward(stream, source, (rows, columns), residual, statistics, None)?;
            return self.cast_norm(stream, x, (rows, columns), outputs);
        }
        let (_, across) = (dimension(kernel, "rows", rows)?, dimension(kernel, "columns", columns)?);
        expect(kernel, "x", x.x, rows * columns)?;
        for part in residual.into_iter().flatten() {
            expect(kernel, "residual", part, rows * columns)?;
        }
        expect(kernel, "gamma", x.gamma, columns)?;
        expect_if(kernel, "beta", x.beta, columns)?;
        statistics.expect(kernel, rows)?;
        let source = residual.map_or(x.x, |[source, _]| source);
        let (other, total) = (optional(residual.map(|[_, other]| other)), optional(residual.map(|_| x.x)));
        let (mean, beta) = (optional(x.mean), optional(x.beta));
        let arguments: [&dyn crate::module::Argument; 9] =
            [&source, &other, &total, &x.gamma, &beta, &mean, &x.rstd, &sink, &across];
        self.launch(stream, kernel, [rows / 4, 1], THREADS, 0, &arguments)
    }

    /// Gradient of the input; `residual`, the gradient that bypasses the norm, is added to it.
    pub fn layer_norm_backward(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        dy: Span<bf16>,
        (rows, columns): (usize, usize),
        gamma: Span<f32>,
        statistics: Statistics,
        residual: Option<Span<bf16>>,
        dx: Span<bf16>,
    ) -> Result {
        let kernel = "layer_norm_backward";
        dimension(kernel, "rows", rows)?;
        let across = dimension(kernel, "columns", columns)?;
        expect(kernel, "x", x, rows * columns)?;
        expect(kernel, "dy", dy, rows * columns)?;
        expect(kernel, "dx", dx, rows * columns)?;
        expect(kernel, "gamma", gamma, columns)?;
        expect_if(kernel, "residual", residual, rows * columns)?;
        statistics.expect(kernel, rows)?;
        let residual = optional(residual);
        let (mean, rstd) = (optional(statistics.mean), statistics.rstd);
        let arguments: [&dyn crate::module::Argument; 8] = [&x, &dy, &gamma, &mean, &rstd, &residual, &dx, &across];
        self.launch(stream, kernel, [rows, 1], THREADS, 0, &arguments)
    }

    /// Gradients of gain and bias: sums over rows. The scratch holds twice [`partial_sums`].
    pub fn layer_norm_gradients(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        dy: Span<bf16>,
        (rows, columns): (usize, usize),
        statistics: Statistics,
        dgamma: Span<f32>,
        dbeta: Option<Span<f32>>,
        scratch: ColumnScratch,
    ) -> Result {
        let kernel = "layer_norm_gradients";
        let (down, across) = (dimension(kernel, "rows", rows)?, dimension(kernel, "columns", columns)?);
        expect(kernel, "x", x, rows * columns)?;
        expect(kernel, "dy", dy, rows * columns)?;
        expect(kernel, "dgamma", dgamma, columns)?;
        expect_if(kernel, "dbeta", dbeta, columns)?;
        let dbeta = optional(dbeta);
        statistics.expect(kernel, rows)?;
        let (mean, rstd) = (optional(statistics.mean), statistics.rstd);
        scratch.expect(kernel, 2 * partial_sums(rows, columns), columns)?;
        let ColumnScratch { partial, finished } = scratch;
        let arguments: [&dyn crate::module::Argument; 10] =
            [&x, &dy, &mean, &rstd, &dgamma, &dbeta, &partial, &finished, &down, &across];
        self.launch(stream, kernel, [columns.div_ceil(TILE), rows.div_ceil(TILE)], 256, 0, &arguments)
    }
}
