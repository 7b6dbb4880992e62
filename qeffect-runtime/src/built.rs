//! A stage of the driver from an op: with its parameters, registered, and its ends of the pipeline.

use std::fmt;
use std::marker::PhantomData;

use qeffect_core::recipe::Recipe;
use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::Act;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::{Effects, Op};
use crate::params::{Params, Registry};
use crate::retained::{Layout, Retained};
use crate::stage::{Stage, StageSpec};
use crate::value::Edge;

/// The op `B`, a function with `#[stage]` mostly, over parameters `P`.
pub struct Built<B, P> {
    spec: StageSpec,
    params: P,
    op: PhantomData<fn() -> B>,
}

impl<B, P> Built<B, P>
where
    B: for<'a> Op<Param<'a> = &'a P>,
    B::Input: Edge,
    B::Output: Edge,
    P: Params,
{
    /// Registers `params`. Every tensor that crosses to another stage has `boundary` rows and columns.
    pub fn new(recipe: Recipe, boundary: [usize; 2], params: P) -> Built<B, P> {
        Built::register(recipe, vec![boundary; B::Input::TENSORS], vec![boundary; B::Output::TENSORS], params)
    }

    /// Registers `params`; rows and columns of each tensor that comes from the stage before and goes to the stage after.
    ///
    /// # Errors
    ///
    /// If the op takes or gives another number of tensors.
    pub fn with_edges(recipe: Recipe, inputs: &[[usize; 2]], outputs: &[[usize; 2]], params: P) -> Result<Built<B, P>> {
        for (what, found, wanted) in
            [("takes", inputs.len(), B::Input::TENSORS), ("gives", outputs.len(), B::Output::TENSORS)]
        {
            if found != wanted {
                return Err(Error::Config(format!("a stage that {what} {wanted} tensors has {found} shapes for them")));
            }
        }
        Ok(Built::register(recipe, inputs.to_vec(), outputs.to_vec(), params))
    }

    fn register(recipe: Recipe, input: Vec<[usize; 2]>, output: Vec<[usize; 2]>, mut params: P) -> Built<B, P> {
        let mut spec = StageSpec::new(recipe);
        (spec.input, spec.output) = (input, output);
        params.register(&mut Registry::new(&mut spec));
        Built { spec, params, op: PhantomData }
    }

    /// Its parameters.
    pub const fn params(&self) -> &P {
        &self.params
    }
}

impl<B, P: fmt::Debug> fmt::Debug for Built<B, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Built").field("params", &self.params).finish_non_exhaustive()
    }
}

impl<B, P: Clone> Clone for Built<B, P> {
    fn clone(&self) -> Built<B, P> {
        Built { spec: self.spec.clone(), params: self.params.clone(), op: PhantomData }
    }
}

impl<B, P> Stage for Built<B, P>
where
    B: for<'a> Op<Param<'a> = &'a P>,
    B::Input: Edge,
    B::Output: Edge,
{
    type Tape = B::Tape;
    type Work = B::Work;

    fn spec(&self) -> &StageSpec {
        &self.spec
    }

    fn effects(&self) -> Effects {
        B::EFFECTS
    }

    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], token: Token<Fwd>) -> Result<(Vec<Act>, B::Tape, Token<Fwd>)> {
        let x = enter(x, &self.spec.input, "a stage")?;
        let (y, tape, token) = B::forward(cx, x, &self.params, token)?;
        Ok((y.into_edge(), tape, cx.roll_forward(token)?))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: B::Tape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, B::Work, Token<Bwd>)> {
        let dy = enter(dy, &self.spec.output, "an input gradient")?;
        let (dx, work, token) = B::input_grad(cx, dy, &self.params, tape, token)?;
        Ok((dx.into_edge(), work, cx.roll_backward(token)?))
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, work: B::Work) -> Result<()> {
        B::weight_grad(cx, &self.params, work)
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        let x = enter(x, &self.spec.input, "a stage")?;
        Ok(B::evaluate(cx, x, &self.params)?.into_edge())
    }
}

