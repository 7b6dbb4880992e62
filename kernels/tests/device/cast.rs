//! The fused cast: codes, transposed codes, amax, scale_inv, flag and column sums, bit for bit.

use half::bf16;
use qeffect_core::fp8::{self, Fp8};
use qeffect_kernels::Buffer;
use qeffect_kernels::launch::cast::{
    Codes, ColumnScratch, ColumnSums, HEALTH_WORDS, LossGradient, Normalised, Outputs, TILE, Transposed, partial_sums,
};

use crate::rig::{BF16, Rig, SHAPES, bf16_bits, bits, close, floats, numbers, rig, rounded, values, within};

/// Everything that a cast can give, poisoned.
struct Made {
    shape: (usize, usize),
    values: Buffer<bf16>,
    codes: Buffer<u8>,
    transposed: Buffer<u8>,
    scale: Buffer<f32>,
    scale_inv: Buffer<f32>,
    amax: Buffer<f32>,
    flag: Buffer<u32>,
    partial: Buffer<f32>,
    finished: Buffer<u32>,
    sums: Buffer<f32>,
}

impl Made {
    fn new(rig: &Rig, shape: (usize, usize), scale: f32, staged: f32) -> Made {
        let len = shape.0 * shape.1;
        Made {
            shape,
            values: rig.poisoned(len),
            codes: rig.poisoned(len),
            transposed: rig.poisoned(len),
            scale: rig.upload(&[scale]),
            scale_inv: rig.poisoned(1),
            amax: rig.upload(&[staged]),
            flag: rig.upload(&[0]),
            partial: rig.poisoned(partial_sums(shape.0, shape.1)),
            finished: rig.upload(&vec![0; shape.1.div_ceil(TILE)]),
            sums: rig.poisoned(shape.1),
        }
    }

    fn outputs(&self) -> Outputs {
        Outputs {
            values: Some(self.values.span()),
            codes: Some(Codes {
                codes: self.codes.span(),
                transposed: Some(Transposed::Alone(self.transposed.span())),
                scale: self.scale.span(),
                scale_inv: self.scale_inv.span(),
                amax: Some(self.amax.span()),
            }),
            column_sums: Some(ColumnSums {
                out: self.sums.span(),
                scratch: ColumnScratch { partial: self.partial.span(), finished: self.finished.span() },
            }),
            flag: Some(self.flag.span()),
        }
    }

    /// Compares with what follows from the values that were cast.
    fn check(&self, format: Fp8, values: &[f32], staged: f32) {
        let (rows, columns) = self.shape;
        let scale = self.scale.read().unwrap()[0];
        let codes: Vec<u8> = values.iter().map(|x| format.encode(x * scale)).collect();
        assert_eq!(self.codes.read().unwrap(), codes, "{:?}", self.shape);
        let transposed: Vec<u8> = (0..rows * columns).map(|i| codes[i % rows * columns + i / rows]).collect();
        assert_eq!(self.transposed.read().unwrap(), transposed, "{:?}", self.shape);
        assert_eq!(bits(&self.scale_inv.read().unwrap()), [(1.0 / scale).to_bits()]);
        let amax = values.iter().filter(|x| !x.is_nan()).map(|x| x.abs()).fold(staged, f32::max);
        assert_eq!(bits(&self.amax.read().unwrap()), [amax.to_bits()]);
        let finite = values.iter().all(|x| x.is_finite());
        assert_eq!(self.flag.read().unwrap(), [u32::from(!finite)]);
        if finite {
            assert_eq!(bits(&self.sums.read().unwrap()), bits(&column_sums(values, rows, columns)));
            assert!(self.finished.read().unwrap().iter().all(|count| *count == 0));
        }
    }
}

/// In the order of the kernel: 4 rows, 16 of those, tiles.
fn column_sums(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let at = |row: usize, column: usize| if row < rows { values[row * columns + column] } else { 0.0 };
    (0..columns)
        .map(|column| {
            let tiles = (0..rows.div_ceil(64)).map(|tile| {
                let quads = (0..16).map(|quad| {
                    let row = tile * 64 + quad * 4;
                    ((at(row, column) + at(row + 1, column)) + at(row + 2, column)) + at(row + 3, column)
                });
                quads.reduce(|a, b| a + b).unwrap()
            });
            tiles.reduce(|a, b| a + b).unwrap()
        })
        .collect()
}

