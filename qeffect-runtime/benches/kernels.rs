//! Speed of the cpu kernels at the sizes of the main model: hidden 128, feed-forward 512, vocabulary 256, sequences of 64.
//!
//! `cargo bench -p qeffect-runtime --bench kernels`. Throughput counts floating-point operations for products and
//! attention, and elements for the rest.

use std::hint::black_box;

use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main, measurement::WallTime};
use half::bf16;
use qeffect_core::fp8::Fp8;
use qeffect_runtime::kernels::Scratch;
use qeffect_runtime::kernels::attention::{AttentionShape, attention_backward, attention_forward};
use qeffect_runtime::kernels::cast::{quantise, quantise_transposed};
use qeffect_runtime::kernels::elementwise::{add, column_sums, sum_slots};
use qeffect_runtime::kernels::gelu::{gelu_backward, gelu_forward};
use qeffect_runtime::kernels::gemm::{GemmShape, Operand, Output, Values, gemm};
use qeffect_runtime::kernels::layer_norm::{NormGradients, Saved, Statistics, layer_norm_backward, layer_norm_forward};
use qeffect_runtime::kernels::loss::{cross_entropy_backward, cross_entropy_forward};
use qeffect_runtime::kernels::optimizer::{AdamW, adamw, sums_of_squares};

const HIDDEN: usize = 128;
const FFN: usize = 512;
const VOCABULARY: usize = 256;

fn values(n: usize) -> Vec<bf16> {
    (0..n).map(|i| bf16::from_f32((i * 7919 % 2003) as f32 / 1001.5 - 1.0)).collect()
}

fn group<'a>(c: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.sample_size(20).warm_up_time(std::time::Duration::from_millis(200));
    group.measurement_time(std::time::Duration::from_millis(500));
    group
}

/// F, I and W of one linear layer: operands in FP8, results in bf16 (F, I) and f32 (W).
fn products(c: &mut Criterion) {
    let mut group = group(c, "fp8 gemm");
    for tokens in [256, 1024] {
        for (name, inputs, outputs) in [
            ("qkv", HIDDEN, 3 * HIDDEN),
            ("proj", HIDDEN, HIDDEN),
            ("fc1", HIDDEN, FFN),
            ("fc2", FFN, HIDDEN),
            ("head", HIDDEN, VOCABULARY),
        ] {
            let mut scratch = Scratch::<f32>::new();
            let codes =
                |n: usize| -> Vec<u8> { values(n).iter().map(|x| Fp8::E4M3.encode(x.to_f32() * 300.0)).collect() };
            let (x, w, dy) = (codes(tokens * inputs), codes(outputs * inputs), codes(tokens * outputs));
            let fp8 = |codes, format| Values::Fp8 { format, codes, scale_inv: 1.0 / 300.0 };
            let bias = vec![0.5f32; outputs];
            let (mut y, mut dx, mut dw) =
                (vec![bf16::ZERO; tokens * outputs], vec![bf16::ZERO; tokens * inputs], vec![0f32; outputs * inputs]);
            group.throughput(Throughput::Elements(2 * (tokens * inputs * outputs) as u64));
            group.bench_function(format!("{name}/F/{tokens}"), |b| {
                let shape = GemmShape { m: tokens, n: outputs, k: inputs };
                let (x, w) = (Operand::plain(fp8(&x, Fp8::E4M3)), Operand::transposed(fp8(&w, Fp8::E4M3)));
                b.iter(|| gemm(&mut scratch, shape, x, w, Some(&bias), Output::Bf16(black_box(&mut y))));
            });
            group.bench_function(format!("{name}/I/{tokens}"), |b| {
                let shape = GemmShape { m: tokens, n: inputs, k: outputs };
                let (dy, w) = (Operand::plain(fp8(&dy, Fp8::E5M2)), Operand::plain(fp8(&w, Fp8::E4M3)));
                b.iter(|| gemm(&mut scratch, shape, dy, w, None, Output::Bf16(black_box(&mut dx))));
            });
            group.bench_function(format!("{name}/W/{tokens}"), |b| {
                let shape = GemmShape { m: outputs, n: inputs, k: tokens };
                let (dy, x) = (Operand::transposed(fp8(&dy, Fp8::E5M2)), Operand::plain(fp8(&x, Fp8::E4M3)));
                b.iter(|| gemm(&mut scratch, shape, dy, x, None, Output::Real(black_box(&mut dw))));
            });
        }
    }
}

fn casts(c: &mut Criterion) {
    let mut group = group(c, "cast");
    let (rows, columns) = (1024, 512);
    let x = values(rows * columns);
    let (mut codes, mut transposed, mut scale_inv) = (vec![0; x.len()], vec![0; x.len()], 0.0);
    group.throughput(Throughput::Elements(x.len() as u64));
    for format in [Fp8::E4M3, Fp8::E5M2] {
        group.bench_function(format!("quantise/{format:?}"), |b| {
            b.iter(|| quantise(format, black_box(&x), 300.0, &mut codes, &mut scale_inv));
        });
    }
    group.bench_function("quantise and transpose", |b| {
        b.iter(|| {
            let size = (rows, columns);
            quantise_transposed(Fp8::E4M3, black_box(&x), size, 300.0, &mut codes, &mut transposed, &mut scale_inv)
        });
    });
}

