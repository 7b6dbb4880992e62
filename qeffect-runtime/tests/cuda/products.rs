//! Matrix products on both devices: equal bit for bit where every sum is exact, within a bound otherwise.

use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_runtime::cmd::{Beside, Cmd, GroupOperand, Operand, Scalar};
use qeffect_runtime::device::{Buf, Device};
use qeffect_runtime::rng;

use crate::rig::Pair;

/// Small integers: products and sums are exact in every order.
fn integers(seed: u64, n: usize) -> Vec<f32> {
    (0..n as u64).map(|i| (rng::draw(&[seed, i]) % 9) as f32 - 4.0).collect()
}

fn codes(pair: &mut Pair, format: Format, cols: usize, values: &[f32]) -> Buf {
    let bytes: Vec<u8> = values.iter().map(|x| format.encode(*x)).collect();
    pair.bytes("codes", format.dtype(), values.len() / cols, cols, &bytes)
}

const SHAPES: [[usize; 3]; 4] = [[64, 128, 256], [32, 64, 32], [48, 80, 144], [128, 32, 1024]];

#[test]
fn fp8_products_with_exact_sums_give_the_same_bits() {
    let Some(mut pair) = Pair::new() else { return };
    // F, dI, and dW, with each way to accumulate.
    for (case, (left, right, out_type, with_bias, fast)) in [
        (Format::E4M3, Format::E4M3, Dtype::Bf16, true),
        (Format::E5M2, Format::E4M3, Dtype::Bf16, false),
        (Format::E5M2, Format::E4M3, Dtype::F32, false),
    ]
    .into_iter()
    .flat_map(|(left, right, out, bias)| [false, true].map(|fast| (left, right, out, bias, fast)))
    .enumerate()
    {
        for [m, n, k] in SHAPES {
            // E5M2 has integers up to 8, E4M3 up to 16.
            let (x, y) = (integers(case as u64, m * k), integers(case as u64 + 10, n * k));
            let (a, b) = (codes(&mut pair, left, k, &x), codes(&mut pair, right, k, &y));
            let (fa, fb) = (pair.f32("left factor", 1, &[0.5]), pair.f32("right factor", 1, &[0.25]));
            let bias = with_bias.then(|| pair.bf16("bias", n, &integers(99, n)));
            let out = pair.empty("out", out_type, m, n);
            let a = Operand { buf: a, scale_inv: Some(fa), transposed: false };
            let b = Operand { buf: b, scale_inv: Some(fb), transposed: true };
            pair.issue(Cmd::Gemm { m, n, k, a, b, bias, out, accumulate: false, fast });
            pair.same(&format!("{left:?} × {right:?}, {m} × {n} × {k}, fast: {fast}"), out);
        }
    }
}

#[test]
fn bf16_products_with_exact_sums_give_the_same_bits_whichever_way_operands_are_stored() {
    let Some(mut pair) = Pair::new() else { return };
    for (case, out_type) in [Dtype::Bf16, Dtype::F32].into_iter().enumerate() {
        for [m, n, k] in SHAPES {
            for (first, second) in [(false, true), (false, false), (true, false), (true, true)] {
                let (x, y) = (integers(case as u64, m * k), integers(case as u64 + 10, n * k));
                let a = pair.bf16("a", if first { m } else { k }, &x);
                let b = pair.bf16("b", if second { k } else { n }, &y);
                let bias = (out_type == Dtype::Bf16).then(|| pair.bf16("bias", n, &integers(99, n)));
                let out = pair.empty("out", out_type, m, n);
                let a = Operand { buf: a, scale_inv: None, transposed: first };
                let b = Operand { buf: b, scale_inv: None, transposed: second };
                pair.issue(Cmd::Gemm { m, n, k, a, b, bias, out, accumulate: false, fast: false });
                pair.same(&format!("{m} × {n} × {k}, transposed {first} {second}"), out);
            }
        }
    }
}

