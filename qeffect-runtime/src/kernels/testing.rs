//! What kernel tests share: numbers without a library, comparison, finite differences.

use super::{Elem, Real};

/// Repeatable values in [-1, 1), from a 64-bit mixer.
pub fn numbers(seed: u64, n: usize) -> Vec<f64> {
    (0..n as u64)
        .map(|i| {
            let mut x = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed.wrapping_mul(0xD1B5_4A32_D192_ED03);
            x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect()
}

/// Stored as `E`.
pub fn stored<E: Elem>(values: &[f64]) -> Vec<E> {
    values.iter().map(|value| E::store(E::Acc::from_f64(*value))).collect()
}

/// Read back as f64.
pub fn loaded<E: Elem>(values: &[E]) -> Vec<f64> {
    values.iter().map(|value| value.load().to_f64()).collect()
}

/// Half a unit in the last place of `E`, relative.
pub fn rounding<E: Elem>() -> f64 {
    match E::DTYPE.size() {
        2 => 2f64.powi(-8), // 8 significant bits
        4 => 2f64.powi(-24),
        _ => 2f64.powi(-53),
    }
}

/// Panics where |got - want| > tolerance · (1 + |want|).
#[track_caller]
pub fn close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs();
        assert!(error <= tolerance * (1.0 + want.abs()), "element {index}: {got} instead of {want}, off by {error:e}");
    }
}

/// Gradient of `f` at `x` by central differences in f64.
pub fn differences(x: &[f64], mut f: impl FnMut(&[f64]) -> f64) -> Vec<f64> {
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let (at, step) = (x[i], 1e-5);
            x[i] = at + step;
            let high = f(&x);
            x[i] = at - step;
            let low = f(&x);
            x[i] = at;
            (high - low) / (2.0 * step)
        })
        .collect()
}

/// Sum of products.
pub fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}
