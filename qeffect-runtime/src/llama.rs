//! The Llama: RMS norms, rotary positions, attention with heads that share keys and values, SwiGLU; the head has a weight of its own, or that of the embedding.

mod model;

pub use model::{Block, First, Last, Middle, ModelStage as LlamaStage, Whole, block, first, last, middle, whole};

use qeffect_core::recipe::Recipe;

use crate::cmd::AttentionShape;
use crate::error::{Error, Result};
use crate::layers;
use crate::ops::embedding::Embedding;
use crate::ops::linear::Linear;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::rotary::Rotary;
use crate::stage::Init;

/// A Llama.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LlamaConfig {
    /// Number of token ids; 256 for bytes.
    pub vocab: usize,
    /// Elements per token.
    pub hidden: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values: a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements per token inside the MLP, after the gate.
    pub ffn: usize,
    /// Blocks.
    pub layers: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per microbatch.
    pub sequences: usize,
    /// Base of the rotary angles; 10,000 is usual.
    pub rotary_base: f64,
    /// Whether the head has the weight of the embedding.
    pub tied: bool,
    /// How numbers are stored and scaled.
    pub recipe: Recipe,
}

impl LlamaConfig {
    /// Checks every size.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] that names the first size that does not fit, and what it must be.
    pub fn validate(&self) -> Result<()> {
        layers::positive(&[
            ("vocab", self.vocab),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("ffn", self.ffn),
            ("layers", self.layers),
            ("seq", self.seq),
            ("sequences", self.sequences),
        ])?;
        let (heads, kv_heads, hidden) = (self.heads, self.kv_heads, self.hidden);
        if !hidden.is_multiple_of(heads) {
            return Err(Error::Config(format!("model: {heads} heads do not divide a hidden size of {hidden}")));
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(Error::Config(format!(
                "model: {kv_heads} heads of keys and values do not divide {heads} heads"
            )));
        }
        let qkv = self.attention().width();
        let sizes = [("hidden", hidden), ("ffn", self.ffn), ("q, k and v", qkv), ("seq · sequences", self.tokens())];
        self.rotary()?;
        layers::aligned(&self.recipe, &sizes, self.vocab)
    }

    /// Tokens of a microbatch.
    pub const fn tokens(&self) -> usize {
        self.seq * self.sequences
    }

    /// Sizes of attention.
    pub const fn attention(&self) -> AttentionShape {
        AttentionShape {
            sequences: self.sequences,
            length: self.seq,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.hidden / self.heads,
        }
    }

    fn rotary(&self) -> Result<Rotary> {
        Rotary::of(&self.attention(), self.rotary_base)
    }

    fn linear(&self, shape: [usize; 2]) -> Linear {
        Linear::of(shape).unbiased().init(Init::Normal(layers::deviation(self.hidden)))
    }

    fn block(&self) -> Result<Block> {
        let (hidden, ffn, shape) = (self.hidden, self.ffn, self.attention());
        let residual = Init::Normal(layers::residual_deviation(hidden, self.layers));
        Ok(Block {
            attention_norm: RmsNorm::of(hidden),
            qkv: self.linear([hidden, shape.width()]),
            rotary: self.rotary()?,
            shape,
            proj: self.linear([hidden, hidden]).init(residual),
            mlp_norm: RmsNorm::of(hidden),
            gate_up: self.linear([hidden, 2 * ffn]),
            down: self.linear([ffn, hidden]).init(residual),
        })
    }

    fn embedding(&self) -> Embedding {
        let init = Init::Normal(layers::deviation(self.hidden));
        Embedding::of(self.vocab, self.seq, self.hidden).without_positions().init(init)
    }

    fn norm(&self) -> RmsNorm {
        RmsNorm::of(self.hidden)
    }

    fn head(&self) -> Linear {
        let head = self.linear([self.hidden, self.vocab]).quantised(layers::fp8_head(&self.recipe));
        if self.tied { head.tied("wte") } else { head }
    }
}
