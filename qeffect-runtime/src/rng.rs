//! Random numbers that are a function of their name: no state, the same on every platform.

use std::f64::consts::TAU;

/// A 64-bit mix with full avalanche (the finaliser of splitmix64).
const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// A random number that belongs to these words, in this order.
pub fn draw(words: &[u64]) -> u64 {
    words.iter().fold(0x9E37_79B9_7F4A_7C15, |state, word| {
        mix(state.wrapping_add(mix(*word)).wrapping_mul(0xD6E8_FEB8_6659_FD93))
    })
}

/// A number that stands for a text.
pub fn name(text: &str) -> u64 {
    text.bytes().fold(draw(&[text.len() as u64]), |state, byte| mix(state ^ u64::from(byte)).wrapping_add(state << 7))
}

/// Uniform in [0, 1), from the upper 53 bits.
pub fn uniform(word: u64) -> f64 {
    (word >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Below `bound`, which is at least 1; the bias is below bound / 2^64.
pub fn below(word: u64, bound: u64) -> u64 {
    ((u128::from(word) * u128::from(bound)) >> 64) as u64
}

/// Standard normal number `index` of the stream `(seed, name)`.
///
/// Box-Muller in f64 with the elementary functions of the crate `libm`, which are the same on every platform.
pub fn normal(seed: u64, stream: u64, index: u64) -> f64 {
    let pair = index / 2;
    let (u, v) = (uniform(draw(&[seed, stream, pair, 0])), uniform(draw(&[seed, stream, pair, 1])));
    let radius = (-2.0 * libm::log(1.0 - u)).sqrt();
    let angle = TAU * v;
    radius * if index.is_multiple_of(2) { libm::cos(angle) } else { libm::sin(angle) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_the_moments_of_the_normal_distribution() {
        let n = 200_000;
        let x: Vec<f64> = (0..n).map(|i| normal(7, name("wte"), i)).collect();
        let moment = |k: i32| x.iter().map(|x| x.powi(k)).sum::<f64>() / n as f64;
        // Standard errors: 1, √2, √15 and √96 over √n; four of each are allowed.
        let error = 4.0 / (n as f64).sqrt();
        assert!(moment(1).abs() < error);
        assert!((moment(2) - 1.0).abs() < error * 1.5);
        assert!(moment(3).abs() < error * 3.9);
        assert!((moment(4) - 3.0).abs() < error * 9.8);
        let inside = x.iter().filter(|x| x.abs() < 1.0).count() as f64 / n as f64;
        assert!((inside - 0.682_689).abs() < error);
        let lag: f64 = x.windows(2).map(|w| w[0] * w[1]).sum::<f64>() / n as f64;
        assert!(lag.abs() < error);
    }

    #[test]
    fn streams_differ_and_repeat() {
        assert_ne!(name("blocks.0.qkv.weight"), name("blocks.1.qkv.weight"));
        assert_ne!(name("ab"), name("ba"));
        assert_ne!(draw(&[0, 1]), draw(&[1, 0]));
        assert_ne!(draw(&[0]), draw(&[0, 0]));
        assert_eq!(normal(1, 2, 3).to_bits(), normal(1, 2, 3).to_bits());
        assert!((0..1000).all(|i| below(draw(&[i]), 10) < 10));
        assert_eq!(below(u64::MAX, 10), 9);
    }
}
