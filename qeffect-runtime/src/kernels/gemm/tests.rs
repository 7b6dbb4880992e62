use super::super::testing::{close, loaded, numbers, rounding, stored};
use super::*;

const SIZES: [usize; 5] = [1, 3, 16, 17, 130];

fn transpose<T: Copy>(x: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|j| (0..rows).map(move |i| x[i * columns + j])).collect()
}

fn naive(shape: GemmShape, a: &[f64], b: &[f64], bias: &[f64]) -> Vec<f64> {
    let GemmShape { m, n, k } = shape;
    let entry = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * n + j]).sum::<f64>() + bias[j];
    (0..m * n).map(|index| entry(index / n, index % n)).collect()
}

fn shapes() -> impl Iterator<Item = GemmShape> {
    SIZES.into_iter().flat_map(|m| SIZES.into_iter().flat_map(move |n| SIZES.map(|k| GemmShape { m, n, k })))
}

fn real_products<A: Real + Elem<Acc = A>>(tolerance: f64) {
    let mut scratch = Scratch::new();
    for shape in shapes() {
        let GemmShape { m, n, k } = shape;
        let (a, b, bias) =
            (stored::<A>(&numbers(1, m * k)), stored::<A>(&numbers(2, k * n)), stored::<A>(&numbers(3, n)));
        let want = naive(shape, &loaded(&a), &loaded(&b), &loaded(&bias));
        let (a_t, b_t) = (transpose(&a, m, k), transpose(&b, k, n));
        let mut first = None;
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let a = Operand { values: Values::Real(if ta { &a_t } else { &a }), transposed: ta };
            let b = Operand { values: Values::Real(if tb { &b_t } else { &b }), transposed: tb };
            let mut out = vec![A::from_f64(f64::NAN); m * n]; // must not be read
            gemm(&mut scratch, shape, a, b, Some(&bias), Output::Real(&mut out)).unwrap();
            close(&loaded(&out), &want, tolerance);
            if m > 1 && n > 1 {
                let bits: Vec<u64> = loaded(&out).iter().map(|x| x.to_bits()).collect();
                assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{shape:?}: the layout shows");
            }
        }
    }
}

#[test]
fn equals_the_sum_of_products_in_every_layout() {
    real_products::<f32>(2e-5);
    real_products::<f64>(1e-13);
}

#[test]
fn bf16_operands_round_once_at_the_end() {
    let mut scratch = Scratch::new();
    for shape in shapes() {
        let GemmShape { m, n, k } = shape;
        let (a, b) = (stored::<bf16>(&numbers(1, m * k)), stored::<bf16>(&numbers(2, k * n)));
        let bias = stored::<f32>(&numbers(3, n));
        let want = naive(shape, &loaded(&a), &loaded(&b), &loaded(&bias));
        let mut out = vec![bf16::NAN; m * n];
        let (a, b) = (Operand::plain(Values::Bf16(&a)), Operand::plain(Values::Bf16(&b)));
        gemm(&mut scratch, shape, a, b, Some(&bias), Output::Bf16(&mut out)).unwrap();
        close(&loaded(&out), &want, rounding::<bf16>() * 1.01);
    }
}

#[test]
fn fp8_is_the_product_of_decoded_values_times_both_inverses() {
    let mut scratch = Scratch::new();
    let (sa, sb) = (1.0 / 3.7f32, 1.0 / 11.3f32);
    for shape in shapes() {
        let GemmShape { m, n, k } = shape;
        // Small integers: sums are exact, so any order of adding gives the same bits.
        let codes = |format: Fp8, seed, len| -> (Vec<u8>, Vec<f64>) {
            let codes: Vec<u8> = numbers(seed, len).iter().map(|x| format.encode((x * 4.0).round() as f32)).collect();
            let values = codes.iter().map(|code| f64::from(format.decode(*code))).collect();
            (codes, values)
        };
        for (fa, fb) in [(Fp8::E4M3, Fp8::E4M3), (Fp8::E5M2, Fp8::E4M3), (Fp8::E4M3, Fp8::E5M2)] {
            let ((a, av), (b, bv)) = (codes(fa, 5, m * k), codes(fb, 6, k * n));
            let bias = stored::<f32>(&numbers(3, n));
            let sums = naive(shape, &av, &bv, &vec![0.0; n]);
            let a = Operand::plain(Values::Fp8 { format: fa, codes: &a, scale_inv: sa });
            let b = Operand::plain(Values::Fp8 { format: fb, codes: &b, scale_inv: sb });
            let mut out = vec![f32::NAN; m * n];
            gemm(&mut scratch, shape, a, b, None, Output::Real(&mut out)).unwrap();
            let want: Vec<f32> = sums.iter().map(|sum| *sum as f32 * (sa * sb)).collect();
            assert_eq!(out, want);

            let mut out = vec![bf16::NAN; m * n];
            gemm(&mut scratch, shape, a, b, Some(&bias), Output::Bf16(&mut out)).unwrap();
            let want: Vec<bf16> = want.iter().enumerate().map(|(i, sum)| bf16::from_f32(sum + bias[i % n])).collect();
            assert_eq!(out, want);
        }
    }
}

