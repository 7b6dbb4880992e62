//! Layer norm against float64.

use half::bf16;
use qeffect_core::fp8::Fp8;
use qeffect_kernels::launch::cast::ColumnSums;
use qeffect_kernels::launch::cast::{Codes, ColumnScratch, Normalised, Outputs, Transposed, partial_sums};
use qeffect_kernels::launch::norm::{DownColumns, NormGradient, Normal, Residual, Statistics};

use crate::rig::{BF16, bf16_bits, bits, close, floats, numbers, rig, rounded, within};

/// Rows that fit into registers, that do not, and odd ones.
const SHAPES: [(usize, usize); 11] = [
    (1, 1),
    (3, 7),
    (5, 64),
    (33, 130),
    (256, 512),
    (64, 4096),
    (7, 11008),
    (2, 16392),
    (12, 2056),
    (516, 40),
    (259, 200),
];
/// What statistics are off by, and what is made with them: sums in floats, each of few numbers.
const FLOATS: f64 = 3e-5;

struct Reference {
    mean: Vec<f64>,
    rstd: Vec<f64>,
}

fn statistics(x: &[f32], columns: usize) -> Reference {
    let (mut mean, mut rstd) = (Vec::new(), Vec::new());
    for row in x.chunks(columns) {
        let center = row.iter().map(|x| f64::from(*x)).sum::<f64>() / columns as f64;
        let variance = row.iter().map(|x| (f64::from(*x) - center).powi(2)).sum::<f64>() / columns as f64;
        mean.push(center);
        rstd.push(1.0 / (variance + 1e-5).sqrt());
    }
    Reference { mean, rstd }
}

fn mean_of(columns: usize, term: impl Fn(usize) -> f64) -> f64 {
    (0..columns).map(term).sum::<f64>() / columns as f64
}

