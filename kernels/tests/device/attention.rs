//! Attention against float64.

use half::bf16;
use qeffect_kernels::cache::Cache;
use qeffect_kernels::compile::Compiler;
use qeffect_kernels::launch::attention::AttentionShape;
use qeffect_kernels::{Kernels, source};

use crate::rig::{BF16, Rig, bf16_bits, bits, close, floats, numbers, rig, within};

const SHAPES: [[usize; 4]; 11] = [
    // sequences, length, heads, head_dim
    [1, 1, 1, 1],
    [2, 3, 1, 17],
    [1, 17, 3, 4],
    [2, 64, 2, 8],
    [1, 130, 2, 32],
    [2, 100, 2, 64],
    [1, 257, 2, 80],
    [1, 256, 3, 128],
    [1, 65, 1, 127],
    [2, 600, 1, 128],
    [1, 513, 1, 48],
];

/// Heads that share keys and values.
const SHARED: [[usize; 5]; 4] =
    // sequences, length, heads, heads of keys, head_dim
    [[2, 70, 4, 2, 32], [1, 130, 6, 2, 64], [2, 33, 3, 1, 80], [1, 200, 4, 2, 128]];

struct Reference {
    out: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
    /// What each of them is allowed to be off by.
    allowed: [Vec<f64>; 3],
}

/// What scores and slopes, which are sums in floats, are off by, for all that their terms add up to.
const SCORES: f64 = 1.0 / 65_536.0;

/// One query against the keys up to its own. `narrow` is what weights go through before they are multiplied: in bounds every
/// weight is off by half a place of bf16, and the result once more.
fn reference(shape: &AttentionShape, qkv: &[f64], dout: &[f64], narrow: fn(f64) -> f64) -> Reference {
    let (hidden, width, dim) = (shape.hidden(), shape.width(), shape.head_dim);
    let zeros = || [shape.tokens() * hidden, shape.statistics(), qkv.len()].map(|len| vec![0.0; len]);
    let [out, lse, dqkv] = zeros();
    let mut made = Reference { out, lse, dqkv, allowed: zeros() };
    let scale = 1.0 / (dim as f64).sqrt();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let size = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum::<f64>();
    for token in 0..shape.tokens() {
        let (sequence, row) = (token / shape.length, token % shape.length);
        let first = sequence * shape.length;
        for head in 0..shape.heads {
            let key = shape.heads + head / (shape.heads / shape.kv_heads);
            let at = |t: usize, which: usize| t * width + [head, key, key + shape.kv_heads][which] * dim;
            let part = |t: usize, which: usize| &qkv[at(t, which)..][..dim];
            let upper = &dout[token * hidden + head * dim..][..dim];
            let scores: Vec<f64> = (first..=token).map(|t| dot(part(token, 0), part(t, 1)) * scale).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mass: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            let statistic = (sequence * shape.heads + head) * shape.length + row;
            made.lse[statistic] = largest + mass.ln();
            let scored = (first..=token).map(|t| size(part(token, 0), part(t, 1)) * scale).fold(0.0, f64::max);
            made.allowed[1][statistic] = SCORES * (1.0 + made.lse[statistic].abs() + scored);
            let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / mass).collect();
            let slopes: Vec<f64> = (first..=token).map(|t| dot(upper, part(t, 2))).collect();
            let mean = dot(&p, &slopes);
            let sizes: Vec<f64> = (first..=token).map(|t| size(upper, part(t, 2))).collect();
            let mean_size = dot(&p, &sizes);
            for (index, t) in (first..=token).enumerate() {
                // As kernels do it: 1 / √dim comes after the sums.
                let (weight, slope) = (narrow(p[index]), narrow(p[index] * (slopes[index] - mean)) * scale);
                let (off, off_slope) =
                    (BF16 * p[index], BF16 * slope.abs() + SCORES * p[index] * (sizes[index] + mean_size) * scale);
                let [out, _, dqkv] = &mut made.allowed;
                for (i, upper) in upper.iter().enumerate() {
                    made.out[token * hidden + head * dim + i] += weight * part(t, 2)[i];
                    made.dqkv[at(token, 0) + i] += slope * part(t, 1)[i];
                    made.dqkv[at(t, 1) + i] += slope * part(token, 0)[i];
                    made.dqkv[at(t, 2) + i] += weight * upper;
                    out[token * hidden + head * dim + i] += off * part(t, 2)[i].abs();
                    dqkv[at(token, 0) + i] += off_slope * part(t, 1)[i].abs();
                    dqkv[at(t, 1) + i] += off_slope * part(token, 0)[i].abs();
                    dqkv[at(t, 2) + i] += off * upper.abs();
                }
            }
        }
    }
    for (allowed, result) in [(0, &made.out), (2, &made.dqkv)] {
        made.allowed[allowed].iter_mut().zip(result).for_each(|(allowed, x)| *allowed += BF16 * x.abs());
    }
    made
}

