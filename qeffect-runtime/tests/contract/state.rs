//! Scales, histories, weight caches and gradient slots of one linear layer, number by number.

use crate::common::settings::{adamw, alone, small};
use crate::common::{Solo, batch};
use half::bf16;
use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::recipe::Recipe;
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::Caps;
use qeffect_runtime::error::{Error, Result};
use qeffect_runtime::op::{Effects, Op};
use qeffect_runtime::ops::linear::{Linear, LinearOp, LinearTape, LinearWork};
use qeffect_runtime::optim::{NormPlan, OptimConfig, Verdict};
use qeffect_runtime::shard::{Named, Shard};
use qeffect_runtime::stage::{Init, Layout, Stage, StageSpec};

const TOKENS: usize = 16;
const WIDTH: usize = 16;
const STAGE: StageId = StageId(0);

/// A stage of one layer, whose input and output gradient the test writes.
struct OneLayer {
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

struct Bench {
    shard: Shard<OneLayer>,
    microbatches: u32,
    fwd: Option<Token<Fwd>>,
    bwd: Option<Token<Bwd>>,
}

/// No learning: the tests move the weight themselves.
const STILL: OptimConfig = OptimConfig { clip: f32::INFINITY, ..adamw(8, 0, 0.0, 0.0) };

impl Bench {
    fn new(recipe: &str, microbatches: u32) -> Bench {
        Bench::with(recipe, microbatches, Caps::default(), false)
    }

    fn with(recipe: &str, microbatches: u32, caps: Caps, twice: bool) -> Bench {
        let recipe: Recipe = recipe.parse().unwrap();
        let mut spec = StageSpec::new(recipe);
        (spec.input, spec.output) = (vec![[TOKENS, WIDTH]], vec![[TOKENS, WIDTH]]);
        let layer = Linear::new(&mut spec, "layer", [WIDTH, WIDTH], false, Init::Ones, true);
        let norm = NormPlan::new([("layer.weight", WIDTH * WIDTH)]).unwrap();
        let config = alone(microbatches, TOKENS, STILL, norm);
        let device = Box::new(CpuDevice::with_caps(caps));
        let mut shard = Shard::new(device, vec![(STAGE, OneLayer { spec, layer, twice })], config).unwrap();
        shard.init(0).unwrap();
        shard.prologue().unwrap();
        Bench { shard, microbatches, fwd: Some(Token::first(STAGE)), bwd: Some(Token::first(STAGE)) }
    }

    /// As [`Bench::with`], with this weight, which is at least 1: the first weights have staged an amax of 1.
    fn starting_with(recipe: &str, microbatches: u32, caps: Caps, weight: f64) -> Bench {
        let mut bench = Bench::with(recipe, microbatches, caps, false);
        bench.shard.set_param("layer.weight", &[weight; WIDTH * WIDTH]).unwrap();
        bench.shard.prologue().unwrap();
        bench
    }

    fn begin(&mut self) {
        let windows = Windows { tokens: vec![0; TOKENS], targets: vec![0; TOKENS] };
        self.shard.begin_step(&vec![windows; self.microbatches as usize]).unwrap();
        self.shard.refresh(STAGE).unwrap();
    }

