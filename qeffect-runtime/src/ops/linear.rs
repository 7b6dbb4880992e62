//! `y = x · Wᵀ + b`, in FP8 or in the activation type.
//!
//! FP8: F casts x to E4M3 with the scale of the layer's input cell, I casts dy to E5M2 with that of its gradient cell;
//! both retain the codes together with the factor they were made with, and W multiplies those two. The weight comes from
//! the cache, with its own factor. The bias gradient is summed in I, from dy as it was before the cast.

use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_macros::{effect, retained};

use crate::act::{Act, Fp8, Kept};
use crate::cmd::Operand;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::groups::Grouped;
use crate::op::{Op, witness};
use crate::params::{Params, Registry};
use crate::stage::{CellId, Init, Layout, ParamId, ParamKind, ParamSpec, Retained, Role, StageSpec, Working};
use crate::state::WorkingBufs;

/// A linear layer.
#[derive(Clone, Debug)]
pub struct Linear {
    path: String,
    inputs: usize,
    outputs: usize,
    weight: ParamId,
    bias: Option<ParamId>,
    cells: Option<Cells>,
    init: Init,
    fp8: bool,
    tied: Option<String>,
}

/// State cells of a layer in FP8; the third, of the weight, is known to the weight cache.
#[derive(Clone, Copy, Debug)]
struct Cells {
    input: CellId,
    grad: CellId,
}

impl Params for Linear {
    fn register(&mut self, registry: &mut Registry<'_>) {
        let path = registry.path().to_owned();
        let (init, fp8) = (registry.init(self.init), self.fp8 && registry.quantised());
        let shape = [self.inputs, self.outputs];
        let tied = self.tied.take();
        *self = Linear::new(registry.spec(), &path, shape, self.bias.is_some(), init, fp8);
        if let Some(to) = &tied {
            registry.spec().tie(self.weight, to);
        }
        self.tied = tied;
    }
}

impl Linear {
    /// A layer of so many inputs and outputs, with a bias, that is to be registered with the struct it stands in. It runs
    /// in FP8 if the recipe scales; its weights begin as those of GPT-2 do.
    pub const fn of([inputs, outputs]: [usize; 2]) -> Linear {
        Linear {
            path: String::new(),
            inputs,
            outputs,
            weight: ParamId::UNREGISTERED,
            bias: Some(ParamId::UNREGISTERED),
            cells: None,
            init: Init::Normal(0.02),
            fp8: true,
            tied: None,
        }
    }

    /// Without a bias.
    pub fn unbiased(self) -> Linear {
        Linear { bias: None, ..self }
    }

    /// With other first weights.
    pub fn init(self, init: Init) -> Linear {
        Linear { init, ..self }
    }

    /// With the weight at `to`, as the head of a model may have that of its embedding. They begin with the same values.
    pub fn tied(self, to: &str) -> Linear {
        Linear { tied: Some(to.into()), ..self }
    }

    /// In FP8, where the recipe scales, or in the activation type.
    pub fn quantised(self, fp8: bool) -> Linear {
        Linear { fp8, ..self }
    }

    /// Registers the layer `path`. It runs in FP8 if the recipe scales and `fp8` is wanted.
    pub fn new(
        spec: &mut StageSpec,
        path: &str,
        [inputs, outputs]: [usize; 2],
        bias: bool,
        init: Init,
        fp8: bool,
    ) -> Linear {
        let fp8 = fp8 && spec.recipe.delayed().is_some();
        let working = if fp8 { Working::Fp8(spec.cell(Role::Weight, path)) } else { Working::Activation };
        let cells = fp8.then(|| Cells { input: spec.cell(Role::Input, path), grad: spec.cell(Role::GradOutput, path) });
        let (rows, cols) = (outputs, inputs);
        let kind = ParamKind::Matrix;
        let weight = spec.param(ParamSpec { path: format!("{path}.weight"), rows, cols, init, kind, working });
        let bias = bias.then(|| {
            spec.param(ParamSpec {
                path: format!("{path}.bias"),
                rows: 1,
                cols: outputs,
                init: Init::Zeros,
                kind: ParamKind::Vector,
                working: Working::Activation,
            })
        });
        Linear { path: path.into(), inputs, outputs, weight, bias, cells, init, fp8, tied: None }
    }

    /// The weight.
    pub const fn weight(&self) -> ParamId {
        self.weight
    }

    fn product(&self, cx: &mut Cx<'_>, x: Operand, rows: usize) -> Result<Act> {
        let weight = match cx.working(self.weight) {
            WorkingBufs::Plain(act) => act.operand(true),
            WorkingBufs::Fp8(view) => view.second(true),
        };
        let bias = self.bias.map(|bias| match cx.working(bias) {
            WorkingBufs::Plain(act) => act.buf,
            WorkingBufs::Fp8(view) => view.codes,
        });
        cx.gemm([rows, self.outputs, self.inputs], x, weight, bias)
    }

    fn check(&self, x: Act, cols: usize) -> Result<()> {
        if x.cols != cols {
            return Err(Error::shape(&self.path, &format!("{cols} columns"), Some(x)));
        }
        Ok(())
    }
}

