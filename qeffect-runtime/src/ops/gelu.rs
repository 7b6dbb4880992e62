//! GELU in its tanh form.

use qeffect_macros::retained;

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::Cx;
use crate::error::Result;
use crate::op::{PureOp, witness};
use crate::stage::Retained;

/// From F to I: the input.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct GeluTape {
    x: Kept,
}

/// The op.
#[derive(Debug)]
pub enum GeluOp {}

pub use GeluOp as gelu;

/// GELU in its tanh form, element by element.
pub fn gelu(_x: Act) -> Act {
    witness("gelu")
}

impl PureOp for GeluOp {
    type Param<'a> = ();
    type Tape = GeluTape;

    fn forward(cx: &mut Cx<'_>, x: Act, p: ()) -> Result<(Act, GeluTape)> {
        let y = <GeluOp as PureOp>::evaluate(cx, x, p)?;
        Ok((y, GeluTape { x: cx.keep(x)? }))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, (): (), tape: GeluTape) -> Result<Act> {
        let dx = cx.lease(dy.rows, dy.cols)?;
        cx.issue(Cmd::GeluGrad { x: tape.x.act().buf, dy: dy.buf, dx: dx.buf })?;
        tape.release(cx)?;
        Ok(dx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, (): ()) -> Result<Act> {
        let y = cx.lease(x.rows, x.cols)?;
        cx.issue(Cmd::Gelu { x: x.buf, y: y.buf })?;
        Ok(y)
    }
}
