//! The fused cast and what can be fused into it.

use core::ffi::c_void;

use bytemuck::NoUninit;
use cudarc::driver::CudaStream;
use half::bf16;
use qeffect_core::fp8::Fp8;

use crate::error::{Error, Result};
use crate::memory::{Element, Span};
use crate::module::{Argument, Kernels, dimension, expect, expect_if, optional, plain_arguments};

/// Rows and columns of a tile.
pub const TILE: usize = 64;
const THREADS: usize = 128;
/// Words that [`Kernels::health`] counts in.
pub const HEALTH_WORDS: usize = 6;

/// Where transposed codes go: one line per column of the matrix.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Transposed {
    /// Into a matrix of their own.
    Alone(Span<u8>),
    /// Into a region where other microbatches lie beside them, along the same lines.
    Beside {
        /// From the first code of the first line on.
        region: Span<u8>,
        /// From one line to the next.
        line: usize,
    },
}

impl Transposed {
    pub(super) fn place(self, kernel: &'static str, rows: usize, columns: usize) -> Result<(Span<u8>, usize)> {
        match self {
            Transposed::Alone(codes) => {
                expect(kernel, "transposed", codes, rows * columns)?;
                Ok((codes, rows))
            }
            Transposed::Beside { region, line } => {
                let expected = (columns - 1) * line + rows;
                if line < rows {
                    let rule = "lines do not overlap";
                    return Err(Error::Dimension { kernel, dimension: "line", found: line, rule });
                }
                if region.len() < expected {
                    let found = region.len();
                    return Err(Error::Length { kernel, operand: "transposed", expected, found });
                }
                expect(kernel, "transposed", region, region.len())?;
                Ok((region, line))
            }
        }
    }
}

/// FP8 codes and what belongs to them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Codes {
    /// rows × columns.
    pub codes: Span<u8>,
    /// columns × rows.
    pub transposed: Option<Transposed>,
    /// The scale in force, one element.
    pub scale: Span<f32>,
    /// The factor of these bytes, one element: written.
    pub scale_inv: Span<f32>,
    /// The staging entry that amax is folded into, one element.
    pub amax: Option<Span<f32>>,
}

/// Sums of columns, and what they are made in.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ColumnSums {
    /// One per column.
    pub out: Span<f32>,
    /// For partial sums.
    pub scratch: ColumnScratch,
}

/// Scratch of sums over columns. Kernels that may run at once need one each.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ColumnScratch {
    /// At least [`partial_sums`] elements.
    pub partial: Span<f32>,
    /// At least one per [`TILE`] columns: zero when first used, and left so.
    pub finished: Span<u32>,
}

impl ColumnScratch {
    pub(crate) fn expect(&self, kernel: &'static str, partial: usize, columns: usize) -> Result {
        let short = |operand, expected, found| Err(Error::Length { kernel, operand, expected, found });
        if self.partial.len() < partial {
            return short("scratch.partial", partial, self.partial.len());
        }
        if self.finished.len() < columns.div_ceil(TILE) {
            return short("scratch.finished", columns.div_ceil(TILE), self.finished.len());
        }
        Ok(())
    }
}

/// Elements of scratch that column sums need.
pub const fn partial_sums(rows: usize, columns: usize) -> usize {
    rows.div_ceil(TILE) * columns
}

/// What is taken from a matrix. Nothing of it is required.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Outputs {
    /// The values, rounded to bf16; rows × columns.
    pub values: Option<Span<bf16>>,
    /// Their codes.
    pub codes: Option<Codes>,
    /// Their sums over rows: the gradient of a bias.
    pub column_sums: Option<ColumnSums>,
    /// Raised, and never lowered, if a value is infinite or NaN; one element.
    pub flag: Option<Span<u32>>,
}

/// As the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
pub(crate) struct Sink {
    values: u64,
    codes: u64,
    transposed: u64,
    scale_inv: u64,
    scale: u64,
    amax: u64,
    flag: u64,
    column_sums: u64,
    partial: u64,
    finished: u64,
    line: i64,
}
plain_arguments!(Sink);