#[test]
fn both_layouts_amax_and_column_sums_are_exact() {
    let Some(rig) = rig() else { return };
    for (index, shape) in SHAPES.into_iter().enumerate() {
        for format in [Fp8::E4M3, Fp8::E5M2] {
            let x = values(index as u64, shape.0 * shape.1);
            let made = Made::new(rig, shape, 3.7, 0.0);
            rig.kernels.cast(&rig.stream, format, rig.upload(&x).span(), shape, &made.outputs()).unwrap();
            made.check(format, &floats(&x), 0.0);
            assert_eq!(bf16_bits(&made.values.read().unwrap()), bf16_bits(&x));
        }
        let x = numbers(index as u64, shape.0 * shape.1);
        let made = Made::new(rig, shape, 300.1, 0.5);
        let source = rig.upload(&x);
        rig.kernels.cast_master(&rig.stream, source.span(), shape, &made.outputs()).unwrap();
        made.check(Fp8::E4M3, &x, 0.5);
    }
}

#[test]
fn every_bf16_is_encoded_as_the_host_does() {
    let Some(rig) = rig() else { return };
    let x: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    for format in [Fp8::E4M3, Fp8::E5M2] {
        for scale in [1.0, 448.0 / 3.0, f32::MAX, f32::MIN_POSITIVE / 8.0, 1e20, 1e-20] {
            let made = Made::new(rig, (256, 256), scale, 0.0);
            let source = rig.upload(&x);
            rig.kernels.cast(&rig.stream, format, source.span(), (256, 256), &made.outputs()).unwrap();
            made.check(format, &floats(&x), 0.0);
        }
    }
}

/// Casts every `step`-th f32, by bits, and compares with the host's codes.
fn sweep(step: usize) {
    const CHUNK: usize = 1 << 22;
    let Some(rig) = rig() else { return };
    let (source, codes) = (rig.poisoned::<f32>(CHUNK), rig.poisoned::<u8>(CHUNK));
    let (scale, scale_inv) = (rig.upload(&[1.0f32]), rig.poisoned::<f32>(1));
    let outputs = Outputs::codes(Codes {
        codes: codes.span(),
        transposed: None,
        scale: scale.span(),
        scale_inv: scale_inv.span(),
        amax: None,
    });
    let mut source = source;
    for start in (0..1usize << 32).step_by(CHUNK * step) {
        let x: Vec<f32> = (0..CHUNK).map(|i| f32::from_bits((start + i * step) as u32)).collect();
        source.write(&x).unwrap();
        rig.kernels.cast_master(&rig.stream, source.span(), (2048, CHUNK / 2048), &outputs).unwrap();
        let mut want = vec![0; CHUNK];
        fp8::E4m3::encode_scaled(&x, 1.0, &mut want);
        assert!(codes.read().unwrap() == want, "from {start:#x} on");
    }
}

#[test]
fn f32_is_encoded_as_the_host_does() {
    sweep(257);
}

#[test]
#[ignore = "half a minute in a release build, minutes in others"]
fn every_f32_is_encoded_as_the_host_does() {
    sweep(1);
}

// case B44: the largest scale has a subnormal inverse, which must not be flushed to zero.
#[test]
fn a_subnormal_inverse_is_kept() {
    let Some(rig) = rig() else { return };
    let made = Made::new(rig, (1, 16), f32::MAX, 0.0);
    let source = rig.upload(&[bf16::ZERO; 16]);
    rig.kernels.cast(&rig.stream, Fp8::E4M3, source.span(), (1, 16), &made.outputs()).unwrap();
    assert_eq!(made.scale_inv.read().unwrap()[0].to_bits(), 2.938_736e-39f32.to_bits());
    assert_eq!(made.codes.read().unwrap(), [0; 16]);
}

#[test]
fn what_is_not_finite_raises_the_flag_and_stays_out_of_amax_if_it_is_nan() {
    let Some(rig) = rig() else { return };
    for (bad, at) in [(f32::NAN, 0), (f32::INFINITY, 4095), (f32::NEG_INFINITY, 2000), (-f32::NAN, 77)] {
        let mut x = values(9, 64 * 64);
        x[at] = bf16::from_f32(bad);
        let made = Made::new(rig, (64, 64), 1.0, 0.0);
        let source = rig.upload(&x);
        rig.kernels.cast(&rig.stream, Fp8::E5M2, source.span(), (64, 64), &made.outputs()).unwrap();
        made.check(Fp8::E5M2, &floats(&x), 0.0);
        let code = made.codes.read().unwrap()[at];
        assert_eq!(
            code,
            if bad.is_nan() {
                fp8::NAN
            } else if bad > 0.0 {
                0x7B
            } else {
                0xFB
            }
        );
    }
}

