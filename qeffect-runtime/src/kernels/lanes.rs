//! Sums in the order in which the kernels of a GPU add, so that equal terms give the same bits on both devices.
//!
//! What a thread there has no element for adds zero. Sums start from zero and so are never -0, to which adding zero would
//! make a difference: such additions are left out here, except where a sum starts from an element.

use std::ops::Range;

use super::real::{Elem, Real};

/// Threads that share a row of a norm.
pub(crate) const NORM_THREADS: usize = 256;
/// Threads that share a row of logits.
pub(crate) const LOSS_THREADS: usize = 512;

/// Neighbours that a thread takes at once.
const GROUP: usize = 8;
const WARP: usize = 32;
/// Rows of a tile; also the columns that are worked on at once, which changes no sum.
const TILE: usize = 64;
/// Rows of a tile that one thread has.
const QUAD: usize = 4;

/// Sum of `f(x[i])` by a block of threads. Groups of eight neighbours go to the threads in turn; a thread adds what it has
/// in ascending order, a warp folds as a tree, warps are added in ascending order.
#[inline(always)]
pub(crate) fn block_sum<const THREADS: usize, A: Real>(x: &[A], f: impl Fn(A) -> A) -> A {
    let mut lanes = [A::ZERO; THREADS];
    for round in x.chunks(THREADS * GROUP) {
        for (lane, group) in lanes.iter_mut().zip(round.chunks(GROUP)) {
            for x in group {
                *lane = *lane + f(*x);
            }
        }
    }
    fold_block(&mut lanes, x.len().div_ceil(GROUP))
}

/// Sum of `x[i] · y[i]`, as [`block_sum`].
#[inline(always)]
pub(crate) fn block_dot<const THREADS: usize, A: Real>(x: &[A], y: &[A]) -> A {
    let mut lanes = [A::ZERO; THREADS];
    for (xs, ys) in x.chunks(THREADS * GROUP).zip(y.chunks(THREADS * GROUP)) {
        for (lane, (xs, ys)) in lanes.iter_mut().zip(xs.chunks(GROUP).zip(ys.chunks(GROUP))) {
            for (x, y) in xs.iter().zip(ys) {
                *lane = *lane + *x * *y;
            }
        }
    }
    fold_block(&mut lanes, x.len().div_ceil(GROUP))
}

#[inline(always)]
fn fold_block<A: Real>(lanes: &mut [A], used: usize) -> A {
    let used = used.min(lanes.len());
    lanes[..used].chunks_mut(WARP).fold(A::ZERO, |total, warp| total + fold_tree(warp, WARP / 2))
}

/// Folds lane i with lane i + width, then with half the width, down to 1.
#[inline(always)]
fn fold_tree<A: Real>(lanes: &mut [A], widest: usize) -> A {
    let mut width = widest;
    while width > 0 {
        for lane in 0..width.min(lanes.len().saturating_sub(width)) {
            lanes[lane] = lanes[lane] + lanes[lane + width];
        }
        width /= 2;
    }
    lanes.first().copied().unwrap_or(A::ZERO)
}

/// Sum by 512 lanes, of which each adds every 512th element in ascending order; folded as a tree.
pub(crate) fn strided_sum<A: Real>(x: &[A]) -> A {
    let mut lanes = [A::ZERO; 512];
    for round in x.chunks(512) {
        for (lane, x) in lanes.iter_mut().zip(round) {
            *lane = *lane + *x;
        }
    }
    fold_tree(&mut lanes, 256)
}

/// `out[j] = Σ x[i, j]`, in the order of [`tiled_sums`].
#[inline(always)]
pub(crate) fn tiled_column_sums<E: Elem>(x: &[E], columns: usize, out: &mut [E::Acc]) {
    tiled_sums(x.len() / columns, out, |row, across| x[row * columns..][..columns][across].iter().map(|x| x.load()));
}

/// Sums of columns: four rows ascending, the sixteen such sums of a tile of 64 rows ascending, tiles ascending. `line` gives
/// the values of some columns of a row.
#[inline(always)]
fn tiled_sums<A: Real, I: Iterator<Item = A>>(rows: usize, out: &mut [A], line: impl Fn(usize, Range<usize>) -> I) {
    let zero = A::ZERO;
    out.fill(zero);
    for (block, out) in out.chunks_mut(TILE).enumerate() {
        let across = block * TILE..block * TILE + out.len();
        for first in (0..rows).step_by(TILE) {
            let end = rows.min(first + TILE);
            let mut tile = [zero; TILE];
            for top in (first..end).step_by(QUAD) {
                let bottom = end.min(top + QUAD);
                let mut quad = [zero; TILE];
                for (sum, x) in quad.iter_mut().zip(line(top, across.clone())) {
                    *sum = x;
                }
                for i in top + 1..bottom {
                    for (sum, x) in quad.iter_mut().zip(line(i, across.clone())) {
                        *sum = *sum + x;
                    }
                }
                let (short, start) = (bottom < top + QUAD, top == first);
                for (sum, quad) in tile.iter_mut().zip(&quad) {
                    let quad = if short { *quad + zero } else { *quad };
                    *sum = if start { quad } else { *sum + quad };
                }
            }
            let (short, start) = (end < first + TILE, first == 0);
            for (sum, tile) in out.iter_mut().zip(&tile) {
                let tile = if short { *tile + zero } else { *tile };
                *sum = if start { tile } else { *sum + tile };
            }
        }
    }
}

