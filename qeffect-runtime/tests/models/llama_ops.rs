//! The ops of a Llama: their kernels against PyTorch's in f32, and a chain of all of them against finite differences in f64.

use crate::common::settings::alone;
use crate::golden::Golden;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::kernels::Scratch;
use qeffect_runtime::kernels::attention::{AttentionShape, attention_backward, attention_forward};
use qeffect_runtime::kernels::rms_norm::{rms_norm_backward, rms_norm_forward};
use qeffect_runtime::kernels::rotary::{RotaryShape, rotary as turn, rotary_table};
use qeffect_runtime::kernels::silu::{silu_backward, silu_forward, swiglu_backward, swiglu_forward};
use qeffect_runtime::optim::{NormPlan, OptimConfig};
use qeffect_runtime::prelude::*;
use qeffect_runtime::rng;
use qeffect_runtime::shard::Shard;
use qeffect_runtime::stage::{Init, Stage as _};

fn cases(golden: &Golden, op: &str, output: &str) -> Vec<String> {
    let names = golden.names(&format!("{op}/"));
    let cases: Vec<String> =
        names.iter().filter_map(|name| name.strip_suffix(output)).map(|case| format!("{op}/{case}")).collect();
    assert!(!cases.is_empty());
    cases
}

#[test]
fn rms_norm_follows_pytorch() {
    let golden = Golden::open("llama_ops");
    for case in cases(&golden, "rms_norm", "/y") {
        let [x, w, dy] = ["x", "w", "dy"].map(|name| golden.floats(&format!("{case}/{name}")));
        let mut scratch = Scratch::new();
        let (mut y, mut rstd) = (vec![0.0; x.len()], vec![0.0; x.len() / w.len()]);
        rms_norm_forward(&mut scratch, &x, &w, &mut y, &mut rstd).unwrap();
        golden.compare(&format!("{case}/y"), &y);
        let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; w.len()]);
        rms_norm_backward(&mut scratch, &x, &w, &rstd, &dy, &mut dx, &mut dw).unwrap();
        golden.compare(&format!("{case}/dx"), &dx);
        golden.compare(&format!("{case}/dw"), &dw);
    }
}

#[test]
fn rotary_follows_pytorch() {
    let golden = Golden::open("llama_ops");
    for case in cases(&golden, "rotary", "/y") {
        let [x, dy, base] = ["x", "dy", "base"].map(|name| golden.floats(&format!("{case}/{name}")));
        let [_, length, heads, head_dim] = golden.shape(&format!("{case}/x"))[..] else { panic!("four dimensions") };
        let shape = RotaryShape { length, heads, head_dim, width: heads * head_dim };
        let table: Vec<f32> =
            rotary_table(length, head_dim, f64::from(base[0])).into_iter().map(|x| x as f32).collect();
        let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        turn(shape, &table, false, &x, &mut y).unwrap();
        golden.compare(&format!("{case}/y"), &y);
        turn(shape, &table, true, &dy, &mut dx).unwrap();
        golden.compare(&format!("{case}/dx"), &dx);
    }
}

#[test]
fn grouped_attention_follows_pytorch() {
    let golden = Golden::open("llama_ops");
    for case in cases(&golden, "attention", "/y") {
        let [qkv, dy] = ["qkv", "dy"].map(|name| golden.floats(&format!("{case}/{name}")));
        let counts: Vec<usize> = golden.ids(&format!("{case}/counts")).into_iter().map(|n| n as usize).collect();
        let [sequences, length, heads, kv_heads, head_dim] = counts[..] else { panic!("five sizes") };
        let shape = AttentionShape { sequences, length, heads, kv_heads, head_dim };
        let mut scratch = Scratch::new();
        let (mut y, mut lse) = (vec![0.0; dy.len()], vec![0.0; shape.statistics()]);
        attention_forward(&mut scratch, shape, &qkv, &mut y, &mut lse).unwrap();
        golden.compare(&format!("{case}/y"), &y);
        let mut dqkv = vec![0.0; qkv.len()];
        attention_backward(&mut scratch, shape, &qkv, &lse, &dy, &mut dqkv).unwrap();
        golden.compare(&format!("{case}/dqkv"), &dqkv);
    }
}

