//! Causal attention on packed `[q | k | v]`.
//!
//! A row of `qkv` holds the queries of all heads, then the keys, then the values. Heads may share keys and values in equal
//! groups of neighbours (grouped queries); their gradients are added in ascending order of heads. Softmax is in f32 (f64 for f64). The
//! forward keeps one log-sum-exp per sequence, head and row; the backward recomputes the probabilities from it. Query rows
//! are taken in blocks, each against the keys up to its own last row: ascending forward, descending backward.

use super::gemm::{View, ViewMut, product};
use super::real::{Elem, Real, largest, load_slice, store_slice, sum, sum2};
use super::{KernelError, Result, Scratch, expect_len, expect_some, simd, take};

/// Query rows per block.
const BLOCK: usize = 64;

/// Sizes of attention; rows of `qkv` are sequence after sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AttentionShape {
    /// Sequences in a microbatch.
    pub sequences: usize,
    /// Tokens of each.
    pub length: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values: a divisor of `heads`, or as many.
    pub kv_heads: usize,
    /// Elements of a query, key or value.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Elements of an output row.
    pub const fn hidden(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of `qkv`.
    pub const fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Rows.
    pub const fn tokens(&self) -> usize {
        self.sequences * self.length
    }

    /// Elements of `lse`, which is `[sequences][heads][length]`.
    pub const fn statistics(&self) -> usize {
        self.sequences * self.heads * self.length
    }

    fn check(&self, kernel: &'static str, operands: &[(&'static str, usize, usize)]) -> Result {
        expect_some(kernel, "head_dim", self.head_dim)?;
        expect_some(kernel, "kv_heads", self.kv_heads)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            let rule = "it divides the number of heads";
            return Err(KernelError::Dimension { kernel, dimension: "kv_heads", found: self.kv_heads, rule });
        }
        operands.iter().try_for_each(|(operand, found, expected)| expect_len(kernel, operand, *found, *expected))
    }

    /// Where the query, key and value of a head begin in a row, and whether it is the first of those that share its key.
    const fn parts(&self, head: usize) -> ([usize; 3], bool) {
        let (shared, dim) = (self.heads / self.kv_heads, self.head_dim);
        let key = self.heads + head / shared;
        ([head * dim, key * dim, (key + self.kv_heads) * dim], head.is_multiple_of(shared))
    }

    fn scale<A: Real>(&self) -> A {
        A::ONE / A::from_f64(self.head_dim as f64).sqrt()
    }

    /// First row, and number of rows, of each block.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let length = self.length;
        (0..length).step_by(BLOCK).map(move |first| (first, BLOCK.min(length - first)))
    }
}

/// `out = softmax(q kᵀ / √head_dim, causal) v` per sequence and head.
pub fn attention_forward<E: Elem>(
    scratch: &mut Scratch<E::Acc>,
    shape: AttentionShape,
    qkv: &[E],
    out: &mut [E],
    lse: &mut [E::Acc],
) -> Result {
    let (hidden, width, length, dim) = (shape.hidden(), shape.width(), shape.length, shape.head_dim);
    shape.check(
        "attention_forward",
        &[
            ("qkv", qkv.len(), shape.tokens() * width),
            ("out", out.len(), shape.tokens() * hidden),
            ("lse", lse.len(), shape.statistics()),
        ],
    )?;
    let scale = shape.scale::<E::Acc>();
    let inputs = take(&mut scratch.a, length * width);
    let scores = take(&mut scratch.b, BLOCK * length);
    let outputs = take(&mut scratch.c, length * hidden);
    for sequence in 0..shape.sequences {
        let rows = sequence * length..(sequence + 1) * length;
        simd(
            #[inline(always)]
            || load_slice(&qkv[rows.start * width..rows.end * width], inputs),
        );
        for head in 0..shape.heads {
            let ([q, k, v], _) = shape.parts(head);
            let lse = &mut lse[(sequence * shape.heads + head) * length..][..length];
            for (first, count) in shape.blocks() {
                let keys = first + count;
                let queries = View::window(&inputs[first * width + q..], count, dim, width);
                product(
                    queries,
                    View::window(&inputs[k..], keys, dim, width).flipped(),
                    ViewMut::new(&mut scores[..count * keys], count, keys),
                );
                simd(
                    #[inline(always)]
                    || {
                        for (row, scores) in scores.chunks_exact_mut(keys).take(count).enumerate() {
                            lse[first + row] = softmax(scores, first + row + 1, scale);
                        }
                    },
                );
                product(
                    View::new(&scores[..count * keys], count, keys, false),
                    View::window(&inputs[v..], keys, dim, width),
                    ViewMut::window(&mut outputs[first * hidden + head * dim..], count, dim, hidden, false),
                );
            }
        }
        simd(
            #[inline(always)]
            || store_slice(outputs, &mut out[rows.start * hidden..rows.end * hidden]),
        );
    }
    Ok(())
}

