//! Layer norm, and RMS norm: the same without means and without a bias.

use cudarc::driver::CudaStream;
use half::bf16;
use qeffect_core::fp8::Fp8;

use super::cast::{Codes, ColumnScratch, Normalised, Outputs, Transposed, partial_sums};
use crate::error::Result;
use crate::memory::Span;
use crate::module::{Kernels, dimension, expect, expect_if, optional};

const THREADS: usize = 256;
/// Rows and columns of a block of [`Kernels::layer_norm_gradients`], whose threads have 4 × 8 elements each.
const DOWN_ROWS: usize = 256;
const DOWN_COLUMNS: usize = 32;

/// Whether rows fit into registers, four at a time.
const fn in_fours(rows: usize, columns: usize) -> bool {
    rows.is_multiple_of(4) && columns.is_multiple_of(8) && columns <= 4096
}

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

/// What the gradient of a norm's input is made from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NormGradient {
    /// The norm's input, rows × columns.
    pub x: Span<bf16>,
    /// The gradient of its output, rows × columns.
    pub dy: Span<bf16>,
    /// Gain, one per column.
    pub gamma: Span<f32>,
    /// As the forward has left them.
    pub statistics: Statistics,
    /// The gradient that bypasses the norm, rows × columns: added to the rounded gradient.
    pub residual: Option<Span<bf16>>,
}

/// Where what goes down the columns of a norm's gradient is put.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DownColumns {
    /// Gradient of the gain, one per column.
    pub dgamma: Span<f32>,
    /// Gradient of the bias, one per column.
    pub dbeta: Option<Span<f32>>,
    /// The gradient of the input, and where its column sums go, in the order of [`cast`](Kernels::cast).
    pub sums: Option<(Span<bf16>, Span<f32>)>,
    /// The codes of the gradient of the input, and where they go transposed.
    pub lines: Option<(Span<u8>, Transposed)>,
}

