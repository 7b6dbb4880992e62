//! Layer norm: statistics in f32 (f64 for f64), saved for the backward.
//!
//! The gradients of gain and bias are sums over rows, one slot per microbatch. Every sum has the order of the GPU's kernels.

use super::lanes::{NORM_THREADS, block_dot, block_sum, norm_gradients};
use super::real::{Elem, Real, load_slice, store_slice};
use super::{Result, Scratch, expect_len, expect_some, simd, take};

/// Added to the variance.
pub const EPSILON: f64 = 1e-5;

/// Statistics of each row, saved by the forward.
#[derive(Debug)]
pub struct Statistics<'a, A> {
    /// Mean of each row.
    pub mean: &'a mut [A],
    /// 1 / √(variance + ε) of each row.
    pub rstd: &'a mut [A],
}

/// `y = (x - mean) · rstd · gamma + beta`, row by row. The number of columns is that of `gamma`.
pub fn layer_norm_forward<E: Elem>(
    scratch: &mut Scratch<E::Acc>,
    x: &[E],
    gamma: &[E::Acc],
    beta: &[E::Acc],
    y: &mut [E],
    statistics: Statistics<'_, E::Acc>,
) -> Result {
    let columns = gamma.len();
    expect_some("layer_norm_forward", "columns", columns)?;
    let rows = statistics.mean.len();
    expect_len("layer_norm_forward", "x", x.len(), rows * columns)?;
    expect_len("layer_norm_forward", "beta", beta.len(), columns)?;
    expect_len("layer_norm_forward", "y", y.len(), rows * columns)?;
    expect_len("layer_norm_forward", "rstd", statistics.rstd.len(), rows)?;

    let row = take(&mut scratch.a, columns);
    let per_row = E::Acc::ONE / E::Acc::from_f64(columns as f64);
    let epsilon = E::Acc::from_f64(EPSILON);
    simd(
        #[inline(always)]
        || {
            let lines = x.chunks_exact(columns).zip(y.chunks_exact_mut(columns));
            for ((x, y), (mean, rstd)) in lines.zip(statistics.mean.iter_mut().zip(statistics.rstd.iter_mut())) {
                load_slice(x, row);
                *mean = block_sum::<NORM_THREADS, _>(row, |x| x) * per_row;
                let center = *mean;
                let variance = block_sum::<NORM_THREADS, _>(row, |x| (x - center) * (x - center)) * per_row;
                *rstd = E::Acc::ONE / (variance + epsilon).sqrt();
                let factor = *rstd;
                for ((x, gamma), beta) in row.iter_mut().zip(gamma).zip(beta) {
                    *x = (*x - center) * factor * *gamma + *beta;
                }
                store_slice(row, y);
            }
        },
    );
    Ok(())
}

/// What the forward saved, for the backward.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, A> {
    /// Mean of each row.
    pub mean: &'a [A],
    /// 1 / √(variance + ε) of each row.
    pub rstd: &'a [A],
}

/// Gradients of gain and bias; what they held is not read.
#[derive(Debug)]
pub struct NormGradients<'a, A> {
    /// Of the gain.
    pub gamma: &'a mut [A],
    /// Of the bias.
    pub beta: &'a mut [A],
}

