//! Every command but products on both devices: equal bit for bit where operations and their order are the same, within a
//! bound where sums have another order.

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_core::recipe::AmaxAlgo;
use qeffect_core::scaling::ScaleRule;
use qeffect_runtime::cmd::{
    AdamWConfig, AttentionShape, Cmd, DropoutKey, DropoutRate, HEALTH_WORDS, RotaryShape, Scalar,
};
use qeffect_runtime::device::{BufSpec, Device, DeviceError};
use qeffect_runtime::kernels::rotary::rotary_table;

use crate::rig::Pair;

/// Whole tiles, and not.
const SHAPES: [(usize, usize); 4] = [(64, 128), (32, 64), (48, 80), (33, 72)];

/// Sums of floats in another order.
const SUMS: f64 = 1e-5;
/// The same, then rounded to bf16: a last place in a few elements.
const ROUNDED: f64 = 2e-3;

#[test]
fn casts_give_the_same_bytes_factors_maxima_and_flags() {
    let Some(mut pair) = Pair::new() else { return };
    for (case, (rows, cols)) in SHAPES.into_iter().enumerate() {
        for (float, format) in [(false, Format::E4M3), (false, Format::E5M2), (true, Format::E4M3)] {
            for (spread, scale) in [(1.0, 1.0), (3000.0, 0.37), (1e-3, 41.0)] {
                let mut values: Vec<f32> = pair.normal(rows * cols).iter().map(|x| x * spread).collect();
                values[7] = 0.0;
                let broken = case == 1 && scale == 1.0;
                if broken {
                    values[9] = f32::NAN;
                    values[11] = f32::INFINITY;
                }
                let src = if float { pair.f32("x", cols, &values) } else { pair.bf16("x", cols, &values) };
                let scales = pair.f32("scales", 3, &[9.0, scale, 9.0]);
                let history = pair.f32("history", 3, &[0.0, 0.25, 0.0, 1.0, 2.0, 3.0]);
                let flag = pair.u32("flag", &[0]);
                let codes = pair.empty("codes", format.dtype(), rows, cols);
                let transposed = pair.empty("transposed", format.dtype(), cols, rows);
                let scale_inv = pair.empty("factor", Dtype::F32, 1, 1);
                pair.issue(Cmd::Quantise {
                    src,
                    rows,
                    cols,
                    format,
                    scale: Scalar { buf: scales, index: 1 },
                    codes,
                    transposed: Some(transposed),
                    beside: None,
                    scale_inv,
                    amax: Some(Scalar { buf: history, index: 1 }),
                    flag: Some(flag),
                });
                let what = format!("{rows} × {cols}, {format:?}, spread {spread}");
                for buf in [codes, transposed, scale_inv, history, flag] {
                    pair.same(&what, buf);
                }
                assert_eq!(pair.read(flag)[1][0], u8::from(broken), "{what}");
            }
        }
    }
}

#[test]
fn counts_of_what_casts_lose_are_the_same() {
    let Some(mut pair) = Pair::new() else { return };
    for (case, (rows, cols)) in SHAPES.into_iter().enumerate() {
        for (float, format) in [(false, Format::E4M3), (false, Format::E5M2), (true, Format::E4M3)] {
            let counts = pair.bytes("counts", Dtype::U64, 3, HEALTH_WORDS, &[0; 3 * 8 * HEALTH_WORDS]);
            // The same cell again and again: counts add up.
            for (spread, scale) in [(1.0, 1.0), (3000.0, 0.37), (1e-3, 41.0), (1e-4, 1e-3), (2.0, 3e4)] {
                let mut values: Vec<f32> = pair.normal(rows * cols).iter().map(|x| x * spread).collect();
                values[7] = 0.0;
                if case == 1 && scale == 1.0 {
                    values[9] = f32::NAN;
                    values[11] = f32::NEG_INFINITY;
                }
                let src = if float { pair.f32("x", cols, &values) } else { pair.bf16("x", cols, &values) };
                let scales = pair.f32("scales", 3, &[9.0, scale, 9.0]);
                let scale = Scalar { buf: scales, index: 1 };
                pair.issue(Cmd::Health { src, format, scale, counts, cell: 1 });
            }
            pair.same(&format!("{rows} × {cols}, {format:?}"), counts);
            let [found, _] = pair.read(counts);
            let words: Vec<u64> = found.chunks_exact(8).map(|x| u64::from_le_bytes(x.try_into().unwrap())).collect();
            let [before, cell, after] = words.as_chunks::<HEALTH_WORDS>().0 else { panic!("three cells") };
            assert!(before.iter().chain(after).all(|word| *word == 0), "other cells are left alone");
            assert!(cell[1] > 0 && cell[2] > 0 && cell[3] == if case == 1 { 2 } else { 0 }, "{cell:?}");
        }
    }
}