/// Probabilities of the first `visible` scores in place, 0 for the others; the log-sum-exp of the scaled scores.
#[inline(always)]
fn softmax<A: Real>(scores: &mut [A], visible: usize, scale: A) -> A {
    let (seen, hidden) = scores.split_at_mut(visible);
    for score in seen.iter_mut() {
        *score = *score * scale;
    }
    let shift = largest(seen);
    for score in seen.iter_mut() {
        *score = (*score - shift).exp();
    }
    let mass = sum(seen, |x| x);
    let inverse = A::ONE / mass;
    for score in seen.iter_mut() {
        *score = *score * inverse;
    }
    hidden.fill(A::ZERO);
    shift + A::from_f64(mass.to_f64().ln())
}

/// `dqkv` from `dout`; what `dqkv` held is not read.
pub fn attention_backward<E: Elem>(
    scratch: &mut Scratch<E::Acc>,
    shape: AttentionShape,
    qkv: &[E],
    lse: &[E::Acc],
    dout: &[E],
    dqkv: &mut [E],
) -> Result {
    let (hidden, width, length, dim) = (shape.hidden(), shape.width(), shape.length, shape.head_dim);
    shape.check(
        "attention_backward",
        &[
            ("qkv", qkv.len(), shape.tokens() * width),
            ("lse", lse.len(), shape.statistics()),
            ("dout", dout.len(), shape.tokens() * hidden),
            ("dqkv", dqkv.len(), shape.tokens() * width),
        ],
    )?;
    let scale = shape.scale::<E::Acc>();
    let (inputs, dout_rows) = take(&mut scratch.a, length * (width + hidden)).split_at_mut(length * width);
    let (probabilities, slopes) = take(&mut scratch.b, 2 * BLOCK * length).split_at_mut(BLOCK * length);
    let gradients = take(&mut scratch.c, length * width);
    for sequence in 0..shape.sequences {
        let rows = sequence * length..(sequence + 1) * length;
        simd(
            #[inline(always)]
            || {
                load_slice(&qkv[rows.start * width..rows.end * width], inputs);
                load_slice(&dout[rows.start * hidden..rows.end * hidden], dout_rows);
            },
        );
        for head in 0..shape.heads {
            let ([q, k, v], first_of_group) = shape.parts(head);
            let lse = &lse[(sequence * shape.heads + head) * length..][..length];
            // The last block sees every key: taken first, it initialises dK and dV, and the others add.
            for (first, count) in shape.blocks().collect::<Vec<_>>().into_iter().rev() {
                let keys = first + count;
                let add = keys != length || !first_of_group;
                let queries = View::window(&inputs[first * width + q..], count, dim, width);
                let key_rows = View::window(&inputs[k..], keys, dim, width);
                let values = View::window(&inputs[v..], keys, dim, width);
                let dout = View::window(&dout_rows[first * hidden + head * dim..], count, dim, hidden);
                let (probabilities, slopes) = (&mut probabilities[..count * keys], &mut slopes[..count * keys]);
                product(queries, key_rows.flipped(), ViewMut::new(probabilities, count, keys));
                product(dout, values.flipped(), ViewMut::new(slopes, count, keys));
                simd(
                    #[inline(always)]
                    || {
                        let lines = probabilities.chunks_exact_mut(keys).zip(slopes.chunks_exact_mut(keys));
                        for (row, (probabilities, slopes)) in lines.enumerate() {
                            softmax_slopes(probabilities, slopes, first + row + 1, lse[first + row], scale);
                        }
                    },
                );
                let probabilities = View::new(probabilities, count, keys, false);
                let slopes = View::new(slopes, count, keys, false);
                let dq = ViewMut::window(&mut gradients[first * width + q..], count, dim, width, false);
                product(slopes, key_rows, dq);
                let dk = ViewMut::window(&mut gradients[k..], keys, dim, width, add);
                product(slopes.flipped(), queries, dk);
                let dv = ViewMut::window(&mut gradients[v..], keys, dim, width, add);
                product(probabilities.flipped(), dout, dv);
            }
        }
        simd(
            #[inline(always)]
            || store_slice(gradients, &mut dqkv[rows.start * width..rows.end * width]),
        );
    }
    Ok(())
}

