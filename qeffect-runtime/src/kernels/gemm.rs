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
mod tests;