#[test]
fn rolls_give_the_same_scales_and_histories() {
    let Some(mut pair) = Pair::new() else { return };
    let (cells, length) = (5, 4);
    for algo in [AmaxAlgo::Max, AmaxAlgo::MostRecent] {
        for raised in [0, 1] {
            let values: Vec<f32> = pair.normal(cells * length).iter().map(|x| x.abs() * 20.0).collect();
            let (scales, history) = (pair.f32("scales", cells, &[1.0; 5]), pair.f32("history", cells, &values));
            let unless = Some(pair.u32("flag", &[raised]));
            let rule = ScaleRule::new(Format::E4M3, 1, algo);
            for staged in [[1.0f32, 0.0, f32::INFINITY, 3.5, 1e-30], [0.5, 7.0, 0.0, 0.0, 2.0]] {
                let [mut rows, _] = pair.read(history);
                rows[..4 * cells].copy_from_slice(bytemuck::cast_slice(&staged));
                pair.cpu.write(history, &rows).unwrap();
                pair.gpu.write(history, &rows).unwrap();
                for cells in [0..2, 2..usize::MAX] {
                    pair.issue(Cmd::Roll { scales, history, cells, rule, unless });
                }
                pair.same("scales", scales);
                pair.same("history", history);
            }
        }
    }
}

#[test]
fn moves_give_the_same_bits() {
    let Some(mut pair) = Pair::new() else { return };
    for (rows, cols) in SHAPES {
        let (x, y) = (pair.activation("x", rows, cols), pair.master("y", rows, cols));
        let [a, b] = ["a", "b"].map(|name| pair.empty(name, Dtype::Bf16, rows, cols));
        let [c, d] = ["c", "d"].map(|name| pair.empty(name, Dtype::F32, rows, cols));
        pair.issue(Cmd::Copy { src: x, dst: a });
        pair.issue(Cmd::Convert { src: y, dst: b });
        pair.issue(Cmd::Convert { src: x, dst: c });
        pair.issue(Cmd::Convert { src: y, dst: d });
        for buf in [a, b, c, d] {
            pair.same("moved", buf);
        }
        for (raised, what) in [(0, "not copied"), (1, "copied")] {
            let flag = pair.u32("flag", &[raised]);
            pair.issue(Cmd::CopyIf { flag, src: y, dst: c });
            pair.same(what, c);
        }
    }
    for (dtype, value) in [
        (Dtype::F32, -1.25),
        (Dtype::Bf16, 1.0039),
        (Dtype::U32, 3.0),
        (Dtype::U64, 77.0),
        (Dtype::E4M3, 5.0),
        (Dtype::U8, 200.0),
    ] {
        let buf = pair.empty("filled", dtype, 3, 37);
        pair.same("poison", buf);
        pair.issue(Cmd::Fill { dst: buf, value });
        pair.same("filled", buf);
        pair.cpu.poison(buf).unwrap();
        pair.gpu.poison(buf).unwrap();
        pair.same("poison again", buf);
    }
    let counter = pair.bytes("counter", Dtype::U64, 1, 1, &41u64.to_le_bytes());
    for raised in [0, 1] {
        let unless = pair.u32("flag", &[raised]);
        pair.issue(Cmd::Advance { counter, unless });
        assert_eq!(pair.read(counter), [42u64.to_le_bytes().to_vec(), 42u64.to_le_bytes().to_vec()]);
    }
}

