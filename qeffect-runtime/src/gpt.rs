//! The GPT: its configuration, how it is cut into stages, and the stages.

mod model;

pub use model::{Block, First, Last, Middle, Whole, block, first, last, middle, whole};

use std::ops::Range;

use qeffect_core::recipe::Recipe;

use crate::built::{Built, Cut};
use crate::cmd::AttentionShape;
use crate::error::{Error, Result};
use crate::layers;
use crate::ops::embedding::Embedding;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::linear::Linear;
use crate::optim::NormPlan;
use crate::params::{Layers, Params, Registry};
use crate::stage::{Init, ParamSpec, Stage, StageSpec};

/// A stage: some blocks, with the embedding before the first and the head after the last.
pub type GptStage = Cut<Built<first, First>, Built<middle, Middle>, Built<last, Last>, Built<whole, Whole>>;
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

    /// Blocks per stage, as even as possible; the first stages take what is left over.
    pub fn split(&self, stages: usize) -> Result<Vec<usize>> {
        layers::split(self.layers, stages)
    }

    /// The stages, given the number of blocks of each. A stage holds at least one unit: the first has the embedding and
    /// the last the head, so these two may have no block.
    pub fn stages(&self, blocks: &[usize]) -> Result<Vec<GptStage>> {
        self.validate()?;
        layers::cut(self.layers, blocks, |blocks, first, last| self.stage(blocks, first, last))
    }

    /// The stage that holds `blocks` of the model, the embedding if it is the `first` and the head if it is the `last`.
    fn stage(&self, blocks: Range<usize>, first: bool, last: bool) -> Result<GptStage> {
        let boundary = [self.tokens(), self.hidden];
        let layers = self.layers(blocks);
        Ok(match (first, last) {
            (true, false) => Cut::First(Built::new(self.recipe, boundary, self.first(layers))?),
            (false, false) => Cut::Middle(Built::new(self.recipe, boundary, Middle { blocks: layers })?),
            (false, true) => Cut::Last(Built::new(self.recipe, boundary, self.last(layers))?),
            (true, true) => Cut::Whole(Built::new(self.recipe, boundary, self.whole(layers))?),
        })
    }

    fn layers(&self, blocks: Range<usize>) -> Layers<Block> {
        Layers::new(blocks.start, blocks.map(|_| self.block()).collect())
    }

    fn block(&self) -> Block {
        let (hidden, ffn, residual) = (self.hidden, self.ffn, self.residual_init());
        let linear = |shape| Linear::of(shape).init(self.init());
        Block {
            ln1: LayerNorm::of(hidden),
            qkv: linear([hidden, 3 * hidden]),
            shape: self.attention(),
            proj: linear([hidden, hidden]).init(residual),
            ln2: LayerNorm::of(hidden),
            fc1: linear([hidden, ffn]),
            fc2: linear([ffn, hidden]).init(residual),
        }
    }

    fn first(&self, blocks: Layers<Block>) -> First {
        First { embedding: Embedding::of(self.vocab, self.seq, self.hidden).init(self.init()), blocks }
    }

    fn last(&self, blocks: Layers<Block>) -> Last {
        let fp8 = layers::fp8_head(&self.recipe);
        let head = Linear::of([self.hidden, self.vocab]).unbiased().init(self.init()).quantised(fp8);
        Last { blocks, ln_f: LayerNorm::of(self.hidden), head }
    }

    fn whole(&self, blocks: Layers<Block>) -> Whole {
        Whole { first: self.first(blocks), last: self.last(Layers::new(self.layers, Vec::new())) }
    }

    /// Parameters of the whole model, in the order of its layers.
    fn specs(&self) -> Vec<ParamSpec> {
        let mut spec = StageSpec::new(self.recipe);
        self.whole(self.layers(0..self.layers)).register(&mut Registry::new(&mut spec));
        spec.params
    }

    /// Where the norm's partial sums lie, the same for every cut.
    pub fn norm_plan(&self) -> Result<NormPlan> {
        let specs = self.specs();
        NormPlan::new(specs.iter().map(|param| (param.path.as_str(), param.elements())))
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        self.specs().iter().map(ParamSpec::elements).sum()
    }
}