// case B13: adding in place is the product, rounded, then one addition: what separate slots would have summed to.
#[test]
fn adding_gives_the_bits_of_a_product_and_an_addition() {
    let mut scratch = Scratch::new();
    for shape in shapes() {
        let GemmShape { m, n, k } = shape;
        let (a, b) = (stored::<bf16>(&numbers(1, m * k)), stored::<bf16>(&numbers(2, k * n)));
        let before = stored::<f32>(&numbers(3, m * n));
        let codes: Vec<u8> = numbers(4, m * k).iter().map(|x| Fp8::E5M2.encode(*x as f32)).collect();
        let b = Operand::plain(Values::Bf16(&b));
        for a in [Values::Bf16(&a), Values::Fp8 { format: Fp8::E5M2, codes: &codes, scale_inv: 0.3 }] {
            let (mut alone, mut added) = (vec![f32::NAN; m * n], before.clone());
            gemm(&mut scratch, shape, Operand::plain(a), b, None, Output::Real(&mut alone)).unwrap();
            gemm(&mut scratch, shape, Operand::plain(a), b, None, Output::Add(&mut added)).unwrap();
            let want: Vec<f32> = before.iter().zip(&alone).map(|(before, product)| before + product).collect();
            assert_eq!(added, want);
        }
    }
}

/// Members side by side, in both layouts and with gaps: the bits of separate products, added in order.
#[test]
fn a_group_has_the_bits_of_its_products_added_in_order() {
    type Part = (Vec<u8>, Vec<u8>);
    fn values(format: Fp8, codes: &[u8]) -> Values<'_, f32> {
        Values::Fp8 { format, codes, scale_inv: 1.0 }
    }
    let mut scratch = Scratch::<f32>::new();
    for (shape, members, gap) in [((3, 17, 5), 1, 0), ((17, 3, 16), 3, 0), ((70, 130, 24), 4, 104)] {
        let member = GemmShape { m: shape.0, n: shape.1, k: shape.2 };
        let GemmShape { m, n, k } = member;
        let (stride, line) = (k + gap, members * (k + gap));
        let code = |format: Fp8, seed, len| -> Vec<u8> {
            numbers(seed, len).iter().map(|x| format.encode(*x as f32)).collect()
        };
        let parts: Vec<Part> =
            (0..members as u64).map(|i| (code(Fp8::E5M2, 2 * i, k * m), code(Fp8::E4M3, 2 * i + 1, k * n))).collect();
        let factors: Vec<f32> = (0..members).map(|i| 0.3 / (i + 1) as f32).collect();
        let mut want = Vec::<f32>::new();
        for ((a, b), factor) in parts.iter().zip(&factors) {
            let a = Values::Fp8 { format: Fp8::E5M2, codes: a, scale_inv: *factor };
            let b = Operand::plain(values(Fp8::E4M3, b));
            let mut product = vec![f32::NAN; m * n];
            gemm(&mut scratch, member, Operand::transposed(a), b, None, Output::Real(&mut product)).unwrap();
            match want.is_empty() {
                true => want = product,
                false => want.iter_mut().zip(&product).for_each(|(sum, x)| *sum += x),
            }
        }
        // Tokens as rows, then as columns; gaps hold zeros.
        let rows = |pick: fn(&Part) -> &Vec<u8>, cols: usize| -> Vec<u8> {
            let part = |part| [pick(part).clone(), vec![0; gap * cols]].concat();
            parts.iter().flat_map(part).collect()
        };
        let (a_rows, b_rows) = (rows(|part| &part.0, m), rows(|part| &part.1, n));
        let (a_lines, b_lines) = (transpose(&a_rows, line, m), transpose(&b_rows, line, n));
        let before = stored::<f32>(&numbers(99, m * n));
        let shape = GroupShape { member, members, stride };
        for (a, b) in [
            (Operand::transposed(values(Fp8::E5M2, &a_rows)), Operand::plain(values(Fp8::E4M3, &b_rows))),
            (Operand::plain(values(Fp8::E5M2, &a_lines)), Operand::transposed(values(Fp8::E4M3, &b_lines))),
        ] {
            let mut out = vec![f32::NAN; m * n];
            group_gemm(&mut scratch, shape, a, b, &factors, false, &mut out).unwrap();
            assert_eq!(out, want);
            let mut out = before.clone();
            group_gemm(&mut scratch, shape, a, b, &factors, true, &mut out).unwrap();
            let added: Vec<f32> = before.iter().zip(&want).map(|(before, sum)| before + sum).collect();
            assert_eq!(out, added);
            assert!(group_gemm(&mut scratch, shape, a, b, &factors[1..], false, &mut out).is_err() || members == 1);
            let short = GroupShape { stride: k - 1, ..shape };
            assert!(group_gemm(&mut scratch, short, a, b, &factors, false, &mut out).is_err());
        }
    }
}

