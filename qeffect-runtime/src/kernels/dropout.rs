//! Dropout whose mask is a function of its name: nothing is kept for the backward, which makes the mask again.
//!
//! A mask has a 64-bit key. Element i takes word i mod 4 of block i / 4 of the counter-based generator Philox-4x32 with ten
//! rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), and is dropped if that word is below the
//! threshold. Survivors are multiplied by one factor, so that the mean stays.

use super::real::{Elem, Real};
use super::{Result, expect_len, simd};

/// Which share is dropped.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DropoutRate {
    /// An element is dropped if its 32-bit random word is below this.
    pub threshold: u32,
    /// What survivors are multiplied by: 1 / (1 - rate).
    pub factor: f32,
}

impl DropoutRate {
    /// For a rate in [0, 1), to the nearest 2^-32; `None` for another number.
    pub fn new(rate: f64) -> Option<DropoutRate> {
        let threshold = (rate * 4_294_967_296.0).round();
        let valid = (0.0..1.0).contains(&rate) && threshold <= f64::from(u32::MAX);
        valid.then(|| DropoutRate { threshold: threshold as u32, factor: (1.0 / (1.0 - rate)) as f32 })
    }
}

/// One block of Philox-4x32-10.
#[inline(always)]
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |x: u32, factor: u32| {
        let wide = u64::from(x) * u64::from(factor);
        ((wide >> 32) as u32, wide as u32)
    };
    for _ in 0..10 {
        let [a, b, c, d] = counter;
        let (high0, low0) = product(a, 0xD251_1F53);
        let (high1, low1) = product(c, 0xCD9E_8D57);
        counter = [high1 ^ b ^ key[0], low1, high0 ^ d ^ key[1], low0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// `y = x · factor` where the mask of `key` keeps an element, 0 where it drops it. Of a gradient: the gradient.
pub fn dropout<E: Elem>(key: u64, rate: DropoutRate, x: &[E], y: &mut [E]) -> Result {
    expect_len("dropout", "y", y.len(), x.len())?;
    let key = [key as u32, (key >> 32) as u32];
    let factor = E::Acc::from_f32(rate.factor);
    simd(
        #[inline(always)]
        || {
            for (block, (x, y)) in x.chunks(4).zip(y.chunks_mut(4)).enumerate() {
                let words = philox([block as u32, (block as u64 >> 32) as u32, 0, 0], key);
                for ((x, y), word) in x.iter().zip(y).zip(words) {
                    *y = E::store(if word < rate.threshold { E::Acc::ZERO } else { x.load() * factor });
                }
            }
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{numbers, stored};
    use super::*;

    /// The vectors that the authors of the generator publish with it.
    #[test]
    fn the_generator_gives_its_known_answers() {
        let ones = u32::MAX;
        for (counter, key, want) in [
            ([0; 4], [0; 2], [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
            ([ones; 4], [ones; 2], [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
            (
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0],
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ] {
            assert_eq!(philox(counter, key), want);
        }
    }

    #[test]
    fn the_right_share_survives_and_is_scaled() {
        let n = 100_003;
        let x = vec![3.0f32; n];
        for rate in [0.0, 0.1, 0.5, 0.9] {
            let mut y = vec![f32::NAN; n];
            let chosen = DropoutRate::new(rate).unwrap();
            dropout(7, chosen, &x, &mut y).unwrap();
            let kept = y.iter().filter(|y| **y != 0.0).count() as f64 / n as f64;
            // Five standard errors.
            assert!((kept - (1.0 - rate)).abs() <= 5.0 * (rate * (1.0 - rate) / n as f64).sqrt(), "{rate}: {kept}");
            assert!(y.iter().all(|y| *y == 0.0 || *y == 3.0 * chosen.factor));
        }
        assert!([1.0, -0.1, f64::NAN, 1.0 - 1e-12].into_iter().all(|rate| DropoutRate::new(rate).is_none()));
    }

    #[test]
    fn a_mask_is_its_keys_and_the_gradient_has_the_same() {
        let (rate, n) = (DropoutRate::new(0.3).unwrap(), 1001);
        let (x, dy) = (stored::<f64>(&numbers(1, n)), stored::<f64>(&numbers(2, n)));
        let mask = |key: u64, x: &[f64]| {
            let mut y = vec![f64::NAN; x.len()];
            dropout(key, rate, x, &mut y).unwrap();
            y
        };
        let (y, dx) = (mask(5, &x), mask(5, &dy));
        let factor = f64::from(rate.factor);
        for i in 0..n {
            let slope = if y[i] == 0.0 { 0.0 } else { factor };
            assert_eq!((y[i], dx[i]), (x[i] * slope, dy[i] * slope));
        }
        let dropped = |y: &[f64]| y.iter().map(|y| *y == 0.0).collect::<Vec<_>>();
        assert_eq!(dropped(&y[..500]), dropped(&mask(5, &x[..500])), "the rest of the tensor does not matter");
        assert_ne!(dropped(&y), dropped(&mask(6, &x)));
        assert_ne!(dropped(&y), dropped(&mask(5 | 1 << 32, &x)));
    }
}
