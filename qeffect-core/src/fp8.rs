//! The two 8-bit floating-point formats, bit-exact on every `f32`.
//!
//! Encoding rounds to nearest, ties to even, and saturates to the largest finite value (infinities
//! too); every NaN becomes `0x7F` without sign. That is what the conversion instruction of GPUs
//! does. Decoding is exact. Both are free of branches, so that slices are converted with vector
//! instructions of whatever width the caller is compiled for.

use crate::dtype::Dtype;

/// An 8-bit floating-point format.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Fp8 {
    /// 4 exponent bits (bias 7), 3 mantissa bits, no infinity. Used forward.
    E4M3,
    /// 5 exponent bits (bias 15), 2 mantissa bits. Used for gradients.
    E5M2,
}

/// What every NaN is encoded as, in both formats.
pub const NAN: u8 = 0x7F;

impl Fp8 {
    /// Largest finite value.
    pub const fn max(self) -> f32 {
        match self {
            Fp8::E4M3 => E4m3::MAX,
            Fp8::E5M2 => E5m2::MAX,
        }
    }

    /// As an element type.
    pub const fn dtype(self) -> Dtype {
        match self {
            Fp8::E4M3 => Dtype::E4M3,
            Fp8::E5M2 => Dtype::E5M2,
        }
    }

    /// The code nearest to `x`.
    #[inline]
    pub const fn encode(self, x: f32) -> u8 {
        match self {
            Fp8::E4M3 => E4m3::encode(x),
            Fp8::E5M2 => E5m2::encode(x),
        }
    }

    /// The value of a code.
    #[inline]
    pub const fn decode(self, code: u8) -> f32 {
        match self {
            Fp8::E4M3 => E4m3::decode(code),
            Fp8::E5M2 => E5m2::decode(code),
        }
    }

    /// Whether a code stands for no number.
    pub const fn is_nan(self, code: u8) -> bool {
        match self {
            Fp8::E4M3 => code & 0x7F == 0x7F,
            Fp8::E5M2 => code & 0x7F > 0x7C,
        }
    }

    /// Whether a code stands for an infinity. Encoding never makes one.
    pub const fn is_infinite(self, code: u8) -> bool {
        match self {
            Fp8::E4M3 => false,
            Fp8::E5M2 => code & 0x7F == 0x7C,
        }
    }
}

