//! `a + b`: both inputs get the gradient as it is, and nothing is retained.

use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::Act;
use crate::cx::Cx;
use crate::error::Result;
use crate::op::{Effects, Op, witness};

/// The op.
#[derive(Debug)]
pub enum AddOp {}

pub use AddOp as add;

/// `a + b`, element by element.
pub fn add(_a: Act, _b: Act) -> Act {
    witness("add")
}

impl Op for AddOp {
    const EFFECTS: Effects = Effects::NONE;
    type Input = (Act, Act);
    type Output = Act;
    type Param<'a> = ();
    type Tape = ();
    type Work = ();

    fn forward(cx: &mut Cx<'_>, (a, b): (Act, Act), (): (), token: Token<Fwd>) -> Result<(Act, (), Token<Fwd>)> {
        Ok((cx.add(a, b)?, (), token))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, (): (), (): (), token: Token<Bwd>) -> Result<((Act, Act), (), Token<Bwd>)> {
        Ok(((cx.share(dy)?, cx.share(dy)?), (), token))
    }

    fn weight_grad(_: &mut Cx<'_>, (): (), (): ()) -> Result<()> {
        Ok(())
    }

    fn evaluate(cx: &mut Cx<'_>, (a, b): (Act, Act), (): ()) -> Result<Act> {
        cx.add(a, b)
    }
}
