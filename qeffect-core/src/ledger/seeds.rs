//! What F leaves where it will be run again: no tape yet, so it does not count as one.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::ids::{Microbatch, Stage};

/// The actions of a rank whose F is run again, and how many wait for that.
#[derive(Clone, Debug, Default)]
pub(super) struct Seeds {
    planned: Arc<BTreeSet<(Stage, Microbatch)>>,
    live: u32,
}

impl Seeds {
    pub fn new(planned: impl IntoIterator<Item = (Stage, Microbatch)>) -> Seeds {
        Seeds { planned: Arc::new(planned.into_iter().collect()), live: 0 }
    }

    pub fn at_rest(&self) -> Seeds {
        Seeds { live: 0, ..self.clone() }
    }

    pub fn planned(&self, stage: Stage, microbatch: Microbatch) -> bool {
        self.planned.contains(&(stage, microbatch))
    }

    /// Between F and R.
    pub const fn live(&self) -> u32 {
        self.live
    }

    /// F has succeeded.
    pub fn left(&mut self, stage: Stage, microbatch: Microbatch) {
        self.live += u32::from(self.planned(stage, microbatch));
    }

    /// R has succeeded.
    pub fn grown(&mut self, stage: Stage, microbatch: Microbatch) {
        self.live -= u32::from(self.planned(stage, microbatch));
    }

    /// A step begins, or is aborted.
    pub const fn clear(&mut self) {
        self.live = 0;
    }
}