/// An input or output gradient, as retained.
#[must_use = "retained tensors are consumed by the backward of their op"]
#[derive(PartialEq, Eq, Debug)]
pub enum Saved {
    /// In the activation type.
    Plain(Kept),
    /// Quantised.
    Fp8(Fp8),
    /// In the region of a group, for its weight gradient alone.
    Grouped(Grouped),
}

impl Retained for Saved {
    fn layout(&self, layout: &mut Layout) {
        match self {
            Saved::Plain(kept) => kept.layout(layout),
            Saved::Fp8(fp8) => fp8.layout(layout),
            Saved::Grouped(grouped) => grouped.layout(layout),
        }
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        match self {
            Saved::Plain(kept) => kept.release(cx),
            Saved::Fp8(fp8) => fp8.release(cx),
            Saved::Grouped(grouped) => grouped.release(cx),
        }
    }
}

impl Saved {
    pub(crate) fn rows(&self) -> usize {
        match self {
            Saved::Plain(kept) => kept.act().rows,
            Saved::Fp8(fp8) => fp8.rows(),
            Saved::Grouped(grouped) => grouped.rows(),
        }
    }

    pub(crate) fn cols(&self) -> usize {
        match self {
            Saved::Plain(kept) => kept.act().cols,
            Saved::Fp8(fp8) => fp8.cols(),
            Saved::Grouped(grouped) => grouped.cols(),
        }
    }

    /// As first operand of a product; a group's part is none.
    pub(crate) fn first(&self, transposed: bool) -> Result<Operand> {
        match self {
            Saved::Plain(kept) => Ok(kept.act().operand(transposed)),
            Saved::Fp8(fp8) => Ok(fp8.view().first(transposed)),
            Saved::Grouped(grouped) => Err(alone(grouped)),
        }
    }

    /// As second operand of a product; a group's part is none.
    pub(crate) fn second(&self, transposed: bool) -> Result<Operand> {
        match self {
            Saved::Plain(kept) => Ok(kept.act().operand(transposed)),
            Saved::Fp8(fp8) => Ok(fp8.view().second(transposed)),
            Saved::Grouped(grouped) => Err(alone(grouped)),
        }
    }
}

fn alone(grouped: &Grouped) -> Error {
    Error::shape("a product of one microbatch", "a tensor of its own", Some(grouped.region()))
}

/// From F to I: the input.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct LinearTape {
    x: Saved,
}

/// From I to W: the input and the gradient of the output.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct LinearWork {
    x: Saved,
    dy: Saved,
}

/// The op.
#[derive(Debug)]
pub enum LinearOp {}

pub use LinearOp as linear;

/// `x · Wᵀ + b`.
pub fn linear(_x: Act, _p: &Linear) -> Act {
    witness("linear")
}

#[effect(crate = crate, read(weight), write(input, grad_output))]
impl Op for LinearOp {
    type Input = Act;
    type Output = Act;
    type Param<'a> = &'a Linear;
    type Tape = LinearTape;
    type Work = LinearWork;

    fn forward(cx: &mut Cx<'_>, x: Act, p: &Linear, token: Token<Fwd>) -> Result<(Act, LinearTape, Token<Fwd>)> {
        p.check(x, p.inputs)?;
        let (saved, token) = match p.cells {
            Some(cells) => {
                let (x8, token) = cx.quantise_input_of(p.weight, x, cells.input, token)?;
                (Saved::Fp8(x8), token)
            }
            None => (Saved::Plain(cx.keep(x)?), token),
        };
        let y = p.product(cx, saved.first(false)?, x.rows)?;
        Ok((y, LinearTape { x: cx.keep_factor(p.weight, Role::Input, saved)? }, token))
    }

    fn input_grad(
        cx: &mut Cx<'_>,
        dy: Act,
        p: &Linear,
        tape: LinearTape,
        token: Token<Bwd>,
    ) -> Result<(Act, LinearWork, Token<Bwd>)> {
        p.check(dy, p.outputs)?;
        if let Some(bias) = p.bias {
            let dst = cx.grad(bias)?;
            cx.column_sums(dy, dst)?;
        }
        let (saved, token) = match p.cells {
            Some(cells) => {
                let (dy8, token) = cx.quantise_grad_of(p.weight, dy, cells.grad, token)?;
                (Saved::Fp8(dy8), token)
            }
            None => (Saved::Plain(cx.keep(dy)?), token),
        };
        let weight = match cx.working(p.weight) {
            WorkingBufs::Plain(act) => act.operand(false),
            WorkingBufs::Fp8(view) => view.second(false),
        };
        let dx = cx.gemm([dy.rows, p.inputs, p.outputs], saved.first(false)?, weight, None)?;
        let dy = cx.keep_factor(p.weight, Role::GradOutput, saved)?;
        Ok((dx, LinearWork { x: tape.x, dy }, token))
    }

    fn weight_grad(cx: &mut Cx<'_>, p: &Linear, work: LinearWork) -> Result<()> {
        let dst = cx.grad(p.weight)?;
        cx.weight_product(dst, work.dy, work.x)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, p: &Linear) -> Result<Act> {
        p.check(x, p.inputs)?;
        match p.cells {
            Some(cells) => {
                let x8 = cx.quantise_frozen(x, cells.input)?;
                let y = p.product(cx, x8.view().first(false), x.rows)?;
                cx.release_fp8(x8)?;
                Ok(y)
            }
            None => p.product(cx, x.operand(false), x.rows),
        }
    }
}