fn wide(x: &[bf16]) -> Vec<f64> {
    x.iter().map(|x| x.to_f64()).collect()
}

/// Forward and backward of every shape within bounds of float64, and the same bits every time.
fn check(rig: &Rig, kernels: &Kernels) {
    let alone = SHAPES.map(|[sequences, length, heads, head_dim]| [sequences, length, heads, heads, head_dim]);
    for [sequences, length, heads, kv_heads, head_dim] in alone.into_iter().chain(SHARED) {
        let shape = AttentionShape { sequences, length, heads, kv_heads, head_dim };
        let of = |seed, len, scale: f32| -> Vec<bf16> {
            numbers(seed, len).iter().map(|x| bf16::from_f32(x * scale)).collect()
        };
        let qkv = of(1, shape.tokens() * shape.width(), 2.0);
        let dout = of(2, shape.tokens() * shape.hidden(), 1.0);
        let want = reference(&shape, &wide(&qkv), &wide(&dout), |x| x);
        let (q, d) = (rig.upload(&qkv), rig.upload(&dout));
        let mut last = None;
        for _ in 0..2 {
            let (out, lse) = (rig.poisoned::<bf16>(dout.len()), rig.poisoned::<f32>(shape.statistics()));
            let (dqkv, delta) = (rig.poisoned::<bf16>(qkv.len()), rig.poisoned::<f32>(shape.statistics()));
            kernels.attention_forward(&rig.stream, &shape, q.span(), out.span(), lse.span()).unwrap();
            kernels
                .attention_backward(&rig.stream, &shape, q.span(), d.span(), lse.span(), dqkv.span(), delta.span())
                .unwrap();
            let made = (out.read().unwrap(), lse.read().unwrap(), dqkv.read().unwrap());
            // Probabilities and the result are rounded to bf16, each within 2^-8, and errors of terms cancel in part.
            close("out", floats(&made.0), &want.out, 1.0 / 256.0);
            close("lse", made.1.iter().copied(), &want.lse, 1e-5);
            if length > 1 {
                close("dqkv", floats(&made.2), &want.dqkv, 1.0 / 128.0);
            }
            let [of_out, of_lse, of_dqkv] = &want.allowed;
            within(&format!("{shape:?}: out"), floats(&made.0), &want.out, |i| of_out[i]);
            within(&format!("{shape:?}: lse"), made.1.iter().copied(), &want.lse, |i| of_lse[i]);
            within(&format!("{shape:?}: dqkv"), floats(&made.2), &want.dqkv, |i| of_dqkv[i]);
            let seen = (bf16_bits(&made.0), bits(&made.1), bf16_bits(&made.2));
            assert!(last.as_ref().is_none_or(|last| *last == seen), "{shape:?}: the same bits every time");
            last = Some(seen);
        }
    }
}

