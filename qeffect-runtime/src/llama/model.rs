//! The Llama as functions: a block, and the four ways in which a pipeline cuts the model.

use std::ops::Range;

use super::LlamaConfig;
use crate::built::{Built, Cut};
use crate::cmd::AttentionShape;
use crate::error::Result;
use crate::layers;
use crate::optim::NormPlan;
use crate::params::{Layers, Registry};
use crate::pipeline::pipeline;
use crate::prelude::*;
use crate::stage::{ParamId, StageSpec};

/// Parameters of a pre-norm block without biases.
#[derive(Clone, Debug, Params)]
#[params(crate = crate)]
pub struct Block {
    pub(super) attention_norm: RmsNorm,
    /// `[(heads + 2 · kv_heads) · head_dim, hidden]`: the rows of q, k and v.
    #[params(views(q = self.shape.heads, k = self.shape.kv_heads, v = self.shape.kv_heads))]
    pub(super) qkv: Linear,
    pub(super) rotary: Rotary,
    #[params(config)]
    pub(super) shape: AttentionShape,
    pub(super) proj: Linear,
    pub(super) mlp_norm: RmsNorm,
    /// `[2 · ffn, hidden]`: the rows of the gate, and of what it lets through.
    #[params(views(gate, up))]
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

/// Attention over turned queries and keys, which heads share in groups, and a gated MLP.
#[stage(crate = crate)]
pub fn block(x: Act, w: &Block) -> Act {
    let qkv = rotary(linear(rms_norm(x, &w.attention_norm), &w.qkv), &w.rotary);
    let x = add(x, linear(attention(qkv, &w.shape), &w.proj));
    let h = swiglu(linear(rms_norm(x, &w.mlp_norm), &w.gate_up));
    add(x, linear(h, &w.down))
}

pipeline!(LlamaConfig: block(Block), rms_norm(RmsNorm) as norm);