#[test]
fn bits_depend_on_values_alone() {
    let shape = GemmShape { m: 70, n: 130, k: 300 };
    let (a, b) = (stored::<f32>(&numbers(1, shape.m * shape.k)), stored::<f32>(&numbers(2, shape.k * shape.n)));
    let run = move |scratch: &mut Scratch<f32>, offset: usize, transposed: bool| {
        // Other addresses, another layout, other leftovers in the output.
        let shifted = |x: &[f32]| [&vec![9.0; offset][..], x].concat();
        let b = if transposed { transpose(&b, shape.k, shape.n) } else { b.clone() };
        let (a, b) = (shifted(&a), shifted(&b));
        let mut out = vec![offset as f32; offset + shape.m * shape.n];
        let a = Operand::plain(Values::Real(&a[offset..]));
        let b = Operand { values: Values::Real(&b[offset..]), transposed };
        gemm(scratch, shape, a, b, None, Output::Real(&mut out[offset..])).unwrap();
        out[offset..].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    let want = run(&mut Scratch::new(), 0, false);
    let mut scratch = Scratch::new();
    for offset in [0, 1, 2, 3, 5, 8, 13] {
        assert_eq!(run(&mut scratch, offset, false), want);
        assert_eq!(run(&mut scratch, offset, true), want);
    }
    let other = std::thread::spawn(move || run(&mut Scratch::new(), 1, false)).join().unwrap();
    assert_eq!(other, want);
}

#[test]
fn nan_codes_and_infinities_come_through() {
    let mut scratch = Scratch::<f32>::new();
    let shape = GemmShape { m: 1, n: 2, k: 2 };
    let a = Operand::plain(Values::Fp8 { format: Fp8::E4M3, codes: &[0x38, 0x7F], scale_inv: 1.0 });
    let b = Operand::plain(Values::Real(&[1.0, 0.0, 0.0, 0.0][..]));
    let mut out = [0.0; 2];
    gemm(&mut scratch, shape, a, b, None, Output::Real(&mut out)).unwrap();
    assert!(out[0].is_nan() && out[1].is_nan());
    let a = Operand::plain(Values::Real(&[f32::INFINITY, 1.0][..]));
    let b = Operand::plain(Values::Real(&[1.0, 2.0, 3.0, 4.0][..]));
    gemm(&mut scratch, shape, a, b, None, Output::Real(&mut out)).unwrap();
    assert_eq!(out, [f32::INFINITY; 2]);
}

#[test]
fn an_empty_sum_is_the_bias_and_wrong_sizes_are_refused() {
    let mut scratch = Scratch::<f32>::new();
    let empty = Operand::plain(Values::Real(&[][..]));
    let mut out = [7.0; 2];
    let shape = GemmShape { m: 1, n: 2, k: 0 };
    gemm(&mut scratch, shape, empty, empty, Some(&[1.0, 2.0]), Output::Real(&mut out)).unwrap();
    assert_eq!(out, [1.0, 2.0]);
    let fault = gemm(
        &mut scratch,
        GemmShape { m: 1, n: 2, k: 3 },
        Operand::plain(Values::Real(&[0.0; 3])),
        Operand::plain(Values::Real(&[0.0; 5])),
        None,
        Output::Real(&mut out),
    );
    assert_eq!(fault.unwrap_err().to_string(), "gemm: `b` has 5 elements, the shape needs 6");
    assert_eq!(out, [1.0, 2.0]);
}
