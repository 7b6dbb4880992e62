//! Weight versions: which weights the quantised cache of a stage holds.
//!
//! Three counters, so that a cache at a fixed address cannot be mistaken for a current one: `weights`
//! (e_W) counts good commits; `cache` (e_C) is set by refresh alone, once per step and before the
//! step's first F, and a training F requires `e_C = e_W`; `filled` says from which weights the cached
//! bytes were quantised. Commit and the prologue fill the cache but do not make it current: refresh
//! still has to roll the weight's scaling state. Evaluation reads filled bytes and moves nothing.

use core::fmt;

/// The version of one stage's weights and of the cache made from them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct WeightVersion {
    weights: u64,
    cache: Option<u64>,
    filled: Option<u64>,
    replaced: bool,
}

/// A cache that is not the one an action needs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Stale {
    /// e_W.
    pub weights: u64,
    /// The cache's epoch; `None`: there is no cache yet.
    pub cache: Option<u64>,
}

impl fmt::Display for Stale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "weights e_W = {}, cache ", self.weights)?;
        match self.cache {
            Some(cache) => write!(f, "e_C = {cache}"),
            None => f.write_str("not made"),
        }
    }
}

impl WeightVersion {
    /// Weights after `weights` good commits, without a cache: at start and after a resume.
    pub const fn without_cache(weights: u64) -> Self {
        WeightVersion { weights, cache: None, filled: None, replaced: false }
    }

    /// e_W: good commits so far.
    pub const fn weights(&self) -> u64 {
        self.weights
    }

    /// e_C: the weights that the last refresh made current.
    pub const fn cache(&self) -> Option<u64> {
        self.cache
    }

    /// The cached bytes now hold the current weights. Rolls nothing, so does not make them current.
    pub fn fill(&mut self) {
        self.filled = Some(self.weights);
        self.replaced = false;
    }

    /// The weights are about to be replaced by others: until [`fill`](Self::fill) the cached bytes are of none that count.
    pub fn forget(&mut self) {
        self.filled = None;
        self.replaced = true;
    }

    /// What a refresh requires: rolling scales makes no bytes of weights that were replaced.
    pub fn require_not_replaced(&self) -> Result<(), Stale> {
        if self.replaced { Err(self.stale(self.filled)) } else { Ok(()) }
    }

    /// `refresh(s)`: the cache is current.
    pub fn refresh(&mut self) {
        self.filled = Some(self.weights);
        self.cache = Some(self.weights);
    }

    /// A good commit: the weights moved, and the optimizer filled the cache with them.
    pub fn commit(&mut self) {
        self.weights += 1;
        self.filled = Some(self.weights);
    }

    /// Weights moved by somebody else, who did not fill the cache.
    pub fn invalidate(&mut self) {
        self.weights += 1;
    }

    /// What a training F (and R) requires.
    pub fn require_current(&self) -> Result<(), Stale> {
        if self.cache == Some(self.weights) && self.filled == self.cache { Ok(()) } else { Err(self.stale(self.cache)) }
    }

    /// What an evaluation F requires.
    pub fn require_filled(&self) -> Result<(), Stale> {
        if self.filled == Some(self.weights) { Ok(()) } else { Err(self.stale(self.filled)) }
    }

    const fn stale(&self, cache: Option<u64>) -> Stale {
        Stale { weights: self.weights, cache }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forward_needs_a_refresh_after_every_commit() {
        let mut version = WeightVersion::without_cache(0);
        assert_eq!(version.require_current(), Err(Stale { weights: 0, cache: None }));
        version.refresh();
        version.require_current().unwrap();
        // case B08: the weights moved at the same address; the cache must not pass as current
        version.commit();
        let stale = version.require_current().unwrap_err();
        assert_eq!(stale, Stale { weights: 1, cache: Some(0) });
        assert_eq!(stale.to_string(), "weights e_W = 1, cache e_C = 0");
        version.refresh();
        version.require_current().unwrap();
    }

    #[test]
    fn filling_serves_evaluation_only() {
        let mut version = WeightVersion::without_cache(7);
        assert!(version.require_filled().is_err());
        version.fill();
        version.require_filled().unwrap();
        assert!(version.require_current().is_err(), "the scaling state was not rolled");
        version.refresh();
        version.commit();
        version.require_filled().unwrap();
        // Other weights, at the same epoch.
        version.forget();
        assert_eq!(version.require_filled(), Err(Stale { weights: 8, cache: None }));
        assert_eq!(version.require_not_replaced(), version.require_filled());
        version.fill();
        version.require_filled().unwrap();
        // case B08, negative: e_W moved by another hand
        version.invalidate();
        assert_eq!(version.require_filled(), Err(Stale { weights: 9, cache: Some(8) }));
        assert!(version.require_current().is_err());
    }
}
