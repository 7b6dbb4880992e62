//! The loss: mean cross-entropy of logits against the targets of the microbatch.
//!
//! F keeps logits and their log-sum-exp; I writes dlogits, so that the projection casts them and its backward cell moves
//! in I only. The loss scale enters here, once, together with the division by the number of tokens.

use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_macros::retained;

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::{Effects, Op, witness};
use crate::retained::Retained;
use crate::value::Loss;

/// From F to I: `[tokens, vocabulary]`, and a log-sum-exp per token.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct CrossEntropyTape {
    logits: Kept,
    lse: Kept,
}

/// The op.
#[derive(Debug)]
pub enum CrossEntropyOp {}

pub use CrossEntropyOp as cross_entropy;

/// Mean over the microbatch's tokens of `log Σ exp(logits) − logits[target]`.
pub fn cross_entropy(_logits: Act) -> Loss {
    witness("cross_entropy")
}

impl Op for CrossEntropyOp {
    const EFFECTS: Effects = Effects::NONE;
    type Input = Act;
    type Output = Loss;
    type Param<'a> = ();
    type Tape = CrossEntropyTape;
    type Work = ();

    fn forward(
        cx: &mut Cx<'_>,
        logits: Act,
        (): (),
        token: Token<Fwd>,
    ) -> Result<(Loss, CrossEntropyTape, Token<Fwd>)> {
        let targets = targets(cx)?;
        let lse = cx.lease_as(cx.recipe().master(), logits.rows, 1)?;
        cx.issue(Cmd::CrossEntropy {
            logits: logits.buf,
            targets: targets.buf,
            lse: lse.buf,
            loss: cx.loss(),
            flag: Some(cx.flag()),
            vocabulary: logits.cols,
        })?;
        let tape = CrossEntropyTape { logits: cx.keep(logits)?, lse: Kept::new(lse) };
        Ok((Loss::written(), tape, token))
    }

    fn input_grad(
        cx: &mut Cx<'_>,
        _: Loss,
        (): (),
        tape: CrossEntropyTape,
        token: Token<Bwd>,
    ) -> Result<(Act, (), Token<Bwd>)> {
        let targets = targets(cx)?;
        let logits = tape.logits.act();
        let dlogits = cx.lease(logits.rows, logits.cols)?;
        cx.issue(Cmd::CrossEntropyGrad {
            logits: logits.buf,
            targets: targets.buf,
            lse: tape.lse.act().buf,
            dlogits: dlogits.buf,
            vocabulary: logits.cols,
            factor: cx.recipe().loss_scale() / logits.rows as f32,
        })?;
        tape.release(cx)?;
        Ok((dlogits, (), token))
    }

    fn weight_grad(_: &mut Cx<'_>, (): (), (): ()) -> Result<()> {
        Ok(())
    }

    /// The logits, and the loss where there are targets.
    fn evaluate(cx: &mut Cx<'_>, logits: Act, (): ()) -> Result<Loss> {
        if let Some(targets) = cx.targets()? {
            let lse = cx.lease_as(cx.recipe().master(), logits.rows, 1)?;
            cx.issue(Cmd::CrossEntropy {
                logits: logits.buf,
                targets: targets.buf,
                lse: lse.buf,
                loss: cx.loss(),
                flag: None,
                vocabulary: logits.cols,
            })?;
            cx.free(lse)?;
        }
        Ok(Loss::of_logits(cx.share(logits)?))
    }
}

fn targets(cx: &Cx<'_>) -> Result<Act> {
    cx.targets()?.ok_or_else(|| Error::shape("cross-entropy", "targets", None))
}