fn attention(c: &mut Criterion) {
    let mut group = group(c, "attention");
    let shape = AttentionShape { sequences: 16, length: 64, heads: 4, kv_heads: 4, head_dim: 32 };
    let mut scratch = Scratch::<f32>::new();
    let qkv = values(shape.tokens() * 3 * HIDDEN);
    let dout = values(shape.tokens() * HIDDEN);
    let (mut out, mut dqkv, mut lse) = (dout.clone(), qkv.clone(), vec![0f32; shape.statistics()]);
    let product = 2 * shape.tokens() * shape.length * HIDDEN;
    group.throughput(Throughput::Elements(2 * product as u64));
    group.bench_function("forward", |b| {
        b.iter(|| attention_forward(&mut scratch, shape, black_box(&qkv), &mut out, &mut lse));
    });
    group.throughput(Throughput::Elements(5 * product as u64));
    group.bench_function("backward", |b| {
        b.iter(|| attention_backward(&mut scratch, shape, black_box(&qkv), &lse, &dout, &mut dqkv));
    });
}

fn rows(c: &mut Criterion) {
    let mut group = group(c, "rows");
    let tokens = 1024;
    let mut scratch = Scratch::<f32>::new();
    let (x, dy) = (values(tokens * HIDDEN), values(tokens * HIDDEN));
    let (gamma, beta) = (vec![1f32; HIDDEN], vec![0f32; HIDDEN]);
    let (mut y, mut mean, mut rstd) = (x.clone(), vec![0f32; tokens], vec![0f32; tokens]);
    let (mut dgamma, mut dbeta) = (gamma.clone(), beta.clone());
    group.throughput(Throughput::Elements(x.len() as u64));
    group.bench_function("layer norm forward", |b| {
        b.iter(|| {
            let statistics = Statistics { mean: &mut mean, rstd: &mut rstd };
            layer_norm_forward(&mut scratch, black_box(&x), &gamma, &beta, &mut y, statistics)
        });
    });
    group.bench_function("layer norm backward", |b| {
        b.iter(|| {
            let saved = Saved { mean: &mean, rstd: &rstd };
            let gradients = NormGradients { gamma: &mut dgamma, beta: &mut dbeta };
            layer_norm_backward(&mut scratch, black_box(&x), &gamma, saved, &dy, &mut y, gradients)
        });
    });
    group.bench_function("add", |b| b.iter(|| add(black_box(&x), &dy, &mut y)));

    let (h, dh) = (values(tokens * FFN), values(tokens * FFN));
    let (mut out, mut bias) = (h.clone(), vec![0f32; FFN]);
    group.throughput(Throughput::Elements(h.len() as u64));
    group.bench_function("gelu forward", |b| b.iter(|| gelu_forward(black_box(&h), &mut out)));
    group.bench_function("gelu backward", |b| b.iter(|| gelu_backward(black_box(&h), &dh, &mut out)));
    group.bench_function("column sums", |b| b.iter(|| column_sums(black_box(&h), FFN, &mut bias)));

    let logits = values(tokens * VOCABULARY);
    let targets: Vec<u32> = (0..tokens as u32).map(|t| t * 31 % VOCABULARY as u32).collect();
    let (mut lse, mut dlogits) = (vec![0f32; tokens], logits.clone());
    group.throughput(Throughput::Elements(logits.len() as u64));
    group.bench_function("cross-entropy forward", |b| {
        b.iter(|| cross_entropy_forward(&mut scratch, black_box(&logits), &targets, VOCABULARY, &mut lse));
    });
    group.bench_function("cross-entropy backward", |b| {
        b.iter(|| {
            let logits = black_box(&logits);
            cross_entropy_backward(&mut scratch, logits, &targets, VOCABULARY, &lse, 1.0, &mut dlogits)
        });
    });
}

fn optimizer(c: &mut Criterion) {
    let mut group = group(c, "optimizer");
    let n = 1 << 18;
    let gradient = vec![0.01f32; n];
    let (mut w, mut m, mut v) = (vec![0.1f32; n], vec![0f32; n], vec![0f32; n]);
    let mut partials = vec![0f32; n / 4096];
    group.throughput(Throughput::Elements(n as u64));
    let step = AdamW::at(1, 1e-3, 0.1, 1.0);
    group.bench_function("adamw", |b| b.iter(|| adamw(&step, black_box(&gradient), &mut w, &mut m, &mut v)));
    group.bench_function("sums of squares", |b| b.iter(|| sums_of_squares(black_box(&gradient), 0.125, &mut partials)));
    let slots = vec![gradient.clone(); 8];
    let views: Vec<&[f32]> = slots.iter().map(Vec::as_slice).collect();
    group.bench_function("sum of 8 slots", |b| b.iter(|| sum_slots(black_box(&views), &mut w)));
}

criterion_group!(benches, products, casts, attention, rows, optimizer);
criterion_main!(benches);
