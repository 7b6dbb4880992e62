//! Cross-entropy of logits against target tokens.

use super::lanes::{LOSS_THREADS, block_sum};
use super::real::{Elem, Real, largest, load_slice, store_slice};
use super::{KernelError, Result, Scratch, expect_len, expect_some, simd, take};

fn check(kernel: &'static str, logits: usize, targets: &[u32], vocabulary: usize) -> Result {
    expect_some(kernel, "vocabulary", vocabulary)?;
    expect_some(kernel, "targets", targets.len())?;
    expect_len(kernel, "logits", logits, targets.len() * vocabulary)?;
    match targets.iter().position(|token| *token as usize >= vocabulary) {
        Some(position) => Err(KernelError::Token { kernel, token: targets[position], position, vocabulary }),
        None => Ok(()),
    }
}

/// Mean over tokens of `lse - logit[target]`, with the log-sum-exp of each row kept in `lse`. Rows are added in ascending
/// order.
pub fn cross_entropy_forward<E: Elem>(
    scratch: &mut Scratch<E::Acc>,
    logits: &[E],
    targets: &[u32],
    vocabulary: usize,
    lse: &mut [E::Acc],
) -> Result<E::Acc> {
    check("cross_entropy_forward", logits.len(), targets, vocabulary)?;
    expect_len("cross_entropy_forward", "lse", lse.len(), targets.len())?;
    let row = take(&mut scratch.a, vocabulary);
    let total = simd(
        #[inline(always)]
        || {
            let mut total = E::Acc::ZERO;
            for ((logits, target), lse) in logits.chunks_exact(vocabulary).zip(targets).zip(lse.iter_mut()) {
                load_slice(logits, row);
                let shift = largest(row);
                let logit = row[*target as usize];
                for x in row.iter_mut() {
                    *x = (*x - shift).exp();
                }
                let mass = block_sum::<LOSS_THREADS, _>(row, |x| x);
                *lse = shift + E::Acc::from_f64(mass.to_f64().ln());
                total = total + (*lse - logit);
            }
            total
        },
    );
    Ok(total / E::Acc::from_f64(targets.len() as f64))
}

