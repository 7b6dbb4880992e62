//! One linear layer on one rank, action by action; the test writes its input and its output gradient.

use super::settings::{adamw, alone};
use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::recipe::Recipe;
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Caps, Device};
use qeffect_runtime::error::Result;
use qeffect_runtime::op::{Effects, Op};
use qeffect_runtime::ops::linear::{Linear, LinearOp, LinearTape, LinearWork};
use qeffect_runtime::optim::{NormPlan, OptimConfig, Verdict};
use qeffect_runtime::shard::Shard;
use qeffect_runtime::stage::{Init, Stage, StageSpec};

pub const TOKENS: usize = 16;
pub const WIDTH: usize = 16;
pub const STAGE: StageId = StageId(0);

/// A stage of one layer, whose input and output gradient the test writes.
pub struct OneLayer {
    spec: StageSpec,
    layer: Linear,
    /// Write the gradient a second time, as a second user of the parameter would.
    twice: bool,
}

impl Stage for OneLayer {
    type Tape = LinearTape;
    type Work = LinearWork;

    fn spec(&self) -> &StageSpec {
        &self.spec
    }

    fn effects(&self) -> Effects {
        LinearOp::EFFECTS
    }

    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], token: Token<Fwd>) -> Result<(Vec<Act>, LinearTape, Token<Fwd>)> {
        let (y, tape, token) = LinearOp::forward(cx, x[0], &self.layer, token)?;
        Ok((vec![y], tape, cx.roll_forward(token)?))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: LinearTape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, LinearWork, Token<Bwd>)> {
        let (dx, work, token) = LinearOp::input_grad(cx, dy[0], &self.layer, tape, token)?;
        Ok((vec![dx], work, cx.roll_backward(token)?))
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, work: LinearWork) -> Result<()> {
        LinearOp::weight_grad(cx, &self.layer, work)?;
        if self.twice {
            let _second = cx.grad(self.layer.weight())?;
        }
        Ok(())
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        Ok(vec![LinearOp::evaluate(cx, x[0], &self.layer)?])
    }
}

pub struct Bench {
    pub shard: Shard<OneLayer>,
    microbatches: u32,
    pub fwd: Option<Token<Fwd>>,
    pub bwd: Option<Token<Bwd>>,
}

/// No learning: the tests move the weight themselves.
const STILL: OptimConfig = OptimConfig { clip: f32::INFINITY, ..adamw(8, 0, 0.0, 0.0) };

impl Bench {
    pub fn new(recipe: &str, microbatches: u32) -> Bench {
        Bench::with(recipe, microbatches, Caps::default(), false)
    }

    pub fn with(recipe: &str, microbatches: u32, caps: Caps, twice: bool) -> Bench {
        Bench::on(Box::new(CpuDevice::with_caps(caps)), recipe, microbatches, twice)
    }

    pub fn on(device: Box<dyn Device>, recipe: &str, microbatches: u32, twice: bool) -> Bench {
        let recipe: Recipe = recipe.parse().unwrap();
        let mut spec = StageSpec::new(recipe);
        (spec.input, spec.output) = (vec![[TOKENS, WIDTH]], vec![[TOKENS, WIDTH]]);
        let layer = Linear::new(&mut spec, "layer", [WIDTH, WIDTH], false, Init::Ones, true);
        let norm = NormPlan::new([("layer.weight", WIDTH * WIDTH)]).unwrap();
        let config = alone(microbatches, TOKENS, STILL, norm);
        let mut shard = Shard::new(device, vec![(STAGE, OneLayer { spec, layer, twice })], config).unwrap();
        shard.init(0).unwrap();
        shard.prologue().unwrap();
        Bench { shard, microbatches, fwd: Some(Token::first(STAGE)), bwd: Some(Token::first(STAGE)) }
    }

    /// As [`Bench::on`], with this weight, which is at least 1: the first weights have staged an amax of 1.
    pub fn starting_with(device: Box<dyn Device>, recipe: &str, microbatches: u32, weight: f64) -> Bench {
        let mut bench = Bench::on(device, recipe, microbatches, false);
        bench.shard.set_param("layer.weight", &[weight; WIDTH * WIDTH]).unwrap();
        bench.shard.prologue().unwrap();
        bench
    }

    pub fn begin(&mut self) {
        let windows = Windows { tokens: vec![0; TOKENS], targets: vec![0; TOKENS] };
        self.shard.begin_step(&vec![windows; self.microbatches as usize]).unwrap();
        self.shard.refresh(STAGE).unwrap();
    }

    pub fn act(&mut self, values: &[f64]) -> Act {
        let dtype = self.shard.recipe().activation();
        let act = self.shard.lease(dtype, TOKENS, WIDTH).unwrap();
        let bytes: Vec<u8> = match dtype {
            Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
            Dtype::F32 => values.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        self.shard.write_act(act, &bytes).unwrap();
        act
    }

    pub fn forward(&mut self, m: u32, x: &[f64]) -> (Vec<f64>, LinearTape) {
        let x = self.act(x);
        let token = self.fwd.take().unwrap();
        let (y, tape, token) = self.shard.forward(STAGE, Microbatch(m), &[x], token).unwrap();
        self.fwd = Some(token);
        let y = y[0];
        let values = self.shard.reals(y).unwrap();
        self.shard.free(y).unwrap();
        self.shard.free(x).unwrap();
        (values, tape)
    }

    pub fn input_grad(&mut self, m: u32, dy: &[f64], tape: LinearTape) -> (Vec<f64>, LinearWork) {
        let dy = self.act(dy);
        let token = self.bwd.take().unwrap();
        let (dx, work, token) = self.shard.input_grad(STAGE, Microbatch(m), &[dy], tape, token).unwrap();
        self.bwd = Some(token);
        let dx = dx[0];
        let values = self.shard.reals(dx).unwrap();
        self.shard.free(dx).unwrap();
        self.shard.free(dy).unwrap();
        (values, work)
    }

    pub fn weight_grad(&mut self, m: u32, work: LinearWork) -> Result<()> {
        self.shard.weight_grad(STAGE, Microbatch(m), work)
    }

    pub fn settle(&mut self) -> Verdict {
        self.shard.reduce(STAGE).unwrap();
        self.shard.measure().unwrap();
        let measured = self.shard.offer().unwrap();
        self.shard.accept(&[measured]).unwrap();
        self.shard.settle().unwrap();
        self.shard.verdict().unwrap()
    }

    pub fn floats(&mut self, name: &str) -> Vec<f32> {
        let named = &self.shard.export().unwrap()[name];
        assert_eq!(named.dtype, Dtype::F32);
        named.bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    pub fn scale(&mut self, role: &str) -> f32 {
        self.floats(&format!("layer.{role}/scale"))[0]
    }
}

pub fn constant(value: f64) -> Vec<f64> {
    vec![value; TOKENS * WIDTH]
}

pub fn pattern(amax: f64) -> Vec<f64> {
    (0..TOKENS * WIDTH).map(|i| amax * [1.0, -0.5, 0.25, 0.0, -1.0][i % 5] * [1.0, 0.5, 0.25][i % 3]).collect()
}
