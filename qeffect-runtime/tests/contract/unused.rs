//! A layer that not every microbatch uses: its scaling state moves for those that do.

use crate::common::settings::alone;
use qeffect_core::dtype::Dtype;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::data::Windows;
use qeffect_runtime::error::Result;
use qeffect_runtime::op::{Effects, Op};
use qeffect_runtime::ops::linear::{Linear, LinearOp, LinearTape, LinearWork};
use qeffect_runtime::optim::{NormPlan, OptimConfig};
use qeffect_runtime::shard::Shard;
use qeffect_runtime::stage::{Init, Stage, StageSpec};

const TOKENS: usize = 16;
const WIDTH: usize = 16;
const STAGE: StageId = StageId(0);

/// Two layers in a row, of which the first is used by microbatch 0 alone.
struct TwoLayers {
    spec: StageSpec,
    a: Linear,
    b: Linear,
}

impl Stage for TwoLayers {
    type Tape = (Option<LinearTape>, LinearTape);
    type Work = (Option<LinearWork>, LinearWork);

    fn spec(&self) -> &StageSpec {
        &self.spec
    }

    fn effects(&self) -> Effects {
        LinearOp::EFFECTS
    }

    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], token: Token<Fwd>) -> Result<(Vec<Act>, Self::Tape, Token<Fwd>)> {
        let (h, a, token) = match cx.microbatch() {
            Microbatch(0) => {
                let (h, tape, token) = LinearOp::forward(cx, x[0], &self.a, token)?;
                (h, Some(tape), token)
            }
            _ => (x[0], None, token),
        };
        let (y, b, token) = LinearOp::forward(cx, h, &self.b, token)?;
        if a.is_some() {
            cx.free(h)?;
        }
        Ok((vec![y], (a, b), cx.roll_forward(token)?))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        (a, b): Self::Tape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, Self::Work, Token<Bwd>)> {
        let (dh, b, token) = LinearOp::input_grad(cx, dy[0], &self.b, b, token)?;
        let (dx, a, token) = match a {
            Some(tape) => {
                let (dx, work, token) = LinearOp::input_grad(cx, dh, &self.a, tape, token)?;
                cx.free(dh)?;
                (dx, Some(work), token)
            }
            None => (dh, None, token),
        };
        Ok((vec![dx], (a, b), cx.roll_backward(token)?))
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, (a, b): Self::Work) -> Result<()> {
        a.map_or(Ok(()), |work| LinearOp::weight_grad(cx, &self.a, work))?;
        LinearOp::weight_grad(cx, &self.b, b)
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        Ok(vec![LinearOp::evaluate(cx, x[0], &self.b)?])
    }
}

// case B05: what I of a microbatch did not cast stays unmoved, whatever else it rolls.
#[test]
fn a_layer_that_a_microbatch_does_not_use_is_not_rolled_for_it() {
    let mut spec = StageSpec::new("fp8-delayed:history=4".parse().unwrap());
    (spec.input, spec.output) = (vec![[TOKENS, WIDTH]], vec![[TOKENS, WIDTH]]);
    let [a, b] = ["a", "b"].map(|name| Linear::new(&mut spec, name, [WIDTH, WIDTH], false, Init::Ones, true));
    let norm = NormPlan::new([("a.weight", WIDTH * WIDTH), ("b.weight", WIDTH * WIDTH)]).unwrap();
    let config = alone(2, TOKENS, OptimConfig::default(), norm);
    let stage = TwoLayers { spec, a, b };
    let mut shard = Shard::new(Box::new(CpuDevice::new()), vec![(STAGE, stage)], config).unwrap();
    shard.init(0).unwrap();
    shard.prologue().unwrap();
    let windows = Windows { tokens: vec![0; TOKENS], targets: vec![0; TOKENS] };
    shard.begin_step(&[windows.clone(), windows]).unwrap();
    shard.refresh(STAGE).unwrap();
    let ones = |shard: &mut Shard<TwoLayers>| {
        let act = shard.lease(shard.recipe().activation(), TOKENS, WIDTH).unwrap();
        shard.write_act(act, &[0x80, 0x3F].repeat(TOKENS * WIDTH)).unwrap(); // 1 in bf16
        act
    };
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
