//! The GPT as functions: a block, and the four ways in which a pipeline cuts the model.

use crate::cmd::AttentionShape;
use crate::prelude::*;

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
    pub(super) ln_f: LayerNorm,
    pub(super) head: Linear,
}

/// Blocks, the final norm, the projection to logits, the loss.
#[stage(crate = crate)]
pub fn last(x: Act, w: &Last) -> Loss {
    let mut x = x;
    for layer in &w.blocks {
        x = block(x, layer);
    }
    cross_entropy(linear(layer_norm(x, &w.ln_f), &w.head))
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
