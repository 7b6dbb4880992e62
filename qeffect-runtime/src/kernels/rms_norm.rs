//! RMS norm: `y = x · gain / √(mean of x² + ε)`. A layer norm that subtracts no mean and has no bias.

use super::lanes::{NORM_THREADS, block_dot, block_sum, norm_gradients};
use super::layer_norm::EPSILON;
use super::real::{Elem, Real, load_slice, store_slice};
use super::{Result, Scratch, expect_len, expect_some, simd, take};

/// `y = x · rstd · gain`, row by row, with `rstd = 1 / √(mean of x² + ε)`. The number of columns is that of `gain`.
pub fn rms_norm_forward<E: Elem>(
    scratch: &mut Scratch<E::Acc>,
    x: &[E],
    gain: &[E::Acc],
    y: &mut [E],
    rstd: &mut [E::Acc],
) -> Result {
    let columns = gain.len();
    expect_some("rms_norm_forward", "columns", columns)?;
    expect_len("rms_norm_forward", "x", x.len(), rstd.len() * columns)?;
    expect_len("rms_norm_forward", "y", y.len(), x.len())?;
    let row = take(&mut scratch.a, columns);
    let per_row = E::Acc::ONE / E::Acc::from_f64(columns as f64);
    let epsilon = E::Acc::from_f64(EPSILON);
    simd(
        #[inline(always)]
        || {
            for ((x, y), rstd) in x.chunks_exact(columns).zip(y.chunks_exact_mut(columns)).zip(rstd.iter_mut()) {
                load_slice(x, row);
                let square = block_sum::<NORM_THREADS, _>(row, |x| x * x) * per_row;
                *rstd = E::Acc::ONE / (square + epsilon).sqrt();
                let factor = *rstd;
                for (x, gain) in row.iter_mut().zip(gain) {
                    *x = *x * factor * *gain;
                }
                store_slice(row, y);
            }
        },
    );
    Ok(())
}

/// `dx` and the gradient of the gain, from the input and what the forward saved. What the outputs held is not read.
pub fn rms_norm_backward<E: Elem>(
    scratch: &mut Scratch<E::Acc>,
    x: &[E],
    gain: &[E::Acc],
    rstd: &[E::Acc],
    dy: &[E],
    dx: &mut [E],
    gain_grad: &mut [E::Acc],
) -> Result {
    let columns = gain.len();
    expect_some("rms_norm_backward", "columns", columns)?;
    expect_len("rms_norm_backward", "x", x.len(), rstd.len() * columns)?;
    expect_len("rms_norm_backward", "dy", dy.len(), x.len())?;
    expect_len("rms_norm_backward", "dx", dx.len(), x.len())?;
    expect_len("rms_norm_backward", "gain_grad", gain_grad.len(), columns)?;
    let normal = take(&mut scratch.a, columns);
    let scaled = take(&mut scratch.b, columns);
    let per_row = E::Acc::ONE / E::Acc::from_f64(columns as f64);
    simd(
        #[inline(always)]
        || {
            for (row, dx) in dx.chunks_exact_mut(columns).enumerate() {
                let at = row * columns..(row + 1) * columns;
                let factor = rstd[row];
                for (normal, x) in normal.iter_mut().zip(&x[at.clone()]) {
                    *normal = x.load() * factor;
                }
                for ((scaled, dy), gain) in scaled.iter_mut().zip(&dy[at]).zip(gain) {
                    *scaled = dy.load() * *gain;
                }
                let slope = block_dot::<NORM_THREADS, _>(scaled, normal) * per_row;
                for ((dx, scaled), normal) in dx.iter_mut().zip(&*scaled).zip(&*normal) {
                    *dx = E::store(factor * (*scaled - *normal * slope));
                }
            }
            norm_gradients(x, dy, None, rstd, gain_grad, None);
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{close, differences, dot, loaded, numbers, rounding, stored};
    use super::*;

    fn reference(x: &[f64], gain: &[f64]) -> Vec<f64> {
        let columns = gain.len();
        x.chunks(columns)
            .flat_map(|row| {
                let square = row.iter().map(|x| x * x).sum::<f64>() / columns as f64;
                (0..columns).map(move |j| row[j] / (square + 1e-5).sqrt() * gain[j])
            })
            .collect()
    }

    fn forward<E: Elem>(tolerance: f64) {
        for (rows, columns) in [(1, 1), (3, 3), (1, 17), (3, 130), (2, 2100)] {
            let x = stored::<E>(&numbers(1, rows * columns).iter().map(|x| x * 3.0 + 1.0).collect::<Vec<_>>());
            let gain = numbers(2, columns);
            let real: Vec<E::Acc> = gain.iter().map(|x| E::Acc::from_f64(*x)).collect();
            let (mut y, mut rstd) = (x.clone(), vec![E::Acc::ZERO; rows]);
            rms_norm_forward(&mut Scratch::new(), &x, &real, &mut y, &mut rstd).unwrap();
            close(&loaded(&y), &reference(&loaded(&x), &gain), tolerance);
        }
    }

    #[test]
    fn forward_scales_rows_to_unit_mean_square() {
        forward::<f32>(3e-6);
        forward::<f64>(1e-13);
        forward::<bf16>(rounding::<bf16>() * 1.02);
    }

    #[test]
    fn backward_is_the_derivative() {
        for (rows, columns) in [(1, 1), (1, 3), (3, 17), (70, 2), (2, 130)] {
            let (x, dy, gain) = (numbers(1, rows * columns), numbers(2, rows * columns), numbers(3, columns));
            let mut scratch = Scratch::new();
            let (mut y, mut rstd) = (x.clone(), vec![0.0; rows]);
            rms_norm_forward(&mut scratch, &x, &gain, &mut y, &mut rstd).unwrap();
            let (mut dx, mut dgain) = (vec![f64::NAN; x.len()], vec![f64::NAN; columns]);
            rms_norm_backward(&mut scratch, &x, &gain, &rstd, &dy, &mut dx, &mut dgain).unwrap();
            close(&dx, &differences(&x, |x| dot(&reference(x, &gain), &dy)), 1e-6);
            close(&dgain, &differences(&gain, |gain| dot(&reference(&x, gain), &dy)), 1e-7);
        }
    }

    #[test]
    fn wrong_sizes_are_refused_and_a_nan_spoils_its_row_only() {
        let mut scratch = Scratch::new();
        let fault = rms_norm_forward(&mut scratch, &[0f32; 3], &[1.0; 2], &mut [0.0; 4], &mut [0.0; 2]);
        assert_eq!(fault.unwrap_err().to_string(), "rms_norm_forward: `x` has 3 elements, the shape needs 4");
        assert!(rms_norm_forward::<f32>(&mut scratch, &[], &[], &mut [], &mut []).is_err());
        let mut y = [0.0; 4];
        rms_norm_forward(&mut scratch, &[1.0, f32::NAN, 1.0, 2.0], &[1.0; 2], &mut y, &mut [0.0; 2]).unwrap();
        assert!(y[0].is_nan() && y[1].is_nan() && y[2].is_finite() && y[3].is_finite());
    }
}