#[test]
fn two_casts_of_one_window_fold_their_amax() {
    let Some(rig) = rig() else { return };
    let (small, large) = (rig.upload(&[bf16::from_f32(-2.0); 64]), rig.upload(&[bf16::from_f32(8.0); 64]));
    let made = Made::new(rig, (8, 8), 1.0, 0.0);
    for (source, amax) in [(&small, 2.0), (&large, 8.0), (&small, 8.0)] {
        rig.kernels.cast(&rig.stream, Fp8::E4M3, source.span(), (8, 8), &made.outputs()).unwrap();
        assert_eq!(made.amax.read().unwrap(), [amax]);
    }
}

/// x/2 (1 + tanh u), written so that 1 and tanh u do not cancel.
fn gelu(x: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
    x / (1.0 + (-2.0 * u).exp())
}

fn gelu_slope(x: f64) -> f64 {
    let (factor, cubic) = ((2.0 / std::f64::consts::PI).sqrt(), 0.044715);
    let t = (factor * (x + cubic * x.powi(3))).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * factor * (1.0 + 3.0 * cubic * x * x)
}

/// An element, rounded to bf16 after a few float operations, of which exponentials are within 2e-5.
const ELEMENT: f64 = BF16 + 3e-5;
/// What functions that are smaller may be: exponentials end at the smallest normal number.
const NOTHING: f64 = 1e-30;
/// A slope is a sum whose terms may cancel, with factors 1 - gate that are exact to 2^-24 and are multiplied by at most 40 where
/// they are not zero.
const SLOPE: f64 = 1e-5;

#[test]
fn fused_producers_round_first_and_equal_their_definitions() {
    let Some(rig) = rig() else { return };
    for (index, shape) in SHAPES.into_iter().enumerate() {
        let len = shape.0 * shape.1;
        let (x, dy) = (values(index as u64, len), values(50 + index as u64, len));
        let (source, upper) = (rig.upload(&x), rig.upload(&dy));
        let wide: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();

        let made = Made::new(rig, shape, 5.3, 0.0);
        rig.kernels.cast_gelu(&rig.stream, source.span(), shape, &made.outputs()).unwrap();
        let out = floats(&made.values.read().unwrap());
        made.check(Fp8::E4M3, &out, 0.0);
        let want: Vec<f64> = wide.iter().map(|x| gelu(*x)).collect();
        close("gelu", out.iter().copied(), &want, BF16);
        within("gelu", out, &want, |i| ELEMENT * want[i].abs() + NOTHING);

        let made = Made::new(rig, shape, 900.0, 0.0);
        rig.kernels.cast_gelu_backward(&rig.stream, source.span(), upper.span(), shape, &made.outputs()).unwrap();
        let out = floats(&made.values.read().unwrap());
        made.check(Fp8::E5M2, &out, 0.0);
        let want: Vec<f64> = wide.iter().zip(&dy).map(|(x, dy)| dy.to_f64() * gelu_slope(*x)).collect();
        close("gelu backward", out.iter().copied(), &want, BF16);
        within("gelu backward", out, &want, |i| ELEMENT * want[i].abs() + SLOPE * dy[i].to_f64().abs());

        let (mean, rstd) = (numbers(3, shape.0), numbers(4, shape.0));
        let (gamma, beta) = (numbers(5, shape.1), numbers(6, shape.1));
        let of = |x: &[f32]| rig.upload(x);
        let (m, r, g, b) = (of(&mean), of(&rstd), of(&gamma), of(&beta));
        let normal = Normalised {
            x: source.span(),
            mean: Some(m.span()),
            rstd: r.span(),
            gamma: g.span(),
            beta: Some(b.span()),
        };
        let made = Made::new(rig, shape, 2.9, 0.0);
        rig.kernels.cast_norm(&rig.stream, &normal, shape, &made.outputs()).unwrap();
        let out = floats(&made.values.read().unwrap());
        made.check(Fp8::E4M3, &out, 0.0);
        let x = floats(&x);
        let want = x.iter().enumerate().map(|(i, x)| {
            let (row, column) = (i / shape.1, i % shape.1);
            rounded((x - mean[row]) * rstd[row] * gamma[column] + beta[column])
        });
        assert_eq!(bits(&out), bits(&want.collect::<Vec<_>>()));

        let normal = Normalised { mean: None, beta: None, ..normal };
        let made = Made::new(rig, shape, 2.9, 0.0);
        rig.kernels.cast_norm(&rig.stream, &normal, shape, &made.outputs()).unwrap();
        let out = floats(&made.values.read().unwrap());
        made.check(Fp8::E4M3, &out, 0.0);
        let want = x.iter().enumerate().map(|(i, x)| rounded(x * rstd[i / shape.1] * gamma[i % shape.1]));
        assert_eq!(bits(&out), bits(&want.collect::<Vec<_>>()), "RMS norm");
    }
}