/// Gradients of a norm's gain and bias: `gain[j] = Σ dy[i, j] · normal[i, j]` and `bias[j] = Σ dy[i, j]`, with
/// `normal = (x - mean) · rstd`, in the order of [`tiled_sums`]. Without means nothing is subtracted.
#[inline(always)]
pub(crate) fn norm_gradients<E: Elem>(
    x: &[E],
    dy: &[E],
    mean: Option<&[E::Acc]>,
    rstd: &[E::Acc],
    gain: &mut [E::Acc],
    bias: Option<&mut [E::Acc]>,
) {
    let columns = gain.len();
    tiled_sums(rstd.len(), gain, |row, across| {
        let (center, factor) = (mean.map_or(E::Acc::ZERO, |mean| mean[row]), rstd[row]);
        let at = row * columns + across.start..row * columns + across.end;
        x[at.clone()].iter().zip(&dy[at]).map(move |(x, dy)| dy.load() * ((x.load() - center) * factor))
    });
    if let Some(bias) = bias {
        tiled_column_sums(dy, columns, bias);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{numbers, stored};
    use super::*;

    /// A warp of the GPU: every lane adds its partner's value.
    fn warp(lanes: &[f32]) -> f32 {
        let mut lanes: [f32; 32] = lanes.try_into().unwrap();
        for width in [16, 8, 4, 2, 1] {
            lanes = std::array::from_fn(|lane| lanes[lane] + lanes[lane ^ width]);
        }
        lanes[0]
    }

    /// A block of the GPU, thread by thread.
    fn block(threads: usize, x: &[f32]) -> f32 {
        let mut lanes = vec![0f32; threads];
        for (thread, lane) in lanes.iter_mut().enumerate() {
            for group in (thread..x.len().div_ceil(8)).step_by(threads) {
                (0..8).for_each(|i| *lane += x.get(group * 8 + i).copied().unwrap_or(0.0));
            }
        }
        let warps: Vec<f32> = lanes.chunks(32).map(warp).collect();
        warps[1..].iter().fold(warps[0], |total, warp| total + warp)
    }

    #[test]
    fn a_row_is_added_as_a_block_adds_it() {
        for n in [1, 7, 8, 17, 130, 256, 2048, 2050, 4096, 9001] {
            let x = stored::<f32>(&numbers(1, n));
            let y = stored::<f32>(&numbers(2, n));
            let products: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x * y).collect();
            assert_eq!(block_sum::<256, f32>(&x, |x| x).to_bits(), block(256, &x).to_bits(), "{n}");
            assert_eq!(block_sum::<512, f32>(&x, |x| x).to_bits(), block(512, &x).to_bits(), "{n}");
            assert_eq!(block_dot::<256, f32>(&x, &y).to_bits(), block(256, &products).to_bits(), "{n}");
        }
        assert_eq!(block_sum::<256, f32>(&[-0.0], |x| x).to_bits(), 0);
    }

    #[test]
    fn partial_sums_are_added_by_512_lanes() {
        for n in [1, 3, 511, 512, 513, 2000] {
            let x = stored::<f32>(&numbers(3, n));
            let mut lanes: Vec<f32> = (0..512).map(|lane| x.iter().skip(lane).step_by(512).sum()).collect();
            for width in [256, 128, 64, 32, 16, 8, 4, 2, 1] {
                (0..width).for_each(|lane| lanes[lane] += lanes[lane + width]);
            }
            assert_eq!(strided_sum(&x).to_bits(), lanes[0].to_bits());
        }
    }

    /// Sixteen threads of four rows each for a column; what lies beyond the matrix is zero.
    fn tiles(x: &[f32], columns: usize, column: usize) -> f32 {
        let rows = x.len() / columns;
        let at = |row: usize| if row < rows { x[row * columns + column] } else { 0.0 };
        let quad = |top: usize| (1..4).fold(at(top), |sum, i| sum + at(top + i));
        let tile = |first: usize| (1..16).fold(quad(first), |sum, i| sum + quad(first + 4 * i));
        (1..rows.div_ceil(64)).fold(tile(0), |sum, i| sum + tile(64 * i))
    }

    #[test]
    fn columns_are_added_as_tiles_add_them() {
        for (rows, columns) in [(1, 1), (3, 5), (64, 64), (65, 70), (130, 3), (200, 129)] {
            let mut x = stored::<f32>(&numbers(4, rows * columns));
            (0..rows).for_each(|row| x[row * columns] = -0.0);
            let mut sums = vec![f32::NAN; columns];
            tiled_column_sums(&x, columns, &mut sums);
            for (column, sum) in sums.iter().enumerate() {
                assert_eq!(sum.to_bits(), tiles(&x, columns, column).to_bits(), "{rows}×{columns}, column {column}");
            }
        }
    }

    #[test]
    fn gradients_of_a_norm_are_added_as_tiles_add_them() {
        for (rows, columns) in [(1, 3), (31, 2), (33, 70), (64, 64), (150, 5)] {
            let (x, dy) = (stored::<f32>(&numbers(5, rows * columns)), stored::<f32>(&numbers(6, rows * columns)));
            let (mean, rstd) = (stored::<f32>(&numbers(7, rows)), stored::<f32>(&numbers(8, rows)));
            for mean in [Some(&mean[..]), None] {
                let (mut gain, mut bias) = (vec![f32::NAN; columns], vec![f32::NAN; columns]);
                norm_gradients(&x, &dy, mean, &rstd, &mut gain, Some(&mut bias));
                let center = |row: usize| mean.map_or(0.0, |mean| mean[row]);
                let normal = |i: usize| (x[i] - center(i / columns)) * rstd[i / columns];
                let terms: Vec<f32> = (0..rows * columns).map(|i| dy[i] * normal(i)).collect();
                for column in 0..columns {
                    assert_eq!(gain[column].to_bits(), tiles(&terms, columns, column).to_bits());
                    assert_eq!(bias[column].to_bits(), tiles(&dy, columns, column).to_bits());
                }
            }
        }
    }
}