/// On the GPU alone, with numbers whose sums are not exact: adding in place is a product, rounded to a float, and a sum.
#[test]
fn adding_a_product_is_a_product_and_a_sum_bit_for_bit() {
    let Some(mut pair) = Pair::new() else { return };
    for [m, n, k] in [[64, 128, 256], [48, 80, 144], [512, 512, 64], [256, 1024, 2048]] {
        for fp8 in [true, false] {
            let (x, y) = (pair.normal(m * k), pair.normal(n * k));
            let (a, b) = match fp8 {
                true => (codes(&mut pair, Format::E5M2, k, &x), codes(&mut pair, Format::E4M3, k, &y)),
                false => (pair.bf16("a", m, &x), pair.bf16("b", n, &y)),
            };
            let [fa, fb] = [0.31, 1.7].map(|x| fp8.then(|| pair.f32("factor", 1, &[x])));
            let a = Operand { buf: a, scale_inv: fa, transposed: !fp8 };
            let b = Operand { buf: b, scale_inv: fb, transposed: fp8 };
            let [held, sum] = [0; 2].map(|_| pair.empty("out", Dtype::F32, m, n));
            let product = pair.empty("product", Dtype::F32, m, n);
            let start = pair.master("start", m, n);
            let gemm = |out, accumulate| Cmd::Gemm { m, n, k, a, b, bias: None, out, accumulate, fast: false };
            for cmd in [
                Cmd::Copy { src: start, dst: held },
                gemm(held, true),
                gemm(product, false),
                Cmd::SumSlots { slots: vec![start, product].into(), out: sum },
            ] {
                pair.gpu.issue(&cmd).unwrap();
            }
            let (held, sum) = (pair.read(held)[1].clone(), pair.read(sum)[1].clone());
            assert!(held == sum, "{m} × {n} × {k}, FP8: {fp8}");
        }
    }
}

#[test]
fn products_of_other_numbers_are_near() {
    let Some(mut pair) = Pair::new() else { return };
    for [m, n, k] in SHAPES {
        let (x, y) = (pair.normal(m * k), pair.normal(n * k));
        let (fa, fb) = (pair.f32("left factor", 1, &[0.31]), pair.f32("right factor", 1, &[1.7]));
        // Fast accumulation keeps fewer bits of its sums; exact sums differ by their order alone.
        for (left, out_type, fast, bound) in [
            (Format::E4M3, Dtype::Bf16, true, 5e-3),
            (Format::E4M3, Dtype::Bf16, false, 3e-3),
            (Format::E5M2, Dtype::Bf16, false, 3e-3),
            (Format::E5M2, Dtype::Bf16, true, 5e-3),
            (Format::E5M2, Dtype::F32, false, 2e-4),
            (Format::E5M2, Dtype::F32, true, 5e-3),
        ] {
            let (a, b) = (codes(&mut pair, left, k, &x), codes(&mut pair, Format::E4M3, k, &y));
            let out = pair.empty("out", out_type, m, n);
            let a = Operand { buf: a, scale_inv: Some(fa), transposed: false };
            let b = Operand { buf: b, scale_inv: Some(fb), transposed: true };
            pair.issue(Cmd::Gemm { m, n, k, a, b, bias: None, out, accumulate: false, fast });
            pair.near(&format!("{left:?}, {m} × {n} × {k} → {out_type}, fast: {fast}"), out, bound);
        }
    }
}

// Case B46: tokens are the depth of a weight gradient.
#[test]
fn what_fp8_cannot_take_is_refused() {
    let Some(mut pair) = Pair::new() else { return };
    let (m, n, k) = (16, 16, 24);
    let (a, b) =
        (codes(&mut pair, Format::E4M3, k, &[1.0; 16 * 24]), codes(&mut pair, Format::E4M3, k, &[1.0; 16 * 24]));
    let factor = Some(pair.f32("factor", 1, &[1.0]));
    let out = pair.empty("out", Dtype::Bf16, m, n);
    let operand = |buf, transposed| Operand { buf, scale_inv: factor, transposed };
    let cmd = |a, b| Cmd::Gemm { m, n, k, a, b, bias: None, out, accumulate: false, fast: false };
    let found = pair.gpu.issue(&cmd(operand(a, false), operand(b, true))).unwrap_err().to_string();
    assert!(found.contains("`depth` is 24; FP8 needs a multiple of 16"), "{found}");
    let found = pair.gpu.issue(&cmd(operand(a, true), operand(b, true))).unwrap_err().to_string();
    assert!(found.contains("terms of a sum side by side"), "{found}");
}

