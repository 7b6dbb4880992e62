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

/// Standard normal numbers `2 · pair` and `2 · pair + 1` of the stream `(seed, name)`.
///
/// Box-Muller in f64 with the elementary functions of the crate `libm`, which are the same on every platform.
fn normal_pair(seed: u64, stream: u64, pair: u64) -> [f64; 2] {
    let (u, v) = (uniform(draw(&[seed, stream, pair, 0])), uniform(draw(&[seed, stream, pair, 1])));
    let radius = (-2.0 * libm::log(1.0 - u)).sqrt();
    let (sin, cos) = libm::sincos(TAU * v);
    [radius * cos, radius * sin]
}

/// Standard normal number `index` of the stream `(seed, name)`.
pub fn normal(seed: u64, stream: u64, index: u64) -> f64 {
    normal_pair(seed, stream, index / 2)[(index % 2) as usize]
}

/// What `value` makes of the first `len` standard normal numbers of a stream; by as many threads as there are cores.
pub fn normals<T: Clone + Default + Send>(
    seed: u64,
    stream: u64,
    len: usize,
    value: impl Fn(f64) -> T + Sync,
) -> Vec<T> {
    const SMALLEST: usize = 1 << 16; // less is not worth a thread
    let mut values = vec![T::default(); len];
    let fill = |first: usize, part: &mut [T]| {
        for (at, pair) in part.chunks_mut(2).enumerate() {
            let normal = normal_pair(seed, stream, (first / 2 + at) as u64);
            pair.iter_mut().zip(normal).for_each(|(out, normal)| *out = value(normal));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(len.div_ceil(SMALLEST));
    if threads <= 1 {
        fill(0, &mut values);
        return values;
    }
    let each = len.div_ceil(threads).next_multiple_of(2);
    std::thread::scope(|scope| {
        for (at, part) in values.chunks_mut(each).enumerate() {
            scope.spawn(move || fill(at * each, part));
        }
    });
    values
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
    fn threads_decide_no_bit() {
        for len in [0, 1, 7, (1 << 18) + 3] {
            let many: Vec<u64> = normals(3, name("wte"), len, |x| (0.5 * x).to_bits());
            let one = (0..len as u64).map(|i| (0.5 * normal(3, name("wte"), i)).to_bits());
            assert!(one.eq(many.iter().copied()), "{len}");
        }
    }

    #[test]
    fn sine_and_cosine_at_once_are_those_alone() {
        for i in 0..1_000_000 {
            let angle = TAU * uniform(draw(&[i]));
            let (sin, cos) = libm::sincos(angle);
            assert_eq!([sin, cos].map(f64::to_bits), [libm::sin(angle), libm::cos(angle)].map(f64::to_bits), "{angle}");
        }
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
