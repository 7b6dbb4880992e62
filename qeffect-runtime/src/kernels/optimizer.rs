//! AdamW and the norm of gradients.

use super::lanes::strided_sum;
use super::real::{Real, sum};
use super::{Result, expect_len, simd};

/// Elements per partial sum of squares. Part of the numeric identity of a run.
pub const NORM_PIECE: usize = 4096;

/// Number of partial sums of squares of a parameter of `len` elements.
pub const fn norm_pieces(len: usize) -> usize {
    len.div_ceil(NORM_PIECE)
}

/// Sums of squares of `x · factor` over fixed-size pieces. They are gathered, and added in a fixed order, by whoever takes
/// the norm. The bits are those of a product that is stored first.
pub fn sums_of_squares<A: Real>(x: &[A], factor: A, partials: &mut [A]) -> Result {
    expect_len("sums_of_squares", "partials", partials.len(), norm_pieces(x.len()))?;
    simd(
        #[inline(always)]
        || {
            for (partial, piece) in partials.iter_mut().zip(x.chunks(NORM_PIECE)) {
                *partial = sum(piece, |x| {
                    let x = x * factor;
                    x * x
                });
            }
        },
    );
    Ok(())
}

/// The norm whose squares of pieces these are: the root of their sum by 512 lanes, folded as a tree.
pub fn norm<A: Real>(partials: &[A]) -> A {
    strided_sum(partials).sqrt()
}

/// Numbers of one AdamW step that all elements share.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamW<A> {
    /// 1 - beta1: share of the gradient in the first moment.
    pub share1: A,
    /// beta2: decay of the second moment.
    pub beta2: A,
    /// 1 - beta2.
    pub share2: A,
    /// Added to the root of the corrected second moment.
    pub epsilon: A,
    /// Learning rate divided by 1 - beta1^t.
    pub step_size: A,
    /// √(1 - beta2^t).
    pub correction2_sqrt: A,
    /// 1 - learning rate · weight decay; 1 on vectors.
    pub decay: A,
    /// What a gradient, a sum over microbatches, is multiplied by first: it makes a mean of it.
    pub factor: A,
    /// What gradients are multiplied by next: the clipping factor.
    pub clip: A,
}

impl<A: Real> AdamW<A> {
    /// The numbers of step `t` (1 for the first) with betas 0.9 and 0.95 and epsilon 1e-8, computed in f64.
    pub fn at(t: u64, learning_rate: f64, weight_decay: f64, clip: A) -> AdamW<A> {
        let (beta1, beta2) = (0.9f64, 0.95f64);
        let power = |beta: f64| 1.0 - beta.powf(t as f64);
        AdamW {
            share1: A::from_f64(1.0 - beta1),
            beta2: A::from_f64(beta2),
            share2: A::from_f64(1.0 - beta2),
            epsilon: A::from_f64(1e-8),
            step_size: A::from_f64(learning_rate / power(beta1)),
            correction2_sqrt: A::from_f64(power(beta2).sqrt()),
            decay: A::from_f64(1.0 - learning_rate * weight_decay),
            factor: A::ONE,
            clip,
        }
    }
}

/// One step, in PyTorch's order of operations: the decoupled decay, the moments, then the update with epsilon added after
/// the bias correction.
pub fn adamw<A: Real>(step: &AdamW<A>, gradient: &[A], weight: &mut [A], first: &mut [A], second: &mut [A]) -> Result {
    expect_len("adamw", "gradient", gradient.len(), weight.len())?;
    expect_len("adamw", "first", first.len(), weight.len())?;
    expect_len("adamw", "second", second.len(), weight.len())?;
    let AdamW { share1, beta2, share2, epsilon, step_size, correction2_sqrt, decay, factor, clip } = *step;
    simd(
        #[inline(always)]
        || {
            for (((w, g), m), v) in weight.iter_mut().zip(gradient).zip(first).zip(second) {
                let g = *g * factor * clip;
                *m = *m + share1 * (g - *m);
                *v = *v * beta2 + share2 * g * g;
                let denominator = v.sqrt() / correction2_sqrt + epsilon;
                *w = *w * decay - step_size * *m / denominator;
            }
        },
    );
    Ok(())
}

