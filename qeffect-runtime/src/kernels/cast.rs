//! FP8 casts: amax, quantisation and the transposed copy.
//!
//! amax is the largest |x| of the unscaled input, before anything is clipped; NaN is passed over. A code is `x · scale`,
//! one f32 multiplication, rounded to nearest and saturated. `scale_inv` is written beside the codes, for a reader must
//! use the scale that they were made with. Saturation turns an infinity into the largest finite code, so a cast also says
//! whether it saw something that is not finite.

use qeffect_core::fp8::{E4m3, E5m2, Fp8};
use qeffect_core::scaling;

use super::real::Elem;
use super::{Result, expect_len, simd};

/// What a cast noticed about its input.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Noticed {
    /// Largest |x|, 0 if there is none; NaN is passed over.
    pub amax: f32,
    /// Whether no element was infinite or NaN.
    pub finite: bool,
}

/// Largest magnitudes as bits: of all elements, and of those that are numbers. The bits of non-negative floats are
/// ordered as the floats are.
#[derive(Clone, Copy)]
struct Magnitudes {
    all: u32,
    numbers: u32,
}

const INFINITY: u32 = 0x7F80_0000;

impl Magnitudes {
    const NONE: Magnitudes = Magnitudes { all: 0, numbers: 0 };

    #[inline(always)]
    fn see(&mut self, x: f32) {
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        self.all = self.all.max(magnitude);
        self.numbers = self.numbers.max(if magnitude > INFINITY { 0 } else { magnitude });
    }

    fn noticed(self) -> Noticed {
        Noticed { amax: f32::from_bits(self.numbers), finite: self.all < INFINITY }
    }
}

/// amax of a tensor, without casting it.
pub fn amax<E: Elem<Acc = f32>>(x: &[E]) -> Noticed {
    simd(
        #[inline(always)]
        || {
            let mut seen = Magnitudes::NONE;
            x.iter().for_each(|x| seen.see(x.load()));
            seen.noticed()
        },
    )
}

/// Casts a tensor: `codes[i] = x[i] · scale`.
pub fn quantise<E: Elem<Acc = f32>>(
    format: Fp8,
    x: &[E],
    scale: f32,
    codes: &mut [u8],
    scale_inv: &mut f32,
) -> Result<Noticed> {
    expect_len("quantise", "codes", codes.len(), x.len())?;
    *scale_inv = scaling::inverse(scale);
    Ok(simd(
        #[inline(always)]
        || match format {
            Fp8::E4M3 => quantise_with(x, scale, codes, E4m3::encode),
            Fp8::E5M2 => quantise_with(x, scale, codes, E5m2::encode),
        },
    ))
}

#[inline(always)]
fn quantise_with<E: Elem<Acc = f32>>(x: &[E], scale: f32, codes: &mut [u8], encode: impl Fn(f32) -> u8) -> Noticed {
    let mut seen = Magnitudes::NONE;
    for (code, x) in codes.iter_mut().zip(x) {
        let x = x.load();
        seen.see(x);
        *code = encode(x * scale);
    }
    seen.noticed()
}

/// Words that [`health`] counts in.
pub const HEALTH_WORDS: usize = 6;

/// How a tensor fares under a scale. Adds to `counts`: its elements, those whose scaled magnitude is beyond the largest code,
/// those that are not zero and whose code is, and those that are infinite or NaN. The next word becomes the bits of the
/// largest magnitude, if that is larger; NaN is passed over. The last one counts such calls.
pub fn health<E: Elem<Acc = f32>>(format: Fp8, x: &[E], scale: f32, counts: &mut [u64; HEALTH_WORDS]) {
    // Half the smallest code is the largest magnitude that is rounded to zero, to even.
    let (largest, vanishing) = (format.max(), format.decode(1) / 2.0);
    let [elements, saturated, underflowed, strange, magnitude, casts] = counts;
    for x in x {
        let x = x.load();
        let scaled = (x * scale).abs();
        *saturated += u64::from(x.is_finite() && scaled > largest);
        *underflowed += u64::from(x != 0.0 && scaled <= vanishing);
        *strange += u64::from(!x.is_finite());
        if !x.is_nan() {
            *magnitude = (*magnitude).max(u64::from(x.abs().to_bits()));
        }
    }
    *elements += x.len() as u64;
    *casts += 1;
}