impl Sink {
    /// Whether four codes of a line of `transposed` can be written at once.
    pub(crate) const fn in_words(&self) -> bool {
        self.transposed.is_multiple_of(4) && self.line % 4 == 0
    }
}

impl Outputs {
    /// Codes alone.
    pub fn codes(codes: Codes) -> Outputs {
        Outputs { codes: Some(codes), ..Outputs::default() }
    }

    pub(crate) fn sink(&self, kernel: &'static str, rows: usize, columns: usize) -> Result<Sink> {
        let len = rows * columns;
        expect_if(kernel, "values", self.values, len)?;
        expect_if(kernel, "flag", self.flag, 1)?;
        if let Some(codes) = &self.codes {
            expect(kernel, "codes", codes.codes, len)?;
            expect(kernel, "scale", codes.scale, 1)?;
            expect(kernel, "scale_inv", codes.scale_inv, 1)?;
            expect_if(kernel, "amax", codes.amax, 1)?;
        }
        if let Some(sums) = &self.column_sums {
            expect(kernel, "column_sums.out", sums.out, columns)?;
            sums.scratch.expect(kernel, partial_sums(rows, columns), columns)?;
        }
        let codes = self.codes;
        let transposed = codes.and_then(|codes| codes.transposed);
        let transposed = transposed.map(|transposed| transposed.place(kernel, rows, columns)).transpose()?;
        Ok(Sink {
            values: optional(self.values),
            codes: optional(codes.map(|codes| codes.codes)),
            transposed: optional(transposed.map(|(codes, _)| codes)),
            scale_inv: optional(codes.map(|codes| codes.scale_inv)),
            scale: optional(codes.map(|codes| codes.scale)),
            amax: optional(codes.and_then(|codes| codes.amax)),
            flag: optional(self.flag),
            column_sums: optional(self.column_sums.map(|sums| sums.out)),
            partial: optional(self.column_sums.map(|sums| sums.scratch.partial)),
            finished: optional(self.column_sums.map(|sums| sums.scratch.finished)),
            line: transposed.map_or(0, |(_, line)| line as i64),
        })
    }
}

/// Input and statistics of a layer norm, or of an RMS norm, which has neither means nor a bias.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Normalised {
    /// rows × columns.
    pub x: Span<bf16>,
    /// One per row.
    pub mean: Option<Span<f32>>,
    /// One per row.
    pub rstd: Span<f32>,
    /// One per column.
    pub gamma: Span<f32>,
    /// One per column.
    pub beta: Option<Span<f32>>,
}

/// Logits, and what their gradient needs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LossGradient {
    /// rows × vocabulary.
    pub logits: Span<bf16>,
    /// One per row.
    pub targets: Span<u32>,
    /// One per row.
    pub lse: Span<f32>,
    /// Loss scale divided by the number of rows.
    pub factor: f32,
}

fn eights(kernel: &'static str, columns: usize) -> Result {
    if columns.is_multiple_of(8) {
        return Ok(());
    }
    let rule = "it must be a multiple of 8";
    Err(Error::Dimension { kernel, dimension: "columns", found: columns, rule })
}

impl Kernels {
    fn tiles(
        &self,
        stream: &CudaStream,
        kernel: &'static str,
        inputs: &[&dyn Argument],
        (rows, columns): (usize, usize),
        outputs: &Outputs,
    ) -> Result {
        let (down, across) = (dimension(kernel, "rows", rows)?, dimension(kernel, "columns", columns)?);
        let sink = outputs.sink(kernel, rows, columns)?;
        let mut arguments = inputs.to_vec();
        arguments.extend([&sink as &dyn Argument, &down, &across]);
        let grid = [columns.div_ceil(TILE), rows.div_ceil(TILE)];
        self.launch(stream, kernel, grid, THREADS, 0, &arguments)
    }