/// From scores and the gradients of probabilities: probabilities, and the gradients of the unscaled scores.
#[inline(always)]
fn softmax_slopes<A: Real>(scores: &mut [A], slopes: &mut [A], visible: usize, lse: A, scale: A) {
    let (seen, hidden) = scores.split_at_mut(visible);
    for score in seen.iter_mut() {
        *score = (*score * scale - lse).exp();
    }
    hidden.fill(A::ZERO);
    let (slopes, hidden) = slopes.split_at_mut(visible);
    let mean = sum2(seen, slopes, |p, slope| p * slope);
    for (slope, p) in slopes.iter_mut().zip(&*seen) {
        *slope = *p * (*slope - mean) * scale;
    }
    hidden.fill(A::ZERO);
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{close, differences, dot, loaded, numbers, rounding, stored};
    use super::*;

    fn shape(sequences: usize, length: usize, heads: usize, head_dim: usize) -> AttentionShape {
        AttentionShape { sequences, length, heads, kv_heads: heads, head_dim }
    }

    fn grouped(sequences: usize, length: usize, [heads, kv_heads]: [usize; 2], head_dim: usize) -> AttentionShape {
        AttentionShape { kv_heads, ..shape(sequences, length, heads, head_dim) }
    }

    fn shapes() -> [AttentionShape; 8] {
        [
            shape(1, 1, 1, 1),
            shape(2, 3, 1, 17),
            shape(1, 17, 3, 4),
            shape(2, 64, 2, 8),
            shape(1, 130, 1, 3),
            grouped(1, 1, [2, 1], 3),
            grouped(2, 17, [6, 2], 5),
            grouped(1, 130, [3, 1], 2),
        ]
    }

    /// One query against the keys up to its own.
    fn reference(shape: AttentionShape, qkv: &[f64]) -> Vec<f64> {
        let (hidden, width, dim) = (shape.hidden(), shape.width(), shape.head_dim);
        let group = shape.heads / shape.kv_heads;
        let mut out = vec![0.0; shape.tokens() * hidden];
        for token in 0..shape.tokens() {
            let first = token / shape.length * shape.length;
            for head in 0..shape.heads {
                let starts = [0, hidden, hidden + shape.kv_heads * dim];
                let own = |which: usize| if which == 0 { head } else { head / group };
                let part = |t: usize, which: usize| &qkv[t * width + starts[which] + own(which) * dim..][..dim];
                let weight = |t: usize| (dot(part(token, 0), part(t, 1)) / (dim as f64).sqrt()).exp();
                let mass: f64 = (first..=token).map(weight).sum();
                for t in first..=token {
                    for (i, v) in part(t, 2).iter().enumerate() {
                        out[token * hidden + head * dim + i] += weight(t) / mass * v;
                    }
                }
            }
        }
        out
    }

    fn run<E: Elem>(shape: AttentionShape, qkv: &[E]) -> (Vec<E>, Vec<E::Acc>) {
        let mut out = stored::<E>(&vec![f64::NAN; shape.tokens() * shape.hidden()]);
        let mut lse = vec![E::Acc::ZERO; shape.statistics()];
        attention_forward(&mut Scratch::new(), shape, qkv, &mut out, &mut lse).unwrap();
        (out, lse)
    }

    fn forward<E: Elem>(tolerance: f64) {
        for shape in shapes() {
            let values: Vec<f64> = numbers(1, shape.tokens() * shape.width()).iter().map(|x| x * 2.0).collect();
            let qkv = stored::<E>(&values);
            close(&loaded(&run(shape, &qkv).0), &reference(shape, &loaded(&qkv)), tolerance);
        }
    }

    #[test]
    fn forward_attends_to_the_past() {
        forward::<f32>(1e-5);
        forward::<f64>(1e-13);
        forward::<bf16>(rounding::<bf16>() * 1.02);
    }

    #[test]
    fn backward_is_the_derivative() {
        for shape in [
            shape(1, 1, 1, 1),
            shape(2, 3, 1, 17),
            shape(1, 17, 2, 3),
            shape(1, 70, 1, 2),
            grouped(2, 7, [6, 2], 3),
            grouped(1, 70, [3, 1], 1),
        ] {
            let qkv: Vec<f64> = numbers(1, shape.tokens() * shape.width()).iter().map(|x| x * 2.0).collect();
            let dout = numbers(2, shape.tokens() * shape.hidden());
            let lse = run(shape, &qkv).1;
            let mut dqkv = vec![f64::NAN; qkv.len()];
            attention_backward(&mut Scratch::new(), shape, &qkv, &lse, &dout, &mut dqkv).unwrap();
            close(&dqkv, &differences(&qkv, |qkv| dot(&reference(shape, qkv), &dout)), 1e-7);
        }
    }

    fn narrow<E: Elem>(tolerance: f64) {
        for shape in shapes() {
            let qkv = stored::<E>(&numbers(1, shape.tokens() * shape.width()));
            let dout = stored::<E>(&numbers(2, shape.tokens() * shape.hidden()));
            let lse = run(shape, &qkv).1;
            let mut dqkv = stored::<E>(&vec![f64::NAN; qkv.len()]);
            attention_backward(&mut Scratch::new(), shape, &qkv, &lse, &dout, &mut dqkv).unwrap();
            let (wide, dout) = (loaded(&qkv), loaded(&dout));
            let lse = run(shape, &wide).1;
            let mut want = vec![f64::NAN; qkv.len()];
            attention_backward(&mut Scratch::new(), shape, &wide, &lse, &dout, &mut want).unwrap();
            close(&loaded(&dqkv), &want, tolerance);
        }
    }

    #[test]
    fn backward_in_narrow_types_follows_f64() {
        narrow::<f32>(1e-5);
        narrow::<bf16>(rounding::<bf16>() * 1.02);
    }

    #[test]
    fn the_future_is_invisible() {
        let shape = shape(1, 17, 1, 4);
        let mut qkv = stored::<f32>(&numbers(1, 17 * 12));
        let before = run(shape, &qkv).0;
        qkv[9 * 12..].fill(1e3);
        let after = run(shape, &qkv).0;
        assert_eq!(before[..9 * 4], after[..9 * 4]);
        assert_ne!(before[9 * 4..], after[9 * 4..]);
    }

    #[test]
    fn scratch_left_over_from_other_shapes_is_not_read() {
        let mut scratch = Scratch::<f32>::new();
        for buffer in [&mut scratch.a, &mut scratch.b, &mut scratch.c] {
            buffer.resize(1 << 16, f32::NAN);
        }
        let shape = shape(2, 70, 2, 3);
        let qkv = stored::<f32>(&numbers(1, shape.tokens() * shape.width()));
        let (want, lse) = run(shape, &qkv);
        let (mut out, mut again) = (want.clone(), lse.clone());
        attention_forward(&mut scratch, shape, &qkv, &mut out, &mut again).unwrap();
        assert_eq!((&out, &again), (&want, &lse));
        for buffer in [&mut scratch.a, &mut scratch.b, &mut scratch.c] {
            buffer.fill(f32::NAN);
        }
        let mut dqkv = vec![f32::NAN; qkv.len()];
        attention_backward(&mut scratch, shape, &qkv, &lse, &out, &mut dqkv).unwrap();
        assert!(dqkv.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn wrong_sizes_are_refused() {
        let shape = shape(1, 2, 1, 2);
        let fault = attention_forward(&mut Scratch::new(), shape, &[0f32; 11], &mut [0.0; 4], &mut [0.0; 2]);
        assert_eq!(fault.unwrap_err().to_string(), "attention_forward: `qkv` has 11 elements, the shape needs 12");
        let shape = AttentionShape { heads: 3, kv_heads: 2, ..shape };
        let fault = attention_forward(&mut Scratch::new(), shape, &[0f32; 28], &mut [0.0; 12], &mut [0.0; 6]);
        assert_eq!(
            fault.unwrap_err().to_string(),
            "attention_forward: `kv_heads` is 2: it divides the number of heads"
        );
    }
}
