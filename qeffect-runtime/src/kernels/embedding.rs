//! Token and position embeddings, and their gradients without atomics.
//!
//! The gradient of the token table touches only the rows of tokens that occur. The positions of each token, sorted once
//! on the host and sent with the batch, say which rows of `dx` belong to it; they are added in ascending order.

use super::real::{Elem, Real};
use super::{KernelError, Result, expect_len, expect_some, simd};

/// Which positions of a microbatch hold which token: `order[starts[i]..starts[i + 1]]` are those of `tokens[i]`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TokenPositions {
    /// The tokens that occur, ascending.
    pub tokens: Vec<u32>,
    /// Where the positions of each begin, and their total.
    pub starts: Vec<u32>,
    /// All positions, by token, then ascending.
    pub order: Vec<u32>,
}

impl TokenPositions {
    /// Sorts the positions of a microbatch.
    pub fn of(ids: &[u32], vocabulary: usize) -> Result<TokenPositions> {
        check("embedding", ids, vocabulary)?;
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_by_key(|position| ids[*position as usize]);
        let (mut tokens, mut starts) = (Vec::new(), Vec::new());
        for (index, position) in order.iter().enumerate() {
            let token = ids[*position as usize];
            if tokens.last() != Some(&token) {
                tokens.push(token);
                starts.push(index as u32);
            }
        }
        starts.push(order.len() as u32);
        Ok(TokenPositions { tokens, starts, order })
    }
}

fn check(kernel: &'static str, ids: &[u32], vocabulary: usize) -> Result {
    match ids.iter().position(|token| *token as usize >= vocabulary) {
        Some(position) => Err(KernelError::Token { kernel, token: ids[position], position, vocabulary }),
        None => Ok(()),
    }
}

/// `y[t] = tokens[ids[t]] + positions[t mod length]`, rounded once; without `positions` only the first. `length` is the
/// number of rows of `positions`.
pub fn embedding_forward<E: Elem>(
    ids: &[u32],
    hidden: usize,
    tokens: &[E::Acc],
    positions: Option<&[E::Acc]>,
    y: &mut [E],
) -> Result {
    let kernel = "embedding_forward";
    expect_some(kernel, "hidden", hidden)?;
    let vocabulary = tokens.len() / hidden;
    expect_len(kernel, "tokens", tokens.len(), vocabulary * hidden)?;
    if let Some(positions) = positions {
        expect_some(kernel, "positions", positions.len() / hidden)?;
        expect_len(kernel, "positions", positions.len(), positions.len() / hidden * hidden)?;
    }
    expect_len(kernel, "y", y.len(), ids.len() * hidden)?;
    check(kernel, ids, vocabulary)?;
    simd(
        #[inline(always)]
        || {
            for (t, (id, y)) in ids.iter().zip(y.chunks_exact_mut(hidden)).enumerate() {
                let token = &tokens[*id as usize * hidden..][..hidden];
                let Some(positions) = positions else {
                    y.iter_mut().zip(token).for_each(|(y, token)| *y = E::store(*token));
                    continue;
                };
                let position = &positions[t * hidden % positions.len()..][..hidden];
                for ((y, token), position) in y.iter_mut().zip(token).zip(position) {
                    *y = E::store(*token + *position);
                }
            }
        },
    );
    Ok(())
}

/// `partial[i] = Σ dx[position]` over the positions of `sorted.tokens[i]`, ascending: one row per token that occurs.
pub fn token_gradient<E: Elem>(dx: &[E], hidden: usize, sorted: &TokenPositions, partial: &mut [E::Acc]) -> Result {
    let kernel = "token_gradient";
    expect_some(kernel, "hidden", hidden)?;
    expect_len(kernel, "dx", dx.len(), sorted.order.len() * hidden)?;
    expect_len(kernel, "partial", partial.len(), sorted.tokens.len() * hidden)?;
    expect_len(kernel, "sorted.starts", sorted.starts.len(), sorted.tokens.len() + 1)?;
    partial.fill(E::Acc::ZERO);
    simd(
        #[inline(always)]
        || {
            for (row, bounds) in partial.chunks_exact_mut(hidden).zip(sorted.starts.windows(2)) {
                for position in &sorted.order[bounds[0] as usize..bounds[1] as usize] {
                    let dx = &dx[*position as usize * hidden..][..hidden];
                    for (sum, dx) in row.iter_mut().zip(dx) {
                        *sum = *sum + dx.load();
                    }
                }
            }
        },
    );
    Ok(())
}

/// Adds the rows of a partial gradient to the rows of `table` that they belong to.
pub fn scatter_rows<A: Real>(rows: &[u32], hidden: usize, partial: &[A], table: &mut [A]) -> Result {
    let kernel = "scatter_rows";
    expect_some(kernel, "hidden", hidden)?;
    expect_len(kernel, "partial", partial.len(), rows.len() * hidden)?;
    expect_len(kernel, "table", table.len(), table.len() / hidden * hidden)?;
    check(kernel, rows, table.len() / hidden)?;
    simd(
        #[inline(always)]
        || {
            for (row, partial) in rows.iter().zip(partial.chunks_exact(hidden)) {
                for (sum, x) in table[*row as usize * hidden..][..hidden].iter_mut().zip(partial) {
                    *sum = *sum + *x;
                }
            }
        },
    );
    Ok(())
}

