//! Faults that users of other systems have met with FP8 state, weight caches and accumulated gradients,
//! on one linear layer whose numbers can be counted by hand. The ids are those of `docs/cases.md`.

use qeffect_core::code::Code;
use qeffect_core::fp8::{E4m3, Fp8};
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::Caps;
use qeffect_runtime::error::{Error, Result};
use qeffect_runtime::op::Op;
use qeffect_runtime::ops::linear::{Linear, LinearOp, LinearTape, LinearWork};
use qeffect_runtime::optim::{NormPlan, OptimConfig};
use qeffect_runtime::shard::{Shard, ShardConfig};
use qeffect_runtime::stage::{Init, Stage, StageSpec};

/// Tokens of a microbatch.
const TOKENS: usize = 4;
/// Inputs of the layer.
const INPUTS: usize = 8;
/// Outputs of the layer.
const OUTPUTS: usize = 16;
const LAYER: StageId = StageId(0);

/// One linear layer; x and dy are constant, a value per microbatch.
struct Layer {
    spec: StageSpec,
    linear: Linear,
    x: Vec<f32>,
    dy: Vec<f32>,
    /// Whether W asks twice for the gradient of its parameter.
    twice: bool,
}

impl Layer {
    fn filled(cx: &mut Cx<'_>, cols: usize, values: &[f32]) -> Result<Act> {
        let act = cx.lease(TOKENS, cols)?;
        cx.issue(Cmd::Fill { dst: act.buf, value: values[cx.microbatch().index()] })?;
        Ok(act)
    }
}

impl Stage for Layer {
    type Tape = LinearTape;
    type Work = LinearWork;

    fn spec(&self) -> &StageSpec {
        &self.spec
    }

    fn forward(
        &self,
        cx: &mut Cx<'_>,
        _x: Option<Act>,
        token: Token<Fwd>,
    ) -> Result<(Option<Act>, LinearTape, Token<Fwd>)> {
        let x = Layer::filled(cx, INPUTS, &self.x)?;
        let (y, tape, token) = LinearOp::forward(cx, x, &self.linear, token)?;
        cx.free(x)?;
        Ok((Some(y), tape, cx.roll_forward(token)?))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        _dy: Option<Act>,
        tape: LinearTape,
        token: Token<Bwd>,
    ) -> Result<(Option<Act>, LinearWork, Token<Bwd>)> {
        let dy = Layer::filled(cx, OUTPUTS, &self.dy)?;
        let (dx, work, token) = LinearOp::input_grad(cx, dy, &self.linear, tape, token)?;
        cx.free(dy)?;
        Ok((Some(dx), work, cx.roll_backward(token)?))
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, work: LinearWork) -> Result<()> {
        let dst = cx.grad(self.linear.weight())?;
        if self.twice {
            let _second = cx.grad(self.linear.weight())?;
        }
        LinearOp::weight_grad(cx, work, dst)
    }

    fn evaluate(&self, cx: &mut Cx<'_>, _x: Option<Act>) -> Result<Option<Act>> {
        let x = Layer::filled(cx, INPUTS, &self.x)?;
        let y = LinearOp::evaluate(cx, x, &self.linear)?;
        cx.free(x)?;
        Ok(Some(y))
    }
}

/// A rank with the layer, all weights equal, and the tokens that a ledger would keep.
struct Rig {
    shard: Shard<Layer>,
    fwd: Option<Token<Fwd>>,
    bwd: Option<Token<Bwd>>,
    microbatches: u32,
}

impl Rig {
    fn new(recipe: &str, weight: f64, x: &[f32], dy: &[f32], caps: Caps) -> Rig {
        let mut spec = StageSpec::new(recipe.parse().unwrap());
        let linear = Linear::new(&mut spec, "layer", [INPUTS, OUTPUTS], false, Init::Zeros, true);
        let layer = Layer { spec, linear, x: x.to_vec(), dy: dy.to_vec(), twice: false };
        Rig::of(layer, weight, caps)
    }

    fn of(layer: Layer, weight: f64, caps: Caps) -> Rig {
        let microbatches = layer.x.len() as u32;
        let config = ShardConfig {
            microbatches,
            data_parallel: 1,
            tokens: TOKENS,
            ranks: 1,
            optim: OptimConfig { steps: 8, peak: 0.1, weight_decay: 0.0, ..OptimConfig::default() },
            norm: NormPlan::new([("layer.weight", INPUTS * OUTPUTS)]).unwrap(),
        };
        let mut shard = Shard::new(Box::new(CpuDevice::with_caps(caps)), vec![(LAYER, layer)], config).unwrap();
        shard.set_param("layer.weight", &[weight; INPUTS * OUTPUTS]).unwrap();
        shard.prologue().unwrap();
        Rig { shard, fwd: Some(Token::first(LAYER)), bwd: Some(Token::first(LAYER)), microbatches }
    }

    fn begin(&mut self) {
        let windows = Windows { tokens: vec![0; TOKENS], targets: vec![0; TOKENS] };
        self.shard.begin_step(&vec![windows; self.microbatches as usize]).unwrap();
        self.shard.refresh(LAYER).unwrap();
    }