/// The factor that bounds a norm: `min(1, limit / (norm + 1e-6))`. NaN stays.
pub fn clip_factor<A: Real>(norm: A, limit: A) -> A {
    let factor = limit / (norm + A::from_f64(1e-6));
    if factor > A::ONE { A::ONE } else { factor }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{close, loaded, numbers, stored};
    use super::*;

    #[test]
    fn pieces_are_summed_apart() {
        for n in [1, 3, 17, 130, 4096, 4097, 9000] {
            let x = numbers(1, n);
            let mut partials = vec![f64::NAN; norm_pieces(n)];
            sums_of_squares(&x, 1.0, &mut partials).unwrap();
            let want: Vec<f64> = x.chunks(NORM_PIECE).map(|piece| piece.iter().map(|x| x * x).sum()).collect();
            close(&partials, &want, 1e-13);
        }
        assert!(sums_of_squares(&[1.0f32], 1.0, &mut []).is_err());
        let mut partial = [0.0];
        sums_of_squares(&[1.0f32, f32::NAN], 1.0, &mut partial).unwrap();
        assert!(partial[0].is_nan());
    }

    /// The textbook form: moments divided by their corrections.
    fn textbook(w: &mut f64, m: &mut f64, v: &mut f64, g: f64, t: i32, rate: f64, decay: f64) {
        *w -= rate * decay * *w;
        *m = 0.9 * *m + 0.1 * g;
        *v = 0.95 * *v + 0.05 * g * g;
        *w -= rate * (*m / (1.0 - 0.9f64.powi(t))) / ((*v / (1.0 - 0.95f64.powi(t))).sqrt() + 1e-8);
    }

    #[test]
    fn ten_steps_follow_the_textbook() {
        for n in [1, 3, 17, 130] {
            let start = numbers(1, n);
            let (mut w, mut m, mut v) = (start.clone(), vec![0.0; n], vec![0.0; n]);
            let (mut w32, mut m32, mut v32) = (stored::<f32>(&start), vec![0f32; n], vec![0f32; n]);
            let (mut want, mut wm, mut wv) = (start, vec![0.0; n], vec![0.0; n]);
            for t in 1..=10 {
                let g = numbers(100 + t, n);
                let step = AdamW::at(t, 3e-3, 0.1, 0.5);
                adamw(&step, &g, &mut w, &mut m, &mut v).unwrap();
                let step = AdamW::at(t, 3e-3, 0.1, 0.5);
                adamw(&step, &stored::<f32>(&g), &mut w32, &mut m32, &mut v32).unwrap();
                for i in 0..n {
                    textbook(&mut want[i], &mut wm[i], &mut wv[i], g[i] * 0.5, t as i32, 3e-3, 0.1);
                }
            }
            close(&w, &want, 1e-12);
            close(&loaded(&w32), &want, 2e-6);
        }
    }

    // case B34: the division by the number of microbatches is one product, whether it is stored or made by the reader.
    #[test]
    fn a_factor_on_loading_gives_the_bits_of_a_stored_product() {
        let factor = 1.0 / 3.0 / 1024.0f32;
        for n in [1, 17, 4097] {
            let sums: Vec<f32> = stored(&numbers(7, n));
            let means: Vec<f32> = sums.iter().map(|sum| sum * factor).collect();
            let (mut found, mut want) = (vec![0.0; norm_pieces(n)], vec![0.0; norm_pieces(n)]);
            sums_of_squares(&sums, factor, &mut found).unwrap();
            sums_of_squares(&means, 1.0, &mut want).unwrap();
            assert_eq!(found, want);

            let update = |gradient: &[f32], factor: f32| {
                let step = AdamW { factor, ..AdamW::at(3, 3e-3, 0.1, 0.7) };
                let (mut w, mut m, mut v) = (stored::<f32>(&numbers(8, n)), vec![0.01; n], vec![0.02; n]);
                adamw(&step, gradient, &mut w, &mut m, &mut v).unwrap();
                (w, m, v)
            };
            assert_eq!(update(&sums, factor), update(&means, 1.0));
            assert_ne!(update(&sums, factor), update(&sums, 1.0));
        }
    }

    #[test]
    fn a_zero_gradient_only_decays() {
        let step = AdamW::at(1, 0.1, 0.5, 1.0);
        let (mut w, mut m, mut v) = ([2.0f32], [0.0], [0.0]);
        adamw(&step, &[0.0], &mut w, &mut m, &mut v).unwrap();
        assert_eq!((w, m, v), ([2.0 * 0.95], [0.0], [0.0]));
    }

    #[test]
    fn clipping_bounds_the_norm() {
        assert_eq!(clip_factor(0.5f32, 1.0), 1.0);
        assert_eq!(clip_factor(4.0f64, 1.0), 1.0 / (4.0 + 1e-6));
        assert_eq!(clip_factor(f32::INFINITY, 1.0), 0.0);
        assert!(clip_factor(f32::NAN, 1.0).is_nan());
    }
}
