//! Matrix products: row-major, from any stored type, accumulated in f32 or f64, rounded once.
//!
//! An operand that is not stored in the type of the accumulator is decoded into scratch first; the product itself is the
//! crate `gemm`. For FP8 the decoded codes are multiplied, and the result times `scale_inv_a · scale_inv_b`, in f32, as
//! GPUs do it: that product, then the bias, then the rounding to the output's type.
//!
//! The bits of a product of at least two rows and columns do not depend on how its operands are stored: terms are added
//! in one order in every layout.

use half::bf16;
use qeffect_core::fp8::{E4m3, E5m2, Fp8};

use super::real::{Elem, Real};
use super::{Result, Scratch, expect_len, simd, take};

/// Sizes of `D[m, n] = A[m, k] · B[k, n]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GemmShape {
    /// Rows of D.
    pub m: usize,
    /// Columns of D.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
}

/// Elements of a matrix, as stored.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a, A> {
    /// In the type of the accumulator.
    Real(&'a [A]),
    /// In bf16.
    Bf16(&'a [bf16]),
    /// As codes; the value of an element is its decoded code times `scale_inv`.
    Fp8 {
        /// Format of the codes.
        format: Fp8,
        /// The codes.
        codes: &'a [u8],
        /// Their factor: of the scale that they were made with, not of the one in force now.
        scale_inv: f32,
    },
}

impl<A> Values<'_, A> {
    fn len(&self) -> usize {
        match self {
            Values::Real(values) => values.len(),
            Values::Bf16(values) => values.len(),
            Values::Fp8 { codes, .. } => codes.len(),
        }
    }
}

/// An operand of a product.
#[derive(Clone, Copy, Debug)]
pub struct Operand<'a, A> {
    /// Its elements, row-major without gaps.
    pub values: Values<'a, A>,
    /// Whether the product takes it transposed: then A is stored as [k, m], B as [n, k].
    pub transposed: bool,
}

impl<'a, A> Operand<'a, A> {
    /// As stored.
    pub const fn plain(values: Values<'a, A>) -> Self {
        Operand { values, transposed: false }
    }

    /// Transposed.
    pub const fn transposed(values: Values<'a, A>) -> Self {
        Operand { values, transposed: true }
    }
}

