//! The commit.

use core::ffi::c_void;

use bytemuck::NoUninit;
use cudarc::driver::CudaStream;
use half::bf16;

use super::cast::{Outputs, TILE};
use crate::error::{Error, Result};
use crate::memory::Span;
use crate::module::{Argument, Kernels, dimension, expect, expect_if, optional, plain_arguments, rows_of};

/// Elements per partial sum of squares. Part of the numeric identity of a run.
pub const NORM_PIECE: usize = 4096;

/// Up to so many pieces have a block each, else sixteen share one. The sums are the same.
const FEW_PIECES: usize = 1024;

/// Threads of a block that updates weights.
const THREADS: usize = 256;

/// What a step of AdamW needs besides its tensors.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamW {
    /// Rows of three: learning rate, learning rate / (1 - β1^t), √(1 - β2^t).
    pub table: Span<f32>,
    /// Good commits so far, one element: the row of the table.
    pub counter: Span<u64>,
    /// The clipping factor, one element.
    pub clip: Span<f32>,
    /// If raised, nothing is done; one element.
    pub unless: Span<u32>,
    /// What gradients are multiplied by before clipping.
    pub factor: f32,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator, after bias correction.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// As the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Adam {
    table: u64,
    counter: u64,
    last: u64,
    clip: u64,
    unless: u64,
    weight_decay: f64,
    factor: f32,
    share1: f32,
    beta2: f32,
    share2: f32,
    epsilon: f32,
    /// What would be padding, whose bytes would differ from launch to launch.
    zero: u32,
}
plain_arguments!(Adam);

impl AdamW {
    fn argument(&self, kernel: &'static str) -> Result<Adam> {
        let rows = dimension(kernel, "table", self.table.len() / 3)?;
        expect(kernel, "table", self.table, rows as usize * 3)?;
        expect(kernel, "counter", self.counter, 1)?;
        expect(kernel, "clip", self.clip, 1)?;
        expect(kernel, "unless", self.unless, 1)?;
        Ok(Adam {
            table: self.table.address(),
            counter: self.counter.address(),
            last: rows as u64 - 1,
            clip: self.clip.address(),
            unless: self.unless.address(),
            weight_decay: self.weight_decay,
            factor: self.factor,
            share1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            share2: (1.0 - self.beta2) as f32,
            epsilon: self.epsilon as f32,
            zero: 0,
        })
    }
}

/// A gradient.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Gradient {
    /// In f32.
    F32(Span<f32>),
    /// In bf16.
    Bf16(Span<bf16>),
    /// In f32, with few rows that are not zero.
    Rows(Span<f32>, Rows),
}

/// Which rows of a matrix may be other than zero.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rows {
    /// One word per row: 0 where all of the row is zero.
    pub touched: Span<u32>,
    /// Elements per row.
    pub columns: usize,
}

impl Rows {
    /// Rows of this size are skipped where they are zero; smaller ones are read.
    const MULTIPLE: usize = 256;
}

impl Gradient {
    fn len(&self) -> usize {
        match self {
            Gradient::F32(values) | Gradient::Rows(values, _) => values.len(),
            Gradient::Bf16(values) => values.len(),
        }
    }

    /// Address, the address of the words of its rows or null, and elements per row.
    fn arguments(&self, kernel: &'static str, len: usize) -> Result<(u64, u64, i64)> {
        match *self {
            Gradient::F32(values) => {
                expect(kernel, "gradient", values, len)?;
                Ok((values.address(), 0, 1))
            }
            Gradient::Bf16(values) => {
                expect(kernel, "gradient", values, len)?;
                Ok((values.address(), 0, 1))
            }
            Gradient::Rows(values, Rows { touched, columns }) => {
                expect(kernel, "gradient", values, len)?;
                if !columns.is_multiple_of(Rows::MULTIPLE) {
                    return Ok((values.address(), 0, 1));
                }
                let rows = rows_of(kernel, "gradient", len, columns)? as usize;
                expect(kernel, "touched", touched, rows)?;
                Ok((values.address(), touched.address(), columns as i64))
            }
        }
    }

    const fn pick(&self, [f32, bf16]: [&'static str; 2]) -> &'static str {
        match self {
            Gradient::F32(_) | Gradient::Rows(..) => f32,
            Gradient::Bf16(_) => bf16,
        }
    }
}

/// The tensors of one parameter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Parameter {
    /// Its gradient.
    pub gradient: Gradient,
    /// Master weights.
    pub weight: Span<f32>,
    /// First moment.
    pub first: Span<f32>,
    /// Second moment.
    pub second: Span<f32>,
}

impl Parameter {
    fn expect(&self, kernel: &'static str, len: usize) -> Result {
        expect(kernel, "weight", self.weight, len)?;
        expect(kernel, "first", self.first, len)?;
        expect(kernel, "second", self.second, len)
    }
}

/// The numbers that a step is settled by, one element each.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settled {
    /// Norm of the whole gradient, before clipping.
    pub norm: Span<f32>,
    /// The clipping factor.
    pub clip: Span<f32>,
    /// Raised, and never lowered, if the step is bad.
    pub flag: Span<u32>,
}

