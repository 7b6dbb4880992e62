//! Sums of tensors, of their columns, and of gradient slots.

use super::lanes::tiled_column_sums;
use super::real::{Elem, Real};
use super::{Result, expect_len, simd};

/// Elements that are worked on while they are in the first cache.
const PIECE: usize = 2048;

/// `out = a + b`, rounded once: the residual connection, and gradients of a value that is used twice.
pub fn add<E: Elem>(a: &[E], b: &[E], out: &mut [E]) -> Result {
    expect_len("add", "b", b.len(), a.len())?;
    expect_len("add", "out", out.len(), a.len())?;
    simd(
        #[inline(always)]
        || {
            for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
                *out = E::store(a.load() + b.load());
            }
        },
    );
    Ok(())
}

/// `out = a + out`, rounded once.
pub fn add_into<E: Elem>(a: &[E], out: &mut [E]) -> Result {
    expect_len("add_into", "out", out.len(), a.len())?;
    simd(
        #[inline(always)]
        || {
            for (out, a) in out.iter_mut().zip(a) {
                *out = E::store(a.load() + out.load());
            }
        },
    );
    Ok(())
}

/// Converts between storage types of one accumulator, rounding once: master weights to bf16.
pub fn convert<F: Elem, T: Elem<Acc = F::Acc>>(from: &[F], to: &mut [T]) -> Result {
    expect_len("convert", "to", to.len(), from.len())?;
    simd(
        #[inline(always)]
        || {
            for (to, from) in to.iter_mut().zip(from) {
                *to = T::store(from.load());
            }
        },
    );
    Ok(())
}

/// Whether every element is neither infinite nor NaN.
pub fn all_finite<E: Elem>(x: &[E]) -> bool {
    simd(
        #[inline(always)]
        || x.iter().fold(true, |finite, x| finite & x.load().finite()),
    )
}

/// `out[j] = Σ x[i, j]`, in the order of the GPU's tiles: the gradient of a bias.
pub fn column_sums<E: Elem>(x: &[E], columns: usize, out: &mut [E::Acc]) -> Result {
    expect_len("column_sums", "out", out.len(), columns)?;
    let rows = x.len().checked_div(columns).unwrap_or(0);
    expect_len("column_sums", "x", x.len(), rows * columns)?;
    if columns == 0 {
        return Ok(());
    }
    simd(
        #[inline(always)]
        || tiled_column_sums(x, columns, out),
    );
    Ok(())
}

/// `out = (slot[0] + slot[1]) + ..`: gradients of microbatches, in ascending order.
pub fn sum_slots<A: Real>(slots: &[&[A]], out: &mut [A]) -> Result {
    for slot in slots {
        expect_len("sum_slots", "slots", slot.len(), out.len())?;
    }
    let Some((first, rest)) = slots.split_first() else {
        out.fill(A::ZERO);
        return Ok(());
    };
    simd(
        #[inline(always)]
        || {
            for (piece, out) in out.chunks_mut(PIECE).enumerate() {
                let at = piece * PIECE..piece * PIECE + out.len();
                out.copy_from_slice(&first[at.clone()]);
                for slot in rest {
                    for (out, x) in out.iter_mut().zip(&slot[at.clone()]) {
                        *out = *out + *x;
                    }
                }
            }
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{close, loaded, numbers, rounding, stored};
    use super::*;

    const SIZES: [usize; 5] = [0, 1, 3, 17, 130];

    fn sums<E: Elem>() {
        for n in SIZES {
            let (a, b) = (stored::<E>(&numbers(1, n)), stored::<E>(&numbers(2, n)));
            let want: Vec<f64> = loaded(&a).iter().zip(loaded(&b)).map(|(a, b)| a + b).collect();
            let (mut out, mut into) = (stored::<E>(&vec![f64::NAN; n]), b.clone());
            add(&a, &b, &mut out).unwrap();
            add_into(&a, &mut into).unwrap();
            close(&loaded(&out), &want, rounding::<E>());
            assert_eq!(
                out.iter().map(|x| x.load()).collect::<Vec<_>>(),
                into.iter().map(|x| x.load()).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn addition_rounds_once() {
        sums::<f32>();
        sums::<f64>();
        sums::<bf16>();
        let mut out = [0.0];
        assert!(add(&[1.0], &[1.0, 2.0], &mut out).is_err());
        add(&[f32::INFINITY], &[f32::NEG_INFINITY], &mut out).unwrap();
        assert!(out[0].is_nan());
    }

    #[test]
    fn conversion_rounds_to_nearest_even() {
        let mut out = [bf16::ZERO; 3];
        convert(&[1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -3.0f32], &mut out).unwrap();
        assert_eq!(out.map(bf16::to_f32), [1.0, 1.015625, -3.0]);
    }

    #[test]
    fn what_is_not_finite_is_found_anywhere() {
        for n in SIZES {
            let mut x = stored::<f32>(&numbers(1, n));
            assert!(all_finite(&x));
            for at in 0..n {
                for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let good = std::mem::replace(&mut x[at], bad);
                    assert!(!all_finite(&x));
                    x[at] = good;
                }
            }
        }
    }

    #[test]
    fn columns_are_summed_down_the_rows() {
        for rows in SIZES {
            for columns in [1, 3, 17, 130] {
                let x = stored::<bf16>(&numbers(1, rows * columns));
                let mut out = vec![f32::NAN; columns];
                column_sums(&x, columns, &mut out).unwrap();
                let mut want = vec![0f32; columns];
                for row in 0..rows {
                    for (column, want) in want.iter_mut().enumerate() {
                        *want += x[row * columns + column].to_f32();
                    }
                }
                assert_eq!(out, want);
            }
        }
        assert!(column_sums(&[1.0f32; 5], 2, &mut [0.0; 2]).is_err());
    }

    #[test]
    fn slots_are_added_in_order() {
        for n in [1, 3, 17, 130, 5000] {
            let slots: Vec<Vec<f32>> = (0..5).map(|m| stored(&numbers(m, n))).collect();
            let views: Vec<&[f32]> = slots.iter().map(Vec::as_slice).collect();
            let mut out = vec![f32::NAN; n];
            sum_slots(&views, &mut out).unwrap();
            for i in 0..n {
                let sum = slots[1..].iter().fold(slots[0][i], |sum, slot| sum + slot[i]);
                assert_eq!(out[i], sum);
            }
        }
        let mut out = [5.0];
        sum_slots(&[], &mut out).unwrap();
        assert_eq!(out, [0.0]);
    }
}
