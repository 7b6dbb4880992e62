//! The output and gradients of the kernel behind every op against PyTorch's, in f32.

use crate::golden::{Golden, TOLERANCE};
use qeffect_runtime::kernels::Scratch;
use qeffect_runtime::kernels::attention::{AttentionShape, attention_backward, attention_forward};
use qeffect_runtime::kernels::elementwise::column_sums;
use qeffect_runtime::kernels::embedding::{
    TokenPositions, embedding_forward, position_gradient, scatter_rows, token_gradient,
};
use qeffect_runtime::kernels::gelu::{gelu_backward, gelu_forward};
use qeffect_runtime::kernels::gemm::{GemmShape, Operand, Output, Values, gemm};
use qeffect_runtime::kernels::layer_norm::{NormGradients, Saved, Statistics, layer_norm_backward, layer_norm_forward};
use qeffect_runtime::kernels::loss::{cross_entropy_backward, cross_entropy_forward};
use qeffect_runtime::kernels::optimizer::{AdamW, adamw};

#[test]
fn linear() {
    let golden = Golden::open("ops");
    let [x, w, b, dy] = ["x", "w", "b", "dy"].map(|name| golden.floats(&format!("linear/{name}")));
    let (tokens, inputs) = (golden.shape("linear/x")[0], golden.shape("linear/x")[1]);
    let outputs = b.len();
    let mut scratch = Scratch::new();
    let real = Values::<f32>::Real;

    let mut y = vec![0.0; tokens * outputs];
    let shape = GemmShape { m: tokens, n: outputs, k: inputs };
    gemm(&mut scratch, shape, Operand::plain(real(&x)), Operand::transposed(real(&w)), Some(&b), Output::Real(&mut y))
        .unwrap();
    golden.compare("linear/y", &y);

    let mut dx = vec![0.0; tokens * inputs];
    let shape = GemmShape { m: tokens, n: inputs, k: outputs };
    gemm(&mut scratch, shape, Operand::plain(real(&dy)), Operand::plain(real(&w)), None, Output::Real(&mut dx))
        .unwrap();
    golden.compare("linear/dx", &dx);

    let mut dw = vec![0.0; outputs * inputs];
    let shape = GemmShape { m: outputs, n: inputs, k: tokens };
    gemm(&mut scratch, shape, Operand::transposed(real(&dy)), Operand::plain(real(&x)), None, Output::Real(&mut dw))
        .unwrap();
    golden.compare("linear/dw", &dw);

    let mut db = vec![0.0; outputs];
    column_sums(&dy, outputs, &mut db).unwrap();
    golden.compare("linear/db", &db);
}

#[test]
fn layer_norm() {
    let golden = Golden::open("ops");
    let [x, w, b, dy] = ["x", "w", "b", "dy"].map(|name| golden.floats(&format!("layer_norm/{name}")));
    let rows = x.len() / w.len();
    let mut scratch = Scratch::new();
    let (mut y, mut mean, mut rstd) = (vec![0.0; x.len()], vec![0.0; rows], vec![0.0; rows]);
    layer_norm_forward(&mut scratch, &x, &w, &b, &mut y, Statistics { mean: &mut mean, rstd: &mut rstd }).unwrap();
    golden.compare("layer_norm/y", &y);

    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; b.len()]);
    let saved = Saved { mean: &mean, rstd: &rstd };
    let gradients = NormGradients { gamma: &mut dw, beta: &mut db };
    layer_norm_backward(&mut scratch, &x, &w, saved, &dy, &mut dx, gradients).unwrap();
    golden.compare("layer_norm/dx", &dx);
    golden.compare("layer_norm/dw", &dw);
    golden.compare("layer_norm/db", &db);
}

#[test]
fn gelu() {
    let golden = Golden::open("ops");
    let (x, dy) = (golden.floats("gelu/x"), golden.floats("gelu/dy"));
    let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    gelu_forward(&x, &mut y).unwrap();
    golden.compare("gelu/y", &y);
    gelu_backward(&x, &dy, &mut dx).unwrap();
    golden.compare("gelu/dx", &dx);
}

