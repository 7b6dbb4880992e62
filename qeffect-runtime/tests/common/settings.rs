//! What tests have to set and are not about: the optimizer, the sizes of a model, the place of a rank that is alone.

use qeffect_core::bind::Gradients;
use qeffect_runtime::device::Caps;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::gradients::GradDtype;
use qeffect_runtime::optim::{NormPlan, OptimConfig};
use qeffect_runtime::session::FastAccumulation;
use qeffect_runtime::shard::ShardConfig;

/// AdamW with its usual settings, for that many commits; the learning rate goes up to `peak`, then down to `floor`.
pub const fn adamw(steps: u64, warmup: u64, peak: f64, floor: f64) -> OptimConfig {
    OptimConfig { steps, warmup, peak, floor, beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1, clip: 1.0 }
}

/// Sizes at which every product is one of FP8 and nothing more.
pub fn tiny(recipe: &str, layers: usize) -> GptConfig {
    let recipe = recipe.parse().unwrap();
    GptConfig { vocab: 32, hidden: 16, heads: 2, ffn: 32, layers, seq: 8, sequences: 2, recipe }
}

/// Twice as wide, four layers deep.
pub fn small(recipe: &str) -> GptConfig {
    GptConfig { hidden: 32, heads: 4, ffn: 64, ..tiny(recipe, 4) }
}

/// One rank that has the whole model; its gradients are copied, all else is as sessions have it.
pub const fn alone(microbatches: u32, tokens: usize, optim: OptimConfig, norm: NormPlan) -> ShardConfig {
    ShardConfig {
        microbatches,
        gradients: Gradients::Copied,
        grad_dtype: GradDtype::Master,
        fast_accumulation: FastAccumulation::Forward, // as a session
        coalesce: 1,
        data_parallel: 1,
        tokens,
        rank: 0,
        ranks: 1,
        lists: false,
        optim,
        norm,
    }
}

/// Products of operands that are stored the other way round too: the same bits.
pub const TRANSPOSES: Caps = Caps {
    fp8_needs_transposes: true,
    fp8_multiple: 1,
    bf16_only: false,
    fuses: false,
    parallel: false,
    one_factor: false,
};
