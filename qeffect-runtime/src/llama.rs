//! The Llama: RMS norms, rotary positions, attention with heads that share keys and values, SwiGLU; the head has a weight of its own, or that of the embedding.

mod model;

pub use model::{Block, First, Last, Middle, Whole, block, first, last, middle, whole};

use std::ops::Range;

use qeffect_core::recipe::Recipe;

use crate::built::{Built, Cut};
use crate::cmd::AttentionShape;
use crate::error::{Error, Result};
use crate::layers;
use crate::ops::embedding::Embedding;
use crate::ops::linear::Linear;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::rotary::Rotary;
use crate::optim::NormPlan;
use crate::params::{Layers, Params, Registry};
use crate::stage::{Init, ParamSpec, StageSpec};

/// A stage: some blocks, with the embedding before the first and the head after the last.
pub type LlamaStage = Cut<Built<first, First>, Built<middle, Middle>, Built<last, Last>, Built<whole, Whole>>;

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

    /// Blocks per stage, as even as possible; the first stages take what is left over.
    ///
    /// # Errors
    ///
    /// If there are more stages than blocks.
    pub fn split(&self, stages: usize) -> Result<Vec<usize>> {
        layers::split(self.layers, stages)
    }

    /// The stages, given the number of blocks of each. The first has the embedding and the last the head, so these two may
    /// have no block.
    ///
    /// # Errors
    ///
    /// As [`LlamaConfig::validate`]; if the blocks are not those of the model.
    pub fn stages(&self, blocks: &[usize]) -> Result<Vec<LlamaStage>> {
        self.validate()?;
        layers::cut(self.layers, blocks, |blocks, first, last| self.stage(blocks, first, last))
    }

    fn stage(&self, blocks: Range<usize>, first: bool, last: bool) -> Result<LlamaStage> {
        let boundary = [self.tokens(), self.hidden];
        let blocks = self.layers(blocks)?;
        Ok(match (first, last) {
            (true, false) => Cut::First(Built::new(self.recipe, boundary, self.first(blocks))?),
            (false, false) => Cut::Middle(Built::new(self.recipe, boundary, Middle { blocks })?),
            (false, true) => Cut::Last(Built::new(self.recipe, boundary, self.last(blocks))?),
            (true, true) => Cut::Whole(Built::new(self.recipe, boundary, self.whole(blocks))?),
        })
    }

    fn layers(&self, blocks: Range<usize>) -> Result<Layers<Block>> {
        Ok(Layers::new(blocks.start, blocks.map(|_| self.block()).collect::<Result<_>>()?))
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

    fn first(&self, blocks: Layers<Block>) -> First {
        let init = Init::Normal(layers::deviation(self.hidden));
        First { embedding: Embedding::of(self.vocab, self.seq, self.hidden).without_positions().init(init), blocks }
    }

    fn last(&self, blocks: Layers<Block>) -> Last {
        let head = self.linear([self.hidden, self.vocab]).quantised(layers::fp8_head(&self.recipe));
        let head = if self.tied { head.tied("wte") } else { head };
        Last { blocks, norm: RmsNorm::of(self.hidden), head }
    }

    fn whole(&self, blocks: Layers<Block>) -> Whole {
        Whole { first: self.first(blocks), last: self.last(Layers::new(self.layers, Vec::new())) }
    }

    /// Parameters of the whole model, in the order of its layers.
    fn specs(&self) -> Result<Vec<ParamSpec>> {
        let mut spec = StageSpec::new(self.recipe);
        self.whole(self.layers(0..self.layers)?).register(&mut Registry::new(&mut spec));
        Ok(spec.params)
    }

    /// Where the norm's partial sums lie, the same for every cut.
    ///
    /// # Errors
    ///
    /// As [`LlamaConfig::validate`], for the rotary angles alone.
    pub fn norm_plan(&self) -> Result<NormPlan> {
        NormPlan::new(self.specs()?.iter().map(|param| (param.path.as_str(), param.elements())))
    }

    /// Number of parameters; a weight that is tied counts once.
    ///
    /// # Errors
    ///
    /// As [`LlamaConfig::norm_plan`].
    pub fn parameters(&self) -> Result<usize> {
        let tied = if self.tied { self.vocab * self.hidden } else { 0 };
        Ok(self.specs()?.iter().map(ParamSpec::elements).sum::<usize>() - tied)
    }
}