#[test]
fn elementwise_commands_give_the_same_bits() {
    let Some(mut pair) = Pair::new() else { return };
    for (rows, cols) in SHAPES {
        let [x, y] = ["x", "y"].map(|name| pair.activation(name, rows, cols));
        let [sum, gelu, grad] = ["sum", "gelu", "grad"].map(|name| pair.empty(name, Dtype::Bf16, rows, cols));
        pair.issue(Cmd::Add { a: x, b: y, out: sum });
        pair.issue(Cmd::Gelu { x, y: gelu });
        pair.issue(Cmd::GeluGrad { x, dy: y, dx: grad });
        pair.same("add", sum);
        pair.same("gelu", gelu);
        pair.same("gelu gradient", grad);
        for count in [1, 4, 70] {
            let slots: Vec<_> = (0..count).map(|_| pair.master("slot", rows, cols)).collect();
            let out = pair.empty("total", Dtype::F32, rows, cols);
            pair.issue(Cmd::SumSlots { slots: slots.into(), out });
            pair.same("slots", out);
        }
    }
}

#[test]
fn gates_give_the_same_bits() {
    let Some(mut pair) = Pair::new() else { return };
    for (rows, cols) in SHAPES {
        let [x, y] = ["x", "y"].map(|name| pair.activation(name, rows, cols));
        let [silu, grad] = ["silu", "grad"].map(|name| pair.empty(name, Dtype::Bf16, rows, cols));
        pair.issue(Cmd::Silu { x, y: silu });
        pair.issue(Cmd::SiluGrad { x, dy: y, dx: grad });
        pair.same("silu", silu);
        pair.same("silu gradient", grad);
        let wide = pair.activation("gates and ups", rows, 2 * cols);
        let (out, grads) =
            (pair.empty("out", Dtype::Bf16, rows, cols), pair.empty("grads", Dtype::Bf16, rows, 2 * cols));
        pair.issue(Cmd::Swiglu { x: wide, y: out, cols });
        pair.issue(Cmd::SwigluGrad { x: wide, dy: y, dx: grads, cols });
        pair.same("swiglu", out);
        pair.same("swiglu gradient", grads);
    }
}

#[test]
fn gates_of_every_activation_give_the_same_bits() {
    let Some(mut pair) = Pair::new() else { return };
    // Up to where squares are infinite: beyond, gradients of both devices are NaN, and not the same one.
    let numbers = (0..=u16::MAX).map(|bits| bf16::from_bits(bits).to_f32()).filter(|x| x.abs() < 1e18);
    let mut values: Vec<f32> = numbers.collect();
    values.resize(values.len().next_multiple_of(64), 1.0);
    let rows = values.len() / 64;
    let (x, dy) = (pair.bf16("x", 64, &values), pair.activation("dy", rows, 64));
    let [y, dx] = ["y", "dx"].map(|name| pair.empty(name, Dtype::Bf16, rows, 64));
    for (what, forward, backward) in [
        ("gelu", Cmd::Gelu { x, y }, Cmd::GeluGrad { x, dy, dx }),
        ("silu", Cmd::Silu { x, y }, Cmd::SiluGrad { x, dy, dx }),
    ] {
        pair.issue(forward);
        pair.issue(backward);
        pair.same(what, y);
        pair.same(what, dx);
    }
}

#[test]
fn rotations_give_the_same_bits() {
    let Some(mut pair) = Pair::new() else { return };
    for (length, heads, head_dim, width) in [(16, 4, 16, 96), (7, 1, 2, 2), (33, 3, 6, 20)] {
        let table: Vec<f32> = rotary_table(length, head_dim, 1e4).into_iter().map(|x| x as f32).collect();
        let (x, table) = (pair.activation("x", 2 * length, width), pair.f32("table", head_dim, &table));
        let shape = RotaryShape { length, heads, head_dim, width };
        for inverse in [false, true] {
            let out = pair.empty("out", Dtype::Bf16, 2 * length, width);
            pair.issue(Cmd::Rotary { x, table, out, shape, inverse });
            pair.same("rotary", out);
        }
    }
}