/// Where a product goes.
#[derive(Debug)]
pub enum Output<'a, A> {
    /// In the type of the accumulator: a gradient slot, logits.
    Real(&'a mut [A]),
    /// Rounded to the type of the accumulator, then added to what is there.
    Add(&'a mut [A]),
    /// Rounded to bf16: an activation.
    Bf16(&'a mut [bf16]),
}

/// `out = op(a) · op(b) + bias`, with one bias per column. What `out` held is not read, unless
/// the product is to be added to it.
pub fn gemm<A: Real>(
    scratch: &mut Scratch<A>,
    shape: GemmShape,
    a: Operand<'_, A>,
    b: Operand<'_, A>,
    bias: Option<&[A]>,
    out: Output<'_, A>,
) -> Result {
    let GemmShape { m, n, k } = shape;
    expect_len("gemm", "a", a.values.len(), m * k)?;
    expect_len("gemm", "b", b.values.len(), k * n)?;
    if let Some(bias) = bias {
        expect_len("gemm", "bias", bias.len(), n)?;
    }
    let found = match &out {
        Output::Real(out) | Output::Add(out) => out.len(),
        Output::Bf16(out) => out.len(),
    };
    expect_len("gemm", "out", found, m * n)?;
    if m == 0 || n == 0 {
        return Ok(());
    }

    let scale = match (scale_inv(&a.values), scale_inv(&b.values)) {
        (None, None) => None,
        (a, b) => Some(A::from_f32(a.unwrap_or(1.0) * b.unwrap_or(1.0))),
    };
    let a_view = View::new(decode(a.values, &mut scratch.a), m, k, a.transposed);
    let b_view = View::new(decode(b.values, &mut scratch.b), k, n, b.transposed);
    let b_view = in_one_order(&a_view, b_view, &mut scratch.e);
    match out {
        Output::Real(out) => {
            product(a_view, b_view, ViewMut::new(out, m, n));
            finish(out, n, scale, bias);
        }
        Output::Add(out) => {
            let sums = take(&mut scratch.c, m * n);
            product(a_view, b_view, ViewMut::new(sums, m, n));
            finish(sums, n, scale, bias);
            add_to(out, sums);
        }
        Output::Bf16(out) => {
            let sums = take(&mut scratch.c, m * n);
            product(a_view, b_view, ViewMut::new(sums, m, n));
            finish_bf16(sums, n, scale, bias, out);
        }
    }
    Ok(())
}

/// How the members of a group lie in the operands of [`group_gemm`], in terms of the sums.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GroupShape {
    /// Sizes of one member's product.
    pub member: GemmShape,
    /// Number of members.
    pub members: usize,
    /// From one member's first term to the next one's.
    pub stride: usize,
}

/// `out = Σ op(a)ᵢ · op(b)ᵢ · factor[i]` over the members of a group, or that sum added to `out`.
///
/// Each member's product has the bits that [`gemm()`] gives it; products are added in order. `factors`: one per member, or
/// none; those of FP8 operands themselves are not used.
pub fn group_gemm<A: Real>(
    scratch: &mut Scratch<A>,
    shape: GroupShape,
    a: Operand<'_, A>,
    b: Operand<'_, A>,
    factors: &[f32],
    accumulate: bool,
    out: &mut [A],
) -> Result {
    let GroupShape { member: GemmShape { m, n, k }, members, stride } = shape;
    let line = members * stride;
    expect_len("group_gemm", "a", a.values.len(), m * line)?;
    expect_len("group_gemm", "b", b.values.len(), line * n)?;
    expect_len("group_gemm", "out", out.len(), m * n)?;
    if !factors.is_empty() {
        expect_len("group_gemm", "factors", factors.len(), members)?;
    }
    if stride < k {
        return expect_len("group_gemm", "stride", stride, k);
    }
    if m == 0 || n == 0 {
        return Ok(());
    }
    let (a_all, b_all) = (decode(a.values, &mut scratch.a), decode(b.values, &mut scratch.b));
    let sums = take(&mut scratch.c, m * n);
    let mut sum_into = |total: &mut [A]| {
        total.fill(A::ZERO);
        for member in 0..members {
            // Along the terms, a member begins `stride` further on than the one before it.
            let first = member * stride;
            let (at, row, column) = if a.transposed { (first * m, 1, m) } else { (first, line, 1) };
            let a_view = View { data: &a_all[at..], rows: m, columns: k, row, column };
            let (at, row, column) = if b.transposed { (first, 1, line) } else { (first * n, n, 1) };
            let b_view = View { data: &b_all[at..], rows: k, columns: n, row, column };
            let b_view = in_one_order(&a_view, b_view, &mut scratch.e);
            let factor = factors.get(member).map(|factor| A::from_f32(*factor));
            let to = if member == 0 { &mut *total } else { &mut *sums };
            product(a_view, b_view, ViewMut::new(to, m, n));
            finish(to, n, factor, None);
            if member > 0 {
                add_to(total, sums);
            }
        }
    };
    match accumulate {
        false => sum_into(out),
        true => {
            let total = take(&mut scratch.d, m * n);
            sum_into(total);
            add_to(out, total);
        }
    }
    Ok(())
}

/// `b`, stored so that the crate `gemm` adds the terms of `a · b` in the order in which it adds them for other layouts.
/// Small products of operands that both lie along their terms are dot products there, with several partial sums each.
fn in_one_order<'a, A: Real>(a: &View<'_, A>, b: View<'a, A>, buffer: &'a mut Vec<A>) -> View<'a, A> {
    const LARGEST_OF_DOT_PRODUCTS: usize = 16 * 16;
    if a.column != 1 || b.row != 1 || b.columns < 2 || a.rows * b.columns > LARGEST_OF_DOT_PRODUCTS {
        return b;
    }
    let turned = take(buffer, b.rows * b.columns);
    for (row, values) in turned.chunks_exact_mut(b.columns).enumerate() {
        for (column, value) in values.iter_mut().enumerate() {
            *value = b.data[row + column * b.column];
        }
    }
    View::new(turned, b.rows, b.columns, false)
}

fn scale_inv<A>(values: &Values<'_, A>) -> Option<f32> {
    match values {
        Values::Fp8 { scale_inv, .. } => Some(*scale_inv),
        _ => None,
    }
}

fn decode<'a, A: Real>(values: Values<'a, A>, buffer: &'a mut Vec<A>) -> &'a [A] {
    match values {
        Values::Real(values) => values,
        Values::Bf16(values) => {
            let decoded = take(buffer, values.len());
            simd(
                #[inline(always)]
                || {
                    for (to, from) in decoded.iter_mut().zip(values) {
                        *to = A::from_f32(from.load());
                    }
                },
            );
            decoded
        }
        Values::Fp8 { format, codes, .. } => {
            let decoded = take(buffer, codes.len());
            simd(
                #[inline(always)]
                || match format {
                    Fp8::E4M3 => decode_codes(codes, decoded, E4m3::decode),
                    Fp8::E5M2 => decode_codes(codes, decoded, E5m2::decode),
                },
            );
            decoded
        }
    }
}

#[inline(always)]
fn decode_codes<A: Real>(codes: &[u8], values: &mut [A], decode: impl Fn(u8) -> f32) {
    for (value, code) in values.iter_mut().zip(codes) {
        *value = A::from_f32(decode(*code));
    }
}

