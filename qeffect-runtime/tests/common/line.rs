//! Stages of linear layers in a row, of which not every microbatch uses all, and what holds of them on whatever device.

use qeffect_core::dtype::Dtype;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::Device;
use qeffect_runtime::error::Result;
use qeffect_runtime::op::{Effects, Op};
use qeffect_runtime::ops::linear::{Linear, LinearOp, LinearTape, LinearWork};
use qeffect_runtime::optim::{NormPlan, OptimConfig};
use qeffect_runtime::shard::Shard;
use qeffect_runtime::stage::{Init, Stage, StageSpec};

use super::one_layer::{TOKENS, WIDTH, constant};
use super::settings::{adamw, alone};
use super::state_cases::Make;

/// Layers whose weights are ones. The first of them are used by microbatch 0 alone.
pub struct Line {
    spec: StageSpec,
    layers: Vec<Linear>,
    only_of_the_first: usize,
}

impl Line {
    fn new(recipe: &str, names: &[&str], only_of_the_first: usize) -> Line {
        let mut spec = StageSpec::new(recipe.parse().unwrap());
        (spec.input, spec.output) = (vec![[TOKENS, WIDTH]], vec![[TOKENS, WIDTH]]);
        let layer = |name: &&str| Linear::new(&mut spec, name, [WIDTH, WIDTH], false, Init::Ones, true);
        let layers = names.iter().map(layer).collect();
        Line { spec, layers, only_of_the_first }
    }

    fn uses(&self, microbatch: Microbatch, layer: usize) -> bool {
        microbatch == Microbatch(0) || layer >= self.only_of_the_first
    }
}

impl Stage for Line {
    /// None of a layer that the microbatch does not use.
    type Tape = Vec<Option<LinearTape>>;
    type Work = Vec<Option<LinearWork>>;

    fn spec(&self) -> &StageSpec {
        &self.spec
    }

    fn effects(&self) -> Effects {
        LinearOp::EFFECTS
    }

    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], mut token: Token<Fwd>) -> Result<(Vec<Act>, Self::Tape, Token<Fwd>)> {
        let (mut h, mut tapes) = (x[0], Vec::new());
        for (at, layer) in self.layers.iter().enumerate() {
            if !self.uses(cx.microbatch(), at) {
                tapes.push(None);
                continue;
            }
            let (y, tape, next) = LinearOp::forward(cx, h, layer, token)?;
            if h != x[0] {
                cx.free(h)?;
            }
            tapes.push(Some(tape));
            (h, token) = (y, next);
        }
        Ok((vec![h], tapes, cx.roll_forward(token)?))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tapes: Self::Tape,
        mut token: Token<Bwd>,
    ) -> Result<(Vec<Act>, Self::Work, Token<Bwd>)> {
        let (mut dh, mut works) = (dy[0], Vec::new());
        for (layer, tape) in self.layers.iter().zip(tapes).rev() {
            let Some(tape) = tape else {
                works.push(None);
                continue;
            };
            let (dx, work, next) = LinearOp::input_grad(cx, dh, layer, tape, token)?;
            if dh != dy[0] {
                cx.free(dh)?;
            }
            works.push(Some(work));
            (dh, token) = (dx, next);
        }
        works.reverse();
        Ok((vec![dh], works, cx.roll_backward(token)?))
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, works: Self::Work) -> Result<()> {
        let mut used = self.layers.iter().zip(works).filter_map(|(layer, work)| Some((layer, work?)));
        used.try_for_each(|(layer, work)| LinearOp::weight_grad(cx, layer, work))
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        let last = self.layers.last().expect("a stage has a layer");
        Ok(vec![LinearOp::evaluate(cx, x[0], last)?])
    }
}

/// Stages with the names of their layers, on one rank.
fn shard(device: Box<dyn Device>, stages: Vec<Line>, microbatches: u32, optim: OptimConfig) -> Shard<Line> {
    let layers = stages.iter().flat_map(|stage| &stage.spec.params);
    let norm = NormPlan::new(layers.map(|param| (param.path.as_str(), WIDTH * WIDTH))).unwrap();
    let config = alone(microbatches, TOKENS, optim, norm);
    let stages = (0..).map(StageId).zip(stages).collect();
    let mut shard = Shard::new(device, stages, config).unwrap();
    shard.init(0).unwrap();
    shard.prologue().unwrap();
    let windows = Windows { tokens: vec![0; TOKENS], targets: vec![0; TOKENS] };
    shard.begin_step(&vec![windows; microbatches as usize]).unwrap();
    shard
}

