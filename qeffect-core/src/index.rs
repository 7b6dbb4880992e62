//! Where each action of a schedule stands: dense tables over (stage, microbatch).

use crate::action::{Item, Kind};
use crate::ids::{Microbatch, Rank, Stage};
use crate::schedule::Schedule;

/// No such action.
pub const ABSENT: u32 = u32::MAX;

/// Positions of F, I and W of every (stage, microbatch), as indices into [`Schedule::items`].
///
/// A full backward stands in both the `input_grad` and the `weight_grad` table. If an action
/// occurs twice, the first one is kept.
#[derive(Debug)]
pub struct Index {
    microbatches: usize,
    /// F.
    pub forward: Vec<u32>,
    /// I or B.
    pub input_grad: Vec<u32>,
    /// W (also as a member of a group) or B.
    pub weight_grad: Vec<u32>,
}

impl Index {
    /// Builds the tables. Items out of range are skipped: they have been reported by then.
    pub fn new(schedule: &Schedule) -> Index {
        let cells = schedule.stages as usize * schedule.microbatches as usize;
        let backward = if schedule.eval { 0 } else { cells };
        let mut index = Index {
            microbatches: schedule.microbatches as usize,
            forward: vec![ABSENT; cells],
            input_grad: vec![ABSENT; backward],
            weight_grad: vec![ABSENT; backward],
        };
        let set = |table: &mut Vec<u32>, cell: usize, at: usize| {
            if let Some(entry) = table.get_mut(cell)
                && *entry == ABSENT
            {
                *entry = at as u32;
            }
        };
        for (at, item) in schedule.items.iter().enumerate() {
            if !item.kind.is_compute() || item.microbatch.0 >= schedule.microbatches || item.stage.0 >= schedule.stages
            {
                continue;
            }
            let cell = index.cell(item.stage, item.microbatch);
            match item.kind {
                Kind::Forward => set(&mut index.forward, cell, at),
                Kind::InputGrad => set(&mut index.input_grad, cell, at),
                Kind::WeightGrad | Kind::WeightGradJoin => set(&mut index.weight_grad, cell, at),
                Kind::FullBackward => {
                    set(&mut index.input_grad, cell, at);
                    set(&mut index.weight_grad, cell, at);
                }
                _ => {}
            }
        }
        index
    }

    /// The table entry of (stage, microbatch).
    pub fn cell(&self, stage: Stage, microbatch: Microbatch) -> usize {
        stage.index() * self.microbatches + microbatch.index()
    }
}

/// Finds the item that an action needs first from another stage, if any.
///
/// F(s, m) needs F(s - 1, m); I(s, m) and B(s, m) need the input gradient of (s + 1, m).
pub fn dependency(schedule: &Schedule, index: &Index, item: &Item) -> Option<u32> {
    match item.kind {
        Kind::Forward if item.stage.0 > 0 => Some(index.forward[index.cell(Stage(item.stage.0 - 1), item.microbatch)]),
        Kind::InputGrad | Kind::FullBackward if item.stage.0 + 1 < schedule.stages => {
            Some(index.input_grad[index.cell(Stage(item.stage.0 + 1), item.microbatch)])
        }
        _ => None,
    }
}

/// The stage, if any, whose action waits for the result of `item`.
pub fn dependent(schedule: &Schedule, item: &Item) -> Option<Stage> {
    match item.kind {
        Kind::Forward if item.stage.0 + 1 < schedule.stages => Some(Stage(item.stage.0 + 1)),
        Kind::InputGrad | Kind::FullBackward if item.stage.0 > 0 => Some(Stage(item.stage.0 - 1)),
        _ => None,
    }
}

impl Schedule {
    /// Rank and index within the rank of an entry of [`Schedule::items`].
    pub fn locate(&self, at: u32) -> (Rank, u32) {
        let rank = self.starts.partition_point(|start| *start <= at) - 1;
        (Rank(rank as u32), at - self.starts[rank])
    }
}