#[test]
fn forward_and_backward_are_within_bounds_of_float64() {
    let Some(rig) = rig() else { return };
    for (rows, columns) in SHAPES {
        let len = rows * columns;
        let of = |seed, scale: f32| -> Vec<bf16> {
            numbers(seed, len).iter().map(|x| bf16::from_f32(x * scale + 0.5)).collect()
        };
        let (x, other, dy, bypass) = (of(1, 3.0), of(2, 1.0), of(3, 1.0), of(4, 1.0));
        let (gamma, beta) = (numbers(5, columns), numbers(6, columns));
        let (dx_in, g, b) = (rig.upload(&x), rig.upload(&gamma), rig.upload(&beta));
        let (o, total, y) = (rig.upload(&other), rig.poisoned::<bf16>(len), rig.poisoned::<bf16>(len));
        let (mean, rstd) = (rig.poisoned::<f32>(rows), rig.poisoned::<f32>(rows));
        let saved = Statistics { mean: Some(mean.span()), rstd: rstd.span() };
        let shape = (rows, columns);
        let residual = Residual { other: o.span(), total: total.span() };
        let normal = Normal { gamma: g.span(), beta: Some(b.span()), y: y.span() };
        rig.kernels.layer_norm_forward(&rig.stream, dx_in.span(), shape, Some(residual), saved, Some(normal)).unwrap();

        // The residual sum is exact, then everything follows from it.
        let input: Vec<f32> = floats(&x).iter().zip(floats(&other)).map(|(a, b)| rounded(a + b)).collect();
        assert_eq!(bits(&floats(&total.read().unwrap())), bits(&input));
        let want = statistics(&input, columns);
        close("mean", mean.read().unwrap(), &want.mean, 1e-6);
        close("rstd", rstd.read().unwrap(), &want.rstd, 1e-5);
        let size = |row: usize| mean_of(columns, |j| f64::from(input[row * columns + j]).abs());
        within("mean", mean.read().unwrap(), &want.mean, |row| 5e-6 * size(row));
        within("rstd", rstd.read().unwrap(), &want.rstd, |row| FLOATS * want.rstd[row]);
        let normal_at = |i: usize| (f64::from(input[i]) - want.mean[i / columns]) * want.rstd[i / columns];
        let out: Vec<f64> =
            (0..len).map(|i| normal_at(i) * f64::from(gamma[i % columns]) + f64::from(beta[i % columns])).collect();
        close("y", floats(&y.read().unwrap()), &out, BF16);
        // The mean may be larger than what is left when it is taken off.
        let parts = |i: usize| {
            let (gamma, beta) = (f64::from(gamma[i % columns]), f64::from(beta[i % columns]));
            (normal_at(i).abs() + 1.0) * gamma.abs() + beta.abs()
        };
        within("y", floats(&y.read().unwrap()), &out, |i| BF16 * out[i].abs() + FLOATS * parts(i));

        // Without a residual: the same bits from the sum.
        let (mean2, rstd2, y2) = (rig.poisoned::<f32>(rows), rig.poisoned::<f32>(rows), rig.poisoned::<bf16>(len));
        let again = Statistics { mean: Some(mean2.span()), rstd: rstd2.span() };
        let normal = Normal { gamma: g.span(), beta: Some(b.span()), y: y2.span() };
        rig.kernels.layer_norm_forward(&rig.stream, total.span(), shape, None, again, Some(normal)).unwrap();
        assert_eq!(bits(&mean2.read().unwrap()), bits(&mean.read().unwrap()));
        assert_eq!(bits(&rstd2.read().unwrap()), bits(&rstd.read().unwrap()));
        assert_eq!(bf16_bits(&y2.read().unwrap()), bf16_bits(&y.read().unwrap()));

        let (d, by) = (rig.upload(&dy), rig.upload(&bypass));
        let (alone, joined) = (rig.poisoned::<bf16>(len), rig.poisoned::<bf16>(len));
        for (residual, to) in [(None, &alone), (Some(by.span()), &joined)] {
            let from = NormGradient { x: total.span(), dy: d.span(), gamma: g.span(), statistics: saved, residual };
            rig.kernels.layer_norm_backward(&rig.stream, &from, shape, to.span()).unwrap();
        }
        let (mut want_dx, mut parts_dx) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let at = |j: usize| row * columns + j;
            let scaled = |j: usize| dy[at(j)].to_f64() * f64::from(gamma[j]);
            let shift = (0..columns).map(scaled).sum::<f64>() / columns as f64;
            let slope = (0..columns).map(|j| scaled(j) * normal_at(at(j))).sum::<f64>() / columns as f64;
            want_dx.extend((0..columns).map(|j| want.rstd[row] * (scaled(j) - shift - normal_at(at(j)) * slope)));
            let (all, along) =
                (mean_of(columns, |j| scaled(j).abs()), mean_of(columns, |j| (scaled(j) * normal_at(at(j))).abs()));
            let parts = |j: usize| scaled(j).abs() + all + (normal_at(at(j)).abs() + 1.0) * along;
            parts_dx.extend((0..columns).map(|j| want.rstd[row] * parts(j)));
        }
        let dx = floats(&alone.read().unwrap());
        if columns > 1 {
            close("dx", dx.iter().copied(), &want_dx, BF16);
            within("dx", dx.iter().copied(), &want_dx, |i| BF16 * want_dx[i].abs() + FLOATS * parts_dx[i]);
        }
        let sums: Vec<f32> = dx.iter().zip(floats(&bypass)).map(|(dx, by)| rounded(dx + by)).collect();
        assert_eq!(bits(&floats(&joined.read().unwrap())), bits(&sums), "fused = unfused");

        let (partial, finished) =
            (rig.poisoned::<f32>(3 * partial_sums(rows, columns)), rig.upload(&vec![0u32; columns.div_ceil(64)]));
        let scratch = ColumnScratch { partial: partial.span(), finished: finished.span() };
        let (dgamma, dbeta) = (rig.poisoned::<f32>(columns), rig.poisoned::<f32>(columns));
        let down = DownColumns { dgamma: dgamma.span(), dbeta: Some(dbeta.span()), sums: None, lines: None };
        rig.kernels.layer_norm_gradients(&rig.stream, total.span(), d.span(), shape, saved, &down, scratch).unwrap();
        let column = |f: &dyn Fn(usize) -> f64| -> Vec<f64> {
            (0..columns).map(|j| (0..rows).map(|row| f(row * columns + j)).sum()).collect()
        };
        let (want_gamma, want_beta) = (column(&|i| dy[i].to_f64() * normal_at(i)), column(&|i| dy[i].to_f64()));
        close("dgamma", dgamma.read().unwrap(), &want_gamma, 1e-5);
        close("dbeta", dbeta.read().unwrap(), &want_beta, 1e-6);
        let parts = column(&|i| dy[i].to_f64().abs() * (normal_at(i).abs() + 1.0));
        within("dgamma", dgamma.read().unwrap(), &want_gamma, |j| FLOATS * parts[j]);
        let parts = column(&|i| dy[i].to_f64().abs());
        within("dbeta", dbeta.read().unwrap(), &want_beta, |j| FLOATS * parts[j]);
    }
}

