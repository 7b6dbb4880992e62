//! The Llama as functions: a block, and the four ways in which a pipeline cuts the model.

use crate::cmd::AttentionShape;
use crate::prelude::*;

/// Parameters of a pre-norm block without biases.
#[derive(Clone, Debug, Params)]
#[params(crate = crate)]
pub struct Block {
    pub(super) attention_norm: RmsNorm,
    /// `[(heads + 2 · kv_heads) · head_dim, hidden]`: the rows of q, k and v.
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

/// Parameters at the start of the pipeline.
#[derive(Clone, Debug, Params)]
#[params(crate = crate)]
pub struct First {
    #[params(name = "")]
    pub(super) embedding: Embedding,
    pub(super) blocks: Layers<Block>,
}

/// The embedding, and blocks.
#[stage(crate = crate)]
pub fn first(w: &First) -> Act {
    let mut x = embedding(&w.embedding);
    for layer in &w.blocks {
        x = block(x, layer);
    }
    x
}

/// Parameters inside the pipeline.
#[derive(Clone, Debug, Params)]
#[params(crate = crate)]
pub struct Middle {
    pub(super) blocks: Layers<Block>,
}

/// Blocks only.
#[stage(crate = crate)]
pub fn middle(x: Act, w: &Middle) -> Act {
    let mut x = x;
    for layer in &w.blocks {
        x = block(x, layer);
    }
    x
}

/// Parameters at the end of the pipeline.
#[derive(Clone, Debug, Params)]
#[params(crate = crate)]
pub struct Last {
    pub(super) blocks: Layers<Block>,
    pub(super) norm: RmsNorm,
    pub(super) head: Linear,
}

/// Blocks, the final norm, the projection to logits, the loss.
#[stage(crate = crate)]
pub fn last(x: Act, w: &Last) -> Loss {
    let mut x = x;
    for layer in &w.blocks {
        x = block(x, layer);
    }
    cross_entropy(linear(rms_norm(x, &w.norm), &w.head))
}

/// Parameters of the whole model.
#[derive(Clone, Debug, Params)]
#[params(crate = crate)]
pub struct Whole {
    #[params(name = "")]
    pub(super) first: First,
    #[params(name = "")]
    pub(super) last: Last,
}

/// All of it.
#[stage(crate = crate)]
pub fn whole(w: &Whole) -> Loss {
    last(first(&w.first), &w.last)
}