#[test]
fn silu_and_swiglu_follow_pytorch() {
    let golden = Golden::open("llama_ops");
    let (x, dy) = (golden.floats("silu/x"), golden.floats("silu/dy"));
    let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    silu_forward(&x, &mut y).unwrap();
    golden.compare("silu/y", &y);
    silu_backward(&x, &dy, &mut dx).unwrap();
    golden.compare("silu/dx", &dx);
    for case in cases(&golden, "swiglu", "/y") {
        let [x, dy] = ["x", "dy"].map(|name| golden.floats(&format!("{case}/{name}")));
        let columns = golden.shape(&format!("{case}/y"))[1];
        let (mut y, mut dx) = (vec![0.0; dy.len()], vec![0.0; x.len()]);
        swiglu_forward(&x, columns, &mut y).unwrap();
        golden.compare(&format!("{case}/y"), &y);
        swiglu_backward(&x, columns, &dy, &mut dx).unwrap();
        golden.compare(&format!("{case}/dx"), &dx);
    }
}

/// Parameters of a chain of all these ops, from the embedding to the loss.
#[derive(Params)]
#[params(crate = qeffect_runtime)]
struct Chain {
    #[params(name = "")]
    embedding: Embedding,
    norm1: RmsNorm,
    qkv: Linear,
    rotary: Rotary,
    #[params(config)]
    attention: AttentionShape,
    #[params(config)]
    drop1: Dropout,
    up: Linear,
    down: Linear,
    #[params(config)]
    drop2: Dropout,
    ln_f: LayerNorm,
    head: Linear,
}

#[stage(crate = qeffect_runtime)]
fn chain(w: &Chain) -> Loss {
    let x = rms_norm(embedding(&w.embedding), &w.norm1);
    let x = attention(rotary(linear(x, &w.qkv), &w.rotary), &w.attention);
    let x = swiglu(linear(dropout(x, &w.drop1), &w.up));
    let x = dropout(silu(linear(x, &w.down)), &w.drop2);
    cross_entropy(linear(layer_norm(x, &w.ln_f), &w.head))
}

const SEQ: usize = 5;
const SEQUENCES: usize = 2;
const VOCABULARY: usize = 11;

type ChainStage = Built<chain, Chain>;

fn chain_stage(rate: f64) -> ChainStage {
    let (hidden, ffn) = (12, 7);
    let shape = AttentionShape { sequences: SEQUENCES, length: SEQ, heads: 6, kv_heads: 2, head_dim: 2 };
    let init = Init::Normal(0.7);
    let linear = |sizes| Linear::of(sizes).unbiased().init(init);
    let params = Chain {
        embedding: Embedding::of(VOCABULARY, SEQ, hidden).init(init),
        norm1: RmsNorm::of(hidden),
        qkv: linear([hidden, shape.width()]),
        rotary: Rotary::of(&shape, 1e4).unwrap(),
        attention: shape,
        drop1: Dropout::new("drop1", rate, 3).unwrap(),
        up: linear([hidden, 2 * ffn]),
        down: linear([ffn, hidden]),
        drop2: Dropout::new("drop2", rate, 3).unwrap(),
        ln_f: LayerNorm::of(hidden),
        head: linear([hidden, VOCABULARY]),
    };
    Built::new("f64".parse().unwrap(), [SEQ * SEQUENCES, hidden], params)
}

const MICROBATCHES: u32 = 2;
const STAGE: StageId = StageId(0);

struct Rig {
    shard: Shard<ChainStage>,
    tokens: Option<(Token<Fwd>, Token<Bwd>)>,
}

impl Rig {
    fn new(rate: f64) -> Rig {
        let chain = chain_stage(rate);
        let sizes = chain.spec().params.iter().map(|param| (param.path.as_str(), param.elements()));
        let norm = NormPlan::new(sizes).unwrap();
        let config = alone(MICROBATCHES, SEQ * SEQUENCES, OptimConfig::default(), norm);
        let mut shard = Shard::new(Box::new(CpuDevice::new()), vec![(STAGE, chain)], config).unwrap();
        shard.init(5).unwrap();
        shard.prologue().unwrap();
        Rig { shard, tokens: Some((Token::first(STAGE), Token::first(STAGE))) }
    }

