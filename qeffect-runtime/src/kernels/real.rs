//! The number types that kernels compute in and store, and sums of fixed order.

use core::ops::{Add, Div, Mul, Neg, Sub};

use bytemuck::Pod;
use half::bf16;
use qeffect_core::dtype::Dtype;

/// A type to compute in: `f32` or `f64`.
pub trait Real:
    Pod
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Default
    + Send
    + Sync
    + core::fmt::Debug
    + 'static
{
    /// As an element type.
    const DTYPE: Dtype;
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// -∞.
    const NEG_INFINITY: Self;

    /// The nearest value.
    fn from_f64(x: f64) -> Self;
    /// The same value.
    fn to_f64(self) -> f64;
    /// Exactly, unless this is f32: then it is the value itself.
    fn from_f32(x: f32) -> Self;
    /// e^x. In f32 a polynomial without branches, within 2 units in the last place; results below the smallest normal
    /// number are 0.
    fn exp(self) -> Self;
    /// 1 / (1 + e^-x). In f32 results not above the smallest normal number are 0, which lets a GPU divide without a branch; of
    /// NaN it is 0, too: whoever multiplies it with what is NaN has NaN.
    fn logistic(self) -> Self;
    /// √x, correctly rounded.
    fn sqrt(self) -> Self;
    /// |x|.
    fn abs(self) -> Self;
    /// The larger value; a NaN is passed over.
    fn larger(self, other: Self) -> Self;
    /// Whether it is neither infinite nor NaN.
    fn finite(self) -> bool;
}

impl Real for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(x: f64) -> f32 {
        x as f32
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }
    #[inline(always)]
    fn logistic(self) -> f32 {
        let inverse = 1.0 + (-self).exp();
        if inverse < 1.0 / f32::MIN_POSITIVE { 1.0 / inverse } else { 0.0 }
    }
    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn abs(self) -> f32 {
        f32::abs(self)
    }
    #[inline(always)]
    fn larger(self, other: f32) -> f32 {
        self.max(other)
    }
    #[inline(always)]
    fn finite(self) -> bool {
        self.is_finite()
    }
}

impl Real for f64 {
    const DTYPE: Dtype = Dtype::F64;
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn from_f64(x: f64) -> f64 {
        x
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        self
    }
    #[inline(always)]
    fn from_f32(x: f32) -> f64 {
        f64::from(x)
    }
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }
    #[inline(always)]
    fn logistic(self) -> f64 {
        1.0 / (1.0 + (-self).exp())
    }
    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }
    #[inline(always)]
    fn abs(self) -> f64 {
        f64::abs(self)
    }
    #[inline(always)]
    fn larger(self, other: f64) -> f64 {
        self.max(other)
    }
    #[inline(always)]
    fn finite(self) -> bool {
        self.is_finite()
    }
}

/// e^x = 2^n · e^r with n = round(x / ln 2), |r| ≤ ln 2 / 2, and e^r as a polynomial.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LOWEST: f32 = -87.33654; // e^x is the smallest normal number
    const HIGHEST: f32 = 88.72283; // e^x is the largest finite number
    const LN2_HIGH: f32 = 0.693_359_4; // few bits: its product with n is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2^23: adding it rounds to an integer, kept in the low bits

    let bounded = if x < LOWEST { LOWEST } else { x };
    let bounded = if bounded > HIGHEST { HIGHEST } else { bounded };
    let shifted = bounded * core::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (bounded - n * LN2_HIGH) - n * LN2_LOW;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let p = (p * (r * r) + r) + 1.0;
    // n is added to the exponent of p: its bits are the low ones of `shifted`, whose high ones fall off. As p · 2^n is a normal
    // number everywhere, this is its product with 2^n.
    let value = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    let value = if x < LOWEST { 0.0 } else { value };
    let value = if x > HIGHEST { f32::INFINITY } else { value };
    if x.is_nan() { x } else { value }
}

/// A type that activations are stored in; arithmetic happens in `Acc`.
pub trait Elem: Pod + Send + Sync + core::fmt::Debug + 'static {
    /// What it is computed in.
    type Acc: Real;
    /// As an element type.
    const DTYPE: Dtype;

    /// The value, exactly.
    fn load(self) -> Self::Acc;
    /// The nearest value, ties to even.
    fn store(x: Self::Acc) -> Self;
}

impl Elem for f32 {
    type Acc = f32;
    const DTYPE: Dtype = Dtype::F32;

    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
    #[inline(always)]
    fn store(x: f32) -> f32 {
        x
    }
}

impl Elem for f64 {
    type Acc = f64;
    const DTYPE: Dtype = Dtype::F64;

    #[inline(always)]
    fn load(self) -> f64 {
        self
    }
    #[inline(always)]
    fn store(x: f64) -> f64 {
        x
    }
}

impl Elem for bf16 {
    type Acc = f32;
    const DTYPE: Dtype = Dtype::Bf16;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// As `half` does it, without branches.
    #[inline(always)]
    fn store(x: f32) -> bf16 {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { quiet as u16 } else { rounded as u16 })
    }
}

/// Copies and converts to the type that is computed in.
#[inline(always)]
pub(crate) fn load_slice<E: Elem>(from: &[E], to: &mut [E::Acc]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.load();
    }
}