#[test]
fn attention() {
    let golden = Golden::open("ops");
    let (qkv, dy, heads) =
        (golden.floats("attention/qkv"), golden.floats("attention/dy"), golden.ids("attention/heads"));
    let [sequences, length, width] = golden.shape("attention/qkv")[..] else { panic!("three dimensions") };
    let heads = heads[0] as usize;
    let shape = AttentionShape { sequences, length, heads, kv_heads: heads, head_dim: width / 3 / heads };
    let mut scratch = Scratch::new();
    let (mut y, mut lse) = (vec![0.0; dy.len()], vec![0.0; shape.statistics()]);
    attention_forward(&mut scratch, shape, &qkv, &mut y, &mut lse).unwrap();
    golden.compare("attention/y", &y);

    let mut dqkv = vec![0.0; qkv.len()];
    attention_backward(&mut scratch, shape, &qkv, &lse, &dy, &mut dqkv).unwrap();
    golden.compare("attention/dqkv", &dqkv);
}

#[test]
fn embedding() {
    let golden = Golden::open("ops");
    let ids = golden.ids("embedding/tokens");
    let [wte, wpe, dy] = ["wte", "wpe", "dy"].map(|name| golden.floats(&format!("embedding/{name}")));
    let [vocabulary, hidden] = golden.shape("embedding/wte")[..] else { panic!("two dimensions") };
    let mut y = vec![0.0; dy.len()];
    embedding_forward(&ids, hidden, &wte, Some(&wpe), &mut y).unwrap();
    golden.compare("embedding/y", &y);

    let sorted = TokenPositions::of(&ids, vocabulary).unwrap();
    assert!(sorted.tokens.len() < vocabulary.min(ids.len()), "some tokens repeat and some never occur");
    let mut partial = vec![0.0; sorted.tokens.len() * hidden];
    token_gradient(&dy, hidden, &sorted, &mut partial).unwrap();
    let mut dwte = vec![0.0; wte.len()];
    scatter_rows(&sorted.tokens, hidden, &partial, &mut dwte).unwrap();
    golden.compare("embedding/dwte", &dwte);

    let mut dwpe = vec![0.0; wpe.len()];
    position_gradient(&dy, hidden, &mut dwpe).unwrap();
    golden.compare("embedding/dwpe", &dwpe);
}

#[test]
fn cross_entropy() {
    let golden = Golden::open("ops");
    let (logits, targets) = (golden.floats("cross_entropy/logits"), golden.ids("cross_entropy/targets"));
    let vocabulary = logits.len() / targets.len();
    let mut scratch = Scratch::new();
    let mut lse = vec![0.0; targets.len()];
    let loss = cross_entropy_forward(&mut scratch, &logits, &targets, vocabulary, &mut lse).unwrap();
    golden.compare("cross_entropy/y", &[loss]);

    let mut dlogits = vec![0.0; logits.len()];
    let factor = 1.0 / targets.len() as f32;
    cross_entropy_backward(&mut scratch, &logits, &targets, vocabulary, &lse, factor, &mut dlogits).unwrap();
    golden.compare("cross_entropy/dlogits", &dlogits);
}

/// Element by element: gradients reach from 1e-6 to 1, so the largest element says little about the others.
#[test]
fn adamw_five_steps() {
    let golden = Golden::open("ops");
    let rates = golden.floats("adamw/lr");
    for (name, weight_decay) in [("matrix", 0.1), ("vector", 0.0)] {
        let mut weight = golden.floats(&format!("adamw/{name}"));
        let (mut first, mut second) = (vec![0.0; weight.len()], vec![0.0; weight.len()]);
        for (step, rate) in rates.iter().enumerate() {
            let at = |part: &str| golden.floats(&format!("adamw/{step}/{name}{part}"));
            let numbers = AdamW::at(step as u64 + 1, f64::from(*rate), weight_decay, 1.0);
            adamw(&numbers, &at("_grad"), &mut weight, &mut first, &mut second).unwrap();
            for (part, got) in [("", &weight), ("_m", &first), ("_v", &second)] {
                for (index, (got, want)) in got.iter().zip(at(part)).enumerate() {
                    let error = f64::from((got - want).abs()) / f64::from(want.abs());
                    assert!(error <= TOLERANCE, "step {step}, {name}{part}[{index}]: {got} instead of {want}");
                }
            }
        }
    }
}
