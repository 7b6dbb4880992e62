//! GELU in its tanh form: `x/2 · (1 + tanh u)` with `u = √(2/π) (x + 0.044715 x³)`, which is `x · sigmoid(2u)`.

use super::real::{Elem, Real};
use super::{Result, expect_len, simd};

/// 2 √(2/π).
const FACTOR: f64 = 1.595_769_121_605_730_7;
const CUBIC: f64 = 0.044_715;

/// sigmoid(2u).
#[inline(always)]
fn gate<A: Real>(x: A) -> A {
    (A::from_f64(FACTOR) * x * (A::ONE + A::from_f64(CUBIC) * x * x)).logistic()
}

/// Derivative of 2u.
#[inline(always)]
fn slope<A: Real>(x: A) -> A {
    A::from_f64(FACTOR) * (A::ONE + A::from_f64(3.0 * CUBIC) * x * x)
}

/// `y = gelu(x)`.
pub fn gelu_forward<E: Elem>(x: &[E], y: &mut [E]) -> Result {
    expect_len("gelu_forward", "y", y.len(), x.len())?;
    simd(
        #[inline(always)]
        || {
            for (y, x) in y.iter_mut().zip(x) {
                let x = x.load();
                *y = E::store(x * gate(x));
            }
        },
    );
    Ok(())
}

/// `dx = dy · gelu'(x)`.
pub fn gelu_backward<E: Elem>(x: &[E], dy: &[E], dx: &mut [E]) -> Result {
    expect_len("gelu_backward", "dy", dy.len(), x.len())?;
    expect_len("gelu_backward", "dx", dx.len(), x.len())?;
    simd(
        #[inline(always)]
        || {
            for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
                let x = x.load();
                let gate = gate(x);
                *dx = E::store(dy.load() * (gate + x * gate * (E::Acc::ONE - gate) * slope(x)));
            }
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{close, differences, loaded, numbers, rounding, stored};
    use super::*;

    fn reference(x: f64) -> f64 {
        0.5 * x * (1.0 + ((2.0 / core::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
    }

    fn forward<E: Elem>(tolerance: f64) {
        for n in [1, 3, 17, 130] {
            let x = stored::<E>(&numbers(1, n).iter().map(|x| x * 8.0).collect::<Vec<_>>());
            let mut y = x.clone();
            gelu_forward(&x, &mut y).unwrap();
            close(&loaded(&y), &loaded(&x).into_iter().map(reference).collect::<Vec<_>>(), tolerance);
        }
    }

    #[test]
    fn forward_is_the_tanh_form() {
        forward::<f32>(1e-6);
        forward::<f64>(1e-14);
        forward::<bf16>(rounding::<bf16>() * 1.01);
    }

    #[test]
    fn backward_is_the_derivative() {
        for n in [1, 3, 17, 130] {
            let x: Vec<f64> = numbers(1, n).iter().map(|x| x * 5.0).collect();
            let dy = numbers(2, n);
            let mut dx = vec![f64::NAN; n];
            gelu_backward(&x, &dy, &mut dx).unwrap();
            let want = differences(&x, |x| x.iter().zip(&dy).map(|(x, dy)| reference(*x) * dy).sum());
            close(&dx, &want, 1e-8);

            let (x, dy) = (stored::<f32>(&x), stored::<f32>(&dy));
            let mut narrow = vec![0f32; n];
            gelu_backward(&x, &dy, &mut narrow).unwrap();
            close(&loaded(&narrow), &dx, 2e-6);
        }
    }

    #[test]
    fn far_out_it_is_zero_or_the_identity_and_nan_stays() {
        let x = [1e4f32, -1e4, -30.0, 0.0, f32::NAN];
        let (mut y, mut dx) = ([0.0; 5], [0.0; 5]);
        gelu_forward(&x, &mut y).unwrap();
        gelu_backward(&x, &[1.0; 5], &mut dx).unwrap();
        assert_eq!((&y[..4], &dx[..4]), (&[1e4, 0.0, 0.0, 0.0][..], &[1.0, 0.0, 0.0, 0.5][..]));
        assert!(y[4].is_nan() && dx[4].is_nan());
    }
}