/// `dlogits = (softmax(logits) - onehot(target)) · factor`; the factor carries 1/tokens and the loss scale.
pub fn cross_entropy_backward<E: Elem>(
    scratch: &mut Scratch<E::Acc>,
    logits: &[E],
    targets: &[u32],
    vocabulary: usize,
    lse: &[E::Acc],
    factor: E::Acc,
    dlogits: &mut [E],
) -> Result {
    check("cross_entropy_backward", logits.len(), targets, vocabulary)?;
    expect_len("cross_entropy_backward", "lse", lse.len(), targets.len())?;
    expect_len("cross_entropy_backward", "dlogits", dlogits.len(), logits.len())?;
    let row = take(&mut scratch.a, vocabulary);
    simd(
        #[inline(always)]
        || {
            let lines = logits.chunks_exact(vocabulary).zip(dlogits.chunks_exact_mut(vocabulary));
            for ((logits, dlogits), (target, lse)) in lines.zip(targets.iter().zip(lse)) {
                load_slice(logits, row);
                for x in row.iter_mut() {
                    *x = (*x - *lse).exp();
                }
                row[*target as usize] = row[*target as usize] - E::Acc::ONE;
                for x in row.iter_mut() {
                    *x = *x * factor;
                }
                store_slice(row, dlogits);
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

    fn reference(logits: &[f64], targets: &[u32], vocabulary: usize) -> f64 {
        let rows = logits.chunks(vocabulary).zip(targets);
        let losses = rows.map(|(row, target)| row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[*target as usize]);
        losses.sum::<f64>() / targets.len() as f64
    }

    fn targets(rows: usize, vocabulary: usize) -> Vec<u32> {
        (0..rows).map(|row| (row * 7 % vocabulary) as u32).collect()
    }

    fn forward<E: Elem>(tolerance: f64) {
        for rows in [1, 3, 17] {
            for vocabulary in [1, 3, 17, 130] {
                let logits = stored::<E>(&numbers(1, rows * vocabulary).iter().map(|x| x * 9.0).collect::<Vec<_>>());
                let targets = targets(rows, vocabulary);
                let mut lse = vec![E::Acc::ZERO; rows];
                let loss = cross_entropy_forward(&mut Scratch::new(), &logits, &targets, vocabulary, &mut lse).unwrap();
                close(&[loss.to_f64()], &[reference(&loaded(&logits), &targets, vocabulary)], tolerance);
            }
        }
    }

    #[test]
    fn the_loss_is_the_mean_of_rows() {
        forward::<f32>(1e-6);
        forward::<f64>(1e-14);
        forward::<bf16>(1e-6);
    }

    #[test]
    fn backward_is_the_derivative_times_the_factor() {
        for (rows, vocabulary) in [(1, 3), (3, 17), (2, 130)] {
            let logits: Vec<f64> = numbers(1, rows * vocabulary).iter().map(|x| x * 4.0).collect();
            let targets = targets(rows, vocabulary);
            let (mut lse, mut dlogits) = (vec![0.0; rows], logits.clone());
            let mut scratch = Scratch::new();
            cross_entropy_forward(&mut scratch, &logits, &targets, vocabulary, &mut lse).unwrap();
            let factor = 16384.0 / rows as f64;
            cross_entropy_backward(&mut scratch, &logits, &targets, vocabulary, &lse, factor, &mut dlogits).unwrap();
            let want = differences(&logits, |logits| reference(logits, &targets, vocabulary) * 16384.0);
            close(&dlogits, &want, 1e-4);
            let unscaled: Vec<f64> = dlogits.iter().map(|x| x / 16384.0).collect();
            close(&unscaled, &want.iter().map(|x| x / 16384.0).collect::<Vec<_>>(), 1e-8);

            let narrow = stored::<bf16>(&logits);
            let (mut lse, mut out) = (vec![0.0; rows], narrow.clone());
            let mut wide = vec![0.0; logits.len()];
            let (mut scratch, mut exact) = (Scratch::new(), vec![0.0; rows]);
            cross_entropy_forward(&mut scratch, &narrow, &targets, vocabulary, &mut lse).unwrap();
            cross_entropy_backward(&mut scratch, &narrow, &targets, vocabulary, &lse, 1.0, &mut out).unwrap();
            let values = loaded(&narrow);
            let mut scratch = Scratch::new();
            cross_entropy_forward(&mut scratch, &values, &targets, vocabulary, &mut exact).unwrap();
            cross_entropy_backward(&mut scratch, &values, &targets, vocabulary, &exact, 1.0, &mut wide).unwrap();
            close(&loaded(&out), &wide, rounding::<bf16>() * 1.01);
        }
    }

    #[test]
    fn large_logits_do_not_overflow_and_nan_stays() {
        let mut lse = [0.0; 1];
        let loss = cross_entropy_forward(&mut Scratch::new(), &[1e4f32, 0.0], &[0], 2, &mut lse).unwrap();
        assert_eq!((loss, lse[0]), (0.0, 1e4));
        for bad in [f32::NAN, f32::INFINITY] {
            let loss = cross_entropy_forward(&mut Scratch::new(), &[bad, 0.0], &[1], 2, &mut lse).unwrap();
            assert!(!loss.is_finite());
        }
    }

    #[test]
    fn a_target_beyond_the_vocabulary_is_refused() {
        let mut lse = [0.0; 2];
        let fault = cross_entropy_forward(&mut Scratch::new(), &[0.0f32; 6], &[2, 3], 3, &mut lse).unwrap_err();
        let text = "cross_entropy_forward: token 3 at position 1 is not below the vocabulary size 3";
        assert_eq!(fault.to_string(), text);
    }
}