/// Casts a matrix of `rows` × `columns` and writes the codes row-major and transposed.
pub fn quantise_transposed<E: Elem<Acc = f32>>(
    format: Fp8,
    x: &[E],
    (rows, columns): (usize, usize),
    scale: f32,
    codes: &mut [u8],
    transposed: &mut [u8],
    scale_inv: &mut f32,
) -> Result<Noticed> {
    expect_len("quantise_transposed", "x", x.len(), rows * columns)?;
    expect_len("quantise_transposed", "codes", codes.len(), x.len())?;
    expect_len("quantise_transposed", "transposed", transposed.len(), x.len())?;
    let noticed = quantise(format, x, scale, codes, scale_inv)?;
    transpose(codes, (rows, columns), transposed)?;
    Ok(noticed)
}

/// Transposes a matrix of bytes, `rows` × `columns`.
pub fn transpose(codes: &[u8], (rows, columns): (usize, usize), transposed: &mut [u8]) -> Result {
    expect_len("transpose", "transposed", transposed.len(), rows * columns)?;
    transpose_beside(codes, (rows, columns), rows, transposed)
}

/// As [`transpose`], into lines that are `line` apart: column j goes to `transposed[j · line..][..rows]`, and what lies
/// between is left alone.
pub fn transpose_beside(codes: &[u8], (rows, columns): (usize, usize), line: usize, transposed: &mut [u8]) -> Result {
    expect_len("transpose", "codes", codes.len(), rows * columns)?;
    if rows == 0 || columns == 0 {
        return Ok(());
    }
    let needed = (columns - 1) * line + rows;
    if line < rows || transposed.len() < needed {
        return expect_len("transpose", "transposed", transposed.len(), needed.max(columns * rows));
    }
    const TILE: usize = 16;
    let whole = (rows / TILE * TILE, columns / TILE * TILE);
    simd(
        #[inline(always)]
        || {
            for row in (0..whole.0).step_by(TILE) {
                for column in (0..whole.1).step_by(TILE) {
                    let mut tile = [[0u8; TILE]; TILE];
                    for (i, bytes) in tile.iter_mut().enumerate() {
                        let start = (row + i) * columns + column;
                        bytes.copy_from_slice(&codes[start..start + TILE]);
                    }
                    let tile = transpose_tile(tile);
                    for (j, bytes) in tile.iter().enumerate() {
                        let start = (column + j) * line + row;
                        transposed[start..start + TILE].copy_from_slice(bytes);
                    }
                }
            }
        },
    );
    for row in 0..rows {
        let from = if row < whole.0 { whole.1 } else { 0 };
        for column in from..columns {
            transposed[column * line + row] = codes[row * columns + column];
        }
    }
    Ok(())
}

