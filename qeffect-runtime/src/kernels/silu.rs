//! SiLU, `x · sigmoid(x)`, and the gated form of it that an MLP uses: `silu(gate) · up`.

use super::real::{Elem, Real};
use super::{Result, expect_len, expect_some, simd};

#[inline(always)]
fn silu<A: Real>(x: A) -> A {
    x * x.logistic()
}

#[inline(always)]
fn slope<A: Real>(x: A) -> A {
    let gate = x.logistic();
    gate * (A::ONE + x * (A::ONE - gate))
}

/// `y = silu(x)`.
pub fn silu_forward<E: Elem>(x: &[E], y: &mut [E]) -> Result {
    expect_len("silu_forward", "y", y.len(), x.len())?;
    simd(
        #[inline(always)]
        || {
            for (y, x) in y.iter_mut().zip(x) {
                *y = E::store(silu(x.load()));
            }
        },
    );
    Ok(())
}

/// `dx = dy · silu'(x)`.
pub fn silu_backward<E: Elem>(x: &[E], dy: &[E], dx: &mut [E]) -> Result {
    expect_len("silu_backward", "dy", dy.len(), x.len())?;
    expect_len("silu_backward", "dx", dx.len(), x.len())?;
    simd(
        #[inline(always)]
        || {
            for ((dx, x), dy) in dx.iter_mut().zip(x).zip(dy) {
                *dx = E::store(dy.load() * slope(x.load()));
            }
        },
    );
    Ok(())
}

/// `y = silu(gate) · up`. A row of `x` holds `columns` gates, then as many ups.
pub fn swiglu_forward<E: Elem>(x: &[E], columns: usize, y: &mut [E]) -> Result {
    expect_some("swiglu_forward", "columns", columns)?;
    let rows = y.len() / columns;
    expect_len("swiglu_forward", "y", y.len(), rows * columns)?;
    expect_len("swiglu_forward", "x", x.len(), 2 * y.len())?;
    simd(
        #[inline(always)]
        || {
            for (y, x) in y.chunks_exact_mut(columns).zip(x.chunks_exact(2 * columns)) {
                let (gates, ups) = x.split_at(columns);
                for ((y, gate), up) in y.iter_mut().zip(gates).zip(ups) {
                    *y = E::store(silu(gate.load()) * up.load());
                }
            }
        },
    );
    Ok(())
}

/// Gradients of gates and ups, laid out as `x` is.
pub fn swiglu_backward<E: Elem>(x: &[E], columns: usize, dy: &[E], dx: &mut [E]) -> Result {
    expect_some("swiglu_backward", "columns", columns)?;
    let rows = dy.len() / columns;
    expect_len("swiglu_backward", "dy", dy.len(), rows * columns)?;
    expect_len("swiglu_backward", "x", x.len(), 2 * dy.len())?;
    expect_len("swiglu_backward", "dx", dx.len(), x.len())?;
    simd(
        #[inline(always)]
        || {
            let lines = dx.chunks_exact_mut(2 * columns).zip(x.chunks_exact(2 * columns));
            for ((dx, x), dy) in lines.zip(dy.chunks_exact(columns)) {
                let (gates, ups) = x.split_at(columns);
                let (gate_grads, up_grads) = dx.split_at_mut(columns);
                for (((grad, gate), up), dy) in gate_grads.iter_mut().zip(gates).zip(ups).zip(dy) {
                    *grad = E::store(dy.load() * up.load() * slope(gate.load()));
                }
                for ((grad, gate), dy) in up_grads.iter_mut().zip(gates).zip(dy) {
                    *grad = E::store(dy.load() * silu(gate.load()));
                }
            }
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{close, differences, dot, loaded, numbers, rounding, stored};
    use super::*;

    fn reference(x: f64) -> f64 {
        x / (1.0 + (-x).exp())
    }

    fn gated(x: &[f64], columns: usize) -> Vec<f64> {
        x.chunks(2 * columns).flat_map(|row| (0..columns).map(|j| reference(row[j]) * row[columns + j])).collect()
    }

    fn wide(seed: u64, n: usize) -> Vec<f64> {
        numbers(seed, n).iter().map(|x| x * 8.0).collect()
    }

    fn forward<E: Elem>(tolerance: f64) {
        for n in [1, 3, 17, 130] {
            let x = stored::<E>(&wide(1, n));
            let mut y = x.clone();
            silu_forward(&x, &mut y).unwrap();
            close(&loaded(&y), &loaded(&x).into_iter().map(reference).collect::<Vec<_>>(), tolerance);
        }
        for (rows, columns) in [(1, 1), (3, 17), (2, 130)] {
            let x = stored::<E>(&wide(2, 2 * rows * columns));
            let mut y = x[..rows * columns].to_vec();
            swiglu_forward(&x, columns, &mut y).unwrap();
            close(&loaded(&y), &gated(&loaded(&x), columns), tolerance);
        }
    }

    #[test]
    fn forward_is_the_definition() {
        forward::<f32>(1e-6);
        forward::<f64>(1e-14);
        forward::<bf16>(rounding::<bf16>() * 1.01);
    }

    #[test]
    fn backward_is_the_derivative() {
        for n in [1, 17, 130] {
            let (x, dy) = (wide(1, n), numbers(2, n));
            let mut dx = vec![f64::NAN; n];
            silu_backward(&x, &dy, &mut dx).unwrap();
            close(&dx, &differences(&x, |x| x.iter().zip(&dy).map(|(x, dy)| reference(*x) * dy).sum()), 1e-8);
        }
        for (rows, columns) in [(1, 1), (3, 17), (2, 33)] {
            let (x, dy) = (wide(3, 2 * rows * columns), numbers(4, rows * columns));
            let mut dx = vec![f64::NAN; x.len()];
            swiglu_backward(&x, columns, &dy, &mut dx).unwrap();
            close(&dx, &differences(&x, |x| dot(&gated(x, columns), &dy)), 1e-7);
            let (x, dy) = (stored::<f32>(&x), stored::<f32>(&dy));
            let mut narrow = vec![0f32; x.len()];
            swiglu_backward(&x, columns, &dy, &mut narrow).unwrap();
            close(&loaded(&narrow), &dx, 2e-6);
        }
    }

    #[test]
    fn far_out_it_is_zero_or_the_identity_and_nan_stays() {
        let x = [1e4f32, -1e4, 0.0, f32::NAN];
        let (mut y, mut dx) = ([0.0; 4], [0.0; 4]);
        silu_forward(&x, &mut y).unwrap();
        silu_backward(&x, &[1.0; 4], &mut dx).unwrap();
        assert_eq!((&y[..3], &dx[..3]), (&[1e4, 0.0, 0.0][..], &[1.0, 0.0, 0.5][..]));
        assert!(y[3].is_nan() && dx[3].is_nan());
        assert!(swiglu_forward(&[0f32; 6], 2, &mut [0.0; 3]).is_err());
    }
}
