//! The commit: norm, clipping and AdamW, bit for bit.

use half::bf16;
use qeffect_core::fp8::Fp8;
use qeffect_kernels::Buffer;
use qeffect_kernels::launch::cast::{Codes, Outputs, Transposed};
use qeffect_kernels::launch::optimizer::{AdamW, Gradient, NORM_PIECE, Parameter, Rows, Settled};

use crate::rig::{Rig, SHAPES, bf16_bits, bits, numbers, rig};

/// Lanes, folded as a tree.
fn lanes<const LANES: usize>(x: impl Iterator<Item = f32>) -> f32 {
    let mut lanes = [0f32; LANES];
    x.enumerate().for_each(|(i, x)| lanes[i % LANES] += x);
    let mut width = LANES / 2;
    while width > 0 {
        (0..width).for_each(|lane| lanes[lane] += lanes[lane + width]);
        width /= 2;
    }
    lanes[0]
}

#[test]
fn partial_sums_norm_and_clip_have_a_fixed_order() {
    let Some(rig) = rig() else { return };
    for len in [1, 15, 4096, 4097, 20_000, 1 << 20, 40_000_001] {
        let gradient = numbers(1, len);
        let factor = 0.37f32;
        let pieces = len.div_ceil(NORM_PIECE);
        let (g, partials) = (rig.upload(&gradient), rig.poisoned::<f32>(pieces));
        rig.kernels.sum_squares(&rig.stream, Gradient::F32(g.span()), factor, partials.span()).unwrap();
        let want: Vec<f32> = gradient
            .chunks(NORM_PIECE)
            .map(|piece| lanes::<16>(piece.iter().map(|g| (g * factor) * (g * factor))))
            .collect();
        assert_eq!(bits(&partials.read().unwrap()), bits(&want));

        for (limit, flags) in [(1.0f32, [0u32, 0]), (f32::INFINITY, [0, 0]), (1e-3, [0, 2])] {
            let (norm, clip, flag) = (rig.poisoned::<f32>(1), rig.poisoned::<f32>(1), rig.upload(&[0u32]));
            let flags_of_ranks = rig.upload(&flags);
            let settled = Settled { norm: norm.span(), clip: clip.span(), flag: flag.span() };
            rig.kernels.settle(&rig.stream, partials.span(), flags_of_ranks.span(), limit, &settled).unwrap();
            let value = lanes::<512>(want.iter().copied()).sqrt();
            let factor = limit / (value + 1e-6);
            let factor = if limit.is_finite() && factor < 1.0 { factor } else { 1.0 };
            assert_eq!(bits(&norm.read().unwrap()), [value.to_bits()]);
            assert_eq!(bits(&clip.read().unwrap()), [factor.to_bits()]);
            assert_eq!(flag.read().unwrap(), [u32::from(flags != [0, 0])]);
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_raises_the_flag() {
    let Some(rig) = rig() else { return };
    for bad in [f32::NAN, f32::INFINITY, 1e30] {
        let mut gradient = numbers(1, 10_000);
        gradient[7777] = bad;
        let (g, partials) = (rig.upload(&gradient), rig.poisoned::<f32>(3));
        rig.kernels.sum_squares(&rig.stream, Gradient::F32(g.span()), 1.0, partials.span()).unwrap();
        let (norm, clip, flag) = (rig.poisoned::<f32>(1), rig.poisoned::<f32>(1), rig.upload(&[0u32]));
        let settled = Settled { norm: norm.span(), clip: clip.span(), flag: flag.span() };
        let none = rig.upload(&[0u32]);
        rig.kernels.settle(&rig.stream, partials.span(), none.span(), 1.0, &settled).unwrap();
        assert_eq!(flag.read().unwrap(), [1]);
    }
}

struct Run {
    table: Vec<f32>,
    device_table: Buffer<f32>,
    counter: Buffer<u64>,
    clip: Buffer<f32>,
    unless: Buffer<u32>,
    gradient: Buffer<f32>,
    weight: Buffer<f32>,
    first: Buffer<f32>,
    second: Buffer<f32>,
}

const CLIP: f32 = 0.83;
const FACTOR: f32 = 1.0 / 3.0;
const DECAY: f64 = 0.1;

impl Run {
    fn new(rig: &Rig, len: usize) -> Run {
        let table: Vec<f32> = (1..=6)
            .flat_map(|t| {
                let rate = 3e-3 / f64::from(t);
                [rate, rate / (1.0 - 0.9f64.powi(t)), (1.0 - 0.95f64.powi(t)).sqrt()].map(|x| x as f32)
            })
            .collect();
        Run {
            device_table: rig.upload(&table),
            table,
            counter: rig.upload(&[0]),
            clip: rig.upload(&[CLIP]),
            unless: rig.upload(&[0]),
            gradient: rig.poisoned(len),
            weight: rig.upload(&numbers(1, len)),
            first: rig.upload(&vec![0.0; len]),
            second: rig.upload(&vec![0.0; len]),
        }
    }

    fn adam(&self) -> AdamW {
        AdamW {
            table: self.device_table.span(),
            counter: self.counter.span(),
            clip: self.clip.span(),
            unless: self.unless.span(),
            factor: FACTOR,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: DECAY,
        }
    }

    fn parameter(&self) -> Parameter {
        Parameter {
            gradient: Gradient::F32(self.gradient.span()),
            weight: self.weight.span(),
            first: self.first.span(),
            second: self.second.span(),
        }
    }

    fn state(&self) -> [Vec<u32>; 3] {
        [&self.weight, &self.first, &self.second].map(|buffer| bits(&buffer.read().unwrap()))
    }
}

/// A step in the order that the definition has.
fn reference(table: &[f32], t: usize, g: f32, w: &mut f32, m: &mut f32, v: &mut f32) {
    let [rate, step_size, root] = [table[3 * t], table[3 * t + 1], table[3 * t + 2]];
    let g = g * FACTOR * CLIP;
    *m += (1.0 - 0.9f64) as f32 * (g - *m);
    *v = *v * 0.95f64 as f32 + (1.0 - 0.95f64) as f32 * g * g;
    let denominator = v.sqrt() / root + 1e-8;
    *w = *w * (1.0 - f64::from(rate) * DECAY) as f32 - step_size * *m / denominator;
}

#[test]
fn steps_equal_the_definition_with_and_without_codes() {
    let Some(rig) = rig() else { return };
    for shape in SHAPES {
        let len = shape.0 * shape.1;
        let (mut flat, mut tiled) = (Run::new(rig, len), Run::new(rig, len));
        let (mut w, mut m, mut v) = (numbers(1, len), vec![0f32; len], vec![0f32; len]);
        let copy = rig.poisoned::<bf16>(len);
        let (codes, transposed) = (rig.poisoned::<u8>(len), rig.poisoned::<u8>(len));
        let (scale, scale_inv) = (rig.upload(&[211.3f32]), rig.poisoned::<f32>(1));
        for t in 0..6 {
            let amax = rig.upload(&[0.0f32]);
            let codes_out = Codes {
                codes: codes.span(),
                transposed: Some(Transposed::Alone(transposed.span())),
                scale: scale.span(),
                scale_inv: scale_inv.span(),
                amax: Some(amax.span()),
            };
            let gradient = numbers(100 + t as u64, len);
            flat.gradient.write(&gradient).unwrap();
            tiled.gradient.write(&gradient).unwrap();
            rig.kernels.adamw(&rig.stream, &flat.adam(), &flat.parameter(), Some(copy.span())).unwrap();
            let outputs = Outputs::codes(codes_out);
            rig.kernels.adamw_cast(&rig.stream, &tiled.adam(), &tiled.parameter(), shape, &outputs).unwrap();
            for i in 0..len {
                reference(&flat.table, t, gradient[i], &mut w[i], &mut m[i], &mut v[i]);
            }
            assert_eq!(flat.state(), [bits(&w), bits(&m), bits(&v)], "{shape:?}, step {t}");
            assert_eq!(tiled.state(), flat.state());
            let narrow: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
            assert_eq!(bf16_bits(&copy.read().unwrap()), bf16_bits(&narrow));
            let want: Vec<u8> = w.iter().map(|w| Fp8::E4M3.encode(w * 211.3)).collect();
            assert_eq!(codes.read().unwrap(), want);
            let want: Vec<u8> = (0..len).map(|i| want[i % shape.0 * shape.1 + i / shape.0]).collect();
            assert_eq!(transposed.read().unwrap(), want);
            assert_eq!(amax.read().unwrap(), [w.iter().fold(0f32, |a, w| a.max(w.abs()))]);
            for run in [&flat, &tiled] {
                rig.kernels.advance(&rig.stream, run.counter.span(), Some(run.unless.span())).unwrap();
                assert_eq!(run.counter.read().unwrap(), [t as u64 + 1]);
            }
        }
    }
}

/// Sums of squares, and what a step makes of weights and moments, of a gradient.
fn outcome(rig: &Rig, run: &Run, gradient: Gradient, shape: (usize, usize), cast: bool) -> ([Vec<u32>; 3], Vec<u32>) {
    let len = shape.0 * shape.1;
    let partials = rig.poisoned::<f32>(len.div_ceil(NORM_PIECE));
    rig.kernels.sum_squares(&rig.stream, gradient, FACTOR, partials.span()).unwrap();
    let parameter = Parameter { gradient, ..run.parameter() };
    if cast {
        let (codes, one) = (rig.poisoned::<u8>(len), rig.upload(&[1.0f32]));
        let (scale_inv, amax) = (rig.poisoned::<f32>(1), None);
        let outputs = Outputs::codes(Codes {
            codes: codes.span(),
            transposed: None,
            scale: one.span(),
            scale_inv: scale_inv.span(),
            amax,
        });
        rig.kernels.adamw_cast(&rig.stream, &run.adam(), &parameter, shape, &outputs).unwrap();
    } else {
        rig.kernels.adamw(&rig.stream, &run.adam(), &parameter, None).unwrap();
    }
    (run.state(), bits(&partials.read().unwrap()))
}

#[test]
fn gradients_in_bf16_give_the_bits_of_their_values() {
    let Some(rig) = rig() else { return };
    // The last one has more pieces than are summed by a block each.
    for shape in SHAPES.into_iter().chain([(2057, 2051)]) {
        let len = shape.0 * shape.1;
        let narrow: Vec<bf16> = numbers(5, len).into_iter().map(bf16::from_f32).collect();
        let wide: Vec<f32> = narrow.iter().map(|x| x.to_f32()).collect();
        let (narrow, wide) = (rig.upload(&narrow), rig.upload(&wide));
        for cast in [false, true] {
            let of = |gradient| outcome(rig, &Run::new(rig, len), gradient, shape, cast);
            assert_eq!(of(Gradient::Bf16(narrow.span())), of(Gradient::F32(wide.span())), "{shape:?}, cast: {cast}");
        }
    }
}

#[test]
fn rows_without_a_gradient_are_not_read() {
    let Some(rig) = rig() else { return };
    // Rows that are not a multiple of 256 are read all the same, and must be what they are said to be.
    // The last one has more pieces than are summed by a block each.
    for (shape, skipped) in
        [((33, 512), true), ((70, 256), true), ((9, 768), true), ((33, 72), false), ((6001, 768), true)]
    {
        let len = shape.0 * shape.1;
        let touched: Vec<u32> = (0..shape.0).map(|row| u32::from(row % 5 == 1 || row == 8)).collect();
        let is_touched = |i: usize| touched[i / shape.1] != 0;
        let dense: Vec<f32> =
            numbers(6, len).into_iter().enumerate().map(|(i, x)| if is_touched(i) { x } else { 0.0 }).collect();
        let sparse: Vec<f32> =
            dense.iter().enumerate().map(|(i, x)| if is_touched(i) || !skipped { *x } else { f32::NAN }).collect();
        let [dense, sparse] = [&dense, &sparse].map(|values| rig.upload(values));
        let touched = rig.upload(&touched);
        let rows = Rows { touched: touched.span(), columns: shape.1 };
        let of = |gradient| outcome(rig, &Run::new(rig, len), gradient, shape, false);
        assert_eq!(of(Gradient::Rows(sparse.span(), rows)), of(Gradient::F32(dense.span())), "{shape:?}");
    }
}

#[test]
fn a_raised_flag_leaves_everything_as_it_was() {
    let Some(rig) = rig() else { return };
    let shape = (64, 128);
    let len = shape.0 * shape.1;
    let mut run = Run::new(rig, len);
    run.gradient.write(&numbers(7, len)).unwrap();
    run.unless.write(&[2]).unwrap();
    let (codes, transposed) = (rig.upload(&vec![3u8; len]), rig.upload(&vec![4u8; len]));
    let (scale, scale_inv, amax) = (rig.upload(&[2.0f32]), rig.upload(&[5.0f32]), rig.upload(&[0.0f32]));
    let outputs = Outputs::codes(Codes {
        codes: codes.span(),
        transposed: Some(Transposed::Alone(transposed.span())),
        scale: scale.span(),
        scale_inv: scale_inv.span(),
        amax: Some(amax.span()),
    });
    let before = run.state();
    rig.kernels.adamw(&rig.stream, &run.adam(), &run.parameter(), None).unwrap();
    rig.kernels.adamw_cast(&rig.stream, &run.adam(), &run.parameter(), shape, &outputs).unwrap();
    rig.kernels.advance(&rig.stream, run.counter.span(), Some(run.unless.span())).unwrap();
    assert_eq!(run.state(), before);
    assert_eq!((codes.read().unwrap(), transposed.read().unwrap()), (vec![3; len], vec![4; len]));
    assert_eq!((scale_inv.read().unwrap(), amax.read().unwrap()), (vec![5.0], vec![0.0]));
    assert_eq!(run.counter.read().unwrap(), [0]);
}
