//! Dropout. The mask is a function of run, step, layer, microbatch and element, so it is made again in I, or in a recomputed
//! F, and nothing is retained. Evaluation drops nothing.

use crate::act::Act;
use crate::cmd::{Cmd, DropoutKey, DropoutRate};
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::{PureOp, witness};
use crate::rng;

/// A dropout layer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    seed: u64,
    site: u64,
    rate: DropoutRate,
}

impl Dropout {
    /// The layer `path` of the whole model, in the run that `seed` names. A share of `rate` is dropped.
    ///
    /// # Errors
    ///
    /// If the rate does not lie in [0, 1).
    pub fn new(path: &str, rate: f64, seed: u64) -> Result<Dropout> {
        let wrong = || Error::Config(format!("{path}: a dropout rate lies in [0, 1), not {rate}"));
        Ok(Dropout { seed, site: rng::name(path), rate: DropoutRate::new(rate).ok_or_else(wrong)? })
    }

    fn run(&self, cx: &mut Cx<'_>, x: Act) -> Result<Act> {
        let y = cx.lease(x.rows, x.cols)?;
        let key = DropoutKey { seed: self.seed, site: self.site, microbatch: u64::from(cx.microbatch().0) };
        let step = cx.step();
        cx.issue(Cmd::Dropout { x: x.buf, y: y.buf, step, key, rate: self.rate })?;
        Ok(y)
    }
}

/// The op.
#[derive(Debug)]
pub enum DropoutOp {}

pub use DropoutOp as dropout;

/// A share of the elements 0, the others scaled up.
pub fn dropout(_x: Act, _p: &Dropout) -> Act {
    witness("dropout")
}

impl PureOp for DropoutOp {
    type Param<'a> = &'a Dropout;
    type Tape = ();

    fn forward(cx: &mut Cx<'_>, x: Act, p: &Dropout) -> Result<(Act, ())> {
        Ok((p.run(cx, x)?, ()))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, p: &Dropout, (): ()) -> Result<Act> {
        p.run(cx, dy)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, _: &Dropout) -> Result<Act> {
        let y = cx.lease(x.rows, x.cols)?;
        cx.issue(Cmd::Copy { src: x.buf, dst: y.buf })?;
        Ok(y)
    }
}