    fn batch() -> Vec<Windows> {
        let ids = |m: u32, shift: u64| {
            let id = |i: usize| rng::below(rng::draw(&[u64::from(m), i as u64 + shift]), VOCABULARY as u64) as u32;
            (0..SEQ * SEQUENCES).map(id).collect()
        };
        (0..MICROBATCHES).map(|m| Windows { tokens: ids(m, 0), targets: ids(m, 1) }).collect()
    }

    /// The mean loss of an attempt, and with `backward` its gradients.
    fn run(&mut self, attempt: u64, backward: bool) -> f64 {
        let (mut fwd, mut bwd) = self.tokens.take().unwrap();
        let shard = &mut self.shard;
        shard.set_attempts(attempt);
        shard.begin_step(&Rig::batch()).unwrap();
        shard.refresh(STAGE).unwrap();
        for m in 0..MICROBATCHES {
            let (_, tape, after) = shard.forward(STAGE, Microbatch(m), &[], fwd).unwrap();
            fwd = after;
            if !backward {
                drop(tape); // its buffers come back below
                continue;
            }
            let (_, work, after) = shard.input_grad(STAGE, Microbatch(m), &[], tape, bwd).unwrap();
            bwd = after;
            shard.weight_grad(STAGE, Microbatch(m), work).unwrap();
        }
        if backward {
            shard.reduce(STAGE).unwrap();
        }
        let losses = shard.losses().unwrap();
        if !backward {
            shard.abort().unwrap();
        }
        self.tokens = Some((fwd, bwd));
        losses.iter().sum::<f64>() / losses.len() as f64
    }
}

/// Every parameter reaches the loss through other ops: the gain and `qkv` through rotation, grouped attention, dropout,
/// SwiGLU and SiLU.
#[test]
fn gradients_of_a_chain_equal_finite_differences() {
    let attempt = 9;
    let mut rig = Rig::new(0.25);
    rig.run(attempt, true);
    let paths: Vec<String> = rig.shard.spec(STAGE).unwrap().params.iter().map(|param| param.path.clone()).collect();
    let step = 1e-5;
    let gradients: Vec<Vec<f64>> = paths.iter().map(|path| rig.shard.gradient(path).unwrap()).collect();
    for (path, gradient) in paths.iter().zip(gradients) {
        let values = rig.shard.param(path).unwrap();
        let norm = (gradient.iter().map(|x| x * x).sum::<f64>() / gradient.len() as f64).sqrt();
        assert!(norm > 1e-6, "`{path}` does not reach the loss");
        for pick in 0..4 {
            let index = rng::below(rng::draw(&[pick, rng::name(path)]), values.len() as u64) as usize;
            let mut at = |delta: f64| {
                let mut moved = values.clone();
                moved[index] += delta;
                rig.shard.set_param(path, &moved).unwrap();
                rig.shard.prologue().unwrap();
                rig.run(attempt, false)
            };
            let difference = (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
            let error = (difference - gradient[index]).abs();
            assert!(error < 1e-9 + 1e-6 * norm, "`{path}`[{index}]: {difference} and {}", gradient[index]);
        }
        rig.shard.set_param(path, &values).unwrap();
    }
}

#[test]
fn a_mask_follows_the_step_and_evaluation_has_none() {
    let mut rig = Rig::new(0.25);
    let [first, again, next] = [4, 4, 5].map(|attempt| rig.run(attempt, false));
    assert_eq!(first.to_bits(), again.to_bits(), "a replay of the step has its mask");
    assert_ne!(first, next, "another step has another");
    assert_eq!(rig.shard.attempts(), 6);

    let evaluated = |rig: Rig| {
        let mut shard = rig.shard;
        shard.load(&Rig::batch()).unwrap();
        for m in 0..MICROBATCHES {
            let logits = shard.evaluate(STAGE, Microbatch(m), &[], true).unwrap();
            shard.free(logits[0]).unwrap();
        }
        let losses = shard.losses().unwrap();
        losses.iter().sum::<f64>() / losses.len() as f64
    };
    let plain = evaluated(rig);
    assert_eq!(plain, evaluated(Rig::new(0.25)));
    let undropped = Rig::new(0.0).run(0, false);
    assert_eq!(plain, undropped, "evaluation computes what training without dropout does");
}
