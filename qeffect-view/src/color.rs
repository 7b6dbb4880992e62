//! Colours of actions: one hue per kind, one shade per virtual stage.
//!
//! Kinds are ordered by lightness (F darkest, then R, B, I, W), so that a greyscale print and any
//! kind of colour blindness keep them apart; hues lie on the blue-to-orange axis, which all common
//! kinds of colour blindness keep. W is hatched as well, and later virtual stages carry a stripe
//! whose length says which one it is: no meaning hangs on hue alone.

use qeffect_core::action::Kind;

use crate::scene::family;

/// Light or dark surroundings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Theme {
    /// On white.
    Light,
    /// On near black.
    Dark,
}

/// An sRGB colour.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rgb(pub u8, pub u8, pub u8);

impl Rgb {
    /// `#rrggbb`.
    pub fn hex(self) -> String {
        format!("#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }

    /// Relative luminance, 0 (black) to 1 (white).
    pub fn luminance(self) -> f64 {
        let linear = |c: u8| {
            let c = f64::from(c) / 255.0;
            if c <= 0.040_45 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * linear(self.0) + 0.7152 * linear(self.1) + 0.0722 * linear(self.2)
    }

    /// Contrast ratio of two colours, 1 to 21.
    pub fn contrast(self, other: Rgb) -> f64 {
        let (a, b) = (self.luminance(), other.luminance());
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    /// The nearest entry of the 6 x 6 x 6 cube of 256-colour terminals.
    pub fn ansi256(self) -> u8 {
        let level = |c: u8| match c {
            0..=47 => 0,
            48..=114 => 1,
            _ => (c - 35) / 40,
        };
        16 + 36 * level(self.0) + 6 * level(self.1) + level(self.2)
    }
}

/// Dark text, for light fills. Black: only so every fill has text of contrast 4.5 or more.
pub const INK: Rgb = Rgb(0, 0, 0);
/// Light text, for dark fills.
pub const PAPER: Rgb = Rgb(0xff, 0xff, 0xff);

/// Lightness of the first and the last virtual stage, chroma, hue (OKLCH) of a kind.
fn band(kind: Kind, theme: Theme) -> (f64, f64, f64, f64) {
    let (from, to, chroma, hue) = match family(kind) {
        Kind::Forward => (0.41, 0.505, 0.130, 255.0),
        Kind::Recompute => (0.585, 0.61, 0.09, 330.0),
        Kind::FullBackward => (0.66, 0.71, 0.155, 42.0),
        Kind::InputGrad => (0.785, 0.845, 0.130, 85.0),
        _ => (0.895, 0.945, 0.075, 165.0),
    };
    match theme {
        Theme::Light => (from, to, chroma, hue),
        // A little dimmer, in the same order.
        Theme::Dark => (from * 0.90 + 0.035, to * 0.90 + 0.035, chroma * 0.95, hue),
    }
}

/// The fill of an action of virtual stage `number` of `of`.
pub fn fill(kind: Kind, number: u32, of: u32, theme: Theme) -> Rgb {
    let (from, to, chroma, hue) = band(kind, theme);
    let share = if of > 1 { f64::from(number) / f64::from(of - 1) } else { 0.0 };
    oklch(from + (to - from) * share, chroma, hue)
}

/// Text on a fill: whichever of ink and paper reads better.
pub fn text_on(fill: Rgb) -> Rgb {
    if fill.contrast(PAPER) >= fill.contrast(INK) { PAPER } else { INK }
}

/// OKLCH (Ottosson) to sRGB, clipped.
fn oklch(lightness: f64, chroma: f64, hue: f64) -> Rgb {
    let (a, b) = (chroma * hue.to_radians().cos(), chroma * hue.to_radians().sin());
    let l = (lightness + 0.396_337_777_4 * a + 0.215_803_757_3 * b).powi(3);
    let m = (lightness - 0.105_561_345_8 * a - 0.063_854_172_8 * b).powi(3);
    let s = (lightness - 0.089_484_177_5 * a - 1.291_485_548_0 * b).powi(3);
    let gamma = |c: f64| {
        let c = c.clamp(0.0, 1.0);
        let c = if c <= 0.003_130_8 { 12.92 * c } else { 1.055 * c.powf(1.0 / 2.4) - 0.055 };
        (c * 255.0).round() as u8
    };
    Rgb(
        gamma(4.076_741_662_1 * l - 3.307_711_591_3 * m + 0.230_969_929_2 * s),
        gamma(-1.268_438_004_6 * l + 2.609_757_401_1 * m - 0.341_319_396_5 * s),
        gamma(-0.004_196_086_3 * l - 0.703_418_614_7 * m + 1.707_614_701_0 * s),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scene::FAMILIES;

    /// Lightness that a greyscale print keeps (CIE L*).
    fn grey(c: Rgb) -> f64 {
        let y = c.luminance();
        if y > 0.008_856 { 116.0 * y.cbrt() - 16.0 } else { 903.3 * y }
    }

    #[test]
    fn known_values() {
        assert_eq!(oklch(1.0, 0.0, 0.0), Rgb(255, 255, 255));
        assert_eq!(oklch(0.0, 0.0, 0.0), Rgb(0, 0, 0));
        // sRGB red is oklch(0.62796, 0.25768, 29.234).
        assert_eq!(oklch(0.627_96, 0.257_68, 29.234), Rgb(255, 0, 0));
        assert!((Rgb(255, 255, 255).contrast(Rgb(0, 0, 0)) - 21.0).abs() < 1e-9);
        assert_eq!((Rgb(255, 0, 0).ansi256(), Rgb(255, 255, 255).ansi256(), Rgb(0, 0, 0).ansi256()), (196, 231, 16));
    }

    #[test]
    fn kinds_differ_in_greyscale_whatever_the_virtual_stage() {
        for theme in [Theme::Light, Theme::Dark] {
            let mut bands: Vec<(f64, f64)> =
                FAMILIES.iter().map(|k| (grey(fill(*k, 0, 2, theme)), grey(fill(*k, 1, 2, theme)))).collect();
            bands.sort_by(|a, b| a.0.total_cmp(&b.0));
            for pair in bands.windows(2) {
                assert!(pair[0].1 + 3.5 < pair[1].0, "{theme:?}: {bands:?}");
            }
            for (from, to) in bands {
                assert!(to - from > 2.5, "two virtual stages of one kind look alike");
            }
        }
    }

    /// What somebody without one kind of cones sees, in linear light (Machado et al. 2009, severity 1); and who has all.
    const SIGHT: [(&str, [[f64; 3]; 3]); 4] = [
        ("all", [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
        (
            "protanopia",
            [
                [0.152_286, 1.052_583, -0.204_868],
                [0.114_503, 0.786_281, 0.099_216],
                [-0.003_882, -0.048_116, 1.051_998],
            ],
        ),
        (
            "deuteranopia",
            [[0.367_322, 0.860_646, -0.227_968], [0.280_085, 0.672_501, 0.047_413], [-0.011_820, 0.042_940, 0.968_881]],
        ),
        (
            "tritanopia",
            [
                [1.255_528, -0.076_749, -0.178_779],
                [-0.078_411, 0.930_809, 0.147_602],
                [0.004_733, 0.691_367, 0.303_900],
            ],
        ),
    ];

    /// OKLab of linear light.
    fn oklab([r, g, b]: [f64; 3]) -> [f64; 3] {
        let l = (0.412_221_470_8 * r + 0.536_332_536_3 * g + 0.051_445_992_9 * b).cbrt();
        let m = (0.211_903_498_2 * r + 0.680_699_545_1 * g + 0.107_396_956_6 * b).cbrt();
        let s = (0.088_302_461_9 * r + 0.281_718_837_6 * g + 0.629_978_700_5 * b).cbrt();
        [
            0.210_454_255_3 * l + 0.793_617_785_0 * m - 0.004_072_046_8 * s,
            1.977_998_495_1 * l - 2.428_592_205_0 * m + 0.450_593_709_9 * s,
            0.025_904_037_1 * l + 0.782_771_766_2 * m - 0.808_675_766_0 * s,
        ]
    }

    #[test]
    fn kinds_differ_for_every_sight_whatever_the_virtual_stage() {
        let linear = |Rgb(r, g, b): Rgb| {
            [r, g, b].map(|c| {
                let c = f64::from(c) / 255.0;
                if c <= 0.040_45 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) }
            })
        };
        for (sight, matrix) in SIGHT {
            for theme in [Theme::Light, Theme::Dark] {
                let seen = |kind: Kind, number| {
                    let light = linear(fill(kind, number, 4, theme));
                    oklab(matrix.map(|row| row.iter().zip(light).map(|(a, b)| a * b).sum::<f64>().clamp(0.0, 1.0)))
                };
                for (at, kind) in FAMILIES.iter().enumerate() {
                    for other in &FAMILIES[at + 1..] {
                        for (a, b) in (0..4).flat_map(|a| (0..4).map(move |b| (a, b))) {
                            let (x, y) = (seen(*kind, a), seen(*other, b));
                            let apart = x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
                            // Three times what is just told apart side by side.
                            assert!(apart > 0.06, "{sight}, {theme:?}: {kind:?} {a} and {other:?} {b}: {apart:.3}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn labels_are_readable() {
        for theme in [Theme::Light, Theme::Dark] {
            for kind in FAMILIES {
                for number in 0..4 {
                    let fill = fill(kind, number, 4, theme);
                    assert!(fill.contrast(text_on(fill)) >= 4.5, "{kind:?} {number} {theme:?} {fill:?}");
                }
            }
        }
    }
}
