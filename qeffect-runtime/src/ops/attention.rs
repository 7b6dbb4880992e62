//! Causal attention over packed queries, keys and values, which heads may share in groups. The backward recomputes the probabilities.

use qeffect_macros::retained;

use crate::act::{Act, Kept};
use crate::cmd::{AttentionShape, Cmd};
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::{PureOp, witness};
use crate::stage::Retained;

/// From F to I: the packed input, and the log-sum-exp of each row of scores.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct AttentionTape {
    qkv: Kept,
    lse: Kept,
}

/// The op.
#[derive(Debug)]
pub enum AttentionOp {}

pub use AttentionOp as attention;

/// Causal attention over packed `[q | k | v]`.
pub fn attention(_qkv: Act, _shape: &AttentionShape) -> Act {
    witness("attention")
}

fn run(cx: &mut Cx<'_>, qkv: Act, shape: &AttentionShape) -> Result<(Act, Act)> {
    if (qkv.rows, qkv.cols) != (shape.tokens(), shape.width()) {
        return Err(Error::shape("attention", &format!("[{}, {}]", shape.tokens(), shape.width()), Some(qkv)));
    }
    let out = cx.lease(shape.tokens(), shape.hidden())?;
    let lse = cx.lease_as(cx.recipe().master(), shape.sequences * shape.heads, shape.length)?;
    cx.issue(Cmd::Attention { qkv: qkv.buf, out: out.buf, lse: lse.buf, shape: *shape })?;
    Ok((out, lse))
}

impl PureOp for AttentionOp {
    type Param<'a> = &'a AttentionShape;
    type Tape = AttentionTape;

    fn forward(cx: &mut Cx<'_>, qkv: Act, shape: &AttentionShape) -> Result<(Act, AttentionTape)> {
        let (out, lse) = run(cx, qkv, shape)?;
        Ok((out, AttentionTape { qkv: cx.keep(qkv)?, lse: Kept::new(lse) }))
    }

    fn input_grad(cx: &mut Cx<'_>, dout: Act, shape: &AttentionShape, tape: AttentionTape) -> Result<Act> {
        let dqkv = cx.lease(shape.tokens(), shape.width())?;
        cx.issue(Cmd::AttentionGrad {
            qkv: tape.qkv.act().buf,
            lse: tape.lse.act().buf,
            dout: dout.buf,
            dqkv: dqkv.buf,
            shape: *shape,
        })?;
        tape.release(cx)?;
        Ok(dqkv)
    }

    fn evaluate(cx: &mut Cx<'_>, qkv: Act, shape: &AttentionShape) -> Result<Act> {
        let (out, lse) = run(cx, qkv, shape)?;
        cx.free(lse)?;
        Ok(out)
    }
}
