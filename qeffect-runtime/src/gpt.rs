//! The GPT: its configuration, how it is cut into stages, and the stages.

mod model;

pub use model::{Block, First, Last, Middle, Whole, block, first, last, middle, whole};

use std::ops::Range;

use qeffect_core::recipe::{Head as HeadFormat, Recipe};

use crate::built::{Built, Cut};
use crate::cmd::AttentionShape;
use crate::error::{Error, Result};
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

/// Every size of a matrix product in FP8 is a multiple of this, tokens too: they are the inner size of a weight gradient.
pub const FP8_ALIGNMENT: usize = 16;

/// Standard deviation of first weights at [`DEVIATION_HIDDEN`]; it goes with 1/√hidden.
const DEVIATION: f64 = 0.02;

/// The hidden size of the smallest GPT-2, for which 0.02 was chosen. A narrow model that starts from 0.02 learns little in
/// its first hundreds of thousands of tokens.
const DEVIATION_HIDDEN: f64 = 768.0;

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
        let sizes = [
            ("vocab", self.vocab),
            ("hidden", self.hidden),
            ("heads", self.heads),
            ("ffn", self.ffn),
            ("layers", self.layers),
            ("seq", self.seq),
            ("sequences", self.sequences),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(Error::Config(format!("model: `{name}` must not be zero")));
        }
        if !self.hidden.is_multiple_of(self.heads) {
            return Err(Error::Config(format!(
                "model: {} heads do not divide a hidden size of {}",
                self.heads, self.hidden
            )));
        }
        if let Some(delayed) = self.recipe.delayed() {
            let mut aligned = vec![("hidden", self.hidden), ("ffn", self.ffn), ("seq · sequences", self.tokens())];
            if delayed.head == HeadFormat::Fp8 {
                aligned.push(("vocab", self.vocab));
            }
            if let Some((name, size)) = aligned.iter().find(|(_, size)| !size.is_multiple_of(FP8_ALIGNMENT)) {
                return Err(Error::Config(format!(
                    "model: products in FP8 need `{name}` to be a multiple of {FP8_ALIGNMENT}, found {size}"
                )));
            }
        }
        Ok(())
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
        Init::Normal(self.deviation())
    }

    /// First values of a matrix that adds to the residual stream: smaller, for there are 2·layers of them.
    pub fn residual_init(&self) -> Init {
        Init::Normal(self.deviation() / (2.0 * self.layers as f64).sqrt())
    }

    fn deviation(&self) -> f64 {
        DEVIATION * (DEVIATION_HIDDEN / self.hidden as f64).sqrt()
    }

    /// Blocks per stage, as even as possible; the first stages take what is left over.
    pub fn split(&self, stages: usize) -> Result<Vec<usize>> {
        if stages == 0 || stages > self.layers {
            return Err(Error::Config(format!("{} blocks cannot be cut into {stages} stages", self.layers)));
        }
        let (each, more) = (self.layers / stages, self.layers % stages);
        Ok((0..stages).map(|stage| each + usize::from(stage < more)).collect())
    }

    /// The stages, given the number of blocks of each. A stage holds at least one unit: the first has the embedding and
    /// the last the head, so these two may have no block.
    pub fn stages(&self, blocks: &[usize]) -> Result<Vec<GptStage>> {
        self.validate()?;
        let total: usize = blocks.iter().sum();
        if blocks.is_empty() || total != self.layers {
            return Err(Error::Config(format!("the stages hold {total} blocks, the model has {}", self.layers)));
        }
        if let Some(stage) = (1..blocks.len().saturating_sub(1)).find(|stage| blocks[*stage] == 0) {
            return Err(Error::Config(format!("stage {stage} holds nothing")));
        }
        let (mut done, last) = (0, blocks.len() - 1);
        let cut = blocks.iter().enumerate().map(|(stage, count)| {
            done += count;
            self.stage(done - count..done, stage == 0, stage == last)
        });
        cut.collect()
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
        let fp8 = self.recipe.delayed().is_some_and(|delayed| delayed.head == HeadFormat::Fp8);
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
