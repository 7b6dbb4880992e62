//! Causal attention over packed queries, keys and values, which heads may share in groups. The backward recomputes the probabilities.

use crate::act::{Act, Kept};
use crate::cmd::{AttentionShape, Cmd};
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::PureOp;
use crate::stage::{Layout, Retained};

/// From F to I: the packed input, and the log-sum-exp of each row of scores.
#[must_use = "a tape is consumed by exactly one input gradient"]
#[derive(PartialEq, Eq, Debug)]
pub struct AttentionTape {
    qkv: Kept,
    lse: Kept,
}

impl Retained for AttentionTape {
    fn layout(&self, layout: &mut Layout) {
        layout.kept("qkv", &self.qkv);
        layout.kept("lse", &self.lse);
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        cx.release(self.qkv)?;
        cx.release(self.lse)
    }
}

/// The op.
#[derive(Debug)]
pub enum AttentionOp {}

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
