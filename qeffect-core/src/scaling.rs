//! Delayed scaling: amax histories, and the scales that follow from them.
//!
//! A cell has one scale and a history of `H` amax values. Cells of one module and direction lie
//! together: entry `i` of cell `c` of `n` is `history[i * n + c]`. Row 0 is the staging row: casts
//! fold their amax into it. Rows 1 to H-1 run from the oldest completed roll to the newest.
//!
//! A roll drops the oldest value after having used it once more, so the window is exactly `H`
//! values. A cell whose staged amax is zero did not run, and is left alone: a weight that was
//! quantised once keeps its history over the other microbatches of the step.

use core::fmt;
use core::ops::Range;

use crate::fp8::{Fp8, power_of_two};
use crate::recipe::AmaxAlgo;

/// How scales follow from a window of amax values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ScaleRule {
    /// Largest value of the format times 2^-margin: what amax is mapped to.
    target: f32,
    algo: AmaxAlgo,
}

/// A history whose size is not a positive multiple of the number of cells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HistoryShape {
    /// Number of scales.
    pub cells: usize,
    /// Number of history entries.
    pub entries: usize,
}

impl fmt::Display for HistoryShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an amax history of {} entries does not fit {} cells", self.entries, self.cells)
    }
}

impl std::error::Error for HistoryShape {}

impl ScaleRule {
    /// The rule for a format. Margins beyond ±[`MARGIN_LIMIT`](crate::recipe::MARGIN_LIMIT) are clamped to it;
    /// recipes refuse them.
    pub const fn new(format: Fp8, margin: i32, algo: AmaxAlgo) -> ScaleRule {
        let limit = crate::recipe::MARGIN_LIMIT;
        let margin = if margin > limit {
            limit
        } else if margin < -limit {
            -limit
        } else {
            margin
        };
        ScaleRule { target: format.max() * power_of_two(-margin), algo }
    }

    /// What amax is mapped to: the largest value of the format times 2^-margin.
    pub const fn target(&self) -> f32 {
        self.target
    }

    /// Which amax of the window counts.
    pub const fn algo(&self) -> AmaxAlgo {
        self.algo
    }

    /// The scale for `amax`, or `old` where `amax` says nothing (zero, infinite, NaN).
    ///
    /// One division; a quotient too large for an f32 becomes the largest finite one, so that a
    /// scale times zero is zero.
    #[inline]
    pub fn scale(&self, amax: f32, old: f32) -> f32 {
        if amax > 0.0 && amax < f32::INFINITY {
            let scale = self.target / amax;
            if scale == f32::INFINITY { f32::MAX } else { scale }
        } else {
            old
        }
    }

    /// Whether an infinity in the history of a cell, its staged entry first, keeps its scale where it is: the roll to come
    /// would leave it there, whatever is staged until then. With [`AmaxAlgo::MostRecent`] only a staged infinity does that.
    pub fn is_frozen(&self, history: &[f32]) -> bool {
        let counted = match self.algo {
            AmaxAlgo::Max => history,
            AmaxAlgo::MostRecent => &history[..history.len().min(1)],
        };
        counted.contains(&f32::INFINITY)
    }

    /// Rolls every cell that ran: moves its staged amax into the window, sets its scale from the
    /// window, and clears the staging row.
    ///
    /// `history` holds `H` rows of `scale.len()` cells. `reduced` replaces the staging row where it
    /// is not zero: the maximum over data-parallel ranks.
    pub fn roll(&self, scale: &mut [f32], history: &mut [f32], reduced: Option<&[f32]>) -> Result<(), HistoryShape> {
        self.roll_some(0..scale.len(), scale, history, reduced)
    }

    /// As [`ScaleRule::roll`], for some of the cells.
    pub fn roll_some(
        &self,
        some: Range<usize>,
        scale: &mut [f32],
        history: &mut [f32],
        reduced: Option<&[f32]>,
    ) -> Result<(), HistoryShape> {
        let cells = scale.len();
        let entries = history.len();
        if cells == 0
            || entries == 0
            || !entries.is_multiple_of(cells)
            || reduced.is_some_and(|row| row.len() != cells)
            || some.end > cells
        {
            return Err(HistoryShape { cells, entries });
        }
        let length = entries / cells;
        for cell in some {
            let newest = match reduced {
                Some(row) if row[cell] != 0.0 => row[cell],
                _ => history[cell],
            };
            if newest == 0.0 {
                continue;
            }
            let mut amax = 0f32;
            for row in 0..length {
                let value = if row + 1 < length { history[(row + 1) * cells + cell] } else { newest };
                amax = amax.max(value); // a NaN is passed over
                history[row * cells + cell] = if row > 0 { value } else { 0.0 };
            }
            if self.algo == AmaxAlgo::MostRecent {
                amax = newest;
            }
            scale[cell] = self.scale(amax, scale[cell]);
        }
        Ok(())
    }
}

