//! Embeddings and their gradients, bit for bit: rows are added in ascending order.

use half::bf16;
use qeffect_kernels::launch::embedding::RotaryShape;

use crate::rig::{bits, floats, numbers, rig, rounded, values};

#[test]
fn forward_and_gradients_are_exact() {
    let Some(rig) = rig() else { return };
    for (vocabulary, length, sequences, hidden) in [(1, 1, 1, 1), (5, 3, 3, 7), (50, 16, 4, 64), (300, 128, 2, 1030)] {
        let rows = length * sequences;
        let ids: Vec<u32> = (0..rows).map(|row| (row * row * 31 % vocabulary) as u32).collect();
        let mut order: Vec<u32> = (0..rows as u32).collect();
        order.sort_by_key(|row| ids[*row as usize]);
        let (table, positions) = (numbers(1, vocabulary * hidden), numbers(2, length * hidden));
        let dy = values(3, rows * hidden);
        let (i, o, t, p) = (rig.upload(&ids), rig.upload(&order), rig.upload(&table), rig.upload(&positions));
        let (d, flag) = (rig.upload(&dy), rig.upload(&[0u32]));
        for placed in [Some(p.span()), None] {
            let y = rig.poisoned::<bf16>(rows * hidden);
            rig.kernels
                .embedding_forward(&rig.stream, i.span(), hidden, t.span(), placed, y.span(), Some(flag.span()))
                .unwrap();
            let want: Vec<f32> = (0..rows * hidden)
                .map(|at| {
                    let (row, j) = (at / hidden, at % hidden);
                    let token = table[ids[row] as usize * hidden + j];
                    rounded(if placed.is_some() { token + positions[row % length * hidden + j] } else { token })
                })
                .collect();
            assert_eq!(bits(&floats(&y.read().unwrap())), bits(&want));
            assert_eq!(flag.read().unwrap(), [0]);
        }

        let dy = floats(&dy);
        for accumulate in [false, true] {
            let before = numbers(4, vocabulary * hidden);
            let out = rig.upload(&before);
            let words: Vec<u32> = (0..vocabulary).map(|token| u32::from(token % 3 == 0)).collect();
            let touched = rig.upload(&words);
            let occurring = Some(touched.span());
            rig.kernels
                .token_gradient(&rig.stream, i.span(), o.span(), hidden, d.span(), accumulate, out.span(), occurring)
                .unwrap();
            let occurs = |token: usize| ids.contains(&(token as u32));
            let now: Vec<u32> = (0..vocabulary).map(|token| u32::from(occurs(token) || token % 3 == 0)).collect();
            assert_eq!(touched.read().unwrap(), now);
            let mut want = before.clone();
            for token in 0..vocabulary {
                let rows: Vec<usize> = (0..rows).filter(|row| ids[*row] as usize == token).collect();
                if rows.is_empty() {
                    continue;
                }
                for j in 0..hidden {
                    let sum = rows.iter().fold(0.0, |sum, row| sum + dy[row * hidden + j]);
                    let to = &mut want[token * hidden + j];
                    *to = if accumulate { *to + sum } else { sum };
                }
            }
            assert_eq!(bits(&out.read().unwrap()), bits(&want));

            rig.kernels.clear_rows(&rig.stream, hidden, touched.span(), out.span()).unwrap();
            let cleared = want.iter().enumerate().map(|(at, x)| if now[at / hidden] != 0 { 0.0 } else { *x });
            assert_eq!(bits(&out.read().unwrap()), bits(&cleared.collect::<Vec<f32>>()));
            assert_eq!(touched.read().unwrap(), vec![0; vocabulary]);
        }

        let out = rig.poisoned::<f32>(length * hidden);
        rig.kernels.position_gradient(&rig.stream, hidden, d.span(), false, out.span()).unwrap();
        let size = length * hidden;
        let want: Vec<f32> = (0..size).map(|at| (0..sequences).fold(0.0, |sum, s| sum + dy[s * size + at])).collect();
        assert_eq!(bits(&out.read().unwrap()), bits(&want));
    }
}

#[test]
fn an_id_beyond_the_table_raises_the_flag_and_reads_nothing() {
    let Some(rig) = rig() else { return };
    let (ids, table) = (rig.upload(&[1u32, 9, u32::MAX]), rig.upload(&[0.25f32; 16]));
    let (y, flag) = (rig.upload(&[bf16::ONE; 24]), rig.upload(&[0u32]));
    rig.kernels
        .embedding_forward(&rig.stream, ids.span(), 8, table.span(), Some(table.span()), y.span(), Some(flag.span()))
        .unwrap();
    assert_eq!(flag.read().unwrap(), [1]);
    let y = floats(&y.read().unwrap());
    assert_eq!((&y[..8], &y[8..]), (&[0.5; 8][..], &[1.0; 16][..]));
}

#[test]
fn rotation_is_exact_and_turns_back() {
    let Some(rig) = rig() else { return };
    for (sequences, length, heads, dim) in [(1, 1, 1, 2), (2, 7, 3, 6), (2, 64, 4, 64)] {
        let (rows, hidden, half) = (sequences * length, heads * dim, dim / 2);
        let x = values(1, rows * 3 * hidden);
        let table: Vec<f32> = (0..length * dim)
            .map(|i| {
                let (position, at) = (i / dim, i % dim);
                let angle = position as f64 / 10_000f64.powf((at % half) as f64 / half as f64);
                if at < half { angle.cos() as f32 } else { angle.sin() as f32 }
            })
            .collect();
        for back in [false, true] {
            let (source, turns) = (rig.upload(&x), rig.upload(&table));
            let shape = RotaryShape { length, heads: 2 * heads, head_dim: dim, width: 3 * hidden };
            let out = rig.poisoned::<bf16>(x.len());
            rig.kernels.rotary(&rig.stream, source.span(), turns.span(), out.span(), back, &shape).unwrap();
            rig.kernels.rotary(&rig.stream, source.span(), turns.span(), source.span(), back, &shape).unwrap();
            let mut want = floats(&x);
            for row in 0..rows {
                for pair in 0..2 * heads * half {
                    let a = row * 3 * hidden + pair / half * dim + pair % half;
                    let turn = &table[row % length * dim + pair % half..];
                    let (cos, sin) = (turn[0], if back { -turn[half] } else { turn[half] });
                    let (first, second) = (want[a], want[a + half]);
                    want[a] = rounded(first * cos - second * sin);
                    want[a + half] = rounded(second * cos + first * sin);
                }
            }
            assert_eq!(bits(&floats(&source.read().unwrap())), bits(&want), "in place");
            assert_eq!(bits(&floats(&out.read().unwrap())), bits(&want));
        }
    }
    let x = rig.upload(&[bf16::ONE; 9]);
    let table = rig.upload(&[1.0f32; 3]);
    for (head_dim, width) in [(3, 9), (4, 3)] {
        let shape = RotaryShape { length: 1, heads: 1, head_dim, width };
        assert!(rig.kernels.rotary(&rig.stream, x.span(), table.span(), x.span(), false, &shape).is_err());
    }
}