/// Transposes 16 × 16 bytes in four rounds of interleaving line i with line i + 8: each round moves one bit of the row
/// index into the column index.
#[inline(always)]
fn transpose_tile(mut tile: [[u8; 16]; 16]) -> [[u8; 16]; 16] {
    for _ in 0..4 {
        let mut next = [[0u8; 16]; 16];
        for i in 0..8 {
            for j in 0..8 {
                next[2 * i][2 * j] = tile[i][j];
                next[2 * i][2 * j + 1] = tile[i + 8][j];
                next[2 * i + 1][2 * j] = tile[i][j + 8];
                next[2 * i + 1][2 * j + 1] = tile[i + 8][j + 8];
            }
        }
        tile = next;
    }
    tile
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::testing::{numbers, stored};
    use super::*;

    #[test]
    fn a_transpose_beside_others_leaves_them_alone() {
        for (rows, columns) in [(1, 1), (3, 17), (17, 33), (48, 16)] {
            let codes: Vec<u8> = (0..rows * columns).map(|i| (i % 251) as u8).collect();
            let mut alone = vec![0; rows * columns];
            transpose(&codes, (rows, columns), &mut alone).unwrap();
            let (first, line) = (5, rows + 9);
            let mut region = vec![0xEE; line * columns];
            transpose_beside(&codes, (rows, columns), line, &mut region[first..]).unwrap();
            for (j, found) in region.chunks(line).enumerate() {
                assert_eq!(found[first..][..rows], alone[j * rows..][..rows]);
                assert!(found[..first].iter().chain(&found[first + rows..]).all(|byte| *byte == 0xEE));
            }
            assert!(transpose_beside(&codes, (rows, columns), rows - 1, &mut region).is_err() || columns == 1);
        }
    }

    #[test]
    fn codes_amax_and_inverse_follow_the_definition() {
        for n in [0, 1, 3, 17, 130, 1000] {
            let x = stored::<bf16>(&numbers(n as u64, n).iter().map(|x| x * 40.0).collect::<Vec<_>>());
            for format in [Fp8::E4M3, Fp8::E5M2] {
                let (scale, mut scale_inv, mut codes) = (23.7f32, 0.0, vec![0; n]);
                let noticed = quantise(format, &x, scale, &mut codes, &mut scale_inv).unwrap();
                let want: Vec<u8> = x.iter().map(|x| format.encode(x.to_f32() * scale)).collect();
                assert_eq!(codes, want);
                assert_eq!(scale_inv, 1.0 / 23.7);
                let largest = x.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
                assert_eq!(noticed, Noticed { amax: largest, finite: true });
                assert_eq!(amax(&x), noticed);
            }
        }
    }

    #[test]
    fn an_infinity_is_clipped_but_noticed() {
        let (mut codes, mut scale_inv) = ([0; 4], 0.0);
        let x = [1.0, f32::INFINITY, -f32::INFINITY, -0.0];
        let noticed = quantise(Fp8::E4M3, &x, 1.0, &mut codes, &mut scale_inv).unwrap();
        assert_eq!(codes, [0x38, 0x7E, 0xFE, 0x80]);
        assert_eq!(noticed, Noticed { amax: f32::INFINITY, finite: false });
    }

    #[test]
    fn a_nan_is_in_the_codes_and_not_in_amax() {
        let (mut codes, mut scale_inv) = ([0; 3], 0.0);
        let noticed = quantise(Fp8::E5M2, &[f32::NAN, -2.0, 1.0], 1.0, &mut codes, &mut scale_inv).unwrap();
        assert_eq!(codes, [0x7F, 0xC0, 0x3C]);
        assert_eq!(noticed, Noticed { amax: 2.0, finite: false });
        assert_eq!(amax(&[f32::NAN]), Noticed { amax: 0.0, finite: false });
    }

    // case B44: the largest scale times zero is zero, and its inverse is not.
    #[test]
    fn the_largest_scale_leaves_zeros_alone() {
        let (mut codes, mut scale_inv) = ([9; 2], 0.0);
        quantise(Fp8::E4M3, &[0.0f32, -0.0], f32::MAX, &mut codes, &mut scale_inv).unwrap();
        assert_eq!((codes, scale_inv > 0.0), ([0x00, 0x80], true));
    }

    #[test]
    fn the_transposed_copy_is_the_transpose() {
        for rows in [1, 3, 16, 17, 130] {
            for columns in [1, 3, 16, 17, 130] {
                let x = stored::<f32>(&numbers(1, rows * columns));
                let (mut codes, mut transposed) = (vec![0; x.len()], vec![0; x.len()]);
                let mut scale_inv = 0.0;
                let size = (rows, columns);
                quantise_transposed(Fp8::E4M3, &x, size, 100.0, &mut codes, &mut transposed, &mut scale_inv).unwrap();
                for row in 0..rows {
                    for column in 0..columns {
                        assert_eq!(transposed[column * rows + row], codes[row * columns + column]);
                    }
                }
            }
        }
    }

    #[test]
    fn wrong_sizes_are_refused_before_anything_is_written() {
        let (mut codes, mut scale_inv) = ([9; 2], 7.0);
        assert!(quantise(Fp8::E4M3, &[1.0f32; 3], 1.0, &mut codes, &mut scale_inv).is_err());
        assert_eq!((codes, scale_inv), ([9; 2], 7.0));
    }
}