/// Rounds and copies.
#[inline(always)]
pub(crate) fn store_slice<E: Elem>(from: &[E::Acc], to: &mut [E]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = E::store(*from);
    }
}

/// Number of partial sums.
const LANES: usize = 16;

/// Folds lanes as a tree: 0 with 8, .. 7 with 15, then by 4, 2 and 1.
#[inline(always)]
fn fold<A: Real>(mut lanes: [A; LANES], op: impl Fn(A, A) -> A) -> A {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = op(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Sum of `f(x[i])`; element i goes to lane i mod 16.
#[inline(always)]
pub(crate) fn sum<A: Real, X: Copy>(x: &[X], f: impl Fn(X) -> A) -> A {
    let mut lanes = [A::ZERO; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane] + f(chunk[lane]);
        }
    }
    for (lane, x) in rest.iter().enumerate() {
        lanes[lane] = lanes[lane] + f(*x);
    }
    fold(lanes, |a, b| a + b)
}

/// Sum of `f(x[i], y[i])`, as [`sum`].
#[inline(always)]
pub(crate) fn sum2<A: Real>(x: &[A], y: &[A], f: impl Fn(A, A) -> A) -> A {
    let mut lanes = [A::ZERO; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    for (x, y) in xs.iter().zip(ys) {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane] + f(x[lane], y[lane]);
        }
    }
    for (lane, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        lanes[lane] = lanes[lane] + f(*x, *y);
    }
    fold(lanes, |a, b| a + b)
}

/// Largest value, passing over NaN; -∞ if there is none.
#[inline(always)]
pub(crate) fn largest<A: Real>(x: &[A]) -> A {
    let mut lanes = [A::NEG_INFINITY; LANES];
    let larger = |a: A, b: A| if b > a { b } else { a };
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(lanes[lane], chunk[lane]);
        }
    }
    for (lane, x) in rest.iter().enumerate() {
        lanes[lane] = larger(lanes[lane], *x);
    }
    fold(lanes, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        for bits in (0..=u32::MAX).step_by(8191) {
            let x = f32::from_bits(bits);
            assert_eq!(<bf16 as Elem>::store(x).to_bits(), bf16::from_f32(x).to_bits(), "{bits:08x}");
        }
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                assert_eq!(<bf16 as Elem>::store(x).to_bits(), bf16::from_f32(x).to_bits());
            }
            let stored = bf16::from_bits(high);
            assert_eq!(stored.load().to_bits(), u32::from(high) << 16);
        }
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0f64;
        for step in -87_300..=88_700 {
            let x = step as f32 * 1e-3;
            let want = f64::from(x).exp();
            let unit = f64::from((want as f32).next_up()) - f64::from(want as f32);
            worst = worst.max((f64::from(exp_f32(x)) - want).abs() / unit);
        }
        assert!(worst < 2.0, "{worst}");
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!((exp_f32(f32::NEG_INFINITY), exp_f32(-200.0)), (0.0, 0.0));
        assert_eq!((exp_f32(f32::INFINITY), exp_f32(89.0)), (f32::INFINITY, f32::INFINITY));
        assert!(exp_f32(88.722).is_finite() && exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn the_logistic_function_is_within_three_units_and_has_no_subnormal_values() {
        let mut worst = 0f64; // two units of e^x, and a half each of the sum and the quotient
        for step in -87_300..=87_300 {
            let x = step as f32 * 1e-3;
            let want = f64::from(x).logistic();
            let unit = f64::from((want as f32).next_up()) - f64::from(want as f32);
            worst = worst.max((f64::from(x.logistic()) - want).abs() / unit);
        }
        assert!(worst < 3.0, "{worst}");
        assert!((-87.33f32).logistic() > f32::MIN_POSITIVE);
        assert_eq!([-87.34, -88.7, -1e30, f32::NEG_INFINITY, f32::NAN].map(f32::logistic), [0.0; 5]);
        assert_eq!([87.34, 1e30, f32::INFINITY].map(f32::logistic), [1.0; 3]);
    }

    #[test]
    fn sums_have_a_fixed_order() {
        for n in [0, 1, 3, 16, 17, 130] {
            let x: Vec<f32> = (0..n).map(|i| 1.0 / (i as f32 + 3.0)).collect();
            let mut lanes = [0f32; 16];
            x.iter().enumerate().for_each(|(i, x)| lanes[i % 16] += x);
            for width in [8, 4, 2, 1] {
                (0..width).for_each(|lane| lanes[lane] += lanes[lane + width]);
            }
            let inline = sum(&x, |x| x);
            let wide = super::super::simd(
                #[inline(always)]
                || sum(&x, |x| x),
            );
            assert_eq!((inline.to_bits(), wide.to_bits()), (lanes[0].to_bits(), lanes[0].to_bits()));
            let ones = vec![1.0; n];
            assert_eq!(sum2(&x, &ones, |x, y| x * y).to_bits(), inline.to_bits());
            assert_eq!(largest(&x), x.first().copied().unwrap_or(f32::NEG_INFINITY));
        }
        assert_eq!(largest(&[1.0, f32::NAN, 3.0]), 3.0);
    }
}