#[test]
fn a_nan_spoils_its_row_only() {
    let Some(rig) = rig() else { return };
    let mut x = vec![bf16::ONE; 3 * 64];
    x[64 + 5] = bf16::NAN;
    let (x, gamma) = (rig.upload(&x), rig.upload(&[1.0f32; 64]));
    let (mean, rstd, y) = (rig.poisoned::<f32>(3), rig.poisoned::<f32>(3), rig.poisoned::<bf16>(3 * 64));
    let statistics = Statistics { mean: Some(mean.span()), rstd: rstd.span() };
    let normal = Normal { gamma: gamma.span(), beta: Some(gamma.span()), y: y.span() };
    rig.kernels.layer_norm_forward(&rig.stream, x.span(), (3, 64), None, statistics, Some(normal)).unwrap();
    let y = y.read().unwrap();
    assert!(y.chunks(64).map(|row| row.iter().all(|y| y.is_nan())).eq([false, true, false]));
    assert!(y[0].is_finite() && y[191].is_finite());
}

#[test]
fn rms_norm_is_within_bounds_of_float64() {
    let Some(rig) = rig() else { return };
    for (rows, columns) in SHAPES {
        let (len, shape) = (rows * columns, (rows, columns));
        let of = |seed| -> Vec<bf16> { numbers(seed, len).iter().map(|x| bf16::from_f32(x * 3.0 + 0.5)).collect() };
        let (x, dy, gamma) = (of(1), of(2), numbers(3, columns));
        let (source, upper, gain) = (rig.upload(&x), rig.upload(&dy), rig.upload(&gamma));
        let (rstd, y, dx) = (rig.poisoned::<f32>(rows), rig.poisoned::<bf16>(len), rig.poisoned::<bf16>(len));
        let saved = Statistics { mean: None, rstd: rstd.span() };
        let normal = Normal { gamma: gain.span(), beta: None, y: y.span() };
        rig.kernels.layer_norm_forward(&rig.stream, source.span(), shape, None, saved, Some(normal)).unwrap();
        let from =
            NormGradient { x: source.span(), dy: upper.span(), gamma: gain.span(), statistics: saved, residual: None };
        rig.kernels.layer_norm_backward(&rig.stream, &from, shape, dx.span()).unwrap();
        let (partial, finished) =
            (rig.poisoned::<f32>(3 * partial_sums(rows, columns)), rig.upload(&vec![0u32; columns.div_ceil(64)]));
        let scratch = ColumnScratch { partial: partial.span(), finished: finished.span() };
        let dgamma = rig.poisoned::<f32>(columns);
        let (x_span, dy_span) = (source.span(), upper.span());
        let down = DownColumns { dgamma: dgamma.span(), dbeta: None, sums: None, lines: None };
        rig.kernels.layer_norm_gradients(&rig.stream, x_span, dy_span, shape, saved, &down, scratch).unwrap();

        let (mut factors, mut want_y, mut want_dx, mut parts_dx) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let [mut want_gamma, mut parts_gamma] = [(); 2].map(|()| vec![0f64; columns]);
        for (x, dy) in x.chunks(columns).zip(dy.chunks(columns)) {
            let squares = x.iter().map(|x| x.to_f64().powi(2)).sum::<f64>() / columns as f64;
            let factor = 1.0 / (squares + 1e-5).sqrt();
            let scaled = |j: usize| dy[j].to_f64() * f64::from(gamma[j]);
            let slope = (0..columns).map(|j| scaled(j) * x[j].to_f64() * factor).sum::<f64>() / columns as f64;
            let along = mean_of(columns, |j| (scaled(j) * x[j].to_f64() * factor).abs());
            factors.push(factor);
            for j in 0..columns {
                want_y.push(x[j].to_f64() * factor * f64::from(gamma[j]));
                want_dx.push(factor * (scaled(j) - x[j].to_f64() * factor * slope));
                want_gamma[j] += dy[j].to_f64() * x[j].to_f64() * factor;
                parts_gamma[j] += (dy[j].to_f64() * x[j].to_f64() * factor).abs();
                parts_dx.push(factor * (scaled(j).abs() + x[j].to_f64().abs() * factor * along));
            }
        }
        close("rstd", rstd.read().unwrap(), &factors, 1e-5);
        within("rstd", rstd.read().unwrap(), &factors, |row| FLOATS * factors[row]);
        close("y", floats(&y.read().unwrap()), &want_y, BF16);
        within("y", floats(&y.read().unwrap()), &want_y, |i| (BF16 + FLOATS) * want_y[i].abs());
        if columns > 1 {
            close("dx", floats(&dx.read().unwrap()), &want_dx, BF16);
        }
        within("dx", floats(&dx.read().unwrap()), &want_dx, |i| BF16 * want_dx[i].abs() + FLOATS * parts_dx[i]);
        close("dgamma", dgamma.read().unwrap(), &want_gamma, 1e-5);
        within("dgamma", dgamma.read().unwrap(), &want_gamma, |j| FLOATS * parts_gamma[j]);
    }
}