/// One side of a group, on both devices: each member's matrix of integers, quantised with a scale of its own beside those
/// of the others.
fn group_side(
    pair: &mut Pair,
    format: Format,
    [tokens, cols, stride, members]: [usize; 4],
    (seed, scale, exact): (u64, f32, bool),
) -> GroupOperand {
    let line = members * stride;
    let region = pair.empty("region", format.dtype(), cols, line);
    pair.issue(Cmd::Fill { dst: region, value: 0.0 });
    let scales: Vec<f32> = (0..members).map(|member| scale.powi(member as i32)).collect();
    let scales = pair.f32("scales", members, &scales);
    let factors = (0..members).map(|member| {
        let values = if exact { integers(seed + member as u64, tokens * cols) } else { pair.normal(tokens * cols) };
        let src = pair.bf16("member", cols, &values);
        let codes = pair.empty("codes", format.dtype(), tokens, cols);
        let scale_inv = pair.empty("factor", Dtype::F32, 1, 1);
        pair.issue(Cmd::Quantise {
            src,
            rows: tokens,
            cols,
            format,
            scale: Scalar { buf: scales, index: member },
            codes,
            transposed: Some(region),
            beside: Some(Beside { first: member * stride, line }),
            scale_inv,
            amax: None,
            flag: None,
        });
        scale_inv
    });
    let scale_inv = factors.collect();
    pair.same("region", region);
    GroupOperand { buf: region, scale_inv, transposed: format == Format::E4M3 }
}

/// Case B25. Members have scales of their own, which differ by powers of two where sums shall be exact, and tokens that fill their
/// blocks or do not.
#[test]
fn products_of_groups_are_those_of_the_cpu() {
    let Some(mut pair) = Pair::new() else { return };
    const GROUPS: [[usize; 4]; 4] = [[64, 128, 128, 1], [272, 144, 100, 3], [48, 80, 256, 4], [128, 64, 16, 35]];
    for (case, [m, n, tokens, members]) in GROUPS.into_iter().enumerate() {
        let stride = tokens.next_multiple_of(128);
        // Powers of two keep sums exact, as long as they are few.
        let scales: &[(f32, f32, bool)] = match members {
            35 => &[(1.01, 0.99, false)],
            _ => &[(2.0, 0.5, true), (1.37, 0.71, false)],
        };
        for &(left, right, exact) in scales {
            let shape = |cols| [tokens, cols, stride, members];
            let seed = 1000 * case as u64;
            let a = group_side(&mut pair, Format::E5M2, shape(m), (seed, left, exact));
            let b = group_side(&mut pair, Format::E4M3, shape(n), (seed + 500, right, exact));
            let out = pair.empty("out", Dtype::F32, m, n);
            for accumulate in [false, true] {
                let (a, b) = (a.clone(), b.clone());
                let cmd = Cmd::GroupGemm { m, n, k: tokens, stride, members, a, b, out, accumulate };
                let what = format!("{members} of {m} × {n} × {tokens}, exact: {exact}, added: {accumulate}");
                let graph = pair.gpu.instantiate(vec![cmd.clone()]).unwrap();
                let before = pair.read(out)[1].clone();
                pair.issue(cmd);
                match exact {
                    true => pair.same(&what, out),
                    false => pair.near(&what, out, 2e-4),
                }
                let issued = pair.read(out)[1].clone();
                pair.gpu.write(out, &before).unwrap();
                pair.gpu.launch(graph).unwrap();
                assert!(pair.read(out)[1] == issued, "{what}: a graph gives the same bits");
                pair.cpu.write(out, &issued).unwrap();
            }
        }
    }
}