/// Folds the amax of a cast into the staging entry of its cell. NaN is passed over.
#[inline]
pub fn stage(staging: &mut f32, amax: f32) {
    *staging = staging.max(amax);
}

/// The factor that undoes `scale`; it is stored beside the bytes that were made with it.
#[inline]
pub fn inverse(scale: f32) -> f32 {
    1.0 / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Cell {
        rule: ScaleRule,
        scale: [f32; 1],
        history: Vec<f32>,
    }

    impl Cell {
        fn new(format: Fp8, margin: i32, algo: AmaxAlgo, length: usize) -> Cell {
            Cell { rule: ScaleRule::new(format, margin, algo), scale: [1.0], history: vec![0.0; length] }
        }

        fn roll(&mut self, amax: f32) -> f32 {
            stage(&mut self.history[0], amax);
            self.rule.roll(&mut self.scale, &mut self.history, None).unwrap();
            self.scale[0]
        }
    }

    #[test]
    fn golden_trace_of_the_maximum_over_a_window_of_four() {
        let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::Max, 4);
        for (n, (amax, bits, history)) in [
            (1.0, 0x43E0_0000u32, [0.0, 0.0, 0.0, 1.0]),
            (2.0, 0x4360_0000, [0.0, 0.0, 1.0, 2.0]),
            (0.0, 0x4360_0000, [0.0, 0.0, 1.0, 2.0]), // did not run: no roll
            (0.5, 0x4360_0000, [0.0, 1.0, 2.0, 0.5]),
            (0.25, 0x4360_0000, [0.0, 2.0, 0.5, 0.25]),
            (0.125, 0x4360_0000, [0.0, 0.5, 0.25, 0.125]), // the 2 is used once more, and leaves
            (0.0625, 0x4460_0000, [0.0, 0.25, 0.125, 0.0625]),
            (3.0, 0x4315_5555, [0.0, 0.125, 0.0625, 3.0]),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(cell.roll(amax).to_bits(), bits, "roll {n}");
            assert_eq!(cell.history, history, "roll {n}");
        }
    }

    #[test]
    fn an_infinite_amax_freezes_the_scale_while_it_is_in_the_window() {
        let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::Max, 4);
        let inf = f32::INFINITY;
        let scales = [1.0, inf, 2.0, 4.0, 8.0].map(|amax| cell.roll(amax));
        assert_eq!(scales, [448.0; 5]);
        assert_eq!(cell.history, [0.0, 2.0, 4.0, 8.0]);
        assert_eq!(cell.roll(1.0), 56.0);

        let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::MostRecent, 4);
        assert_eq!([1.0, inf, 2.0].map(|amax| cell.roll(amax)), [448.0, 448.0, 224.0]);
    }

    #[test]
    fn a_frozen_cell_is_one_whose_next_roll_leaves_the_scale() {
        for (algo, length) in
            [(AmaxAlgo::Max, 4), (AmaxAlgo::Max, 1), (AmaxAlgo::MostRecent, 4), (AmaxAlgo::MostRecent, 1)]
        {
            // Every place in the history, and none.
            for place in 0..=length {
                let mut cell = Cell::new(Fp8::E4M3, 0, algo, length);
                cell.history.iter_mut().for_each(|amax| *amax = 2.0);
                cell.history.get_mut(place).into_iter().for_each(|amax| *amax = f32::INFINITY);
                let frozen = cell.rule.is_frozen(&cell.history);
                stage(&mut cell.history[0], 3.0);
                cell.rule.roll(&mut cell.scale, &mut cell.history, None).unwrap();
                assert_eq!(frozen, cell.scale == [1.0], "{algo:?}, {length} entries, infinity at {place}");
                assert_eq!(frozen, place < if algo == AmaxAlgo::Max { length } else { 1 });
            }
        }
    }

    #[test]
    fn a_nan_in_the_history_is_passed_over() {
        for (algo, want) in [(AmaxAlgo::Max, 448.0), (AmaxAlgo::MostRecent, 448.0)] {
            let mut cell = Cell::new(Fp8::E4M3, 0, algo, 4);
            cell.roll(1.0);
            cell.history[0] = f32::NAN; // only an edited checkpoint can do this: casts pass NaN over
            cell.rule.roll(&mut cell.scale, &mut cell.history, None).unwrap();
            assert_eq!(cell.scale, [want]);
            assert!(cell.history[3].is_nan(), "it is rolled in");
            assert_eq!(cell.roll(2.0), 224.0);
        }
        let mut staged = 3.0;
        stage(&mut staged, f32::NAN);
        assert_eq!(staged, 3.0);
    }

    #[test]
    fn gradients_and_the_most_recent_value() {
        let mut cell = Cell::new(Fp8::E5M2, 0, AmaxAlgo::Max, 4);
        let scale = cell.roll(3.0);
        assert_eq!(scale.to_bits(), 0x4695_5555);
        assert_eq!(inverse(scale), 5.231_585e-5);

        let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::MostRecent, 4);
        assert_eq!([1.0, 2.0, 0.0, 0.5].map(|amax| cell.roll(amax)), [448.0, 224.0, 224.0, 896.0]);
    }

    #[test]
    fn a_margin_scales_the_target_before_the_division() {
        for margin in [-3, 1, 2, 7] {
            let mut cell = Cell::new(Fp8::E4M3, margin, AmaxAlgo::Max, 4);
            assert_eq!(cell.roll(3.0), (448.0 * 2f32.powi(-margin)) / 3.0);
        }
    }

    // case B01: the largest amax of a step survives, whichever microbatch it came from.
    #[test]
    fn the_first_of_four_microbatches_counts() {
        let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::Max, 4);
        let scales = [8.0, 1.0, 1.0, 1.0].map(|amax| cell.roll(amax));
        assert_eq!(scales[3].to_bits(), 0x4260_0000);
        assert_eq!(cell.history, [0.0, 1.0, 1.0, 1.0]);
        assert_eq!(cell.roll(1.0), 448.0);

        // one roll per step: the staging row folds
        let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::Max, 4);
        for amax in [8.0, 1.0, 1.0] {
            stage(&mut cell.history[0], amax);
        }
        assert_eq!(cell.history[0], 8.0);
        assert_eq!(cell.roll(1.0), 56.0);
    }

    // case B02: a weight is quantised once per step; the other rolls of the step pass it over.
    #[test]
    fn a_cell_that_did_not_run_keeps_its_history() {
        let rule = ScaleRule::new(Fp8::E4M3, 0, AmaxAlgo::Max);
        let (mut scale, mut history) = ([1.0; 2], [0.0; 8]); // cells: input, weight
        for (step, weight_amax) in [3.0, 1.0].into_iter().enumerate() {
            for microbatch in 0..6 {
                stage(&mut history[0], 0.5);
                if microbatch == 0 {
                    stage(&mut history[1], weight_amax);
                }
                rule.roll(&mut scale, &mut history, None).unwrap();
            }
            let weight: Vec<f32> = (0..4).map(|row| history[row * 2 + 1]).collect();
            assert_eq!(weight, [[0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 3.0, 1.0]][step]);
            assert_eq!(scale[1].to_bits(), 0x4315_5555);
            assert_eq!(scale[0], 896.0);
        }
    }

    // case B44: a tiny amax saturates the scale; its inverse is subnormal and not zero.
    #[test]
    fn a_tiny_amax_makes_a_finite_scale() {
        for amax in [1e-37, f32::from_bits(1)] {
            let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::Max, 4);
            let scale = cell.roll(amax);
            assert_eq!(scale.to_bits(), 0x7F7F_FFFF);
            assert_eq!(inverse(scale), 2.938_736e-39);
            assert_eq!(Fp8::E4M3.encode(0.0 * scale), 0x00);
        }
        let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::Max, 4);
        assert_eq!((cell.roll(0.0), &cell.history[..]), (1.0, &[0.0; 4][..]));
    }

    // case B43: what a group of replicas agreed on replaces a cell's own amax, cell by cell.
    #[test]
    fn a_reduced_amax_replaces_the_staged_one() {
        let rule = ScaleRule::new(Fp8::E4M3, 0, AmaxAlgo::Max);
        let (mut scale, mut history) = ([1.0; 2], [2.0, 4.0, 0.0, 0.0]);
        rule.roll(&mut scale, &mut history, Some(&[7.0, 0.0])).unwrap();
        assert_eq!((scale, history), ([64.0, 112.0], [0.0, 0.0, 7.0, 4.0]));
    }

    #[test]
    fn a_history_of_one_is_the_last_value() {
        let mut cell = Cell::new(Fp8::E4M3, 0, AmaxAlgo::Max, 1);
        assert_eq!([8.0, 1.0].map(|amax| cell.roll(amax)), [56.0, 448.0]);
        assert_eq!(cell.history, [0.0]);
    }

    #[test]
    fn a_history_of_the_wrong_size_is_refused_untouched() {
        let rule = ScaleRule::new(Fp8::E4M3, 0, AmaxAlgo::Max);
        let (mut scale, mut history) = ([1.0; 2], [5.0; 3]);
        let fault = rule.roll(&mut scale, &mut history, None).unwrap_err();
        assert_eq!(fault.to_string(), "an amax history of 3 entries does not fit 2 cells");
        assert_eq!((scale, history), ([1.0; 2], [5.0; 3]));
        assert!(rule.roll(&mut [], &mut [], None).is_err());
    }
}