/// A bf16 activation of ones.
fn ones(shard: &mut Shard<Line>) -> Act {
    let act = shard.lease(shard.recipe().activation(), TOKENS, WIDTH).unwrap();
    shard.write_act(act, &[0x80, 0x3F].repeat(TOKENS * WIDTH)).unwrap();
    act
}

/// Case B05: what I of a microbatch did not cast stays unmoved, whatever else it rolls.
pub fn a_layer_that_a_microbatch_does_not_use_is_not_rolled_for_it(device: Make<'_>) {
    const STAGE: StageId = StageId(0);
    let line = Line::new("fp8-delayed:history=4", &["a", "b"], 1);
    let mut shard = shard(device(), vec![line], 2, OptimConfig::default());
    shard.refresh(STAGE).unwrap();
    let (mut fwd, mut bwd) = (Token::first(STAGE), Token::first(STAGE));
    let mut works = Vec::new();
    for m in [0, 1].map(Microbatch) {
        let x = ones(&mut shard);
        let (_, tape, token) = shard.forward(STAGE, m, &[x], fwd).unwrap();
        fwd = token;
        let dy = ones(&mut shard);
        let (_, work, token) = shard.input_grad(STAGE, m, &[dy], tape, bwd).unwrap();
        bwd = token;
        works.push(work);
    }
    assert_eq!((fwd.rolls(), bwd.rolls(), works.len()), (2, 2, 2));
    let values = shard.export().unwrap();
    let rolls = |name: &str| {
        let history = &values[name];
        assert_eq!(history.dtype, Dtype::F32);
        history.bytes.chunks_exact(4).filter(|word| **word != [0; 4]).count()
    };
    for role in ["input", "grad_output"] {
        let of = |layer: &str| rolls(&format!("{layer}.{role}/history"));
        assert_eq!((of("a"), of("b")), (1, 2), "{role}");
    }
}

/// Case B10: both stages of a rank have the new transposed weight in the next step, whichever of them runs its first F first.
pub fn transposed_weights_follow_the_optimizer_whichever_stage_begins(device: Make<'_>) {
    const STILL: OptimConfig = OptimConfig { clip: f32::INFINITY, ..adamw(8, 0, 0.0, 0.0) };
    for order in [[0, 1], [1, 0]].map(|order| order.map(StageId)) {
        let stages = ["a", "b"].map(|name| Line::new("fp8-delayed:history=4,margin=1", &[name], 0));
        let mut shard = shard(device(), stages.into(), 1, STILL);
        let mut tokens = [0, 1].map(|stage| Some((Token::first(StageId(stage)), Token::first(StageId(stage)))));
        for want in [16.0, 32.0] {
            let mut tapes = Vec::new();
            for stage in order {
                shard.refresh(stage).unwrap();
                let (fwd, bwd): (Token<Fwd>, Token<Bwd>) = tokens[stage.index()].take().unwrap();
                let x = ones(&mut shard);
                let (y, tape, fwd) = shard.forward(stage, Microbatch(0), &[x], fwd).unwrap();
                assert_eq!(shard.reals(y[0]).unwrap(), constant(want), "{order:?}, {stage}");
                y.into_iter().chain([x]).for_each(|act| shard.free(act).unwrap());
                tokens[stage.index()] = Some((fwd, bwd));
                tapes.push((stage, tape));
            }
            for (stage, tape) in tapes.into_iter().rev() {
                let (fwd, bwd) = tokens[stage.index()].take().unwrap();
                let dy = ones(&mut shard);
                let (dx, work, bwd) = shard.input_grad(stage, Microbatch(0), &[dy], tape, bwd).unwrap();
                assert_eq!(shard.reals(dx[0]).unwrap(), constant(want), "{order:?}, {stage}");
                dx.into_iter().chain([dy]).for_each(|act| shard.free(act).unwrap());
                tokens[stage.index()] = Some((fwd, bwd));
                shard.weight_grad(stage, Microbatch(0), work).unwrap();
            }
            order.iter().for_each(|stage| shard.reduce(*stage).unwrap());
            shard.measure().unwrap();
            let measured = shard.offer().unwrap();
            shard.accept(&[measured]).unwrap();
            shard.settle().unwrap();
            assert!(shard.verdict().unwrap().commit);
            for name in ["a.weight", "b.weight"] {
                shard.set_param(name, &[2.0; WIDTH * WIDTH]).unwrap(); // as the optimizer would
            }
            shard.commit().unwrap();
            let windows = Windows { tokens: vec![0; TOKENS], targets: vec![0; TOKENS] };
            shard.begin_step(&[windows]).unwrap();
        }
    }
}
