//! What a run fixes, as its shards are told.

use qeffect_core::bind::Gradients;

use crate::fast::FastAccumulation;
use crate::gradients::GradDtype;
use crate::optim::{NormPlan, OptimConfig};

/// What a run fixes for all its ranks.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Microbatches of a step.
    pub microbatches: u32,
    /// How weight gradients reach the optimizer.
    pub gradients: Gradients,
    /// What they are stored in.
    pub grad_dtype: GradDtype,
    /// Which products in FP8 may be summed in fewer bits.
    pub fast_accumulation: FastAccumulation,
    /// Where they are coalesced: microbatches of a group.
    pub coalesce: u32,
    /// Ranks that see other data of the same step; gradients are divided by microbatches times this.
    pub data_parallel: u32,
    /// Tokens of a microbatch.
    pub tokens: usize,
    /// This rank of the pipeline: its flag is the one of this number.
    pub rank: u32,
    /// Ranks of the pipeline: as many flags are agreed on.
    pub ranks: u32,
    /// Whether its steps are made lists. Where commands of a list run in parallel, buffers are then reused late.
    pub lists: bool,
    /// The optimizer.
    pub optim: OptimConfig,
    /// Partial sums of the whole model.
    pub norm: NormPlan,
}

impl ShardConfig {
    /// Microbatches of a group, the last one aside, whose weight gradients are one product.
    pub(super) fn members(&self) -> u32 {
        match self.gradients {
            Gradients::Coalesced => self.coalesce.min(self.microbatches),
            Gradients::Copied | Gradients::Direct => 1,
        }
    }
}