    fn act(&mut self, values: &[f64]) -> Act {
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

    fn forward(&mut self, m: u32, x: &[f64]) -> (Vec<f64>, LinearTape) {
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

    fn input_grad(&mut self, m: u32, dy: &[f64], tape: LinearTape) -> (Vec<f64>, LinearWork) {
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

    fn weight_grad(&mut self, m: u32, work: LinearWork) -> Result<()> {
        self.shard.weight_grad(STAGE, Microbatch(m), work)
    }

    fn settle(&mut self) -> Verdict {
        self.shard.reduce(STAGE).unwrap();
        self.shard.measure().unwrap();
        let measured = self.shard.offer().unwrap();
        self.shard.accept(&[measured]).unwrap();
        self.shard.settle().unwrap();
        self.shard.verdict().unwrap()
    }

    fn floats(&mut self, name: &str) -> Vec<f32> {
        let named = &self.shard.export().unwrap()[name];
        assert_eq!(named.dtype, Dtype::F32);
        named.bytes.chunks_exact(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn scale(&mut self, role: &str) -> f32 {
        self.floats(&format!("layer.{role}/scale"))[0]
    }
}

fn constant(value: f64) -> Vec<f64> {
    vec![value; TOKENS * WIDTH]
}

/// `value` in the first row only: as dy, with x = 1, it makes a weight gradient of `value` everywhere.
fn first_row(value: f64) -> Vec<f64> {
    (0..TOKENS * WIDTH).map(|i| if i < WIDTH { value } else { 0.0 }).collect()
}

fn pattern(amax: f64) -> Vec<f64> {
    (0..TOKENS * WIDTH).map(|i| amax * [1.0, -0.5, 0.25, 0.0, -1.0][i % 5] * [1.0, 0.5, 0.25][i % 3]).collect()
}

/// `dyᵀ · x` of what the codes of two scales stand for.
fn weight_gradient(dy: &[f64], dy_scale: f32, x: &[f64], x_scale: f32) -> Vec<f32> {
    let code = |format: Format, x: f64, scale: f32| f64::from(format.decode(format.encode(x as f32 * scale)));
    let factor = (1.0 / dy_scale) * (1.0 / x_scale);
    (0..WIDTH * WIDTH)
        .map(|i| {
            let (row, column) = (i / WIDTH, i % WIDTH);
            let term = |t: usize| {
                code(Format::E5M2, dy[t * WIDTH + row], dy_scale) * code(Format::E4M3, x[t * WIDTH + column], x_scale)
            };
            (0..TOKENS).map(term).sum::<f64>() as f32 * factor
        })
        .collect()
}

// case B04: retained bytes are read with the factor they were made with, whatever the scale is by now.
#[test]
fn a_retained_tensor_carries_its_own_factor() {
    for caps in [Caps::default(), Caps { fp8_needs_transposes: true, ..Caps::default() }] {
        for order in [[0, 1], [1, 0]] {
            let mut bench = Bench::with("fp8-delayed:history=4,loss-scale=2^0", 2, caps, false);
            let x = [pattern(1.0), pattern(8.0)];
            let dy = [pattern(2.0), pattern(0.5)];
            bench.begin();
            let (_, first) = bench.forward(0, &x[0]);
            let (_, second) = bench.forward(1, &x[1]);
            assert_eq!(bench.scale("input"), 56.0);
            for (tape, want) in [(&first, 1.0), (&second, 1.0 / 448.0)] {
                let layout = Layout::of(tape);
                let factor = layout.entries[layout.entries.len() - 1].1;
                assert_eq!((factor.rows, factor.cols), (1, 1));
                assert_eq!(bench.shard.reals(factor).unwrap(), [f64::from(want as f32)]);
            }
            let (_, first) = bench.input_grad(0, &dy[0], first);
            let (_, second) = bench.input_grad(1, &dy[1], second);
            let mut works = [Some(first), Some(second)];
            for m in order {
                let work = works[m as usize].take().unwrap();
                bench.weight_grad(m, work).unwrap();
            }
            bench.settle();
            let grads =
                [weight_gradient(&dy[0], 1.0, &x[0], 1.0), weight_gradient(&dy[1], 57344.0 / 2.0, &x[1], 448.0)];
            let want: Vec<f32> = grads[0].iter().zip(&grads[1]).map(|(a, b)| (a + b) * 0.5).collect();
            assert!(want.iter().any(|x| *x != 0.0));
            assert_eq!(bench.floats("layer.weight/gradient"), want);
        }
    }
}

// case B05: the backward state moves once per I, at its end; F, W, reduce and commit leave it alone.
#[test]
fn only_an_input_gradient_moves_the_backward_state() {
    for order in [[1, 0], [0, 1]] {
        let mut bench = Bench::new("fp8-delayed:history=4", 2);
        let state = |bench: &mut Bench| (bench.scale("grad_output"), bench.floats("layer.grad_output/history"));
        bench.begin();
        let start = state(&mut bench);
        assert_eq!(start, (1.0, vec![0.0; 4]));
        let (_, first) = bench.forward(0, &constant(1.0));
        let (_, second) = bench.forward(1, &constant(1.0));
        assert_eq!(state(&mut bench), start);
        let (_, first) = bench.input_grad(0, &constant(1.0), first);
        assert_eq!(state(&mut bench), (57344.0, vec![0.0, 0.0, 0.0, 1.0]));
        let (_, second) = bench.input_grad(1, &constant(2.0), second);
        let moved = state(&mut bench);
        assert_eq!(moved, (28672.0, vec![0.0, 0.0, 1.0, 2.0]));
        let mut works = [Some(first), Some(second)];
        for m in order {
            let work = works[m as usize].take().unwrap();
            bench.weight_grad(m, work).unwrap();
        }
        assert!(bench.settle().commit);
        bench.shard.commit().unwrap();
        assert_eq!(state(&mut bench), moved);
        assert_eq!((bench.fwd.unwrap().rolls(), bench.bwd.unwrap().rolls()), (2, 2));
    }
}

// case B44: an input so small that its scale would be infinite, and a zero that is cast with that scale.
#[test]
fn a_tiny_input_gives_finite_numbers() {
    let mut bench = Bench::new("fp8-delayed:history=4", 2);
    bench.begin();
    let (_, _first) = bench.forward(0, &constant(1e-37));
    assert_eq!(bench.scale("input"), f32::MAX);
    let (y, _second) = bench.forward(1, &constant(0.0));
    assert_eq!(y, constant(0.0));
}

// case B07: the weight's scale moves while its cached bytes stay; their factor stays with them.
#[test]
fn a_moving_weight_scale_does_not_change_what_the_cache_means() {
    let mut bench = Bench::starting_with("fp8-delayed:history=4", 4, Caps::default(), 3.0);
    let x = pattern(448.0); // keeps the input's scale at 1
    bench.begin();
    let scale = bench.scale("weight");
    assert_eq!(scale.to_bits(), 0x4315_5555);
    let mut outputs = Vec::new();
    for m in 0..4 {
        let (y, tape) = bench.forward(m, &x);
        assert_eq!(bench.floats("layer.weight/scale_inv"), [1.0]);
        assert_eq!(bench.scale("input"), 1.0);
        outputs.push(y);
        let (_, work) = bench.input_grad(m, &constant(1.0), tape);
        bench.weight_grad(m, work).unwrap();
    }
    assert!(outputs[0].iter().any(|y| *y != 0.0) && outputs.iter().all(|y| *y == outputs[0]));
    assert!(bench.settle().commit);
    bench.shard.commit().unwrap();
    bench.begin();
    assert_eq!(bench.floats("layer.weight/scale_inv"), [1.0 / scale]);
    let (y, tape) = bench.forward(0, &x);
    let row: f64 = x[..WIDTH].iter().sum();
    assert!((y[0] - 3.0 * row).abs() <= (3.0 * row).abs() / 256.0);
    let (_, work) = bench.input_grad(0, &constant(1.0), tape);
    bench.weight_grad(0, work).unwrap();
}

// case B02: a weight rolls once per step, however many microbatches there are.
#[test]
fn a_weight_history_rolls_once_per_step() {
    for update in ["microbatch", "step"] {
        let mut bench =
            Bench::starting_with(&format!("fp8-delayed:history=4,update={update}"), 6, Caps::default(), 3.0);
        let step = |bench: &mut Bench, next: f64| {
            bench.begin();
            let rolled = bench.floats("layer.weight/history");
            for m in 0..6 {
                let (_, tape) = bench.forward(m, &constant(0.5));
                let (_, work) = bench.input_grad(m, &constant(1.0), tape);
                bench.weight_grad(m, work).unwrap();
            }
            assert!(bench.settle().commit);
            bench.shard.set_param("layer.weight", &[next; WIDTH * WIDTH]).unwrap(); // as the optimizer would
            bench.shard.commit().unwrap();
            rolled
        };
        // With `update = step` the roll is at commit: there, the history lags by one step and the scale does not.
        let histories = [step(&mut bench, 1.0), step(&mut bench, 1.0), step(&mut bench, 1.0)];
        let want = match update {
            "microbatch" => [[0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 3.0, 1.0], [0.0, 3.0, 1.0, 1.0]],
            _ => [[3.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 3.0], [1.0, 0.0, 3.0, 1.0]],
        };
        assert_eq!(histories, want, "{update}");
        assert_eq!(bench.scale("weight").to_bits(), 0x4315_5555);
        // The bytes of each step were made with the same scale in both modes.
        assert_eq!(bench.floats("layer.weight/scale_inv"), [1.0 / f32::from_bits(0x4315_5555)]);
    }
}

// case B10: a commit renews the transposed copy too.
#[test]
fn the_transposed_weight_follows_the_optimizer() {
    for caps in [Caps::default(), Caps { fp8_needs_transposes: true, ..Caps::default() }] {
        let mut bench = Bench::starting_with("fp8-delayed:history=4,margin=1", 1, caps, 1.0);
        for (want, next) in [(16.0, 2.0), (32.0, 2.0)] {
            bench.begin();
            let (y, tape) = bench.forward(0, &constant(1.0));
            let (dx, work) = bench.input_grad(0, &constant(1.0), tape);
            assert_eq!((y, dx), (constant(want), constant(want)));
            bench.weight_grad(0, work).unwrap();
            assert!(bench.settle().commit);
            bench.shard.set_param("layer.weight", &[next; WIDTH * WIDTH]).unwrap();
            bench.shard.commit().unwrap();
        }
        assert_eq!(bench.shard.export().unwrap().contains_key("layer.weight/transposed"), caps.fp8_needs_transposes);
    }
}

fn train_one_step(bench: &mut Bench, gradients: &[f64], order: &[u32]) -> Vec<f32> {
    bench.begin();
    let mut works = Vec::new();
    for (m, gradient) in gradients.iter().enumerate() {
        let (_, tape) = bench.forward(m as u32, &constant(1.0));
        let (_, work) = bench.input_grad(m as u32, &first_row(*gradient), tape);
        works.push(Some(work));
    }
    for m in order {
        let work = works[*m as usize].take().unwrap();
        bench.weight_grad(*m, work).unwrap();
    }
    bench.settle();
    bench.floats("layer.weight/gradient")
}

// case B55, case B13: every microbatch is added once, whichever weight gradient runs first or last.
#[test]
fn every_microbatch_is_added_once_in_any_order() {
    for recipe in ["f32", "bf16"] {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 3, 0]] {
            let mut bench = Bench::new(recipe, 4);
            let gradient = train_one_step(&mut bench, &[1.0, 2.0, 4.0, 8.0], &order);
            assert_eq!(gradient, [15.0 / 4.0; WIDTH * WIDTH]);
        }
    }
}

// case B34: the division by the number of microbatches happens once; so does that by the loss scale.
#[test]
fn gradients_are_scaled_once() {
    for recipe in ["f32", "bf16"] {
        let mut bench = Bench::new(recipe, 4);
        assert_eq!(train_one_step(&mut bench, &[4.0, 8.0, 12.0, 16.0], &[0, 1, 2, 3]), [10.0; WIDTH * WIDTH]);
    }
    // As many numbers, times a loss scale that is undone exactly.
    let mut bench = Bench::new("fp8-delayed:loss-scale=2^10,history=1", 1);
    assert_eq!(train_one_step(&mut bench, &[10.0 * 1024.0], &[0]), [10.0; WIDTH * WIDTH]);
}

// case B13: a second write of one microbatch's gradient is refused; it neither replaces the first nor is lost.
#[test]
fn a_gradient_that_is_written_twice_is_refused() {
    let mut bench = Bench::with("f32", 1, Caps::default(), true);
    bench.begin();
    let (_, tape) = bench.forward(0, &constant(1.0));
    let (_, work) = bench.input_grad(0, &first_row(0.6), tape);
    match bench.weight_grad(0, work) {
        Err(Error::Contract { code: Code::ArenaDuplicate, message }) => assert!(message.contains("layer.weight")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_gradient_is_refused() {
    let mut bench = Bench::new("f32", 2);
    bench.begin();
    let (_, tape) = bench.forward(0, &constant(1.0));
    let (_, work) = bench.input_grad(0, &first_row(1.0), tape);
    bench.weight_grad(0, work).unwrap();
    match bench.shard.reduce(STAGE) {
        Err(Error::Contract { code: Code::ArenaMissing, message }) => {
            assert!(message.contains("layer.weight") && message.contains("microbatch 1"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

/// Everything that a step may change only if it is good.
fn lasting(bench: &mut Bench) -> Vec<(String, Named)> {
    bench.shard.export().unwrap().into_iter().filter(|(name, _)| !name.ends_with("/gradient")).collect()
}

#[test]
fn a_value_that_is_not_finite_leaves_no_trace() {
    for recipe in ["fp8-delayed:history=4", "fp8-delayed:history=4,update=step", "bf16", "f32"] {
        for hidden in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            for backward in [false, true] {
                let mut bench = Bench::new(recipe, 2);
                train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
                bench.shard.commit().unwrap();
                let before = lasting(&mut bench);
                bench.begin();
                for m in 0..2 {
                    let (mut x, mut dy) = (constant(1.0), constant(1.0));
                    if m == 0 {
                        if backward { dy[7] = hidden } else { x[7] = hidden }
                    }
                    let (_, tape) = bench.forward(m, &x);
                    let (_, work) = bench.input_grad(m, &dy, tape);
                    bench.weight_grad(m, work).unwrap();
                }
                let verdict = bench.settle();
                assert!(!verdict.commit, "{recipe}: {hidden} is noticed");
                bench.shard.commit().unwrap();
                assert!(lasting(&mut bench) == before, "{recipe}: {hidden} leaves a trace");
                // The next step is none the worse for it.
                train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
                bench.shard.commit().unwrap();
                assert_eq!(bench.shard.commits().unwrap(), 2);
            }
        }
    }
}

#[test]
fn an_aborted_step_leaves_no_trace() {
    let mut bench = Bench::new("fp8-delayed:history=4", 2);
    train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
    bench.shard.commit().unwrap();
    let before = lasting(&mut bench);
    bench.begin();
    let (_, tape) = bench.forward(0, &pattern(64.0));
    drop(bench.input_grad(0, &pattern(32.0), tape));
    assert!(bench.shard.pool().quiescent().is_err());
    bench.shard.abort().unwrap();
    bench.shard.pool().quiescent().unwrap();
    assert!(lasting(&mut bench) == before);
}

#[test]
fn with_one_update_per_step_the_largest_amax_of_the_step_counts() {
    let mut bench = Bench::new("fp8-delayed:history=4,update=step", 3);
    bench.begin();
    for (m, amax) in [2.0, 8.0, 1.0].into_iter().enumerate() {
        let (_, tape) = bench.forward(m as u32, &pattern(amax));
        assert_eq!(bench.scale("input"), 1.0, "scales stand still within a step");
        let (_, work) = bench.input_grad(m as u32, &pattern(4.0 * amax), tape);
        bench.weight_grad(m as u32, work).unwrap();
    }
    assert!(bench.settle().commit);
    bench.shard.commit().unwrap();
    assert_eq!((bench.scale("input"), bench.scale("grad_output")), (56.0, 57344.0 / 32.0));
    assert_eq!(bench.floats("layer.input/history"), [0.0, 0.0, 0.0, 8.0]);
}

// case B35: the cache is derived from the masters with the scale in force, so deriving it again gives the same bits.
#[test]
fn filling_the_cache_again_changes_nothing() {
    for recipe in ["bf16", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step"] {
        let config = small(recipe);
        let optim = OptimConfig { steps: 6, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
        let (mut plain, mut again) = (Solo::new(&config, &[4], 2, optim), Solo::new(&config, &[4], 2, optim));
        for step in 0..6 {
            plain.step(&batch(&config, step, 2));
            again.step(&batch(&config, step, 2));
            again.shard.prologue().unwrap();
        }
        assert!(plain.shard.export().unwrap() == again.shard.export().unwrap(), "{recipe}");
    }
}

/// Values that are given replace those before, and what was learnt about them: larger ones leave no amax behind.
#[test]
fn values_that_are_given_decide_alone() {
    for recipe in ["bf16", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step"] {
        let config = small(recipe);
        let optim = OptimConfig { steps: 4, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
        let mut runs = [1.0, 1024.0].map(|factor| {
            let mut solo = Solo::new(&config, &[4], 2, optim);
            let paths: Vec<String> =
                config.stages(&[4]).unwrap()[0].spec().params.iter().map(|p| p.path.clone()).collect();
            let values: Vec<Vec<f64>> = paths.iter().map(|path| solo.shard.param(path).unwrap()).collect();
            for factor in [factor, 1.0] {
                for (path, values) in paths.iter().zip(&values) {
                    let values: Vec<f64> = values.iter().map(|x| x * factor).collect();
                    solo.shard.set_param(path, &values).unwrap();
                }
                solo.shard.prologue().unwrap();
            }
            for step in 0..4 {
                solo.step(&batch(&config, step, 2));
            }
            solo.shard.export().unwrap()
        });
        let (plain, replaced) = runs.split_at_mut(1);
        assert!(plain[0] == replaced[0], "{recipe}");
    }
}

#[test]
fn evaluation_leaves_no_trace() {
    for recipe in ["f32", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step"] {
        let config = small(recipe);
        let optim = OptimConfig { steps: 4, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
        let mut runs = [false, true].map(|evaluates| {
            let mut solo = Solo::new(&config, &[2, 2], 2, optim);
            for step in 0..4 {
                if evaluates {
                    let before = solo.shard.export().unwrap();
                    assert!(solo.evaluate(&batch(&config, 100 + step, 2)).is_finite());
                    assert!(solo.shard.export().unwrap() == before);
                }
                solo.step(&batch(&config, step, 2));
            }
            solo.shard.export().unwrap()
        });
        let (plain, evaluated) = runs.split_at_mut(1);
        assert!(plain[0] == evaluated[0], "{recipe}");
    }
}

#[test]
fn transposed_copies_change_no_bit() {
    let config = small("fp8-delayed:history=4");
    let optim = OptimConfig { steps: 4, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
    let [mut plain, mut both] = [Caps::default(), Caps { fp8_needs_transposes: true, ..Caps::default() }]
        .map(|caps| Solo::on(Box::new(CpuDevice::with_caps(caps)), &config, &[4], 2, optim, (Gradients::Copied, 1)));
    for step in 0..4 {
        let data = batch(&config, step, 2);
        assert_eq!(plain.step(&data), both.step(&data));
    }
    let both = both.shard.export().unwrap();
    for (name, value) in plain.shard.export().unwrap() {
        assert!(both[&name] == value, "`{name}` differs");
    }
}

// case B46: sizes that a weight gradient in FP8 cannot take are refused when the model is made.
#[test]
fn sizes_that_do_not_fit_fp8_are_refused() {
    for (tokens, fits) in [(8, false), (16, true), (24, false), (32, true), (40, false)] {
        let mut config = small("fp8-delayed");
        (config.seq, config.sequences) = (tokens, 1);
        assert_eq!(config.stages(&[4]).is_ok(), fits, "{tokens} tokens");
    }
    let mut config = small("fp8-delayed");
    config.ffn = 24;
    let message = config.stages(&[4]).unwrap_err().to_string();
    assert_eq!(message, "model: products in FP8 need `ffn` to be a multiple of 16, found 24");
    config.recipe = Recipe::Bf16;
    assert!(config.stages(&[4]).is_ok());
    config.vocab = 24;
    config.ffn = 64;
    config.recipe = "fp8-delayed:head=bf16".parse().unwrap();
    assert!(config.stages(&[4]).is_ok());
    config.recipe = Recipe::fp8_delayed();
    assert!(config.stages(&[4]).is_err());
}

#[test]
fn cuts_that_leave_a_stage_empty_are_refused() {
    let config = small("f32");
    assert_eq!(config.split(3).unwrap(), [2, 1, 1]);
    assert!(config.split(0).is_err() && config.split(5).is_err());
    assert_eq!(config.stages(&[2, 0, 2]).unwrap_err().to_string(), "stage 1 holds nothing");
    assert_eq!(config.stages(&[2, 1]).unwrap_err().to_string(), "the stages hold 3 blocks, the model has 4");
    assert!(config.stages(&[0, 4, 0]).is_ok() && config.stages(&[]).is_err());
}
