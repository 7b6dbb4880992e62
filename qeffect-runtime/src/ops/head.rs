//! The end of the model: final norm, projection to logits, cross-entropy.
//!
//! F keeps logits and their log-sum-exp; I writes dlogits and casts them, so that the backward cell moves in I only. The
//! loss scale enters here, once, together with the division by the number of tokens.

use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::{Op, PureOp};
use crate::ops::layer_norm::{LayerNorm, LayerNormOp, LayerNormTape};
use crate::ops::linear::{Linear, LinearOp, LinearTape, LinearWork};
use crate::stage::{Init, Layout, Retained, StageSpec};

/// The head.
#[derive(Clone, Debug)]
pub struct Head {
    norm: LayerNorm,
    linear: Linear,
    vocab: usize,
}

/// From F to I.
#[must_use = "a tape is consumed by exactly one input gradient"]
#[derive(PartialEq, Eq, Debug)]
pub struct HeadTape {
    norm: LayerNormTape,
    linear: LinearTape,
    logits: Kept,
    lse: Kept,
}

impl Retained for HeadTape {
    fn layout(&self, layout: &mut Layout) {
        self.norm.layout(layout);
        self.linear.layout(layout);
        layout.kept("logits", &self.logits);
        layout.kept("lse", &self.lse);
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        self.norm.release(cx)?;
        self.linear.release(cx)?;
        cx.release(self.logits)?;
        cx.release(self.lse)
    }
}

impl Head {
    /// Registers `ln_f` and `head`.
    pub fn new(spec: &mut StageSpec, hidden: usize, vocab: usize, init: Init, fp8: bool) -> Head {
        let norm = LayerNorm::new(spec, "ln_f", hidden);
        Head { norm, linear: Linear::new(spec, "head", [hidden, vocab], false, init, fp8), vocab }
    }

    fn targets(cx: &Cx<'_>) -> Result<Act> {
        cx.targets()?.ok_or_else(|| Error::shape("cross-entropy", "targets", None))
    }

    /// F: writes the loss.
    pub fn forward(&self, cx: &mut Cx<'_>, x: Act, token: Token<Fwd>) -> Result<(HeadTape, Token<Fwd>)> {
        let targets = Self::targets(cx)?;
        let (h, norm) = <LayerNormOp as PureOp>::forward(cx, x, &self.norm)?;
        let (logits, linear, token) = LinearOp::forward(cx, h, &self.linear, token)?;
        cx.free(h)?;
        let lse = cx.lease_as(cx.recipe().master(), logits.rows, 1)?;
        cx.issue(Cmd::CrossEntropy {
            logits: logits.buf,
            targets: targets.buf,
            lse: lse.buf,
            loss: cx.loss(),
            flag: Some(cx.flag()),
            vocabulary: self.vocab,
        })?;
        Ok((HeadTape { norm, linear, logits: Kept::new(logits), lse: Kept::new(lse) }, token))
    }

    /// I.
    pub fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        tape: HeadTape,
        token: Token<Bwd>,
    ) -> Result<(Act, LinearWork, Token<Bwd>)> {
        let targets = Self::targets(cx)?;
        let logits = tape.logits.act();
        let dlogits = cx.lease(logits.rows, logits.cols)?;
        cx.issue(Cmd::CrossEntropyGrad {
            logits: logits.buf,
            targets: targets.buf,
            lse: tape.lse.act().buf,
            dlogits: dlogits.buf,
            vocabulary: self.vocab,
            factor: cx.recipe().loss_scale() / logits.rows as f32,
        })?;
        cx.release(tape.logits)?;
        cx.release(tape.lse)?;
        let (dh, work, token) = LinearOp::input_grad(cx, dlogits, &self.linear, tape.linear, token)?;
        cx.free(dlogits)?;
        let dx = <LayerNormOp as PureOp>::input_grad(cx, dh, &self.norm, tape.norm)?;
        cx.free(dh)?;
        Ok((dx, work, token))
    }

    /// W.
    pub fn weight_grad(&self, cx: &mut Cx<'_>, work: LinearWork) -> Result<()> {
        LinearOp::weight_grad(cx, &self.linear, work)
    }

    /// F of evaluation: logits, and the loss where there are targets.
    pub fn evaluate(&self, cx: &mut Cx<'_>, x: Act) -> Result<Act> {
        let h = <LayerNormOp as PureOp>::evaluate(cx, x, &self.norm)?;
        let logits = LinearOp::evaluate(cx, h, &self.linear)?;
        cx.free(h)?;
        if let Some(targets) = cx.targets()? {
            let lse = cx.lease_as(cx.recipe().master(), logits.rows, 1)?;
            cx.issue(Cmd::CrossEntropy {
                logits: logits.buf,
                targets: targets.buf,
                lse: lse.buf,
                loss: cx.loss(),
                flag: None,
                vocabulary: self.vocab,
            })?;
            cx.free(lse)?;
        }
        Ok(logits)
    }
}
