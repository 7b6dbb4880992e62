//! SiLU, and the product of SwiGLU: `silu(gate) · up`, with gates and ups packed in one row.

use qeffect_macros::retained;

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::{PureOp, witness};
use crate::stage::Retained;

/// From F to I: the input.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct SiluTape {
    x: Kept,
}

/// `silu(x)`.
#[derive(Debug)]
pub enum SiluOp {}

pub use SiluOp as silu;

/// `x · σ(x)`, element by element.
pub fn silu(_x: Act) -> Act {
    witness("silu")
}

impl PureOp for SiluOp {
    type Param<'a> = ();
    type Tape = SiluTape;

    fn forward(cx: &mut Cx<'_>, x: Act, p: ()) -> Result<(Act, SiluTape)> {
        let y = <SiluOp as PureOp>::evaluate(cx, x, p)?;
        Ok((y, SiluTape { x: cx.keep(x)? }))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, (): (), tape: SiluTape) -> Result<Act> {
        let dx = cx.lease(dy.rows, dy.cols)?;
        cx.issue(Cmd::SiluGrad { x: tape.x.act().buf, dy: dy.buf, dx: dx.buf })?;
        tape.release(cx)?;
        Ok(dx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, (): ()) -> Result<Act> {
        let y = cx.lease(x.rows, x.cols)?;
        cx.issue(Cmd::Silu { x: x.buf, y: y.buf })?;
        Ok(y)
    }
}

/// `silu(gate) · up` of rows `[gates | ups]`: half as many columns come out as go in.
#[derive(Debug)]
pub enum SwigluOp {}

pub use SwigluOp as swiglu;

/// `silu(gate) · up` of packed `[gates | ups]`.
pub fn swiglu(_x: Act) -> Act {
    witness("swiglu")
}

impl PureOp for SwigluOp {
    type Param<'a> = ();
    type Tape = SiluTape;

    fn forward(cx: &mut Cx<'_>, x: Act, p: ()) -> Result<(Act, SiluTape)> {
        let y = <SwigluOp as PureOp>::evaluate(cx, x, p)?;
        Ok((y, SiluTape { x: cx.keep(x)? }))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, (): (), tape: SiluTape) -> Result<Act> {
        let dx = cx.lease(dy.rows, 2 * dy.cols)?;
        cx.issue(Cmd::SwigluGrad { x: tape.x.act().buf, dy: dy.buf, dx: dx.buf, cols: dy.cols })?;
        tape.release(cx)?;
        Ok(dx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, (): ()) -> Result<Act> {
        if !x.cols.is_multiple_of(2) {
            return Err(Error::shape("swiglu", "as many gates as ups", Some(x)));
        }
        let y = cx.lease(x.rows, x.cols / 2)?;
        cx.issue(Cmd::Swiglu { x: x.buf, y: y.buf, cols: y.cols })?;
        Ok(y)
    }
}