#[test]
fn masks_of_dropout_are_the_same_and_move_with_the_step() {
    let Some(mut pair) = Pair::new() else { return };
    let rate = DropoutRate::new(0.3).unwrap();
    for (rows, cols) in [(1, 5), (64, 128), (33, 71)] {
        let x = pair.activation("x", rows, cols);
        let mut before = Vec::new();
        for step in [0u64, 1, u64::MAX] {
            let at = pair.bytes("step", Dtype::U64, 1, 1, &step.to_le_bytes());
            let y = pair.empty("y", Dtype::Bf16, rows, cols);
            let key = DropoutKey { seed: 9, site: u64::MAX - 1, microbatch: 3 };
            pair.issue(Cmd::Dropout { x, y, step: at, key, rate });
            pair.same("dropout", y);
            let found = pair.read(y)[1].clone();
            assert!(rows == 1 || found != before);
            before = found;
        }
    }
}

#[test]
fn embeddings_give_the_same_bits() {
    let Some(mut pair) = Pair::new() else { return };
    let (vocabulary, seq, sequences, cols) = (40, 16, 3, 72);
    let ids: Vec<u32> = (0..seq * sequences).map(|i| (i * i % 23) as u32).collect();
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|row| (ids[*row as usize], *row));
    let (tokens, order) = (pair.u32("tokens", &ids), pair.u32("order", &order));
    let (table, places) = (pair.master("table", vocabulary, cols), pair.master("positions", seq, cols));
    let flag = Some(pair.u32("flag", &[0]));
    let dy = pair.activation("dy", ids.len(), cols);
    for placed in [true, false] {
        let out = pair.empty("out", Dtype::Bf16, ids.len(), cols);
        let positions = placed.then_some(places);
        pair.issue(Cmd::Embed { tokens, table, positions, out, flag, seq, cols });
        pair.same("rows", out);
        let table_grad = pair.empty("table gradient", Dtype::F32, vocabulary, cols);
        let positions_grad = placed.then(|| pair.empty("position gradient", Dtype::F32, seq, cols));
        for accumulate in [false, true] {
            pair.issue(Cmd::EmbedGrad { tokens, order, dy, table_grad, positions_grad, seq, cols, accumulate });
        }
        pair.same("table gradient", table_grad);
        if let Some(grad) = positions_grad {
            pair.same("position gradient", grad);
        }
    }
}