impl NormGradient {
    /// Checks lengths; the columns as a kernel takes them.
    fn expect(&self, kernel: &'static str, rows: usize, columns: usize) -> Result<i32> {
        dimension(kernel, "rows", rows)?;
        let across = dimension(kernel, "columns", columns)?;
        expect(kernel, "x", self.x, rows * columns)?;
        expect(kernel, "dy", self.dy, rows * columns)?;
        expect(kernel, "gamma", self.gamma, columns)?;
        expect_if(kernel, "residual", self.residual, rows * columns)?;
        self.statistics.expect(kernel, rows)?;
        Ok(across)
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

    /// Gradient of the input.
    pub fn layer_norm_backward(
        &self,
        stream: &CudaStream,
        from: &NormGradient,
        (rows, columns): (usize, usize),
        dx: Span<bf16>,
    ) -> Result {
        if in_fours(rows, columns) {
            let outputs = Outputs { values: Some(dx), ..Outputs::default() };
            return self.layer_norm_backward_in_fours(stream, from, (rows, columns), &outputs);
        }
        let kernel = "layer_norm_backward";
        let across = from.expect(kernel, rows, columns)?;
        expect(kernel, "dx", dx, rows * columns)?;
        let (residual, mean) = (optional(from.residual), optional(from.statistics.mean));
        let NormGradient { x, dy, gamma, statistics: Statistics { rstd, .. }, .. } = *from;
        let arguments: [&dyn crate::module::Argument; 8] = [&x, &dy, &gamma, &mean, &rstd, &residual, &dx, &across];
        self.launch(stream, kernel, [rows, 1], THREADS, 0, &arguments)
    }

    /// Gradient of the input, as [`layer_norm_backward`](Kernels::layer_norm_backward) makes it, and its codes, row-major, as
    /// [`cast`](Kernels::cast) does: for E5M2 in one pass up to 4,096 columns, else by those two. `dx` is always stored. Of the
    /// outputs, transposed codes and column sums are left to [`layer_norm_gradients`](Kernels::layer_norm_gradients).
    pub fn layer_norm_backward_cast(
        &self,
        stream: &CudaStream,
        from: &NormGradient,
        shape: (usize, usize),
        dx: Span<bf16>,
        format: Fp8,
        outputs: &Outputs,
    ) -> Result {
        let codes = outputs.codes.map(|codes| Codes { transposed: None, ..codes });
        let outputs = Outputs { codes, column_sums: None, ..*outputs };
        if format == Fp8::E5M2 && codes.is_some() && in_fours(shape.0, shape.1) {
            return self.layer_norm_backward_in_fours(stream, from, shape, &Outputs { values: Some(dx), ..outputs });
        }
        self.layer_norm_backward(stream, from, shape, dx)?;
        self.cast(stream, format, dx, shape, &Outputs { values: None, ..outputs })
    }

    fn layer_norm_backward_in_fours(
        &self,
        stream: &CudaStream,
        from: &NormGradient,
        (rows, columns): (usize, usize),
        outputs: &Outputs,
    ) -> Result {
        let kernel = if columns <= 2048 { "layer_norm_backward_cast_2048" } else { "layer_norm_backward_cast_4096" };
        let across = from.expect(kernel, rows, columns)?;
        let sink = outputs.sink(kernel, rows, columns)?;
        let (residual, mean) = (optional(from.residual), optional(from.statistics.mean));
        let NormGradient { x, dy, gamma, statistics: Statistics { rstd, .. }, .. } = *from;
        let arguments: [&dyn crate::module::Argument; 8] = [&x, &dy, &gamma, &mean, &rstd, &residual, &sink, &across];
        self.launch(stream, kernel, [rows / 4, 1], THREADS, 0, &arguments)
    }

    /// What goes down the columns of a norm's gradient: those of gain and bias, and what `down` asks for besides. The scratch
    /// holds three times [`partial_sums`].
    pub fn layer_norm_gradients(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        dy: Span<bf16>,
        (rows, columns): (usize, usize),
        statistics: Statistics,
        down: &DownColumns,
        scratch: ColumnScratch,
    ) -> Result {
        let kernel = "layer_norm_gradients";
        let (height, across) = (dimension(kernel, "rows", rows)?, dimension(kernel, "columns", columns)?);
        let DownColumns { dgamma, dbeta, sums, lines } = *down;
        expect(kernel, "x", x, rows * columns)?;
        expect(kernel, "dy", dy, rows * columns)?;
        expect(kernel, "dgamma", dgamma, columns)?;
        expect_if(kernel, "dbeta", dbeta, columns)?;
        expect_if(kernel, "dx", sums.map(|(dx, _)| dx), rows * columns)?;
        expect_if(kernel, "sums", sums.map(|(_, to)| to), columns)?;
        expect_if(kernel, "codes", lines.map(|(codes, _)| codes), rows * columns)?;
        statistics.expect(kernel, rows)?;
        scratch.expect(kernel, 3 * partial_sums(rows, columns), columns)?;
        let place = lines.map(|(_, transposed)| transposed.place(kernel, rows, columns)).transpose()?;
        let (dx, sums) = (optional(sums.map(|(dx, _)| dx)), optional(sums.map(|(_, to)| to)));
        let (codes, transposed) =
            (optional(lines.map(|(codes, _)| codes)), optional(place.map(|(transposed, _)| transposed)));
        let line = place.map_or(0, |(_, line)| line as i64);
        let (dbeta, mean, rstd) = (optional(dbeta), optional(statistics.mean), statistics.rstd);
        let ColumnScratch { partial, finished } = scratch;
        let arguments: [&dyn crate::module::Argument; 15] = [
            &x,
            &dy,
            &mean,
            &rstd,
            &dx,
            &codes,
            &dgamma,
            &dbeta,
            &sums,
            &transposed,
            &line,
            &partial,
            &finished,
            &height,
            &across,
        ];
        let grid = [columns.div_ceil(DOWN_COLUMNS), rows.div_ceil(DOWN_ROWS)];
        self.launch(stream, kernel, grid, DOWN_ROWS * DOWN_COLUMNS / 32, 0, &arguments)
    }
}