impl Kernels {
    /// Sums of squares of `gradient · factor` over pieces of [`NORM_PIECE`] elements.
    pub fn sum_squares(&self, stream: &CudaStream, gradient: Gradient, factor: f32, partials: Span<f32>) -> Result {
        let pieces = gradient.len().div_ceil(NORM_PIECE);
        let few = pieces <= FEW_PIECES;
        let kernel = gradient.pick(if few {
            ["sum_few_squares", "sum_few_squares_bf16"]
        } else {
            ["sum_squares", "sum_squares_bf16"]
        });
        let (values, touched, columns) = gradient.arguments(kernel, gradient.len())?;
        if partials.len() != pieces {
            let (operand, expected, found) = ("partials", pieces, partials.len());
            return Err(Error::Length { kernel, operand, expected, found });
        }
        let len = gradient.len() as i64;
        let arguments: [&dyn Argument; 6] = [&values, &touched, &columns, &factor, &partials, &len];
        let blocks = if few { pieces } else { pieces.div_ceil(16) };
        self.launch(stream, kernel, [blocks, 1], 128, 0, &arguments)
    }

    /// Norm and clipping factor from all partial sums, in the order in which they lie; and the verdict over `flags`.
    pub fn settle(
        &self,
        stream: &CudaStream,
        partials: Span<f32>,
        flags: Span<u32>,
        limit: f32,
        settled: &Settled,
    ) -> Result {
        let kernel = "settle";
        expect(kernel, "norm", settled.norm, 1)?;
        expect(kernel, "clip", settled.clip, 1)?;
        expect(kernel, "flag", settled.flag, 1)?;
        let (count, ranks) = (partials.len() as i64, flags.len() as i32);
        let arguments: [&dyn Argument; 8] =
            [&partials, &count, &flags, &ranks, &limit, &settled.norm, &settled.clip, &settled.flag];
        self.launch(stream, kernel, [1, 1], 512, 0, &arguments)
    }

    /// A step over any run of elements; with `copy`, also the nearest bf16 of each new weight.
    pub fn adamw(&self, stream: &CudaStream, adam: &AdamW, parameter: &Parameter, copy: Option<Span<bf16>>) -> Result {
        let Parameter { gradient, weight, first, second } = *parameter;
        let kernel = gradient.pick(["adamw", "adamw_bf16"]);
        let len = weight.len();
        parameter.expect(kernel, len)?;
        expect_if(kernel, "copy", copy, len)?;
        let (values, touched, columns) = gradient.arguments(kernel, len)?;
        let (adam, copy, size) = (adam.argument(kernel)?, optional(copy), len as i64);
        let arguments: [&dyn Argument; 9] =
            [&adam, &values, &touched, &columns, &weight, &first, &second, &copy, &size];
        self.launch(stream, kernel, [len.div_ceil(THREADS * 8), 1], THREADS, 0, &arguments)
    }

    /// A step over a matrix, and the E4M3 codes of its new weights.
    pub fn adamw_cast(
        &self,
        stream: &CudaStream,
        adam: &AdamW,
        parameter: &Parameter,
        (rows, columns): (usize, usize),
        outputs: &Outputs,
    ) -> Result {
        let Parameter { gradient, weight, first, second } = *parameter;
        let kernel = gradient.pick(["adamw_e4m3", "adamw_e4m3_bf16"]);
        let (down, across) = (dimension(kernel, "rows", rows)?, dimension(kernel, "columns", columns)?);
        parameter.expect(kernel, rows * columns)?;
        if outputs.column_sums.is_some() {
            return Err(Error::Argument { kernel, found: "sums over the rows of a weight".into() });
        }
        // A weight that is cast is read whole: none of its rows stays without a gradient.
        let (values, _, _) = gradient.arguments(kernel, rows * columns)?;
        let (adam, sink) = (adam.argument(kernel)?, outputs.sink(kernel, rows, columns)?);
        let arguments: [&dyn Argument; 8] = [&adam, &values, &weight, &first, &second, &sink, &down, &across];
        let grid = [columns.div_ceil(TILE), rows.div_ceil(TILE)];
        self.launch(stream, kernel, grid, THREADS, 0, &arguments)
    }
}