/// Rows that are zero are known on the GPU, and neither read nor cleared again; whatever is written in between, they are
/// what they are on cpu.
#[test]
fn rows_of_embeddings_that_are_zero_stay_known() {
    let Some(mut pair) = Pair::new() else { return };
    let (vocabulary, seq, cols) = (48, 16, 256);
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.0 };
    let [param, moment1] = ["param", "first"].map(|name| pair.master(name, vocabulary, cols));
    let second: Vec<f32> = pair.normal(vocabulary * cols).iter().map(|x| x * x).collect();
    let moment2 = pair.f32("second", cols, &second);
    let (table, clip) = (pair.f32("rates", 3, &[1e-3, 1.2e-3, 0.31]), pair.f32("clip", 1, &[0.7]));
    let counter = pair.bytes("counter", Dtype::U64, 1, 1, &0u64.to_le_bytes());
    let unless = pair.u32("flag", &[0]);
    let (grad, other) = (pair.empty("gradient", Dtype::F32, vocabulary, cols), pair.master("other", vocabulary, cols));
    let positions_grad = Some(pair.empty("positions", Dtype::F32, seq, cols));
    let partials = pair.empty("partials", Dtype::F32, 1, vocabulary * cols / 4096);
    for round in 0..6u32 {
        let ids: Vec<u32> = (0..seq as u32).map(|i| (i * i + 7 * round) % (5 + 8 * round)).collect();
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_by_key(|row| (ids[*row as usize], *row));
        let (tokens, order) = (pair.u32("tokens", &ids), pair.u32("order", &order));
        for accumulate in [false, true] {
            let dy = pair.activation("dy", ids.len(), cols);
            let table_grad = grad;
            pair.issue(Cmd::EmbedGrad { tokens, order, dy, table_grad, positions_grad, seq, cols, accumulate });
        }
        match round {
            2 => pair.issue(Cmd::Copy { src: other, dst: grad }),
            3 => pair.issue(Cmd::Fill { dst: grad, value: 0.5 }),
            4 => {
                let bytes = pair.read(other)[0].clone();
                pair.cpu.write(grad, &bytes).unwrap();
                pair.gpu.write(grad, &bytes).unwrap();
            }
            _ => {}
        }
        pair.same("gradient", grad);
        pair.issue(Cmd::SumSquares { src: grad, factor: 0.3, partials, first: 0 });
        pair.near("sums of squares", partials, SUMS);
        let factor = 0.125;
        pair.issue(Cmd::AdamW { param, grad, factor, moment1, moment2, clip, table, counter, config, unless });
        for buf in [param, moment1, moment2] {
            pair.same("adamw", buf);
        }
    }
}

/// Gradients in bf16: what is read of them is their values.
#[test]
fn gradients_in_bf16_are_read_as_their_values() {
    let Some(mut pair) = Pair::new() else { return };
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
    let (rows, cols) = (130, 72);
    let [param, moment1] = ["param", "first"].map(|name| pair.master(name, rows, cols));
    let second: Vec<f32> = pair.normal(rows * cols).iter().map(|x| x * x).collect();
    let moment2 = pair.f32("second", cols, &second);
    let grad = pair.activation("gradient", rows, cols);
    let (table, clip) = (pair.f32("rates", 3, &[1e-3, 1.2e-3, 0.31]), pair.f32("clip", 1, &[0.7]));
    let counter = pair.bytes("counter", Dtype::U64, 1, 1, &0u64.to_le_bytes());
    let unless = pair.u32("flag", &[0]);
    let factor = 0.125;
    pair.issue(Cmd::AdamW { param, grad, factor, moment1, moment2, clip, table, counter, config, unless });
    for buf in [param, moment1, moment2] {
        pair.same("adamw", buf);
    }
    let partials = pair.empty("partials", Dtype::F32, 1, 3);
    pair.issue(Cmd::SumSquares { src: grad, factor: 0.3, partials, first: 0 });
    pair.near("sums of squares", partials, SUMS);
}

#[test]
fn the_commit_gives_the_same_bits_and_changes_nothing_after_a_bad_step() {
    let Some(mut pair) = Pair::new() else { return };
    let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
    for (rows, cols) in SHAPES {
        let [param, grad, moment1] = ["param", "grad", "first"].map(|name| pair.master(name, rows, cols));
        let second: Vec<f32> = pair.normal(rows * cols).iter().map(|x| x * x).collect();
        let moment2 = pair.f32("second", cols, &second);
        let table = pair.f32("rates", 3, &[1.0, 1.0, 1.0, 1e-3, 1.2e-3, 0.31, 1.0, 1.0, 1.0]);
        let counter = pair.bytes("counter", Dtype::U64, 1, 1, &1u64.to_le_bytes());
        let clip = pair.f32("clip", 1, &[0.7]);
        for raised in [0, 1] {
            let unless = pair.u32("flag", &[raised]);
            let before = pair.read(param);
            pair.issue(Cmd::AdamW {
                param,
                grad,
                factor: 0.125,
                moment1,
                moment2,
                clip,
                table,
                counter,
                config,
                unless,
            });
            for buf in [param, moment1, moment2] {
                pair.same("adamw", buf);
            }
            assert_eq!(pair.read(param) == before, raised == 1);
        }
    }
}

