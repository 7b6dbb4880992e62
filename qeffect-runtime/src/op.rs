//! Ops: the parts of a stage, each with its own forward, input gradient and weight gradient.

use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::Act;
use crate::cx::{Cx, GradDst};
use crate::error::Result;
use crate::stage::Retained;

/// An op that moves hidden state: its quantised tensors have scales that follow their history.
///
/// Tensors that go in stay the property of the caller; those that come out are leased to it.
pub trait Op {
    /// What it reads of the model.
    type Param;
    /// From F to I.
    type Tape: Retained;
    /// From I to W.
    type Work: Retained;

    /// F.
    fn forward(
        cx: &mut Cx<'_>,
        x: Act,
        param: &Self::Param,
        token: Token<Fwd>,
    ) -> Result<(Act, Self::Tape, Token<Fwd>)>;

    /// I, with the gradients of vectors.
    fn input_grad(
        cx: &mut Cx<'_>,
        dy: Act,
        param: &Self::Param,
        tape: Self::Tape,
        token: Token<Bwd>,
    ) -> Result<(Act, Self::Work, Token<Bwd>)>;

    /// W. No token is in reach: it cannot move state.
    fn weight_grad(cx: &mut Cx<'_>, work: Self::Work, dst: GradDst) -> Result<()>;

    /// F of evaluation: moves nothing, retains nothing.
    fn evaluate(cx: &mut Cx<'_>, x: Act, param: &Self::Param) -> Result<Act>;
}

/// An op without hidden state and without matrices.
pub trait PureOp {
    /// What it reads of the model.
    type Param;
    /// From F to I.
    type Tape: Retained;

    /// F.
    fn forward(cx: &mut Cx<'_>, x: Act, param: &Self::Param) -> Result<(Act, Self::Tape)>;

    /// I, with the gradients of vectors.
    fn input_grad(cx: &mut Cx<'_>, dy: Act, param: &Self::Param, tape: Self::Tape) -> Result<Act>;

    /// F of evaluation.
    fn evaluate(cx: &mut Cx<'_>, x: Act, param: &Self::Param) -> Result<Act>;
}