#[test]
fn silu_and_swiglu_equal_their_definitions() {
    let Some(rig) = rig() else { return };
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let slope = |x: f64| {
        let gate = 1.0 / (1.0 + (-x).exp());
        gate * (1.0 + x * (1.0 - gate))
    };
    for (index, shape) in [(1, 8), (17, 24), (130, 272), (64, 64), (33, 520)].into_iter().enumerate() {
        let (rows, columns) = shape;
        let len = rows * columns;
        let (x, dy) = (values(index as u64, 2 * len), values(50 + index as u64, len));
        let (source, upper) = (rig.upload(&x), rig.upload(&dy));
        let first = source.span().part(0..len).unwrap();
        let wide: Vec<f64> = x.iter().map(|x| x.to_f64()).collect();
        let dy: Vec<f64> = dy.iter().map(|x| x.to_f64()).collect();
        // Each with the largest term of its sum.
        let check = |what: &str, format, shape, wanted: Vec<(f64, f64)>, run: &dyn Fn(&Outputs)| {
            let (want, terms): (Vec<f64>, Vec<f64>) = wanted.into_iter().unzip();
            let made = Made::new(rig, shape, 7.7, 0.0);
            run(&made.outputs());
            let out = floats(&made.values.read().unwrap());
            made.check(format, &out, 0.0);
            close(what, out.iter().copied(), &want, BF16);
            within(what, out, &want, |i| ELEMENT * want[i].abs() + SLOPE * terms[i].abs() + NOTHING);
        };
        check("silu", Fp8::E4M3, shape, wide[..len].iter().map(|x| (silu(*x), 0.0)).collect(), &|outputs| {
            rig.kernels.cast_silu(&rig.stream, first, shape, outputs).unwrap();
        });
        let want = (0..len).map(|i| (dy[i] * slope(wide[i]), dy[i])).collect();
        check("silu backward", Fp8::E5M2, shape, want, &|outputs| {
            rig.kernels.cast_silu_backward(&rig.stream, first, upper.span(), shape, outputs).unwrap();
        });
        let pair = |i: usize| {
            let at = i / columns * 2 * columns + i % columns;
            (wide[at], wide[at + columns])
        };
        let want = (0..len).map(pair).map(|(gate, up)| (silu(gate) * up, 0.0)).collect();
        check("swiglu", Fp8::E4M3, shape, want, &|outputs| {
            rig.kernels.cast_swiglu(&rig.stream, source.span(), shape, outputs).unwrap();
        });
        let want = (0..2 * len)
            .map(|at| {
                let (row, column) = (at / (2 * columns), at % (2 * columns));
                let i = row * columns + column % columns;
                let (gate, up) = pair(i);
                match column < columns {
                    true => (dy[i] * up * slope(gate), dy[i] * up),
                    false => (dy[i] * silu(gate), 0.0),
                }
            })
            .collect();
        check("swiglu backward", Fp8::E5M2, (rows, 2 * columns), want, &|outputs| {
            rig.kernels.cast_swiglu_backward(&rig.stream, source.span(), upper.span(), shape, outputs).unwrap();
        });
    }
    let source = rig.upload(&[bf16::ONE; 24]);
    let made = Made::new(rig, (1, 12), 1.0, 0.0);
    assert!(rig.kernels.cast_swiglu(&rig.stream, source.span(), (1, 12), &made.outputs()).is_err());
}

#[test]
fn health_counts_what_a_cast_loses() {
    let Some(rig) = rig() else { return };
    for (format, scale) in [(Fp8::E4M3, 40.0f32), (Fp8::E5M2, 3e4), (Fp8::E4M3, 1e-3)] {
        let mut x = values(5, 100_003);
        x[7] = bf16::NAN;
        x[8] = bf16::INFINITY;
        x[9] = bf16::ZERO;
        let (source, factor, counts) = (rig.upload(&x), rig.upload(&[scale]), rig.upload(&[0u64; HEALTH_WORDS]));
        rig.kernels.health(&rig.stream, format, source.span(), factor.span(), counts.span()).unwrap();
        let count = |f: &dyn Fn(f32) -> bool| x.iter().filter(|x| f(x.to_f32())).count() as u64;
        let want = [
            x.len() as u64,
            count(&|x| x.is_finite() && (x * scale).abs() > format.max()),
            count(&|x| x != 0.0 && format.encode(x * scale) & 0x7F == 0),
            2,
            u64::from(f32::INFINITY.to_bits()),
            1,
        ];
        assert_eq!(counts.read().unwrap(), want);
        assert!(want[1] + want[2] > 0, "the case is not empty");
        // Masters, and counts that are added to.
        (x[7], x[8]) = (bf16::ZERO, bf16::ONE);
        let masters: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let (masters, counts) = (rig.upload(&masters), rig.upload(&[1u64; HEALTH_WORDS]));
        rig.kernels.health_master(&rig.stream, format, masters.span(), factor.span(), counts.span()).unwrap();
        let (of_ones, of_zeros) = ((scale > format.max()) as u64, (format.encode(scale) & 0x7F == 0) as u64);
        let amax = x.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
        let want = [want[0] + 1, want[1] + of_ones + 1, want[2] + of_zeros + 1, 1, u64::from(amax.to_bits()), 2];
        assert_eq!(counts.read().unwrap(), want);
    }
}