/// What a norm leaves behind: the sum, statistics, values, both layouts of codes, and the numbers beside them.
type Left = (Vec<u16>, [Vec<u32>; 2], Vec<u16>, [Vec<u8>; 2], [Vec<u32>; 2], Vec<u32>);

#[test]
fn a_norm_with_its_cast_in_one_pass_gives_the_bits_of_both() {
    let Some(rig) = rig() else { return };
    // With one and with two groups of eight columns per thread, whole and not; and what is done in two passes all the same.
    for (rows, columns) in [(4, 8), (8, 264), (256, 2048), (64, 2056), (132, 4096), (3, 64), (8, 4104), (12, 20)] {
        let (len, shape) = (rows * columns, (rows, columns));
        let of = |seed, scale: f32| -> Vec<bf16> {
            numbers(seed, len).iter().map(|x| bf16::from_f32(x * scale + 0.25)).collect()
        };
        let (gamma, beta) = (rig.upload(&numbers(3, columns)), rig.upload(&numbers(4, columns)));
        let (other, scale) = (rig.upload(&of(2, 1.0)), rig.upload(&[173.0f32]));
        for (with_sum, with_bias, beside, bad) in [
            (true, true, false, None),
            (true, true, true, None),
            (false, true, false, None),
            (false, false, true, None),
            (true, false, false, None),
            (true, true, true, Some(bf16::NAN)),
            (false, true, false, Some(bf16::INFINITY)),
        ] {
            let mut x = of(1, 2.0);
            if let Some(bad) = bad {
                x[len / 2 + 3] = bad;
            }
            let x = rig.upload(&x);
            let run = |one_pass: bool| -> Left {
                let (total, values) = (rig.poisoned::<bf16>(len), rig.poisoned::<bf16>(len));
                let (mean, rstd) = (rig.poisoned::<f32>(rows), rig.poisoned::<f32>(rows));
                let line = if beside { rows.next_multiple_of(16) + 32 } else { rows };
                let (codes, transposed) = (rig.poisoned::<u8>(len), rig.poisoned::<u8>(columns * line));
                let (scale_inv, amax, flag) = (rig.poisoned::<f32>(1), rig.upload(&[0.5f32]), rig.upload(&[0u32]));
                let normalised = Normalised {
                    x: if with_sum { total.span() } else { x.span() },
                    mean: with_bias.then(|| mean.span()),
                    rstd: rstd.span(),
                    gamma: gamma.span(),
                    beta: with_bias.then(|| beta.span()),
                };
                let outputs = Outputs {
                    values: Some(values.span()),
                    codes: Some(Codes {
                        codes: codes.span(),
                        transposed: Some(if beside {
                            Transposed::Beside { region: transposed.span().part(16..columns * line).unwrap(), line }
                        } else {
                            Transposed::Alone(transposed.span())
                        }),
                        scale: scale.span(),
                        scale_inv: scale_inv.span(),
                        amax: Some(amax.span()),
                    }),
                    column_sums: None,
                    flag: Some(flag.span()),
                };
                if one_pass {
                    let parts = with_sum.then(|| [x.span(), other.span()]);
                    rig.kernels.layer_norm_cast(&rig.stream, &normalised, shape, parts, &outputs).unwrap();
                } else {
                    let saved = Statistics { mean: normalised.mean, rstd: rstd.span() };
                    let residual = with_sum.then(|| Residual { other: other.span(), total: total.span() });
                    rig.kernels.layer_norm_forward(&rig.stream, x.span(), shape, residual, saved, None).unwrap();
                    rig.kernels.cast_norm(&rig.stream, &normalised, shape, &outputs).unwrap();
                }
                (
                    bf16_bits(&total.read().unwrap()),
                    [mean, rstd].map(|buffer| bits(&buffer.read().unwrap())),
                    bf16_bits(&values.read().unwrap()),
                    [codes, transposed].map(|buffer| buffer.read().unwrap()),
                    [scale_inv, amax].map(|buffer| bits(&buffer.read().unwrap())),
                    flag.read().unwrap(),
                )
            };
            let (one, two) = (run(true), run(false));
            assert_eq!(one.5, [u32::from(bad.is_some())], "the flag");
            assert_eq!(one, two, "{shape:?}, sum {with_sum}, bias {with_bias}, beside {beside}, {bad:?}");
        }
    }
}