    /// F, and the value of every output.
    fn forward(&mut self, m: u32) -> (LinearTape, f64) {
        let token = self.fwd.take().unwrap();
        let (y, tape, token) = self.shard.forward(LAYER, Microbatch(m), None, token).unwrap();
        self.fwd = Some(token);
        (tape, self.value(y))
    }

    /// I, and the value of every element of dX.
    fn input_grad(&mut self, m: u32, tape: LinearTape) -> (LinearWork, f64) {
        let token = self.bwd.take().unwrap();
        let (dx, work, token) = self.shard.input_grad(LAYER, Microbatch(m), None, tape, token).unwrap();
        self.bwd = Some(token);
        (work, self.value(dx))
    }

    fn weight_grad(&mut self, m: u32, work: LinearWork) {
        self.shard.weight_grad(LAYER, Microbatch(m), work).unwrap();
    }

    /// The one value that all elements have.
    fn value(&mut self, act: Option<Act>) -> f64 {
        let act = act.unwrap();
        let values = self.shard.reals(act).unwrap();
        assert!(values.iter().all(|value| *value == values[0]), "{values:?}");
        self.shard.free(act).unwrap();
        values[0]
    }

    /// The mean gradient of every weight, after `reduce`.
    fn gradient(&mut self) -> f64 {
        self.shard.reduce(LAYER).unwrap();
        let values = self.shard.gradient("layer.weight").unwrap();
        assert!(values.iter().all(|value| *value == values[0]), "{values:?}");
        values[0]
    }

    fn commit(&mut self) {
        let measured = self.shard.measure().unwrap();
        assert!(self.shard.settle(&[measured]).unwrap().commit);
        self.shard.commit().unwrap();
    }

    /// One whole step; the values of its outputs.
    fn step(&mut self) -> Vec<f64> {
        self.begin();
        let mut outputs = Vec::new();
        for m in 0..self.microbatches {
            let (tape, y) = self.forward(m);
            let (work, _) = self.input_grad(m, tape);
            self.weight_grad(m, work);
            outputs.push(y);
        }
        self.gradient();
        self.commit();
        outputs
    }