/// `out[p] = Σ dx[p + s · length]` over sequences s ascending; what `out` held is not read.
pub fn position_gradient<E: Elem>(dx: &[E], hidden: usize, out: &mut [E::Acc]) -> Result {
    let kernel = "position_gradient";
    expect_some(kernel, "hidden", hidden)?;
    expect_some(kernel, "positions", out.len())?;
    expect_len(kernel, "dx", dx.len(), dx.len() / out.len() * out.len())?;
    expect_len(kernel, "out", out.len(), out.len() / hidden * hidden)?;
    out.fill(E::Acc::ZERO);
    simd(
        #[inline(always)]
        || {
            for sequence in dx.chunks_exact(out.len()) {
                for (sum, dx) in out.iter_mut().zip(sequence) {
                    *sum = *sum + dx.load();
                }
            }
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{close, differences, dot, numbers, stored};
    use super::*;

    const IDS: [u32; 9] = [4, 0, 4, 2, 2, 4, 0, 0, 4];

    fn reference(ids: &[u32], hidden: usize, tokens: &[f64], positions: &[f64]) -> Vec<f64> {
        let length = positions.len() / hidden;
        let at = |i: usize| (ids[i / hidden] as usize * hidden + i % hidden, i / hidden % length * hidden + i % hidden);
        (0..ids.len() * hidden).map(|i| tokens[at(i).0] + positions[at(i).1]).collect()
    }

    #[test]
    fn positions_are_sorted_by_token_then_ascending() {
        let sorted = TokenPositions::of(&IDS, 5).unwrap();
        assert_eq!(sorted.tokens, [0, 2, 4]);
        assert_eq!(sorted.starts, [0, 3, 5, 9]);
        assert_eq!(sorted.order, [1, 6, 7, 3, 4, 0, 2, 5, 8]);
        assert_eq!(TokenPositions::of(&[], 5).unwrap().starts, [0]);
        let fault = TokenPositions::of(&IDS, 4).unwrap_err().to_string();
        assert_eq!(fault, "embedding: token 4 at position 0 is not below the vocabulary size 4");
    }

    #[test]
    fn forward_and_both_gradients() {
        for hidden in [1, 3, 17, 130] {
            let (tokens, positions) = (numbers(1, 5 * hidden), numbers(2, 3 * hidden));
            let dx = numbers(3, IDS.len() * hidden);
            let mut y = vec![f64::NAN; dx.len()];
            embedding_forward(&IDS, hidden, &tokens, Some(&positions), &mut y).unwrap();
            assert_eq!(y, reference(&IDS, hidden, &tokens, &positions));
            embedding_forward(&IDS, hidden, &tokens, None, &mut y).unwrap();
            assert_eq!(y, reference(&IDS, hidden, &tokens, &vec![0.0; 3 * hidden]));

            let sorted = TokenPositions::of(&IDS, 5).unwrap();
            let mut partial = vec![f64::NAN; 3 * hidden];
            token_gradient(&dx, hidden, &sorted, &mut partial).unwrap();
            let mut table = vec![0.0; 5 * hidden];
            scatter_rows(&sorted.tokens, hidden, &partial, &mut table).unwrap();
            let want = differences(&tokens, |tokens| dot(&reference(&IDS, hidden, tokens, &positions), &dx));
            close(&table, &want, 1e-7);
            assert!(table[hidden..2 * hidden].iter().all(|x| *x == 0.0), "token 1 does not occur");

            let mut out = vec![f64::NAN; 3 * hidden];
            position_gradient(&dx, hidden, &mut out).unwrap();
            let want = differences(&positions, |positions| dot(&reference(&IDS, hidden, &tokens, positions), &dx));
            close(&out, &want, 1e-7);
        }
    }

    #[test]
    fn rows_are_added_in_ascending_order() {
        let dx = stored::<bf16>(&[256.0, 1.0, 1.0]);
        let sorted = TokenPositions::of(&[0, 0, 0], 1).unwrap();
        let mut partial = [0f32];
        token_gradient(&dx, 1, &sorted, &mut partial).unwrap();
        assert_eq!(partial, [258.0]);
        let big = [1e8f32, 1.0, -1e8];
        token_gradient(&big, 1, &sorted, &mut partial).unwrap();
        assert_eq!(partial, [(1e8f32 + 1.0) - 1e8]);
    }

    #[test]
    fn a_token_beyond_the_table_is_refused() {
        let mut y = [0f32; 2];
        assert!(embedding_forward(&[2], 2, &[0.0; 4], Some(&[0.0; 2]), &mut y).is_err());
        assert!(scatter_rows(&[2], 2, &[0.0; 2], &mut [0.0; 4]).is_err());
    }
}
