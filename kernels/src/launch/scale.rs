//! Delayed scaling.

use cudarc::driver::CudaStream;
use qeffect_core::recipe::AmaxAlgo;
use qeffect_core::scaling::ScaleRule;

use crate::error::{Error, Result};
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

    /// Copies words if the flag is raised: state goes back to the copy of the step's start.
    pub fn copy_if(&self, stream: &CudaStream, flag: Span<u32>, from: Span<u32>, to: Span<u32>) -> Result {
        expect("copy_if", "flag", flag, 1)?;
        expect("copy_if", "to", to, from.len())?;
        let words = from.len() as i64;
        self.launch(stream, "copy_if", [from.len().div_ceil(256), 1], 256, 0, &[&flag, &from, &to, &words])
    }
}