    /// Codes, and column sums, of a stored matrix.
    pub fn cast(
        &self,
        stream: &CudaStream,
        format: Fp8,
        x: Span<bf16>,
        shape: (usize, usize),
        outputs: &Outputs,
    ) -> Result {
        let kernel = match format {
            Fp8::E4M3 => "cast_bf16_e4m3",
            Fp8::E5M2 => "cast_bf16_e5m2",
        };
        expect(kernel, "x", x, shape.0 * shape.1)?;
        self.tiles(stream, kernel, &[&x], shape, outputs)
    }

    /// E4M3 codes of a float matrix: of master weights.
    pub fn cast_master(&self, stream: &CudaStream, x: Span<f32>, shape: (usize, usize), outputs: &Outputs) -> Result {
        expect("cast_f32_e4m3", "x", x, shape.0 * shape.1)?;
        self.tiles(stream, "cast_f32_e4m3", &[&x], shape, outputs)
    }

    /// Layer norm from statistics; codes are E4M3.
    pub fn cast_norm(&self, stream: &CudaStream, x: &Normalised, shape: (usize, usize), outputs: &Outputs) -> Result {
        let kernel = "cast_norm_e4m3";
        let (rows, columns) = shape;
        expect(kernel, "x", x.x, rows * columns)?;
        expect_if(kernel, "mean", x.mean, rows)?;
        expect(kernel, "rstd", x.rstd, rows)?;
        expect(kernel, "gamma", x.gamma, columns)?;
        expect_if(kernel, "beta", x.beta, columns)?;
        let (mean, beta) = (optional(x.mean), optional(x.beta));
        self.tiles(stream, kernel, &[&x.x, &mean, &x.rstd, &x.gamma, &beta], shape, outputs)
    }

    /// GELU; codes are E4M3.
    pub fn cast_gelu(&self, stream: &CudaStream, x: Span<bf16>, shape: (usize, usize), outputs: &Outputs) -> Result {
        expect("cast_gelu_e4m3", "x", x, shape.0 * shape.1)?;
        self.tiles(stream, "cast_gelu_e4m3", &[&x], shape, outputs)
    }

    /// Gradient of GELU; codes are E5M2.
    pub fn cast_gelu_backward(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        dy: Span<bf16>,
        shape: (usize, usize),
        outputs: &Outputs,
    ) -> Result {
        let kernel = "cast_gelu_backward_e5m2";
        expect(kernel, "x", x, shape.0 * shape.1)?;
        expect(kernel, "dy", dy, shape.0 * shape.1)?;
        self.tiles(stream, kernel, &[&x, &dy], shape, outputs)
    }

    /// SiLU; codes are E4M3.
    pub fn cast_silu(&self, stream: &CudaStream, x: Span<bf16>, shape: (usize, usize), outputs: &Outputs) -> Result {
        expect("cast_silu_e4m3", "x", x, shape.0 * shape.1)?;
        self.tiles(stream, "cast_silu_e4m3", &[&x], shape, outputs)
    }

    /// Gradient of SiLU; codes are E5M2.
    pub fn cast_silu_backward(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        dy: Span<bf16>,
        shape: (usize, usize),
        outputs: &Outputs,
    ) -> Result {
        let kernel = "cast_silu_backward_e5m2";
        expect(kernel, "x", x, shape.0 * shape.1)?;
        expect(kernel, "dy", dy, shape.0 * shape.1)?;
        self.tiles(stream, kernel, &[&x, &dy], shape, outputs)
    }

    /// SwiGLU, silu(gate) · up: a row of `x` holds all gates, then all ups. The shape is that of the result, whose columns
    /// are a multiple of 8; codes are E4M3.
    pub fn cast_swiglu(&self, stream: &CudaStream, x: Span<bf16>, shape: (usize, usize), outputs: &Outputs) -> Result {
        let kernel = "cast_swiglu_e4m3";
        eights(kernel, shape.1)?;
        expect(kernel, "x", x, shape.0 * shape.1 * 2)?;
        self.tiles(stream, kernel, &[&x], shape, outputs)
    }