#[test]
fn the_gradient_of_the_loss_is_softmax_minus_onehot() {
    let Some(rig) = rig() else { return };
    for shape in [(3, 17), (64, 256), (70, 1000), (256, 4096)] {
        let (rows, vocabulary) = shape;
        let logits: Vec<bf16> = numbers(8, rows * vocabulary).iter().map(|x| bf16::from_f32(x * 6.0)).collect();
        let targets: Vec<u32> = (0..rows).map(|row| (row * 7919 % vocabulary) as u32).collect();
        let lse: Vec<f32> = logits
            .chunks(vocabulary)
            .map(|row| row.iter().map(|x| x.to_f64().exp()).sum::<f64>().ln() as f32)
            .collect();
        let (l, t, s) = (rig.upload(&logits), rig.upload(&targets), rig.upload(&lse));
        let factor = 16384.0 / rows as f32;
        let loss = LossGradient { logits: l.span(), targets: t.span(), lse: s.span(), factor };
        let made = Made::new(rig, shape, 0.7, 0.0);
        rig.kernels.cast_loss(&rig.stream, &loss, shape, &made.outputs()).unwrap();
        let out = floats(&made.values.read().unwrap());
        made.check(Fp8::E5M2, &out, 0.0);
        let onehot = |i: usize| f64::from(u8::from(i % vocabulary == targets[i / vocabulary] as usize));
        let share = |i: usize| (logits[i].to_f64() - f64::from(lse[i / vocabulary])).exp();
        let want: Vec<f64> = (0..rows * vocabulary).map(|i| (share(i) - onehot(i)) * f64::from(factor)).collect();
        close("dlogits", out.iter().copied(), &want, BF16);
        // Exponents of up to 20 are exact to 2^-19; at the target the difference may be much smaller than both.
        within("dlogits", out, &want, |i| ELEMENT * want[i].abs() + 4e-6 * f64::from(factor) * onehot(i));
    }
}

#[test]
fn amax_alone_covers_every_element() {
    let Some(rig) = rig() else { return };
    for len in [1, 7, 8, 1000, 300_001] {
        for at in [0, len / 2, len - 1] {
            let mut x = numbers(2, len);
            x[at] = -7.25;
            let (amax, flag) = (rig.upload(&[0.0f32]), rig.upload(&[0u32]));
            let source = rig.upload(&x);
            rig.kernels.amax_master(&rig.stream, source.span(), amax.span(), Some(flag.span())).unwrap();
            assert_eq!((amax.read().unwrap(), flag.read().unwrap()), (vec![7.25], vec![0]));
            let mut x: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            x[at] = bf16::NAN;
            let source = rig.upload(&x);
            let amax = rig.upload(&[0.0f32]);
            rig.kernels.amax(&rig.stream, source.span(), amax.span(), Some(flag.span())).unwrap();
            assert!(amax.read().unwrap()[0] <= 1.0);
            assert_eq!(flag.read().unwrap(), [1]);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(rig) = rig() else { return };
    let made = Made::new(rig, (8, 8), 1.0, 0.0);
    let x = rig.upload(&[bf16::ONE; 65]);
    let fault = rig.kernels.cast(&rig.stream, Fp8::E4M3, x.span(), (8, 8), &made.outputs()).unwrap_err();
    assert_eq!(fault.to_string(), "cast_bf16_e4m3: `x` has 65 elements, the shape needs 64");
    let shifted = x.span().part(1..65).unwrap();
    let fault = rig.kernels.cast(&rig.stream, Fp8::E4M3, shifted, (8, 8), &made.outputs()).unwrap_err();
    assert!(fault.to_string().ends_with("is no multiple of 16"), "{fault}");
}
