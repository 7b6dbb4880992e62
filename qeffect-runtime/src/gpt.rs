//! The GPT: its configuration, how it is cut into stages, and the stages.

mod block;
mod stage;

pub use block::{Block, BlockTape, BlockWork};
pub use stage::{GptStage, GptTape, GptWork};

use qeffect_core::recipe::{Head as HeadFormat, Recipe};

use crate::cmd::AttentionShape;
use crate::error::{Error, Result};
use crate::optim::NormPlan;
use crate::stage::{Init, Stage};

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
        let mut first = 0;
        let last = blocks.len() - 1;
        Ok(blocks
            .iter()
            .enumerate()
            .map(|(stage, count)| {
                first += count;
                GptStage::new(self, first - count..first, stage == 0, stage == last)
            })
            .collect())
    }

    /// Where the norm's partial sums lie, the same for every cut.
    pub fn norm_plan(&self) -> Result<NormPlan> {
        let whole = GptStage::new(self, 0..self.layers, true, true);
        NormPlan::new(whole.spec().params.iter().map(|param| (param.path.as_str(), param.elements())))
    }

    /// Number of parameters.
    pub fn parameters(&self) -> usize {
        let whole = GptStage::new(self, 0..self.layers, true, true);
        whole.spec().params.iter().map(|param| param.elements()).sum()
    }
}