#[test]
fn norms_of_gradients_are_near_and_flags_the_same() {
    let Some(mut pair) = Pair::new() else { return };
    let grad = pair.master("gradient", 130, 72);
    let partials = pair.f32("partials", 5, &[0.5, 0.0, 0.0, 0.0, 0.25]);
    pair.issue(Cmd::SumSquares { src: grad, factor: 0.3, partials, first: 1 });
    pair.near("sums of squares", partials, SUMS);
    let bytes = pair.read(partials)[1].clone();
    assert_eq!((&bytes[..4], &bytes[16..]), (&0.5f32.to_le_bytes()[..], &0.25f32.to_le_bytes()[..]), "others stay");
    for (flags, limit) in [([0, 0], 1.0), ([0, 1], 1.0), ([0, 0], 1e9), ([0, 0], f32::INFINITY)] {
        let (flags, flag) = (pair.u32("flags", &flags), pair.u32("flag", &[0]));
        let [norm, clip] = ["norm", "clip"].map(|name| pair.empty(name, Dtype::F32, 1, 1));
        pair.issue(Cmd::Settle { partials, flags, limit, norm, clip, flag });
        pair.near("norm", norm, SUMS);
        pair.near("clip", clip, SUMS);
        pair.same("flag", flag);
    }
}

#[test]
fn norms_and_their_gradients_are_near() {
    let Some(mut pair) = Pair::new() else { return };
    for (rows, cols) in SHAPES {
        let [x, dy] = ["x", "dy"].map(|name| pair.activation(name, rows, cols));
        let [gain, bias] = ["gain", "bias"].map(|name| pair.master(name, 1, cols));
        let [y, dx] = ["y", "dx"].map(|name| pair.empty(name, Dtype::Bf16, rows, cols));
        let [mean, rstd] = ["mean", "rstd"].map(|name| pair.empty(name, Dtype::F32, rows, 1));
        let [gain_grad, bias_grad] = ["gains", "biases"].map(|name| pair.empty(name, Dtype::F32, 1, cols));
        pair.issue(Cmd::LayerNorm { x, gain, bias, y, mean, rstd, cols });
        pair.issue(Cmd::LayerNormGrad { dy, x, gain, mean, rstd, dx, gain_grad, bias_grad, cols });
        pair.near("y", y, ROUNDED);
        pair.near("mean", mean, SUMS);
        pair.near("rstd", rstd, SUMS);
        pair.near("dx", dx, ROUNDED);
        pair.near("gain gradient", gain_grad, SUMS);
        pair.same("bias gradient", bias_grad);
        let [y, dx] = ["y", "dx"].map(|name| pair.empty(name, Dtype::Bf16, rows, cols));
        let (rstd, gain_grad) = (pair.empty("rstd", Dtype::F32, rows, 1), pair.empty("gains", Dtype::F32, 1, cols));
        pair.issue(Cmd::RmsNorm { x, gain, y, rstd, cols });
        pair.issue(Cmd::RmsNormGrad { dy, x, gain, rstd, dx, gain_grad, cols });
        pair.near("rms y", y, ROUNDED);
        pair.near("rms rstd", rstd, SUMS);
        pair.near("rms dx", dx, ROUNDED);
        pair.near("rms gain gradient", gain_grad, SUMS);
        let sums = pair.empty("sums", Dtype::F32, 1, cols);
        pair.issue(Cmd::ColumnSums { x: dy, out: sums, cols });
        pair.same("column sums", sums);
    }
}

