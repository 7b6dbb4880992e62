//! RMS norm over rows, with its gain read from the master.

use qeffect_macros::retained;

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::{PureOp, witness};
use crate::params::{Params, Registry};
use crate::stage::{Init, ParamId, ParamKind, ParamSpec, Retained, StageSpec, Working};

/// An RMS norm.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    path: String,
    cols: usize,
    gain: ParamId,
}

impl Params for RmsNorm {
    fn register(&mut self, registry: &mut Registry<'_>) {
        let path = registry.path().to_owned();
        *self = RmsNorm::new(registry.spec(), &path, self.cols);
    }
}

impl RmsNorm {
    /// A norm over so many columns, that is to be registered with the struct it stands in.
    pub const fn of(cols: usize) -> RmsNorm {
        RmsNorm { path: String::new(), cols, gain: ParamId::UNREGISTERED }
    }

    /// Registers the layer `path`, whose one parameter is `{path}.weight`.
    pub fn new(spec: &mut StageSpec, path: &str, cols: usize) -> RmsNorm {
        let gain = spec.param(ParamSpec {
            path: format!("{path}.weight"),
            rows: 1,
            cols,
            init: Init::Ones,
            kind: ParamKind::Vector,
            working: Working::Master,
        });
        RmsNorm { path: path.into(), cols, gain }
    }

    fn run(&self, cx: &mut Cx<'_>, x: Act) -> Result<(Act, Act)> {
        if x.cols != self.cols {
            return Err(Error::shape(&self.path, &format!("{} columns", self.cols), Some(x)));
        }
        let y = cx.lease(x.rows, x.cols)?;
        let rstd = cx.lease_as(cx.recipe().master(), x.rows, 1)?;
        let gain = cx.master(self.gain).buf;
        cx.issue(Cmd::RmsNorm { x: x.buf, gain, y: y.buf, rstd: rstd.buf, cols: self.cols })?;
        Ok((y, rstd))
    }
}

/// From F to I: the input, and one factor per row.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct RmsNormTape {
    x: Kept,
    rstd: Kept,
}

/// The op.
#[derive(Debug)]
pub enum RmsNormOp {}

pub use RmsNormOp as rms_norm;

/// Rows with root mean square 1, times gain.
pub fn rms_norm(_x: Act, _p: &RmsNorm) -> Act {
    witness("rms_norm")
}

impl PureOp for RmsNormOp {
    type Param<'a> = &'a RmsNorm;
    type Tape = RmsNormTape;

    fn forward(cx: &mut Cx<'_>, x: Act, p: &RmsNorm) -> Result<(Act, RmsNormTape)> {
        let (y, rstd) = p.run(cx, x)?;
        Ok((y, RmsNormTape { x: cx.keep(x)?, rstd: Kept::new(rstd) }))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, p: &RmsNorm, tape: RmsNormTape) -> Result<Act> {
        let dx = cx.lease(dy.rows, dy.cols)?;
        let gain_grad = cx.grad(p.gain)?;
        cx.issue(Cmd::RmsNormGrad {
            dy: dy.buf,
            x: tape.x.act().buf,
            gain: cx.master(p.gain).buf,
            rstd: tape.rstd.act().buf,
            dx: dx.buf,
            gain_grad: gain_grad.act().buf,
            cols: p.cols,
        })?;
        tape.release(cx)?;
        Ok(dx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, p: &RmsNorm) -> Result<Act> {
        let (y, rstd) = p.run(cx, x)?;
        cx.free(rstd)?;
        Ok(y)
    }
}