/// `dx` and the gradients of gain and bias, from the input and what the forward saved.
pub fn layer_norm_backward<E: Elem>(
    scratch: &mut Scratch<E::Acc>,
    x: &[E],
    gamma: &[E::Acc],
    saved: Saved<'_, E::Acc>,
    dy: &[E],
    dx: &mut [E],
    gradients: NormGradients<'_, E::Acc>,
) -> Result {
    let columns = gamma.len();
    expect_some("layer_norm_backward", "columns", columns)?;
    let Saved { mean, rstd } = saved;
    let rows = mean.len();
    expect_len("layer_norm_backward", "x", x.len(), rows * columns)?;
    expect_len("layer_norm_backward", "rstd", rstd.len(), rows)?;
    expect_len("layer_norm_backward", "dy", dy.len(), rows * columns)?;
    expect_len("layer_norm_backward", "dx", dx.len(), rows * columns)?;
    expect_len("layer_norm_backward", "gradients.gamma", gradients.gamma.len(), columns)?;
    expect_len("layer_norm_backward", "gradients.beta", gradients.beta.len(), columns)?;

    let normal = take(&mut scratch.a, columns);
    let scaled = take(&mut scratch.b, columns);
    let per_row = E::Acc::ONE / E::Acc::from_f64(columns as f64);
    simd(
        #[inline(always)]
        || {
            for row in 0..rows {
                let at = row * columns..(row + 1) * columns;
                let (x, dy, dx) = (&x[at.clone()], &dy[at.clone()], &mut dx[at]);
                let (center, factor) = (mean[row], rstd[row]);
                for (normal, x) in normal.iter_mut().zip(x) {
                    *normal = (x.load() - center) * factor;
                }
                for ((scaled, dy), gamma) in scaled.iter_mut().zip(dy).zip(gamma) {
                    *scaled = dy.load() * *gamma;
                }
                let shift = block_sum::<NORM_THREADS, _>(scaled, |x| x) * per_row;
                let slope = block_dot::<NORM_THREADS, _>(scaled, normal) * per_row;
                for ((dx, scaled), normal) in dx.iter_mut().zip(&*scaled).zip(&*normal) {
                    *dx = E::store(factor * (*scaled - shift - *normal * slope));
                }
            }
            norm_gradients(x, dy, Some(mean), rstd, gradients.gamma, Some(gradients.beta));
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{close, differences, dot, loaded, numbers, rounding, stored};
    use super::*;

    fn reference(x: &[f64], gamma: &[f64], beta: &[f64]) -> Vec<f64> {
        let columns = gamma.len();
        x.chunks(columns)
            .flat_map(|row| {
                let mean = row.iter().sum::<f64>() / columns as f64;
                let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / columns as f64;
                let normal = move |x: f64| (x - mean) / (variance + 1e-5).sqrt();
                (0..columns).map(move |j| normal(row[j]) * gamma[j] + beta[j])
            })
            .collect()
    }

    fn forward<E: Elem>(tolerance: f64) {
        for rows in [1, 3] {
            for columns in [1, 3, 17, 130] {
                let x = stored::<E>(&numbers(1, rows * columns).iter().map(|x| x * 3.0 + 1.0).collect::<Vec<_>>());
                let (gamma, beta) = (numbers(2, columns), numbers(3, columns));
                let real = |values: &[f64]| values.iter().map(|x| E::Acc::from_f64(*x)).collect::<Vec<_>>();
                let (mut mean, mut rstd) = (real(&vec![0.0; rows]), real(&vec![0.0; rows]));
                let mut y = x.clone();
                layer_norm_forward(
                    &mut Scratch::new(),
                    &x,
                    &real(&gamma),
                    &real(&beta),
                    &mut y,
                    Statistics { mean: &mut mean, rstd: &mut rstd },
                )
                .unwrap();
                close(&loaded(&y), &reference(&loaded(&x), &gamma, &beta), tolerance);
            }
        }
    }

    #[test]
    fn forward_normalises_rows() {
        forward::<f32>(3e-5);
        forward::<f64>(1e-11);
        forward::<bf16>(rounding::<bf16>() * 1.02);
    }

    #[test]
    fn backward_is_the_derivative() {
        for (rows, columns) in [(1, 3), (3, 1), (3, 17), (2, 130)] {
            let (x, dy) = (numbers(1, rows * columns), numbers(2, rows * columns));
            let (gamma, beta) = (numbers(3, columns), numbers(4, columns));
            let mut scratch = Scratch::new();
            let (mut y, mut mean, mut rstd) = (x.clone(), vec![0.0; rows], vec![0.0; rows]);
            let statistics = Statistics { mean: &mut mean, rstd: &mut rstd };
            layer_norm_forward(&mut scratch, &x, &gamma, &beta, &mut y, statistics).unwrap();
            let (mut dx, mut dgamma, mut dbeta) = (x.clone(), vec![f64::NAN; columns], vec![f64::NAN; columns]);
            let gradients = NormGradients { gamma: &mut dgamma, beta: &mut dbeta };
            let saved = Saved { mean: &mean, rstd: &rstd };
            layer_norm_backward(&mut scratch, &x, &gamma, saved, &dy, &mut dx, gradients).unwrap();
            close(&dx, &differences(&x, |x| dot(&reference(x, &gamma, &beta), &dy)), 1e-6);
            close(&dgamma, &differences(&gamma, |gamma| dot(&reference(&x, gamma, &beta), &dy)), 1e-7);
            close(&dbeta, &differences(&beta, |beta| dot(&reference(&x, &gamma, beta), &dy)), 1e-7);
        }
    }

    #[test]
    fn a_nan_spoils_its_row_only() {
        let x = [1.0f32, f32::NAN, 1.0, 2.0];
        let (mut y, mut mean, mut rstd) = ([0.0; 4], [0.0; 2], [0.0; 2]);
        let statistics = Statistics { mean: &mut mean, rstd: &mut rstd };
        layer_norm_forward(&mut Scratch::new(), &x, &[1.0; 2], &[0.0; 2], &mut y, statistics).unwrap();
        assert!(y[0].is_nan() && y[1].is_nan() && y[2].is_finite() && y[3].is_finite());
    }
}