    /// Gradients of gates and ups, laid out as `x` is. The shape is that of `dy`; codes are E5M2.
    pub fn cast_swiglu_backward(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        dy: Span<bf16>,
        shape: (usize, usize),
        outputs: &Outputs,
    ) -> Result {
        let kernel = "cast_swiglu_backward_e5m2";
        eights(kernel, shape.1)?;
        expect(kernel, "x", x, shape.0 * shape.1 * 2)?;
        expect(kernel, "dy", dy, shape.0 * shape.1)?;
        self.tiles(stream, kernel, &[&x, &dy], (shape.0, 2 * shape.1), outputs)
    }

    /// How a tensor fares under a scale: adds to [`HEALTH_WORDS`] counts its values, those that saturate, those that are not
    /// zero but become so, and those that are infinite or NaN; the next word becomes the bits of its largest magnitude, if
    /// that is larger, where NaN is passed over; to the last one is added.
    pub fn health(
        &self,
        stream: &CudaStream,
        format: Fp8,
        x: Span<bf16>,
        scale: Span<f32>,
        counts: Span<u64>,
    ) -> Result {
        self.count_health(stream, "health_bf16", format, x, scale, counts)
    }

    /// As [`Kernels::health`], of a float tensor.
    pub fn health_master(
        &self,
        stream: &CudaStream,
        format: Fp8,
        x: Span<f32>,
        scale: Span<f32>,
        counts: Span<u64>,
    ) -> Result {
        self.count_health(stream, "health_f32", format, x, scale, counts)
    }

    fn count_health<T: Element>(
        &self,
        stream: &CudaStream,
        kernel: &'static str,
        format: Fp8,
        x: Span<T>,
        scale: Span<f32>,
        counts: Span<u64>,
    ) -> Result {
        expect(kernel, "x", x, x.len())?;
        expect(kernel, "scale", scale, 1)?;
        expect(kernel, "counts", counts, HEALTH_WORDS)?;
        let (largest, vanishing) = (format.max(), format.decode(1) / 2.0);
        let blocks = x.len().div_ceil(256 * 8).clamp(1, 1024);
        let len = x.len() as i64;
        self.launch(stream, kernel, [blocks, 1], 256, 0, &[&x, &scale, &largest, &vanishing, &counts, &len])
    }

    /// Gradient of the cross-entropy; codes are E5M2. The shape is rows and vocabulary.
    pub fn cast_loss(
        &self,
        stream: &CudaStream,
        loss: &LossGradient,
        shape: (usize, usize),
        outputs: &Outputs,
    ) -> Result {
        let kernel = "cast_loss_e5m2";
        expect(kernel, "logits", loss.logits, shape.0 * shape.1)?;
        expect(kernel, "targets", loss.targets, shape.0)?;
        expect(kernel, "lse", loss.lse, shape.0)?;
        self.tiles(stream, kernel, &[&loss.logits, &loss.targets, &loss.lse, &loss.factor], shape, outputs)
    }

    /// Folds the largest magnitude of a tensor into `amax`, which the caller has set; NaN is passed over.
    pub fn amax(&self, stream: &CudaStream, x: Span<bf16>, amax: Span<f32>, flag: Option<Span<u32>>) -> Result {
        let kernel = "amax_bf16";
        expect(kernel, "x", x, x.len())?;
        expect(kernel, "amax", amax, 1)?;
        expect_if(kernel, "flag", flag, 1)?;
        let blocks = x.len().div_ceil(256 * 8).min(1024);
        self.launch(stream, kernel, [blocks, 1], 256, 0, &[&x, &amax, &optional(flag), &(x.len() as i64)])
    }

    /// As [`Kernels::amax`], of a float tensor.
    pub fn amax_master(&self, stream: &CudaStream, x: Span<f32>, amax: Span<f32>, flag: Option<Span<u32>>) -> Result {
        let kernel = "amax_f32";
        expect(kernel, "x", x, x.len())?;
        expect(kernel, "amax", amax, 1)?;
        expect_if(kernel, "flag", flag, 1)?;
        let blocks = x.len().div_ceil(256 * 8).min(1024);
        self.launch(stream, kernel, [blocks, 1], 256, 0, &[&x, &amax, &optional(flag), &(x.len() as i64)])
    }
}
