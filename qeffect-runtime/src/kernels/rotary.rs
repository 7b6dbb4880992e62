//! Rotary position embedding: the elements j and j + d/2 of a query or key turn by an angle that grows with the position.
//!
//! The angle is `position · base^(-2j/d)`. Cosines and sines come from a table that is made once on the host, so that
//! every device turns by the same numbers.

use super::real::Elem;
use super::{KernelError, Result, expect_len, expect_some, simd};

/// Sizes of the rotation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RotaryShape {
    /// Tokens of a sequence: row t has the position `t mod length`.
    pub length: usize,
    /// Heads that are turned: the first ones of a row. The rest of the row stays as it is.
    pub heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Elements of a row.
    pub width: usize,
}

/// `[length, head_dim]`: per position the cosines of head_dim / 2 angles, then their sines.
pub fn rotary_table(length: usize, head_dim: usize, base: f64) -> Vec<f64> {
    let half = head_dim / 2;
    let angle = |position: usize, j: usize| position as f64 * libm::pow(base, -((2 * j) as f64) / head_dim as f64);
    (0..length)
        .flat_map(|position| {
            let angles = move |f: fn(f64) -> f64| (0..half).map(move |j| f(angle(position, j)));
            angles(libm::cos).chain(angles(libm::sin))
        })
        .collect()
}

/// Turns by the angles of `table` ([`rotary_table`]), or back with `inverse`, which is the gradient.
pub fn rotary<E: Elem>(shape: RotaryShape, table: &[E::Acc], inverse: bool, x: &[E], out: &mut [E]) -> Result {
    const KERNEL: &str = "rotary";
    let RotaryShape { length, heads, head_dim, width } = shape;
    expect_some(KERNEL, "length", length)?;
    expect_some(KERNEL, "width", width)?;
    expect_some(KERNEL, "head_dim", head_dim)?;
    let refused = |dimension, found, rule| Err(KernelError::Dimension { kernel: KERNEL, dimension, found, rule });
    if !head_dim.is_multiple_of(2) {
        return refused("head_dim", head_dim, "pairs are turned, so it is even");
    }
    if heads * head_dim > width {
        return refused("width", width, "a row holds every head that is turned");
    }
    expect_len(KERNEL, "table", table.len(), length * head_dim)?;
    expect_len(KERNEL, "x", x.len(), x.len() / width * width)?;
    expect_len(KERNEL, "out", out.len(), x.len())?;
    let half = head_dim / 2;
    simd(
        #[inline(always)]
        || {
            for (row, (x, out)) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
                let (cosines, sines) = table[row % length * head_dim..][..head_dim].split_at(half);
                let turned = heads * head_dim;
                for (x, out) in x[..turned].chunks_exact(head_dim).zip(out[..turned].chunks_exact_mut(head_dim)) {
                    let ((a, b), (low, high)) = (x.split_at(half), out.split_at_mut(half));
                    for j in 0..half {
                        let (a, b, cosine) = (a[j].load(), b[j].load(), cosines[j]);
                        let sine = if inverse { -sines[j] } else { sines[j] };
                        low[j] = E::store(a * cosine - b * sine);
                        high[j] = E::store(b * cosine + a * sine);
                    }
                }
                out[turned..].copy_from_slice(&x[turned..]);
            }
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::real::Real;
    use super::super::testing::{close, differences, dot, loaded, numbers, rounding, stored};
    use super::*;

    fn shapes() -> [(RotaryShape, usize); 4] {
        let shape = |length, heads, head_dim, width| RotaryShape { length, heads, head_dim, width };
        [(shape(1, 1, 2, 2), 1), (shape(3, 2, 6, 17), 6), (shape(17, 3, 2, 8), 34), (shape(5, 1, 34, 40), 5)]
    }

    /// As a product of complex numbers.
    fn reference(shape: RotaryShape, base: f64, x: &[f64]) -> Vec<f64> {
        let mut out = x.to_vec();
        let half = shape.head_dim / 2;
        for (row, out) in out.chunks_mut(shape.width).enumerate() {
            for head in out[..shape.heads * shape.head_dim].chunks_mut(shape.head_dim) {
                for j in 0..half {
                    let angle = (row % shape.length) as f64 / base.powf(j as f64 / half as f64);
                    let (radius, before) = (head[j].hypot(head[j + half]), head[j + half].atan2(head[j]));
                    head[j] = radius * (before + angle).cos();
                    head[j + half] = radius * (before + angle).sin();
                }
            }
        }
        out
    }

    fn table<A: Real>(shape: RotaryShape, base: f64) -> Vec<A> {
        rotary_table(shape.length, shape.head_dim, base).into_iter().map(A::from_f64).collect()
    }

    fn turned<E: Elem>(tolerance: f64) {
        for (shape, rows) in shapes() {
            let x = stored::<E>(&numbers(1, rows * shape.width));
            let mut out = stored::<E>(&vec![f64::NAN; x.len()]);
            rotary(shape, &table(shape, 1e4), false, &x, &mut out).unwrap();
            close(&loaded(&out), &reference(shape, 1e4, &loaded(&x)), tolerance);
        }
    }

    #[test]
    fn pairs_turn_by_their_position() {
        turned::<f32>(1e-6);
        turned::<f64>(1e-13);
        turned::<bf16>(rounding::<bf16>() * 1.02);
    }

    #[test]
    fn turning_back_is_the_derivative_and_the_inverse() {
        for (shape, rows) in shapes() {
            let (x, dy) = (numbers(1, rows * shape.width), numbers(2, rows * shape.width));
            let table = table::<f64>(shape, 100.0);
            let (mut y, mut back, mut dx) = (x.clone(), x.clone(), x.clone());
            rotary(shape, &table, false, &x, &mut y).unwrap();
            rotary(shape, &table, true, &y, &mut back).unwrap();
            close(&back, &x, 1e-14);
            rotary(shape, &table, true, &dy, &mut dx).unwrap();
            close(&dx, &differences(&x, |x| dot(&reference(shape, 100.0, x), &dy)), 1e-8);
        }
    }

    #[test]
    fn odd_heads_and_wrong_sizes_are_refused() {
        let shape = RotaryShape { length: 1, heads: 1, head_dim: 3, width: 4 };
        let fault = rotary(shape, &[0f32; 3], false, &[0f32; 4], &mut [0.0; 4]).unwrap_err();
        assert_eq!(fault.to_string(), "rotary: `head_dim` is 3: pairs are turned, so it is even");
        let shape = RotaryShape { head_dim: 2, heads: 3, ..shape };
        assert!(rotary(shape, &[0f32; 2], false, &[0f32; 4], &mut [0.0; 4]).is_err());
        let shape = RotaryShape { heads: 1, ..shape };
        assert!(rotary(shape, &[0f32; 3], false, &[0f32; 4], &mut [0.0; 4]).is_err());
        assert!(rotary(shape, &[0f32; 2], false, &[0f32; 5], &mut [0.0; 5]).is_err());
    }
}
