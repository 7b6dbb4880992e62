//! The GPT: its configuration, and the sizes that follow from it.

mod model;

pub use model::{Block, First, Last, Middle, ModelStage as GptStage, Whole, block, first, last, middle, whole};

use qeffect_core::recipe::Recipe;

use crate::cmd::AttentionShape;
use crate::error::{Error, Result};
use crate::layers;
use crate::ops::embedding::Embedding;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::linear::Linear;
use crate::stage::{Init, Stage};

/// From F to I.
pub type GptTape = <GptStage as Stage>::Tape;
/// From I to W.
pub type GptWork = <GptStage as Stage>::Work;

pub use crate::layers::FP8_ALIGNMENT;

/// A GPT.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GptConfig {
    /// Number of token ids; 256 for bytes.
    pub vocab: usize,
    /// Elements per token.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Elements per token inside the MLP.
    pub ffn: usize,
    /// Blocks.
    pub layers: usize,
    /// Tokens per sequence.
    pub seq: usize,
    /// Sequences per microbatch.
    pub sequences: usize,
    /// How numbers are stored and scaled.
    pub recipe: Recipe,
}

impl GptConfig {
    /// Checks every size.
    pub fn validate(&self) -> Result<()> {
        layers::positive(&[
            ("vocab", self.vocab),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("ffn", self.ffn),
            ("layers", self.layers),
            ("seq", self.seq),
            ("sequences", self.sequences),
        ])?;
        if !self.hidden.is_multiple_of(self.heads) {
            return Err(Error::Config(format!(
                "model: {} heads do not divide a hidden size of {}",
                self.heads, self.hidden
            )));
        }
        let sizes = [("hidden", self.hidden), ("ffn", self.ffn), ("seq · sequences", self.tokens())];
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
            kv_heads: self.heads,
            head_dim: self.hidden / self.heads,
        }
    }

    /// First values of a matrix.
    pub fn init(&self) -> Init {
        Init::Normal(layers::deviation(self.hidden))
    }

    /// First values of a matrix that adds to the residual stream: smaller, for there are 2·layers of them.
    pub fn residual_init(&self) -> Init {
        Init::Normal(layers::residual_deviation(self.hidden, self.layers))
    }

    fn block(&self) -> Result<Block> {
        let (hidden, ffn, residual) = (self.hidden, self.ffn, self.residual_init());
        let linear = |shape| Linear::of(shape).init(self.init());
        Ok(Block {
            ln1: LayerNorm::of(hidden),
            qkv: linear([hidden, 3 * hidden]),
            shape: self.attention(),
            proj: linear([hidden, hidden]).init(residual),
            ln2: LayerNorm::of(hidden),
            fc1: linear([hidden, ffn]),
            fc2: linear([ffn, hidden]).init(residual),
        })
    }

    fn embedding(&self) -> Embedding {
        Embedding::of(self.vocab, self.seq, self.hidden).init(self.init())
    }

    fn norm(&self) -> LayerNorm {
        LayerNorm::of(self.hidden)
    }

    fn head(&self) -> Linear {
        let fp8 = layers::fp8_head(&self.recipe);
        Linear::of([self.hidden, self.vocab]).unbiased().init(self.init()).quantised(fp8)
    }
}