#[test]
fn attention_and_its_gradient_are_near() {
    let Some(mut pair) = Pair::new() else { return };
    let shapes = [(16, 4, 4, 16), (70, 2, 2, 32), (128, 2, 2, 64), (16, 4, 2, 16), (70, 6, 2, 32), (65, 4, 1, 64)];
    for (length, heads, kv_heads, head_dim) in shapes {
        let shape = AttentionShape { sequences: 2, length, heads, kv_heads, head_dim };
        let (tokens, hidden) = (shape.tokens(), shape.hidden());
        let (qkv, dout) = (pair.activation("qkv", tokens, shape.width()), pair.activation("dout", tokens, hidden));
        let (out, dqkv) =
            (pair.empty("out", Dtype::Bf16, tokens, hidden), pair.empty("dqkv", Dtype::Bf16, tokens, shape.width()));
        let lse = pair.empty("lse", Dtype::F32, 2 * heads, length);
        pair.issue(Cmd::Attention { qkv, out, lse, shape });
        pair.issue(Cmd::AttentionGrad { qkv, lse, dout, dqkv, shape });
        // Probabilities enter the tensor cores as bf16.
        pair.near("out", out, 5e-3);
        pair.near("lse", lse, SUMS);
        pair.near("dqkv", dqkv, 8e-3);
    }
}

#[test]
fn the_loss_and_its_gradient_are_near() {
    let Some(mut pair) = Pair::new() else { return };
    for (rows, vocabulary) in SHAPES {
        let logits = pair.activation("logits", rows, vocabulary);
        let targets: Vec<u32> = (0..rows).map(|row| (row * 7 % vocabulary) as u32).collect();
        let (targets, flag) = (pair.u32("targets", &targets), pair.u32("flag", &[0]));
        let (lse, losses) = (pair.empty("lse", Dtype::F32, rows, 1), pair.f32("losses", 3, &[5.0, 5.0, 5.0]));
        let dlogits = pair.empty("dlogits", Dtype::Bf16, rows, vocabulary);
        let loss = Scalar { buf: losses, index: 1 };
        pair.issue(Cmd::CrossEntropy { logits, targets, lse, loss, flag: Some(flag), vocabulary });
        pair.issue(Cmd::CrossEntropyGrad { logits, targets, lse, dlogits, vocabulary, factor: 64.0 / rows as f32 });
        pair.near("lse", lse, SUMS);
        pair.near("loss", losses, SUMS);
        pair.same("flag", flag);
        pair.near("dlogits", dlogits, ROUNDED);
    }
}

#[test]
fn refusals_name_what_is_wrong_and_write_nothing() {
    let Some(mut pair) = Pair::new() else { return };
    let [a, b] = ["a", "b"].map(|name| pair.activation(name, 4, 8));
    let (short, ids) = (pair.activation("short", 1, 8), pair.u32("ids", &[0; 32]));
    let flag = pair.u32("flag", &[0]);
    for (cmd, message) in [
        (Cmd::Add { a, b, out: a }, "add: `a` is written and used a second time"),
        (Cmd::Copy { src: a, dst: a }, "copy: `a` is written and used a second time"),
        (Cmd::Copy { src: a, dst: short }, "copy: `short` has 8 elements, not 32"),
        (Cmd::Add { a, b: ids, out: b }, "add: `ids` holds u32, not bf16"),
        (Cmd::Gelu { x: ids, y: a }, "gelu: `ids` holds u32, not bf16"),
        (Cmd::Advance { counter: a, unless: flag }, "advance: `a` holds bf16, not u64"),
    ] {
        let before = [a, b, short].map(|buf| pair.read(buf)[1].clone());
        let found = pair.gpu.issue(&cmd).unwrap_err().to_string();
        assert_eq!(found, message);
        assert_eq!([a, b, short].map(|buf| pair.read(buf)[1].clone()), before);
    }
    let wide = pair.gpu.alloc(BufSpec::new("wide", Dtype::F64, 2, 2)).unwrap_err();
    assert!(wide.to_string().contains("`wide` would hold f64"), "{wide}");
    let other = pair.cpu.alloc(BufSpec::new("of the cpu alone", Dtype::F32, 1, 1)).unwrap();
    assert_eq!(pair.gpu.issue(&Cmd::Fill { dst: other, value: 0.0 }), Err(DeviceError::UnknownBuffer(other)));
    let given = pair.gpu.write(a, &[0; 3]).unwrap_err().to_string();
    assert_eq!(given, "write: `a` has 64 bytes, 3 were given");
}
