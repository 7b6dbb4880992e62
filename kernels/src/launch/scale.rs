//! Delayed scaling.

use core::ffi::c_void;
use core::ops::Range;

use bytemuck::NoUninit;
use cudarc::driver::CudaStream;
use qeffect_core::recipe::AmaxAlgo;
use qeffect_core::scaling::ScaleRule;

use crate::error::{Error, Result};
use crate::gemm::{BLOCK, BlockScale};
use crate::memory::Span;
use crate::module::{Argument, Kernels, dimension, expect, expect_if, optional, plain_arguments};

/// Members whose factors one launch takes.
const MEMBERS: usize = 32;

/// One operand of a product over a group: where the factors of its members go.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Spread<'a> {
    /// One element per member.
    pub factors: &'a [Span<f32>],
    /// The form of the table.
    pub kind: BlockScale,
    /// Rows of the operand.
    pub rows: usize,
    /// Block scales; entries that pad it are left alone.
    pub table: Span<f32>,
}

/// As the kernel takes it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct SpreadArguments {
    factors: [u64; MEMBERS],
    table: u64,
    along: i64,
    across: i64,
    count: i64,
}
plain_arguments!(SpreadArguments);

impl Spread<'_> {
    /// Entries per block of depth.
    const fn lines(&self) -> usize {
        match self.kind {
            BlockScale::Vector => self.rows,
            BlockScale::Square => self.rows.div_ceil(BLOCK),
        }
    }

    fn arguments(&self, members: &[Span<f32>], depth: usize) -> SpreadArguments {
        let mut factors = [0; MEMBERS];
        factors.iter_mut().zip(members).for_each(|(address, factor)| *address = factor.address());
        let next_line = if self.kind == BlockScale::Square { BLOCK } else { 1 };
        SpreadArguments {
            factors,
            table: self.table.address(),
            along: self.kind.index(self.rows, depth, 0, 1) as i64,
            across: self.kind.index(self.rows, depth, next_line, 0) as i64,
            count: self.lines() as i64,
        }
    }
}

impl Kernels {
    /// Rolls those of some cells that ran, as [`ScaleRule::roll_some`] does, bit for bit.
    pub fn roll_scales(
        &self,
        stream: &CudaStream,
        rule: &ScaleRule,
        some: Range<usize>,
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
        let (Some(part), Some(staged)) = (scale.part(some.clone()), history.part(some.start..history.len())) else {
            let rule = "they are among the cells";
            return Err(Error::Dimension { kernel, dimension: "some", found: some.end, rule });
        };
        // A column begins at its staging entry.
        let reduced = reduced.and_then(|reduced| reduced.part(some));
        let threads = (length as usize).next_multiple_of(32).min(256);
        let most_recent = i32::from(rule.algo() == AmaxAlgo::MostRecent);
        let reduced = optional(reduced);
        self.launch(
            stream,
            kernel,
            [part.len(), 1],
            threads,
            0,
            &[&part, &staged, &reduced, &optional(unless), &rule.target(), &most_recent, &cells, &length],
        )
    }

    /// Writes the factors of a group's members into the tables of block scales of both operands of a product. Each member
    /// has `blocks` blocks of the depth, which is that of all members.
    pub fn spread_scales(&self, stream: &CudaStream, sides: [&Spread<'_>; 2], blocks: usize) -> Result {
        let kernel = "spread_scales";
        let [left, right] = sides;
        let members = left.factors.len();
        if members == 0 || right.factors.len() != members {
            let (expected, found) = (members.max(1), right.factors.len());
            return Err(Error::Length { kernel, operand: "factors", expected, found });
        }
        let per = dimension(kernel, "blocks", blocks)?;
        let depth = members * blocks * BLOCK;
        for side in sides {
            expect(kernel, "table", side.table, side.kind.len(side.rows, depth))?;
            side.factors.iter().try_for_each(|factor| expect(kernel, "factor", *factor, 1))?;
        }
        for (launch, (l, r)) in left.factors.chunks(MEMBERS).zip(right.factors.chunks(MEMBERS)).enumerate() {
            let (members, to_left, to_right) = (l.len(), left.arguments(l, depth), right.arguments(r, depth));
            let across = left.lines().max(right.lines()).div_ceil(1024);
            let first = (launch * MEMBERS * blocks) as i64;
            self.launch(stream, kernel, [across, members * blocks], 256, 0, &[&to_left, &to_right, &first, &per])?;
        }
        Ok(())
    }

    /// Copies words if the flag is raised: state goes back to the copy of the step's start.
    pub fn copy_if(&self, stream: &CudaStream, flag: Span<u32>, from: Span<u32>, to: Span<u32>) -> Result {
        expect("copy_if", "flag", flag, 1)?;
        expect("copy_if", "to", to, from.len())?;
        let words = from.len() as i64;
        self.launch(stream, "copy_if", [from.len().div_ceil(256), 1], 256, 0, &[&flag, &from, &to, &words])
    }
}