/// What a gradient leaves behind: dx; codes and the same transposed; sums of columns, and gradients of gain and bias; the
/// numbers beside the codes; the flag.
type Taken = (Vec<u16>, [Vec<u8>; 2], [Vec<u32>; 3], [Vec<u32>; 2], Vec<u32>);

#[test]
fn a_gradient_with_its_cast_gives_the_bits_of_both_whatever_the_number_of_rows() {
    let Some(rig) = rig() else { return };
    // Four rows at a time and not, blocks of columns whole and not, more rows than a block has, rows too long.
    let shapes =
        [(4, 8), (8, 264), (256, 2048), (64, 2056), (132, 4096), (3, 64), (8, 4104), (12, 20), (260, 96), (600, 136)];
    for (rows, columns) in shapes {
        let (len, shape) = (rows * columns, (rows, columns));
        let of = |seed, scale: f32| -> Vec<bf16> {
            numbers(seed, len).iter().map(|x| bf16::from_f32(x * scale + 0.25)).collect()
        };
        let (x, gamma, other) = (rig.upload(&of(1, 2.0)), rig.upload(&numbers(3, columns)), rig.upload(&of(2, 1.0)));
        let ones = vec![0.75f32; rows];
        let (mean, rstd, scale) = (rig.upload(&numbers(4, rows)), rig.upload(&ones), rig.upload(&[173.0f32]));
        let finished = rig.upload(&vec![0u32; columns.div_ceil(64)]);
        for (with_sum, with_bias, beside, format, bad) in [
            (true, true, false, Fp8::E5M2, None),
            (true, true, true, Fp8::E5M2, None),
            (false, false, true, Fp8::E5M2, None),
            (true, false, false, Fp8::E4M3, None),
            (true, true, true, Fp8::E5M2, Some(bf16::NAN)),
            (false, true, false, Fp8::E5M2, Some(bf16::INFINITY)),
        ] {
            let mut dy = of(5, 1.5);
            if let Some(bad) = bad {
                dy[len / 2 + 3] = bad;
            }
            let dy = rig.upload(&dy);
            let statistics = Statistics { mean: with_bias.then(|| mean.span()), rstd: rstd.span() };
            let residual = with_sum.then(|| other.span());
            let from = NormGradient { x: x.span(), dy: dy.span(), gamma: gamma.span(), statistics, residual };
            let run = |together: bool| -> Taken {
                let line = if beside { rows.next_multiple_of(16) + 32 } else { rows };
                let (dx, codes) = (rig.poisoned::<bf16>(len), rig.poisoned::<u8>(len));
                let transposed = rig.poisoned::<u8>(columns * line);
                let partial = rig.poisoned::<f32>(3 * partial_sums(rows, columns));
                let scratch = ColumnScratch { partial: partial.span(), finished: finished.span() };
                let [sums, dgamma, dbeta] = [(); 3].map(|()| rig.poisoned::<f32>(columns));
                let (scale_inv, amax, flag) = (rig.poisoned::<f32>(1), rig.upload(&[0.5f32]), rig.upload(&[0u32]));
                let lines = if beside {
                    Transposed::Beside { region: transposed.span().part(16..columns * line).unwrap(), line }
                } else {
                    Transposed::Alone(transposed.span())
                };
                let outputs = Outputs {
                    values: None,
                    codes: Some(Codes {
                        codes: codes.span(),
                        transposed: Some(lines),
                        scale: scale.span(),
                        scale_inv: scale_inv.span(),
                        amax: Some(amax.span()),
                    }),
                    column_sums: Some(ColumnSums { out: sums.span(), scratch }),
                    flag: Some(flag.span()),
                };
                let mut down = DownColumns {
                    dgamma: dgamma.span(),
                    dbeta: with_bias.then(|| dbeta.span()),
                    sums: None,
                    lines: None,
                };
                let (k, stream) = (&rig.kernels, &rig.stream);
                if together {
                    k.layer_norm_backward_cast(stream, &from, shape, dx.span(), format, &outputs).unwrap();
                    down.sums = Some((dx.span(), sums.span()));
                    down.lines = Some((codes.span(), lines));
                } else {
                    k.layer_norm_backward(stream, &from, shape, dx.span()).unwrap();
                    k.cast(stream, format, dx.span(), shape, &outputs).unwrap();
                }
                k.layer_norm_gradients(stream, x.span(), dy.span(), shape, statistics, &down, scratch).unwrap();
                (
                    bf16_bits(&dx.read().unwrap()),
                    [codes, transposed].map(|buffer| buffer.read().unwrap()),
                    [sums, dgamma, dbeta].map(|buffer| bits(&buffer.read().unwrap())),
                    [scale_inv, amax].map(|buffer| bits(&buffer.read().unwrap())),
                    flag.read().unwrap(),
                )
            };
            let what = format!("{shape:?}, sum {with_sum}, bias {with_bias}, beside {beside}, {format:?}, {bad:?}");
            let (one, two) = (run(true), run(false));
            assert_eq!(one.4, [u32::from(bad.is_some())], "the flag: {what}");
            assert_eq!(one, two, "{what}");

            // A row's bits are its own: those of one row less, which is no multiple of four where the whole is one.
            let (fewer, len) = (rows - 1, (rows - 1) * columns);
            let dx = rig.poisoned::<bf16>(len);
            let statistics = Statistics {
                mean: statistics.mean.map(|mean| mean.part(0..fewer).unwrap()),
                rstd: rstd.span().part(0..fewer).unwrap(),
            };
            let part = |span: qeffect_kernels::Span<bf16>| span.part(0..len).unwrap();
            let from =
                NormGradient { x: part(from.x), dy: part(from.dy), statistics, residual: residual.map(part), ..from };
            rig.kernels.layer_norm_backward(&rig.stream, &from, (fewer, columns), dx.span()).unwrap();
            assert_eq!(bf16_bits(&dx.read().unwrap()), one.0[..len], "one row less: {what}");
        }
        assert!(finished.read().unwrap().iter().all(|count| *count == 0), "counters are zero again");
    }
}