fn enter<E: Edge>(acts: &[Act], shapes: &[[usize; 2]], consumer: &str) -> Result<E> {
    for (act, [rows, cols]) in acts.iter().zip(shapes) {
        if [act.rows, act.cols] != [*rows, *cols] {
            return Err(Error::shape(consumer, &format!("[{rows}, {cols}]"), Some(*act)));
        }
    }
    E::from_edge(acts)
}

/// One of four: the part of a model at the start of the pipeline, inside it, at its end, or the whole model. Stages,
/// tapes and works alike, so that the stages of one pipeline are of one type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cut<F, M, L, W> {
    /// Fed with tokens.
    First(F),
    /// Between two others.
    Middle(M),
    /// Ends in the loss.
    Last(L),
    /// Fed with tokens, ends in the loss.
    Whole(W),
}

/// Does the same, whichever it is.
macro_rules! each {
    ($cut:expr, $part:pat => $body:expr) => {
        match $cut {
            Cut::First($part) => $body,
            Cut::Middle($part) => $body,
            Cut::Last($part) => $body,
            Cut::Whole($part) => $body,
        }
    };
}

impl<F: Retained, M: Retained, L: Retained, W: Retained> Retained for Cut<F, M, L, W> {
    fn layout(&self, layout: &mut Layout) {
        each!(self, part => part.layout(layout));
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        each!(self, part => part.release(cx))
    }
}

impl<F: Stage, M: Stage, L: Stage, W: Stage> Stage for Cut<F, M, L, W> {
    type Tape = Cut<F::Tape, M::Tape, L::Tape, W::Tape>;
    type Work = Cut<F::Work, M::Work, L::Work, W::Work>;

    fn spec(&self) -> &StageSpec {
        each!(self, stage => stage.spec())
    }

    fn effects(&self) -> Effects {
        each!(self, stage => stage.effects())
    }

    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], token: Token<Fwd>) -> Result<(Vec<Act>, Self::Tape, Token<Fwd>)> {
        Ok(match self {
            Cut::First(stage) => wrap(stage.forward(cx, x, token)?, Cut::First),
            Cut::Middle(stage) => wrap(stage.forward(cx, x, token)?, Cut::Middle),
            Cut::Last(stage) => wrap(stage.forward(cx, x, token)?, Cut::Last),
            Cut::Whole(stage) => wrap(stage.forward(cx, x, token)?, Cut::Whole),
        })
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: Self::Tape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, Self::Work, Token<Bwd>)> {
        Ok(match (self, tape) {
            (Cut::First(stage), Cut::First(tape)) => wrap(stage.input_grad(cx, dy, tape, token)?, Cut::First),
            (Cut::Middle(stage), Cut::Middle(tape)) => wrap(stage.input_grad(cx, dy, tape, token)?, Cut::Middle),
            (Cut::Last(stage), Cut::Last(tape)) => wrap(stage.input_grad(cx, dy, tape, token)?, Cut::Last),
            (Cut::Whole(stage), Cut::Whole(tape)) => wrap(stage.input_grad(cx, dy, tape, token)?, Cut::Whole),
            _ => return Err(another("tape")),
        })
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, work: Self::Work) -> Result<()> {
        match (self, work) {
            (Cut::First(stage), Cut::First(work)) => stage.weight_grad(cx, work),
            (Cut::Middle(stage), Cut::Middle(work)) => stage.weight_grad(cx, work),
            (Cut::Last(stage), Cut::Last(work)) => stage.weight_grad(cx, work),
            (Cut::Whole(stage), Cut::Whole(work)) => stage.weight_grad(cx, work),
            _ => Err(another("work")),
        }
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        each!(self, stage => stage.evaluate(cx, x))
    }
}

fn wrap<R, C, T>((acts, retained, token): (Vec<Act>, R, T), cut: impl Fn(R) -> C) -> (Vec<Act>, C, T) {
    (acts, cut(retained), token)
}

fn another(what: &str) -> Error {
    Error::Config(format!("this {what} is of another stage"))
}
