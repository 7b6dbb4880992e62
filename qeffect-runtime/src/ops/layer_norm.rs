//! Layer norm over rows, with gain and bias read from the masters.

use qeffect_macros::retained;

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::op::{PureOp, witness};
use crate::params::{Params, Registry};
use crate::stage::{Init, ParamId, ParamKind, ParamSpec, Retained, StageSpec, Working};

/// A layer norm.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    path: String,
    cols: usize,
    gain: ParamId,
    bias: ParamId,
}

impl Params for LayerNorm {
    fn register(&mut self, registry: &mut Registry<'_>) {
        let path = registry.path().to_owned();
        *self = LayerNorm::new(registry.spec(), &path, self.cols);
    }
}

impl LayerNorm {
    /// A norm over so many columns, that is to be registered with the struct it stands in.
    pub const fn of(cols: usize) -> LayerNorm {
        LayerNorm { path: String::new(), cols, gain: ParamId::UNREGISTERED, bias: ParamId::UNREGISTERED }
    }

    /// Registers the layer `path`.
    pub fn new(spec: &mut StageSpec, path: &str, cols: usize) -> LayerNorm {
        let mut vector = |name: &str, init: Init| {
            spec.param(ParamSpec {
                path: format!("{path}.{name}"),
                rows: 1,
                cols,
                init,
                kind: ParamKind::Vector,
                working: Working::Master,
            })
        };
        LayerNorm { path: path.into(), cols, gain: vector("weight", Init::Ones), bias: vector("bias", Init::Zeros) }
    }

    fn run(&self, cx: &mut Cx<'_>, x: Act) -> Result<(Act, Act, Act)> {
        if x.cols != self.cols {
            return Err(Error::shape(&self.path, &format!("{} columns", self.cols), Some(x)));
        }
        let y = cx.lease(x.rows, x.cols)?;
        let master = cx.recipe().master();
        let (mean, rstd) = (cx.lease_as(master, x.rows, 1)?, cx.lease_as(master, x.rows, 1)?);
        let (gain, bias) = (cx.master(self.gain).buf, cx.master(self.bias).buf);
        cx.issue(Cmd::LayerNorm { x: x.buf, gain, bias, y: y.buf, mean: mean.buf, rstd: rstd.buf, cols: self.cols })?;
        Ok((y, mean, rstd))
    }
}

/// From F to I: the input and its statistics.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct LayerNormTape {
    x: Kept,
    mean: Kept,
    rstd: Kept,
}

/// The op.
#[derive(Debug)]
pub enum LayerNormOp {}

pub use LayerNormOp as layer_norm;

/// Rows with mean 0 and variance 1, times gain, plus bias.
pub fn layer_norm(_x: Act, _p: &LayerNorm) -> Act {
    witness("layer_norm")
}

impl PureOp for LayerNormOp {
    type Param<'a> = &'a LayerNorm;
    type Tape = LayerNormTape;

    fn forward(cx: &mut Cx<'_>, x: Act, p: &LayerNorm) -> Result<(Act, LayerNormTape)> {
        let (y, mean, rstd) = p.run(cx, x)?;
        let tape = LayerNormTape { x: cx.keep(x)?, mean: Kept::new(mean), rstd: Kept::new(rstd) };
        Ok((y, tape))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, p: &LayerNorm, tape: LayerNormTape) -> Result<Act> {
        let dx = cx.lease(dy.rows, dy.cols)?;
        let (gain_grad, bias_grad) = (cx.grad(p.gain)?, cx.grad(p.bias)?);
        cx.issue(Cmd::LayerNormGrad {
            dy: dy.buf,
            x: tape.x.act().buf,
            gain: cx.master(p.gain).buf,
            mean: tape.mean.act().buf,
            rstd: tape.rstd.act().buf,
            dx: dx.buf,
            gain_grad: gain_grad.act().buf,
            bias_grad: bias_grad.act().buf,
            cols: p.cols,
        })?;
        tape.release(cx)?;
        Ok(dx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, p: &LayerNorm) -> Result<Act> {
        let (y, mean, rstd) = p.run(cx, x)?;
        cx.free(mean)?;
        cx.free(rstd)?;
        Ok(y)
    }
}
