//! One stage of a GPT: some blocks, with the embedding before the first and the head after the last.

use std::ops::Range;

use qeffect_core::recipe::Head as HeadFormat;
use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::Act;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::gpt::{Block, BlockTape, BlockWork, GptConfig};
use crate::ops::embedding::{Embedding, EmbeddingWork};
use crate::ops::head::{Head, HeadTape};
use crate::ops::linear::LinearWork;
use crate::stage::{Layout, Retained, Stage, StageSpec};

/// A stage.
#[derive(Clone, Debug)]
pub struct GptStage {
    spec: StageSpec,
    embedding: Option<Embedding>,
    blocks: Vec<Block>,
    head: Option<Head>,
}

/// From F to I.
#[must_use = "a tape is consumed by exactly one input gradient"]
#[derive(PartialEq, Eq, Debug)]
pub struct GptTape {
    blocks: Vec<BlockTape>,
    head: Option<HeadTape>,
}

impl Retained for GptTape {
    fn layout(&self, layout: &mut Layout) {
        self.blocks.iter().for_each(|block| block.layout(layout));
        self.head.iter().for_each(|head| head.layout(layout));
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        self.blocks.into_iter().try_for_each(|block| block.release(cx))?;
        self.head.into_iter().try_for_each(|head| head.release(cx))
    }
}

/// From I to W.
#[must_use = "retained work is consumed by exactly one weight gradient"]
#[derive(PartialEq, Eq, Debug)]
pub struct GptWork {
    embedding: Option<EmbeddingWork>,
    /// Last block first.
    blocks: Vec<BlockWork>,
    head: Option<LinearWork>,
}

impl Retained for GptWork {
    fn layout(&self, layout: &mut Layout) {
        self.embedding.iter().for_each(|embedding| embedding.layout(layout));
        self.blocks.iter().for_each(|block| block.layout(layout));
        self.head.iter().for_each(|head| head.layout(layout));
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        self.embedding.into_iter().try_for_each(|embedding| embedding.release(cx))?;
        self.blocks.into_iter().try_for_each(|block| block.release(cx))?;
        self.head.into_iter().try_for_each(|head| head.release(cx))
    }
}

impl GptStage {
    /// The stage that holds `blocks` of the model, the embedding if it is the `first` and the head if it is the `last`.
    pub fn new(config: &GptConfig, blocks: Range<usize>, first: bool, last: bool) -> GptStage {
        let mut spec = StageSpec::new(config.recipe);
        let boundary = [config.tokens(), config.hidden];
        spec.input = (!first).then_some(boundary);
        spec.output = (!last).then_some(boundary);
        let embedding =
            first.then(|| Embedding::new(&mut spec, config.vocab, config.seq, config.hidden, config.init()));
        let blocks = blocks.map(|index| Block::new(&mut spec, config, index)).collect();
        let fp8 = config.recipe.delayed().is_some_and(|delayed| delayed.head == HeadFormat::Fp8);
        let head = last.then(|| Head::new(&mut spec, config.hidden, config.vocab, config.init(), fp8));
        GptStage { spec, embedding, blocks, head }
    }

    /// What flows through the blocks: the embedded tokens, or what the stage before sent. The flag says who holds it.
    fn enter(&self, cx: &mut Cx<'_>, x: Option<Act>) -> Result<(Act, bool)> {
        match (&self.embedding, x, self.spec.input) {
            (Some(embedding), None, _) => Ok((embedding.forward(cx)?, true)),
            (None, Some(x), Some([rows, cols])) if (x.rows, x.cols) == (rows, cols) => Ok((x, false)),
            (Some(_), _, _) => Err(Error::shape("the first stage", "tokens only", x)),
            (None, _, shape) => {
                let [rows, cols] = shape.unwrap_or_default();
                Err(Error::shape("a stage", &format!("[{rows}, {cols}]"), x))
            }
        }
    }
}

impl Stage for GptStage {
    type Tape = GptTape;
    type Work = GptWork;

    fn spec(&self) -> &StageSpec {
        &self.spec
    }

    fn forward(
        &self,
        cx: &mut Cx<'_>,
        x: Option<Act>,
        mut token: Token<Fwd>,
    ) -> Result<(Option<Act>, GptTape, Token<Fwd>)> {
        let (mut x, mut own) = self.enter(cx, x)?;
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (y, tape, after) = block.forward(cx, x, token)?;
            if own {
                cx.free(x)?;
            }
            blocks.push(tape);
            (x, own, token) = (y, true, after);
        }
        let (y, head) = match &self.head {
            Some(head) => {
                let (tape, after) = head.forward(cx, x, token)?;
                if own {
                    cx.free(x)?;
                }
                token = after;
                (None, Some(tape))
            }
            None if own => (Some(x), None),
            None => return Err(Error::Config("a stage holds nothing".into())),
        };
        Ok((y, GptTape { blocks, head }, cx.roll_forward(token)?))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: Option<Act>,
        tape: GptTape,
        mut token: Token<Bwd>,
    ) -> Result<(Option<Act>, GptWork, Token<Bwd>)> {
        let (mut dx, mut own, head) = match (&self.head, tape.head, dy) {
            (Some(head), Some(tape), None) => {
                let (dx, work, after) = head.input_grad(cx, tape, token)?;
                token = after;
                (dx, true, Some(work))
            }
            (None, None, Some(dy)) => (dy, false, None),
            (_, _, dy) => return Err(Error::shape("an input gradient", "the gradient of what the stage sent", dy)),
        };
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for (block, tape) in self.blocks.iter().zip(tape.blocks).rev() {
            let (before, work, after) = block.input_grad(cx, dx, tape, token)?;
            if own {
                cx.free(dx)?;
            }
            blocks.push(work);
            (dx, own, token) = (before, true, after);
        }
        let token = cx.roll_backward(token)?;
        let (dx, embedding) = match &self.embedding {
            Some(embedding) => {
                let work = embedding.input_grad(cx, dx)?;
                if own {
                    cx.free(dx)?;
                }
                (None, Some(work))
            }
            None => (Some(dx), None),
        };
        Ok((dx, GptWork { embedding, blocks, head }, token))
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, work: GptWork) -> Result<()> {
        if let (Some(head), Some(work)) = (&self.head, work.head) {
            head.weight_grad(cx, work)?;
        }
        for (block, work) in self.blocks.iter().rev().zip(work.blocks) {
            block.weight_grad(cx, work)?;
        }
        match (&self.embedding, work.embedding) {
            (Some(embedding), Some(work)) => embedding.weight_grad(cx, work),
            _ => Ok(()),
        }
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: Option<Act>) -> Result<Option<Act>> {
        let (mut x, mut own) = self.enter(cx, x)?;
        for block in &self.blocks {
            let y = block.evaluate(cx, x)?;
            if own {
                cx.free(x)?;
            }
            (x, own) = (y, true);
        }
        match &self.head {
            Some(head) => {
                let logits = head.evaluate(cx, x)?;
                if own {
                    cx.free(x)?;
                }
                Ok(Some(logits))
            }
            None => Ok(Some(x)),
        }
    }
}