macro_rules! format {
    ($(#[$doc:meta])* $name:ident, mantissa: $mantissa:literal, bias: $bias:literal, max: $max:literal, special: $special:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $name {}

        impl $name {
            /// Largest finite value.
            pub const MAX: f32 = $max;
            /// Smallest normal value.
            pub const MIN_POSITIVE: f32 = power_of_two(1 - $bias);
            /// Smallest positive value, and the step between subnormal ones.
            pub const SUBNORMAL_STEP: f32 = power_of_two(1 - $bias - $mantissa);

            /// The code nearest to `x`.
            #[inline(always)]
            pub const fn encode(x: f32) -> u8 {
                const DROPPED: u32 = 23 - $mantissa;
                // Adding this puts the last mantissa bit of an f32 at the subnormal step: the
                // addition rounds, and the difference of the bits counts steps.
                const ALIGN: f32 = power_of_two(24 - $bias - $mantissa);
                const MAX_BITS: u32 = ($max as f32).to_bits();
                const MIN_BITS: u32 = $name::MIN_POSITIVE.to_bits();

                let bits = x.to_bits();
                let sign = (bits >> 24) & 0x80;
                let magnitude = bits & 0x7FFF_FFFF;
                let bounded = if magnitude < MAX_BITS { magnitude } else { MAX_BITS };
                let half = (1 << (DROPPED - 1)) - 1 + ((bounded >> DROPPED) & 1);
                let normal = ((bounded + half) >> DROPPED).wrapping_sub((127 - $bias) << $mantissa);
                let subnormal = (f32::from_bits(bounded) + ALIGN).to_bits().wrapping_sub(ALIGN.to_bits());
                let code = sign | if bounded < MIN_BITS { subnormal } else { normal };
                (if magnitude > 0x7F80_0000 { NAN as u32 } else { code }) as u8
            }

            /// The value of a code, exactly.
            #[inline(always)]
            pub const fn decode(code: u8) -> f32 {
                const BIAS: u32 = (127 - $bias) << 23;

                let code = code as u32;
                let magnitude = code & 0x7F;
                let bits = magnitude << (23 - $mantissa);
                // A subnormal gets the leading one that it lacks, which is then taken away: no
                // subnormal f32 takes part, which some processors are slow at.
                let normal = f32::from_bits(bits + BIAS);
                let subnormal = f32::from_bits(bits + BIAS + (1 << 23)) - $name::MIN_POSITIVE;
                let value = if magnitude < 1 << $mantissa { subnormal } else { normal };
                let value = if magnitude < $special {
                    value
                } else if $special == 0x7C && magnitude == $special {
                    f32::INFINITY
                } else {
                    f32::NAN
                };
                f32::from_bits(value.to_bits() | (code & 0x80) << 24)
            }

            /// `codes[i] = encode(values[i] * scale)`, over the shorter of both.
            #[inline(always)]
            pub fn encode_scaled(values: &[f32], scale: f32, codes: &mut [u8]) {
                for (code, value) in codes.iter_mut().zip(values) {
                    *code = $name::encode(value * scale);
                }
            }

            /// `values[i] = decode(codes[i])`, over the shorter of both.
            #[inline(always)]
            pub fn decode_slice(codes: &[u8], values: &mut [f32]) {
                for (value, code) in values.iter_mut().zip(codes) {
                    *value = $name::decode(*code);
                }
            }
        }
    };
}

format! {
    /// The format [`Fp8::E4M3`].
    E4m3, mantissa: 3, bias: 7, max: 448.0, special: 0x7F
}
format! {
    /// The format [`Fp8::E5M2`].
    E5m2, mantissa: 2, bias: 15, max: 57344.0, special: 0x7C
}

/// 2^`exponent`, for exponents of normal numbers.
pub(crate) const fn power_of_two(exponent: i32) -> f32 {
    assert!(exponent > -127 && exponent < 128);
    f32::from_bits(((exponent + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same conversion through the crate `float8`, whose sign and payload of NaN are dropped.
    fn reference(format: Fp8, x: f32) -> u8 {
        match format {
            _ if x.is_nan() => NAN,
            Fp8::E4M3 => float8::F8E4M3::from_f32(x).to_bits(),
            Fp8::E5M2 => float8::F8E5M2::from_f32(x).to_bits(),
        }
    }

    fn compare(bits: u32) {
        let x = f32::from_bits(bits);
        for format in [Fp8::E4M3, Fp8::E5M2] {
            assert_eq!(format.encode(x), reference(format, x), "{format:?} of {x:e} ({bits:08x})");
        }
    }

    /// Value of a code from the definition of the format, in f64.
    fn value(format: Fp8, code: u8) -> f64 {
        let (mantissa_bits, bias) = if format == Fp8::E4M3 { (3, 7) } else { (2, 15) };
        let exponent = i32::from((code & 0x7F) >> mantissa_bits);
        let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let special = if format == Fp8::E4M3 { code & 0x7F == 0x7F } else { exponent == 31 };
        match (special, exponent) {
            (true, _) if format == Fp8::E5M2 && mantissa == 0.0 => sign * f64::INFINITY,
            (true, _) => f64::NAN,
            (false, 0) => sign * mantissa * 2f64.powi(1 - bias),
            (false, _) => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
        }
    }

    #[test]
    fn every_code_decodes_by_definition_and_encodes_back() {
        for format in [Fp8::E4M3, Fp8::E5M2] {
            for code in 0..=255u8 {
                let (got, want) = (format.decode(code), value(format, code));
                assert_eq!(format.is_nan(code), want.is_nan());
                assert_eq!(format.is_infinite(code), want.is_infinite());
                if want.is_nan() {
                    assert!(got.is_nan());
                    assert_eq!(format.encode(got), NAN);
                } else {
                    assert_eq!(f64::from(got).to_bits(), want.to_bits(), "{format:?} {code:02x}");
                    let back = if want.is_infinite() { code & 0x80 | 0x7B } else { code };
                    assert_eq!(format.encode(got), back);
                }
            }
        }
    }

    #[test]
    fn rounding_at_the_boundaries() {
        let after = |x: f32| f32::from_bits(x.to_bits() + 1);
        let half_e4m3 = 0.0009765625; // half the smallest subnormal: a tie, to even
        let half_e5m2 = 2f32.powi(-17);
        for (x, e4m3, e5m2) in [
            (0.0, 0x00, 0x00),
            (half_e4m3, 0x00, 0x14),
            (after(half_e4m3), 0x01, 0x14),
            (half_e5m2, 0x00, 0x00),
            (after(half_e5m2), 0x00, 0x01),
            (1.5 * 2f32.powi(-9), 0x02, 0x1A),
            (448.0, 0x7E, 0x5F),
            (464.0, 0x7E, 0x5F),
            (464.1, 0x7E, 0x5F),
            (480.0, 0x7E, 0x60),
            (57344.0, 0x7E, 0x7B),
            (61440.0, 0x7E, 0x7B),
            (65536.0, 0x7E, 0x7B),
            (f32::INFINITY, 0x7E, 0x7B),
        ] {
            for (format, code) in [(Fp8::E4M3, e4m3), (Fp8::E5M2, e5m2)] {
                assert_eq!(format.encode(x), code, "{format:?} of {x:e}");
                assert_eq!(format.encode(-x), code | 0x80, "{format:?} of -{x:e}");
            }
        }
        for payload in [0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFFF_FFFF] {
            assert_eq!(Fp8::E4M3.encode(f32::from_bits(payload)), NAN);
            assert_eq!(Fp8::E5M2.encode(f32::from_bits(payload)), NAN);
        }
    }

    #[test]
    fn constants_are_those_of_the_formats() {
        assert_eq!((Fp8::E4M3.max(), Fp8::E5M2.max()), (448.0, 57344.0));
        assert_eq!((Fp8::E4M3.decode(0x7E), Fp8::E5M2.decode(0x7B)), (448.0, 57344.0));
        assert_eq!((E4m3::MIN_POSITIVE, E5m2::MIN_POSITIVE), (2f32.powi(-6), 2f32.powi(-14)));
        assert_eq!((Fp8::E4M3.decode(1), Fp8::E5M2.decode(1)), (E4m3::SUBNORMAL_STEP, E5m2::SUBNORMAL_STEP));
    }

    #[test]
    fn sampled_sweep_equals_the_reference() {
        // A prime step: all residues of the low bits come up, and every exponent is visited.
        for bits in (0..=u32::MAX).step_by(1021) {
            compare(bits);
        }
        // All neighbourhoods of representable values and of the midpoints between them.
        for format in [Fp8::E4M3, Fp8::E5M2] {
            for code in 0..=0x7Eu8 {
                let (low, high) = (value(format, code), value(format, code + 1));
                let points = [low, (low + high) / 2.0];
                for point in points.into_iter().filter(|point| point.is_finite()) {
                    let bits = (point as f32).to_bits();
                    for near in bits.saturating_sub(3)..=bits + 3 {
                        compare(near);
                        compare(near | 0x8000_0000);
                    }
                }
            }
        }
    }

    /// All 2^32 inputs: `cargo test --release -p qeffect-core -- --ignored every_f32 --nocapture`.
    #[test]
    #[ignore = "minutes: every f32 against the reference"]
    fn every_f32_equals_the_reference() {
        let start = std::time::Instant::now();
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        std::thread::scope(|scope| {
            for part in 0..threads {
                scope.spawn(move || {
                    let (from, to) = ((part << 32) / threads, ((part + 1) << 32) / threads);
                    (from..to).for_each(|bits| compare(bits as u32));
                });
            }
        });
        println!("2^32 inputs in {:.1} s on {threads} threads", start.elapsed().as_secs_f64());
    }

    #[test]
    fn slices_scale_with_one_multiplication() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0) * 0.37).collect();
        let scale = 448.0 / 185.0;
        let mut codes = vec![0; values.len()];
        let mut back = vec![0.0; values.len()];
        E4m3::encode_scaled(&values, scale, &mut codes);
        E4m3::decode_slice(&codes, &mut back);
        for ((&value, &code), &back) in values.iter().zip(&codes).zip(&back) {
            assert_eq!(code, float8::F8E4M3::from_f32(value * scale).to_bits());
            assert_eq!(back, float8::F8E4M3::from_bits(code).to_f32());
        }
    }
}
