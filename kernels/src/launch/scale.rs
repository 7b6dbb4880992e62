//! Delayed scaling.

use core::ops::Range;

use cudarc::driver::CudaStream;
use qeffect_core::recipe::AmaxAlgo;
use qeffect_core::scaling::ScaleRule;

use crate::error::{Error, Result};
use crate::gemm::{BLOCK, BlockScale};
use crate::memory::Span;
use crate::module::{Kernels, dimension, expect, expect_if, optional};

impl Kernels {
    /// Rolls every cell that ran, as [`ScaleRule::roll`] does, bit for bit.
    pub fn roll_scales(
        &self,
        stream: &CudaStream,
        rule: &ScaleRule,
        scale: Span<f32>,
        history: Span<f32>,
        reduced: Option<Span<f32>>,
        unless: Option<Span<u32>>,
    ) -> Result {
        let kernel = "roll_scales";
        let cells = dimension(kernel, "cells", scale.len())?;
        if history.is_empty() || !history.len().is_multiple_of(scale.len()) {
            let (expected, found) = (scale.len(), history.len());
            return Err(Error::Length { kernel, operand: "history", expected, found });
        }
        expect_if(kernel, "reduced", reduced, scale.len())?;
        expect_if(kernel, "unless", unless, 1)?;
        let length = dimension(kernel, "history", history.len() / scale.len())?;
        let threads = (length as usize).next_multiple_of(32).min(256);
        let most_recent = i32::from(rule.algo() == AmaxAlgo::MostRecent);
        let reduced = optional(reduced);
        self.launch(
            stream,
            kernel,
            [scale.len(), 1],
            threads,
            0,
            &[&scale, &history, &reduced, &optional(unless), &rule.target(), &most_recent, &cells, &length],
        )
    }

    /// Writes a microbatch's scale into the table of block scales of an operand of `rows` rows and a given depth, for the
    /// blocks of depth that it has.
    pub fn spread_scale(
        &self,
        stream: &CudaStream,
        scale_inv: Span<f32>,
        kind: BlockScale,
        (rows, depth): (usize, usize),
        blocks: Range<usize>,
        table: Span<f32>,
    ) -> Result {
        let kernel = "spread_scale";
        expect(kernel, "scale_inv", scale_inv, 1)?;
        expect(kernel, "table", table, kind.len(rows, depth))?;
        if blocks.start >= blocks.end || blocks.end > depth.div_ceil(BLOCK) {
            let rule = "blocks lie within the depth";
            return Err(Error::Dimension { kernel, dimension: "blocks", found: blocks.end, rule });
        }
        let first = kind.index(rows, depth, 0, blocks.start);
        let (lines, width, stride) = match kind {
            BlockScale::Vector => (blocks.len(), rows, rows),
            BlockScale::Square => (rows.div_ceil(BLOCK), blocks.len(), kind.index(rows, depth, BLOCK, 0)),
        };
        let expected = first + (lines - 1) * stride + width;
        let found = table.len();
        let out = table.part(first..found).ok_or(Error::Length { kernel, operand: "table", expected, found })?;
        let width = dimension(kernel, "blocks", width)?;
        self.launch(stream, kernel, [lines, 1], 128, 0, &[&scale_inv, &out, &width, &(stride as i64)])
    }

    /// Copies words if the flag is raised: state goes back to the copy of the step's start.
    pub fn copy_if(&self, stream: &CudaStream, flag: Span<u32>, from: Span<u32>, to: Span<u32>) -> Result {
        expect("copy_if", "flag", flag, 1)?;
        expect("copy_if", "to", to, from.len())?;
        let words = from.len() as i64;
        self.launch(stream, "copy_if", [from.len().div_ceil(256), 1], 256, 0, &[&flag, &from, &to, &words])
    }
}
