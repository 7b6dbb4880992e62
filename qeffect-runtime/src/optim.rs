//! The optimizer: learning-rate table, gradient norm, clipping, AdamW, and the commit that all of it is gated by.
//!
//! The norm is the root of a sum of partial sums of squares over fixed-size pieces of each parameter. Every rank adds all
//! partial sums in the order of parameter names, so the norm does not depend on where a parameter lives.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::kernels::optimizer::norm_pieces;

/// The most steps of a run: each has a row in the table of learning rates.
pub const MOST_STEPS: u64 = 10_000_000;

/// Settings of the optimizer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct OptimConfig {
    /// Commits in the run, at most [`MOST_STEPS`]: the learning rate is at `floor` after the last.
    pub steps: u64,
    /// Commits of linear warm-up.
    pub warmup: u64,
    /// Learning rate after warm-up.
    pub peak: f64,
    /// Learning rate at the end of the cosine.
    pub floor: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator, after bias correction.
    pub epsilon: f64,
    /// Decoupled decay of matrices; vectors are not decayed.
    pub weight_decay: f64,
    /// Largest gradient norm; infinite: no clipping.
    pub clip: f32,
}

impl Default for OptimConfig {
    fn default() -> Self {
        OptimConfig {
            steps: 1,
            warmup: 0,
            peak: 1e-3,
            floor: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
        }
    }
}

impl OptimConfig {
    /// Checks every setting against its range.
    pub fn validate(&self) -> Result<()> {
        let wrong = |what: &str| Err(Error::Config(format!("optimizer: {what}")));
        let beta = |beta: f64| (0.0..1.0).contains(&beta);
        if self.steps == 0 {
            return wrong("there must be at least one step");
        }
        if self.steps > MOST_STEPS {
            return wrong(&format!(
                "a run has at most {MOST_STEPS} steps, as each has a row in the table of learning rates"
            ));
        }
        if !(self.peak >= 0.0 && self.peak.is_finite() && self.floor >= 0.0 && self.floor <= self.peak) {
            return wrong("learning rates must be 0 ≤ floor ≤ peak");
        }
        if !(beta(self.beta1) && beta(self.beta2) && self.epsilon > 0.0 && self.weight_decay >= 0.0) {
            return wrong("betas lie in [0, 1), epsilon is positive, weight decay is not negative");
        }
        if self.clip.is_nan() || self.clip <= 0.0 {
            return wrong("the norm is clipped to a positive number");
        }
        Ok(())
    }

    /// Learning rate of the commit `t` (0 for the first): linear warm-up, then half a cosine down to `floor`.
    /// Rounded to f32, which is what is used and reported.
    pub fn learning_rate(&self, t: u64) -> f32 {
        let rate = if t < self.warmup {
            self.peak * (t + 1) as f64 / self.warmup as f64
        } else {
            let span = self.steps.saturating_sub(self.warmup).max(1) as f64;
            let progress = ((t - self.warmup + 1) as f64 / span).min(1.0);
            self.floor + 0.5 * (self.peak - self.floor) * (1.0 + libm::cos(std::f64::consts::PI * progress))
        };
        rate as f32
    }

    /// The table that commits read, three numbers each: learning rate, step size (learning rate / (1 - β1^t)), and
    /// √(1 - β2^t).
    pub fn table(&self) -> Vec<f64> {
        (0..self.steps)
            .flat_map(|t| {
                let correction = |beta: f64| 1.0 - libm::pow(beta, (t + 1) as f64);
                let rate = f64::from(self.learning_rate(t));
                [rate, rate / correction(self.beta1), correction(self.beta2).sqrt()]
            })
            .collect()
    }
}

/// Where the partial sums of each parameter lie among those of the whole model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NormPlan {
    first: BTreeMap<String, usize>,
    len: usize,
}

impl NormPlan {
    /// From the names and sizes of all parameters of the model, in any order.
    pub fn new<'a>(params: impl IntoIterator<Item = (&'a str, usize)>) -> Result<NormPlan> {
        let mut sizes = BTreeMap::new();
        for (path, elements) in params {
            if sizes.insert(path.to_owned(), elements).is_some() {
                return Err(Error::Config(format!("two parameters have the name `{path}`")));
            }
        }
        let mut len = 0;
        let mut first = BTreeMap::new();
        for (path, elements) in sizes {
            first.insert(path, len);
            len += norm_pieces(elements);
        }
        Ok(NormPlan { first, len })
    }

    /// Position of a parameter's first partial sum.
    pub fn first(&self, path: &str) -> Result<usize> {
        let unknown = || Error::Config(format!("the model has no parameter `{path}`"));
        self.first.get(path).copied().ok_or_else(unknown)
    }

    /// Number of partial sums of the model.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the model has no parameter.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// What one rank contributes to `agree`.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Measured {
    /// Position and value of each of its partial sums of squares.
    pub partials: Vec<(usize, f64)>,
    /// Whether it met a value that is not finite.
    pub bad: bool,
    /// In an exchange of its own, before: gradients of ties that span ranks, by tie and end.
    pub tied: Vec<(usize, Vec<f64>)>,
}

/// What all ranks know after `agree`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Verdict {
    /// Norm of the whole gradient, before clipping.
    pub norm: f64,
    /// Whether the step is committed: every value was finite.
    pub commit: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_then_a_cosine_to_the_floor() {
        let config = OptimConfig { steps: 20, warmup: 4, peak: 4e-3, floor: 4e-4, ..OptimConfig::default() };
        let rates: Vec<f32> = (0..20).map(|t| config.learning_rate(t)).collect();
        assert_eq!(rates[..4], [1e-3f32, 2e-3, 3e-3, 4e-3]);
        assert!(rates[3..].windows(2).all(|w| w[0] > w[1]));
        assert_eq!(rates[11], 2.2e-3); // half way
        assert_eq!((rates[19], config.learning_rate(25)), (4e-4, 4e-4));
        let table = config.table();
        assert_eq!(table.len(), 60);
        assert_eq!(table[0], f64::from(1e-3f32));
        assert!((table[1] - 1e-2).abs() < 1e-9 && (table[2] - 0.05f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn no_warm_up_and_a_single_step_are_fine() {
        let config = OptimConfig { steps: 1, warmup: 0, peak: 2.0, floor: 1.0, ..OptimConfig::default() };
        assert_eq!(config.learning_rate(0), 1.0);
        assert!(config.validate().is_ok());
        for broken in [
            OptimConfig { steps: 0, ..config },
            OptimConfig { steps: MOST_STEPS + 1, ..config },
            OptimConfig { steps: u64::MAX, ..config },
            OptimConfig { floor: 3.0, ..config },
            OptimConfig { peak: f64::NAN, ..config },
            OptimConfig { beta2: 1.0, ..config },
            OptimConfig { clip: 0.0, ..config },
            OptimConfig { clip: f32::NAN, ..config },
        ] {
            assert!(broken.validate().is_err(), "{broken:?}");
        }
    }

    #[test]
    fn partial_sums_lie_in_the_order_of_names() {
        let plan = NormPlan::new([("b", 4097), ("a", 1), ("c", 4096)]).unwrap();
        assert_eq!(plan, NormPlan::new([("a", 1), ("c", 4096), ("b", 4097)]).unwrap());
        assert_eq!((plan.first("a").unwrap(), plan.first("b").unwrap(), plan.first("c").unwrap()), (0, 1, 3));
        assert_eq!(plan.len(), 4);
        assert!(plan.first("d").is_err());
        assert!(NormPlan::new([("a", 1), ("a", 1)]).is_err());
    }
}