/// Members with one factor are a product that any GPU has; no block has to end where a member does.
#[test]
fn products_of_groups_with_one_factor_are_those_of_the_cpu() {
    let Some(mut pair) = Pair::new() else { return };
    for [m, n, tokens, stride, members] in [[272, 144, 48, 48, 3], [64, 128, 100, 128, 4], [128, 64, 256, 256, 1]] {
        let shape = |cols| [tokens, cols, stride, members];
        let mut side = |format, cols, seed, factor| {
            let side = group_side(&mut pair, format, shape(cols), (seed, 1.0, true));
            GroupOperand { scale_inv: Box::from([pair.f32("factor", 1, &[factor])]), ..side }
        };
        let (a, b) = (side(Format::E5M2, m, 1, 0.25), side(Format::E4M3, n, 501, 2.0));
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let out = pair.empty("out", dtype, m, n);
            for accumulate in [false, true] {
                let (a, b) = (a.clone(), b.clone());
                let cmd = Cmd::GroupGemm { m, n, k: tokens, stride, members, a, b, out, accumulate };
                let what = format!("{members} of {m} × {n} × {tokens} into {dtype:?}, added: {accumulate}");
                let graph = pair.gpu.instantiate(vec![cmd.clone()]).unwrap();
                let before = pair.read(out)[1].clone();
                pair.issue(cmd);
                match (dtype, accumulate) {
                    (Dtype::Bf16, true) => pair.near(&what, out, 1e-2),
                    _ => pair.same(&what, out),
                }
                let issued = pair.read(out)[1].clone();
                pair.gpu.write(out, &before).unwrap();
                pair.gpu.launch(graph).unwrap();
                assert!(pair.read(out)[1] == issued, "{what}: a graph gives the same bits");
                pair.cpu.write(out, &issued).unwrap();
            }
        }
    }
}

/// A sum that is exact is rounded to the same bf16.
#[test]
fn products_of_groups_into_bf16_are_rounded_once() {
    let Some(mut pair) = Pair::new() else { return };
    let (m, n, tokens, members) = (272, 144, 128, 3);
    let shape = |cols| [tokens, cols, tokens, members];
    let a = group_side(&mut pair, Format::E5M2, shape(m), (1, 2.0, true));
    let b = group_side(&mut pair, Format::E4M3, shape(n), (501, 0.5, true));
    let out = pair.empty("out", Dtype::Bf16, m, n);
    for accumulate in [false, true] {
        let (a, b) = (a.clone(), b.clone());
        pair.issue(Cmd::GroupGemm { m, n, k: tokens, stride: tokens, members, a, b, out, accumulate });
        match accumulate {
            false => pair.same("a sum", out),
            true => pair.near("twice the sum", out, 1e-2),
        }
    }
}

#[test]
fn products_of_groups_in_bf16_are_those_of_the_cpu() {
    let Some(mut pair) = Pair::new() else { return };
    let (m, n, k, members) = (64, 96, 40, 3);
    let (x, y) = (integers(1, members * k * m), integers(2, members * k * n));
    let (a, b) = (pair.bf16("dy", m, &x), pair.bf16("x", n, &y));
    let side = |buf, transposed| GroupOperand { buf, scale_inv: Box::default(), transposed };
    let out = pair.master("out", m, n);
    for accumulate in [false, true] {
        let (a, b) = (side(a, true), side(b, false));
        pair.issue(Cmd::GroupGemm { m, n, k, stride: k, members, a, b, out, accumulate });
        pair.same("product of a group", out);
    }
}

#[test]
fn groups_that_block_scales_cannot_tell_apart_are_refused() {
    let Some(mut pair) = Pair::new() else { return };
    let (m, n, k) = (32, 32, 64);
    let region = codes(&mut pair, Format::E4M3, 2 * k, &vec![1.0; m * 2 * k]);
    let (factor, out) = (pair.f32("factor", 1, &[1.0]), pair.empty("out", Dtype::F32, m, n));
    let side = |count, transposed| GroupOperand { buf: region, scale_inv: vec![factor; count].into(), transposed };
    let mut refused = |stride, a, b| {
        let cmd = Cmd::GroupGemm { m, n, k, stride, members: 2, a, b, out, accumulate: false };
        pair.gpu.issue(&cmd).unwrap_err().to_string()
    };
    let found = refused(64, side(2, false), side(2, true));
    assert!(found.contains("members begin every 64 terms; block scales need a multiple of 128"), "{found}");
    let found = refused(128, side(1, false), side(2, true));
    assert!(found.contains("2 members in E4M3 × E4M3 have 1 factors"), "{found}");
}