    /// Floats of the exported state.
    fn floats(&mut self, name: &str) -> Vec<f32> {
        let named = &self.shard.export().unwrap()[name];
        named.bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    fn codes(&mut self, name: &str) -> Vec<u8> {
        self.shard.export().unwrap()[name].bytes.clone()
    }
}

const FP8: &str = "fp8-delayed:history=4,loss-scale=2^0";

fn close(value: f64, wanted: f64) {
    assert!((value - wanted).abs() <= 1e-6 * wanted.abs(), "{value}, not {wanted}");
}

// case B04: a second forward moves the scale before the first backward; the bytes keep their own.
#[test]
fn b04_bytes_are_read_with_the_scale_that_made_them() {
    let mut gradients = Vec::new();
    for order in [[0, 1], [1, 0]] {
        let mut rig = Rig::new(FP8, 0.5, &[8.0, 1.0], &[1.0, 1.0], Caps::default());
        rig.begin();
        let (tape0, _) = rig.forward(0);
        assert_eq!(rig.floats("layer.input/scale"), [56.0]);
        let (tape1, _) = rig.forward(1);
        let mut works = [Some(rig.input_grad(0, tape0).0), Some(rig.input_grad(1, tape1).0)];
        for m in order {
            let work = works[m].take().unwrap();
            rig.weight_grad(m as u32, work);
        }
        gradients.push(rig.gradient());
    }
    // Read with the scale of the second forward, the first contribution would be 32 / 56.
    close(gradients[0], (4.0 * 8.0 + 4.0 * 1.0) / 2.0);
    assert_eq!(gradients[0].to_bits(), gradients[1].to_bits());
}

// case B05: the backward state moves once per I, at its end, and never with F or W.
#[test]
fn b05_only_an_input_gradient_moves_the_backward_state() {
    let mut rig = Rig::new(FP8, 0.5, &[1.0, 1.0], &[1.0, 2.0], Caps::default());
    let state = |rig: &mut Rig| (rig.floats("layer.grad_output/scale"), rig.floats("layer.grad_output/history"));
    rig.begin();
    let start = state(&mut rig);
    let (tape0, _) = rig.forward(0);
    let (tape1, _) = rig.forward(1);
    assert_eq!(state(&mut rig), start);
    let (work0, _) = rig.input_grad(0, tape0);
    assert_eq!(state(&mut rig), (vec![57344.0], vec![0.0, 0.0, 0.0, 1.0]));
    let (work1, _) = rig.input_grad(1, tape1);
    let after = state(&mut rig);
    assert_eq!(after, (vec![28672.0], vec![0.0, 0.0, 1.0, 2.0]));
    rig.weight_grad(1, work1);
    rig.weight_grad(0, work0);
    rig.gradient();
    rig.commit();
    assert_eq!(state(&mut rig), after);
    assert_eq!((rig.fwd.unwrap().rolls(), rig.bwd.unwrap().rolls()), (2, 2));
}

// case B07: the weight's scale moves, the cached weight keeps its factor. Case B02: one roll per step.
#[test]
fn b07_a_cached_weight_keeps_its_factor_when_its_scale_moves() {
    let mut rig = Rig::new(FP8, 3.0, &[0.5; 6], &[0.0; 6], Caps::default());
    let outputs = rig.step();
    for y in &outputs {
        close(*y, 8.0 * 3.0 * 0.5);
    }
    assert!(outputs[1..].iter().all(|y| y.to_bits() == outputs[1].to_bits()));
    // dy is 0, so the weight is still 3; commit has quantised it with the scale that its first roll gave.
    assert_eq!(rig.floats("layer.weight/scale")[0].to_bits(), 0x4315_5555);
    assert_eq!(rig.floats("layer.weight/scale_inv"), [1.0 / f32::from_bits(0x4315_5555)]);
    assert_eq!(rig.floats("layer.weight/history"), [3.0, 0.0, 0.0, 3.0]); // staged for the next refresh
    rig.begin();
    assert_eq!(rig.floats("layer.weight/history"), [0.0, 0.0, 3.0, 3.0]);
    close(rig.forward(0).1, 8.0 * 3.0 * 0.5);
}

// case B10: after a commit, weight and transpose are both the new ones.
#[test]
fn b10_the_transposed_weight_follows_the_optimizer() {
    for fp8_needs_transposes in [false, true] {
        let mut rig = Rig::new(FP8, 1.0, &[1.0], &[1.0], Caps { fp8_needs_transposes });
        let old = rig.codes("layer.weight/codes");
        rig.step();
        let new = rig.codes("layer.weight/codes");
        assert_ne!(old, new, "the optimizer moved the weight");
        if fp8_needs_transposes {
            let transposed = rig.codes("layer.weight/transposed");
            let at = |row: usize, column: usize| transposed[column * OUTPUTS + row];
            assert!((0..OUTPUTS * INPUTS).all(|i| new[i] == at(i / INPUTS, i % INPUTS)));
        }
        let weight = f64::from(E4m3::decode(new[0]) * rig.floats("layer.weight/scale_inv")[0]);
        let master = rig.shard.param("layer.weight").unwrap()[0];
        assert!((weight - master).abs() <= master / 16.0, "{weight} stands for {master}");
        rig.begin();
        let (tape, y) = rig.forward(0);
        let (work, dx) = rig.input_grad(0, tape);
        rig.weight_grad(0, work);
        assert!((y - INPUTS as f64 * weight).abs() < 0.01 * y, "{y} {weight}");
        assert!((dx - OUTPUTS as f64 * weight).abs() < 0.01 * dx, "{dx} {weight}");
    }
}

// case B13: a parameter that is written twice for one microbatch is refused, not overwritten.
#[test]
fn b13_a_second_contribution_is_refused() {
    let mut spec = StageSpec::new("f32".parse().unwrap());
    let linear = Linear::new(&mut spec, "layer", [INPUTS, OUTPUTS], false, Init::Zeros, true);
    let mut rig = Rig::of(Layer { spec, linear, x: vec![1.0], dy: vec![1.0], twice: true }, 1.0, Caps::default());
    rig.begin();
    let (tape, _) = rig.forward(0);
    let (work, _) = rig.input_grad(0, tape);
    match rig.shard.weight_grad(LAYER, Microbatch(0), work) {
        Err(Error::Contract { code: Code::ArenaDuplicate, message }) => {
            assert_eq!(message, "the gradient of `layer.weight` is written twice for microbatch 0");
        }
        other => panic!("not refused: {other:?}"),
    }
}

// case B34: the mean is taken once. Case B55: every microbatch counts, in whatever order W runs.
#[test]
fn b34_gradients_are_averaged_once_in_every_order_of_w() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 3, 0]] {
        let mut rig = Rig::new("f32", 0.5, &[1.0; 4], &[1.0, 2.0, 3.0, 4.0], Caps::default());
        for _ in 0..2 {
            rig.begin();
            let tapes: Vec<_> = (0..4).map(|m| rig.forward(m).0).collect();
            let works = tapes.into_iter().zip(0..).map(|(tape, m)| rig.input_grad(m, tape).0);
            let mut works: Vec<_> = works.map(Some).collect();
            for m in order {
                let work = works[m].take().unwrap();
                rig.weight_grad(m as u32, work);
            }
            // 4 tokens each: 4, 8, 12, 16; their mean, in the second step as in the first.
            assert_eq!(rig.gradient(), 10.0, "{order:?}");
            rig.commit();
        }
    }
}

// case B44: an input so small that its scale would be infinite.
#[test]
fn b44_a_tiny_input_gives_finite_numbers() {
    let mut rig = Rig::new(FP8, 1.0, &[1e-37, 0.0], &[0.0, 0.0], Caps::default());
    let outputs = rig.step();
    assert!(outputs.iter().all(|y| *y == 0.0), "{outputs:?}");
    assert_eq!(rig.floats("layer.input/scale"), [f32::MAX]);
    assert_eq!(Fp8::E4M3.encode(0.0 * f32::MAX), 0);
}