/// Scale and bias in place.
fn finish<A: Real>(out: &mut [A], n: usize, scale: Option<A>, bias: Option<&[A]>) {
    simd(
        #[inline(always)]
        || match (scale, bias) {
            (None, None) => {}
            (Some(scale), None) => out.iter_mut().for_each(|x| *x = *x * scale),
            (scale, Some(bias)) => {
                let scale = scale.unwrap_or(A::ONE);
                for row in out.chunks_exact_mut(n) {
                    for (x, bias) in row.iter_mut().zip(bias) {
                        *x = *x * scale + *bias;
                    }
                }
            }
        },
    );
}

fn add_to<A: Real>(out: &mut [A], sums: &[A]) {
    simd(
        #[inline(always)]
        || {
            for (out, x) in out.iter_mut().zip(sums) {
                *out = *out + *x;
            }
        },
    );
}

/// Scale, bias, and rounding.
fn finish_bf16<A: Real>(sums: &[A], n: usize, scale: Option<A>, bias: Option<&[A]>, out: &mut [bf16]) {
    // f64 sums are rounded twice on their way to bf16; no recipe pairs the two.
    let round = |x: A| bf16::store(x.to_f64() as f32);
    let scale = scale.unwrap_or(A::ONE);
    simd(
        #[inline(always)]
        || match bias {
            None => {
                for (out, x) in out.iter_mut().zip(sums) {
                    *out = round(*x * scale);
                }
            }
            Some(bias) => {
                for (out, row) in out.chunks_exact_mut(n).zip(sums.chunks_exact(n)) {
                    for ((out, x), bias) in out.iter_mut().zip(row).zip(bias) {
                        *out = round(*x * scale + *bias);
                    }
                }
            }
        },
    );
}

/// A matrix in memory: element (i, j) at `i * row + j * column`.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, A> {
    data: &'a [A],
    rows: usize,
    columns: usize,
    row: usize,
    column: usize,
}

impl<'a, A> View<'a, A> {
    /// A matrix of `rows` × `columns` without gaps, row-major, or column-major if `transposed`.
    pub(crate) fn new(data: &'a [A], rows: usize, columns: usize, transposed: bool) -> Self {
        let (row, column) = if transposed { (1, rows) } else { (columns, 1) };
        View { data, rows, columns, row, column }
    }

    /// A window: rows of `columns` elements, `stride` apart.
    pub(crate) fn window(data: &'a [A], rows: usize, columns: usize, stride: usize) -> Self {
        View { data, rows, columns, row: stride, column: 1 }
    }

    pub(crate) fn flipped(self) -> Self {
        View { data: self.data, rows: self.columns, columns: self.rows, row: self.column, column: self.row }
    }

    fn fits(&self) -> bool {
        self.rows == 0
            || self.columns == 0
            || (self.rows - 1) * self.row + (self.columns - 1) * self.column < self.data.len()
    }
}

/// A matrix to write, row-major.
pub(crate) struct ViewMut<'a, A> {
    data: &'a mut [A],
    rows: usize,
    columns: usize,
    row: usize,
    /// Whether the product is added to what is there.
    add: bool,
}

impl<'a, A> ViewMut<'a, A> {
    pub(crate) fn new(data: &'a mut [A], rows: usize, columns: usize) -> Self {
        ViewMut { data, rows, columns, row: columns, add: false }
    }

    pub(crate) fn window(data: &'a mut [A], rows: usize, columns: usize, stride: usize, add: bool) -> Self {
        ViewMut { data, rows, columns, row: stride, add }
    }
}

/// `d = a · b`, or `d += a · b`. Panics if the views disagree: callers have checked.
pub(crate) fn product<A: Real>(a: View<'_, A>, b: View<'_, A>, d: ViewMut<'_, A>) {
    assert!(a.rows == d.rows && b.columns == d.columns && a.columns == b.rows, "matrix sizes disagree");
    assert!(a.fits() && b.fits(), "a matrix reaches beyond its data");
    if d.rows == 0 || d.columns == 0 {
        return;
    }
    assert!((d.rows - 1) * d.row + d.columns <= d.data.len() && d.row >= d.columns, "no room for the product");
    let stride = |n: usize| n as isize;
    // SAFETY: sizes agree, the views lie within their slices (asserted above), and `d` is borrowed exclusively, so it
    // overlaps neither of them.
    unsafe {
        gemm::gemm(
            d.rows,
            d.columns,
            a.columns,
            d.data.as_mut_ptr(),
            1,
            stride(d.row),
            d.add,
            a.data.as_ptr(),
            stride(a.column),
            stride(a.row),
            b.data.as_ptr(),
            stride(b.column),
            stride(b.row),
            A::ONE,
            A::ONE,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
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
                let codes: Vec<u8> =
                    numbers(seed, len).iter().map(|x| format.encode((x * 4.0).round() as f32)).collect();
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
                let want: Vec<bf16> =
                    want.iter().enumerate().map(|(i, sum)| bf16::from_f32(sum + bias[i % n])).collect();
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
            let parts: Vec<Part> = (0..members as u64)
                .map(|i| (code(Fp8::E5M2, 2 * i, k * m), code(Fp8::E4M3, 2 * i + 1, k * n)))
                .collect();
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
}
