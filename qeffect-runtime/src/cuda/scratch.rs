//! Memory that kernels use besides their operands, one set per lane, so that lanes may run at once.

use std::sync::Arc;

use qeffect_kernels::gemm::{Scaling, WORKSPACE};
use qeffect_kernels::launch::cast::{ColumnScratch, TILE, partial_sums};
use qeffect_kernels::{Buffer, CudaContext, CudaStream, Error, Result, Span, memory};

use super::product;
use crate::cmd::Cmd;
use crate::cmd::fused::Producer;
use crate::device::{Buf, BufSpec, DeviceError};

/// What a command needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Need {
    /// Partial sums over columns.
    partial: usize,
    /// Counters of tiles of columns.
    finished: usize,
    /// One number per row, or per row and head.
    rows: usize,
    /// Block scales of both operands of a product.
    scales: usize,
}

impl Need {
    /// Of a command; what it needs beyond its operands follows from their sizes.
    pub(super) fn of<'a>(
        cmd: &Cmd,
        spec: impl Fn(Buf) -> std::result::Result<&'a BufSpec, DeviceError>,
    ) -> std::result::Result<Need, DeviceError> {
        let columns = |elements: usize, cols: usize, kinds: usize| Need {
            partial: kinds * partial_sums(elements / cols.max(1), cols),
            finished: cols.div_ceil(TILE),
            ..Need::default()
        };
        Ok(match cmd {
            Cmd::ColumnSums { x, cols, .. } => columns(spec(*x)?.elements(), *cols, 1),
            Cmd::LayerNormGrad { x, cols, .. } | Cmd::RmsNormGrad { x, cols, .. } => {
                columns(spec(*x)?.elements(), *cols, 3)
            }
            Cmd::Fused(fused) => match fused.producer {
                Producer::LayerNormGrad { .. } | Producer::RmsNormGrad { .. } => {
                    columns(fused.rows * fused.cols, fused.cols, 3)
                }
                _ if fused.outputs.column_sums.is_some() => columns(fused.rows * fused.cols, fused.cols, 1),
                _ => Need::default(),
            },
            Cmd::AttentionGrad { lse, .. } => Need { rows: spec(*lse)?.elements(), ..Need::default() },
            Cmd::CrossEntropy { targets, .. } => Need { rows: spec(*targets)?.elements(), ..Need::default() },
            Cmd::GroupGemm { .. } => match product::of(cmd, spec)? {
                Some(product) if product.scaling != Scaling::Tensor => {
                    let (left, right) = product.scales();
                    Need { scales: right_table(left) + right, ..Need::default() }
                }
                _ => Need::default(),
            },
            _ => Need::default(),
        })
    }

    /// Bytes of it.
    pub(super) const fn bytes(&self) -> usize {
        (self.partial + self.finished + self.rows + self.scales) * size_of::<f32>()
    }

    /// What serves both.
    pub(super) fn max(self, other: Need) -> Need {
        Need {
            partial: self.partial.max(other.partial),
            finished: self.finished.max(other.finished),
            rows: self.rows.max(other.rows),
            scales: self.scales.max(other.scales),
        }
    }

    fn exceeds(&self, other: &Need) -> bool {
        self.max(*other) != *other
    }
}

/// The memory of one lane.
#[derive(Debug)]
pub(super) struct Scratch {
    has: Need,
    holds: Holds,
    workspace: Buffer<u8>,
    /// What was too small, and may be named by graphs.
    outgrown: Vec<Holds>,
}

/// Buffers for a need.
#[derive(Debug)]
struct Holds {
    partial: Buffer<f32>,
    finished: Buffer<u32>,
    rows: Buffer<f32>,
    scales: Buffer<f32>,
}

impl Holds {
    fn new(context: &Arc<CudaContext>, need: Need) -> Result<Holds> {
        Ok(Holds {
            partial: Buffer::poisoned(context, need.partial)?,
            finished: Buffer::poisoned(context, need.finished)?,
            rows: Buffer::poisoned(context, need.rows)?,
            scales: Buffer::poisoned(context, need.scales)?,
        })
    }
}

impl Holds {
    fn bytes(&self) -> usize {
        let floats = self.partial.span().len() + self.rows.span().len() + self.scales.span().len();
        (floats + self.finished.span().len()) * size_of::<f32>()
    }
}

/// Where the right operand's table begins behind a left one: aligned as products want it.
const fn right_table(left: usize) -> usize {
    left.next_multiple_of(4)
}

impl Scratch {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Scratch> {
        let named = |error| match error {
            Error::Driver { source, .. } => Error::Driver { call: "allocation of a workspace for products", source },
            other => other,
        };
        Ok(Scratch {
            has: Need::default(),
            holds: Holds::new(context, Need::default())?,
            workspace: Buffer::poisoned(context, WORKSPACE).map_err(named)?,
            outgrown: Vec::new(),
        })
    }

    /// Makes room. Never inside a capture. What there was stays valid, since graphs may use it.
    pub(super) fn reserve(&mut self, context: &Arc<CudaContext>, stream: &CudaStream, need: Need) -> Result {
        if !need.exceeds(&self.has) {
            return Ok(());
        }
        let double = |need: usize, has: usize| if need > has { need.max(2 * has) } else { has };
        let has = Need {
            partial: double(need.partial, self.has.partial),
            finished: double(need.finished, self.has.finished),
            rows: double(need.rows, self.has.rows),
            scales: double(need.scales, self.has.scales),
        };
        let made = Holds::new(context, has)?;
        memory::zero(stream, made.finished.span())?; // kernels leave the counters at zero
        self.has = has;
        self.outgrown.push(std::mem::replace(&mut self.holds, made));
        Ok(())
    }

    /// Bytes of device memory that it takes, what it has outgrown included.
    pub(super) fn bytes(&self) -> usize {
        let all = self.outgrown.iter().chain([&self.holds]);
        all.map(Holds::bytes).sum::<usize>() + self.workspace.span().len()
    }

    /// For sums over columns.
    pub(super) fn columns(&self) -> ColumnScratch {
        ColumnScratch { partial: self.holds.partial.span(), finished: self.holds.finished.span() }
    }

    /// As many numbers as asked for, within what was reserved.
    pub(super) fn rows(&self, len: usize) -> Option<Span<f32>> {
        self.holds.rows.span().part(0..len)
    }

    /// Tables of block scales of that many entries, within what was reserved.
    pub(super) fn block_scales(&self, (left, right): (usize, usize)) -> Option<[Span<f32>; 2]> {
        let all = self.holds.scales.span();
        let second = right_table(left);
        Some([all.part(0..left)?, all.part(second..second + right)?])
    }

    /// For products.
    pub(super) fn workspace(&self) -> Span<u8> {
        self.workspace.span()
    }
}
