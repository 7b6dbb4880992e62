//! The GPT as functions: a block, and the four ways in which a pipeline cuts the model.

use std::ops::Range;

use super::GptConfig;
use crate::built::{Built, Cut};
use crate::cmd::AttentionShape;
use crate::error::Result;
use crate::layers;
use crate::optim::NormPlan;
use crate::params::{Layers, Registry};
use crate::pipeline::pipeline;
use crate::prelude::*;
use crate::stage::{ParamId, StageSpec};

/// Parameters of a pre-norm transformer block.
#[derive(Clone, Debug, Params)]
#[params(crate = crate)]
pub struct Block {
    pub(super) ln1: LayerNorm,
    /// `[3 · hidden, hidden]`: the rows of q, k and v.
    #[params(views(q, k, v))]
    pub(super) qkv: Linear,
    #[params(config)]
    pub(super) shape: AttentionShape,
    pub(super) proj: Linear,
    pub(super) ln2: LayerNorm,
    pub(super) fc1: Linear,
    pub(super) fc2: Linear,
}

/// Attention and MLP, each behind a norm and beside a residual connection.
#[stage(crate = crate)]
pub fn block(x: Act, w: &Block) -> Act {
    let a = attention(linear(layer_norm(x, &w.ln1), &w.qkv), &w.shape);
    let x = add(x, linear(a, &w.proj));
    let h = gelu(linear(layer_norm(x, &w.ln2), &w.fc1));
    add(x, linear(h, &w.fc2))
}

pipeline!(GptConfig: block(Block), layer_norm(LayerNorm) as ln_f);
