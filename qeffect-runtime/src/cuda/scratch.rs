//! Memory that kernels use besides their operands, one set per lane, so that lanes may run at once.

use std::sync::Arc;

use qeffect_kernels::gemm::WORKSPACE;
use qeffect_kernels::launch::cast::{ColumnScratch, TILE, partial_sums};
use qeffect_kernels::{Buffer, CudaContext, CudaStream, Result, Span, memory};

use crate::cmd::Cmd;
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
            rows: 0,
        };
        Ok(match cmd {
            Cmd::ColumnSums { x, cols, .. } => columns(spec(*x)?.elements(), *cols, 1),
            Cmd::LayerNormGrad { x, cols, .. } | Cmd::RmsNormGrad { x, cols, .. } => {
                columns(spec(*x)?.elements(), *cols, 2)
            }
            Cmd::Fused(fused) => columns(fused.rows * fused.cols, fused.cols, 2),
            Cmd::AttentionGrad { lse, .. } => Need { rows: spec(*lse)?.elements(), ..Need::default() },
            Cmd::CrossEntropy { targets, .. } => Need { rows: spec(*targets)?.elements(), ..Need::default() },
            _ => Need::default(),
        })
    }

    /// What serves both.
    pub(super) fn max(self, other: Need) -> Need {
        Need {
            partial: self.partial.max(other.partial),
            finished: self.finished.max(other.finished),
            rows: self.rows.max(other.rows),
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
    partial: Buffer<f32>,
    finished: Buffer<u32>,
    rows: Buffer<f32>,
    workspace: Buffer<u8>,
    /// What was too small, and may be named by graphs.
    outgrown: Vec<(Buffer<f32>, Buffer<u32>, Buffer<f32>)>,
}

impl Scratch {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Scratch> {
        Ok(Scratch {
            has: Need::default(),
            partial: Buffer::poisoned(context, 0)?,
            finished: Buffer::poisoned(context, 0)?,
            rows: Buffer::poisoned(context, 0)?,
            workspace: Buffer::poisoned(context, WORKSPACE)?,
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
        };
        let made = (
            Buffer::poisoned(context, has.partial)?,
            Buffer::poisoned(context, has.finished)?,
            Buffer::poisoned(context, has.rows)?,
        );
        memory::zero(stream, made.1.span())?; // kernels leave the counters at zero
        self.has = has;
        self.outgrown.push((
            std::mem::replace(&mut self.partial, made.0),
            std::mem::replace(&mut self.finished, made.1),
            std::mem::replace(&mut self.rows, made.2),
        ));
        Ok(())
    }

    /// For sums over columns.
    pub(super) fn columns(&self) -> ColumnScratch {
        ColumnScratch { partial: self.partial.span(), finished: self.finished.span() }
    }

    /// As many numbers as asked for, within what was reserved.
    pub(super) fn rows(&self, len: usize) -> Option<Span<f32>> {
        self.rows.span().part(0..len)
    }

    /// For products.
    pub(super) fn workspace(&self) -> Span<u8> {
        self.workspace.span()
    }
}