/// On the host: what rounds as kernels do is within the bounds, and one element of another row is not.
#[test]
fn bounds_hold_what_rounds_and_not_what_is_wrong() {
    for [sequences, length, heads, kv_heads, head_dim] in [[2, 70, 4, 2, 8], [1, 300, 1, 1, 32], [1, 1, 1, 1, 1]] {
        let shape = AttentionShape { sequences, length, heads, kv_heads, head_dim };
        let of = |seed, len, scale: f32| -> Vec<f64> {
            numbers(seed, len).iter().map(|x| bf16::from_f32(x * scale).to_f64()).collect()
        };
        let (qkv, dout) = (of(1, shape.tokens() * shape.width(), 2.0), of(2, shape.tokens() * shape.hidden(), 1.0));
        let narrow = |x: f64| bf16::from_f64(x).to_f64();
        let (want, made) = (reference(&shape, &qkv, &dout, |x| x), reference(&shape, &qkv, &dout, narrow));
        let rounded = |x: &[f64]| -> Vec<f32> { x.iter().map(|x| bf16::from_f64(*x).to_f32()).collect() };
        let (out, dqkv) = (rounded(&made.out), rounded(&made.dqkv));
        within("out", out.iter().copied(), &want.out, |i| want.allowed[0][i]);
        within("dqkv", dqkv, &want.dqkv, |i| want.allowed[2][i]);
        // Late rows are small.
        let mut wrong = out;
        let last = wrong.len() - 1;
        wrong[last] = -wrong[last];
        let caught = std::panic::catch_unwind(|| within("out", wrong, &want.out, |i| want.allowed[0][i]));
        assert!(caught.is_err(), "{shape:?}");
    }
}

#[test]
fn forward_and_backward_are_within_bounds_of_float64() {
    let Some(rig) = rig() else { return };
    check(rig, &rig.kernels);
}

/// As other generations run it, without products of four warps.
#[test]
fn so_they_are_with_products_of_one_warp() {
    let Some(rig) = rig() else { return };
    let (compiler, arch) = (Compiler::new(Cache::standard()), rig.kernels.arch().portable());
    let kernels = Kernels::load_for(&rig.context, &compiler, arch, &[source::ATTENTION]).unwrap();
    check(rig, &kernels);
}

#[test]
fn later_tokens_change_nothing_before_them() {
    let Some(rig) = rig() else { return };
    let shape = AttentionShape { sequences: 2, length: 150, heads: 2, kv_heads: 2, head_dim: 64 };
    let mut qkv: Vec<bf16> = numbers(3, shape.tokens() * shape.width()).iter().map(|x| bf16::from_f32(*x)).collect();
    let run = |qkv: &[bf16]| {
        let (q, out) = (rig.upload(qkv), rig.poisoned::<bf16>(shape.tokens() * shape.hidden()));
        let lse = rig.poisoned::<f32>(shape.statistics());
        rig.kernels.attention_forward(&rig.stream, &shape, q.span(), out.span(), lse.span()).unwrap();
        bf16_bits(&out.read().unwrap())
    };
    let before = run(&qkv);
    let changed = 97;
    let width = 3 * shape.hidden();
    qkv[changed * width..(changed + 1) * width].fill(bf16::from_f32(3.0));
    let after = run(&qkv);
    let row = |token: usize| token * shape.hidden()..(token + 1) * shape.hidden();
    for token in (0..changed).chain(150..300) {
        assert_eq!(before[row(token)], after[row(token)], "token {token}");
    }
    assert_ne!(before[row(changed)], after[row(changed)]);
}

#[test]
fn a_nan_stays_one_and_a_large_head_is_refused() {
    let Some(rig) = rig() else { return };
    let shape = AttentionShape { sequences: 1, length: 70, heads: 1, kv_heads: 1, head_dim: 32 };
    let mut qkv = vec![bf16::ONE; 70 * 96];
    qkv[66 * 96 + 3] = bf16::NAN;
    let (q, out, lse) = (rig.upload(&qkv), rig.poisoned::<bf16>(70 * 32), rig.poisoned::<f32>(70));
    rig.kernels.attention_forward(&rig.stream, &shape, q.span(), out.span(), lse.span()).unwrap();
    let out_rows = out.read().unwrap();
    let bad = |row: usize| out_rows[row * 32..(row + 1) * 32].iter().all(|x| x.is_nan());
    assert!(bad(66) && !bad(65) && !bad(67));
    let large = AttentionShape { head_dim: 129, ..shape };
    let fault = rig.kernels.attention_forward(&rig.stream, &large, q.span(), out.span(), lse.span()).unwrap_err();
    assert!(fault.to_string().contains("`head_dim` is 129; it is at most 128"), "{fault}");
}
