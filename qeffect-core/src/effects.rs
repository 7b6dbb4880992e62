//! What actions do to state that others see: one table, by kind.
//!
//! | action | forward cell | backward cell | weight cache | gradient |
//! |---|---|---|---|---|
//! | F | rolls | | reads | |
//! | R | | | reads | |
//! | I, B | | rolls | reads | adds |
//! | W | | | | adds |
//! | `refresh(s)` | | | writes | |
//! | `reduce(s)` | | | | writes |
//! | `commit` | writes | writes | writes | writes |
//!
//! Every cell belongs to a stage; `commit` touches those of every stage of its rank. A roll is a write
//! with `update: microbatch`, a fold by maximum with `update: step`, and nothing with `update: none`.
//! R reads the scales that F used, which travel with what F kept. Evaluation's F only reads the cache.
//! The weight cells move with the cache: `refresh` alone rolls them. W reads no cache and no scale:
//! what it multiplies came with its work.

use crate::action::{Item, Kind};
use crate::schedule::Update;

/// State of a stage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Cell {
    /// The forward scaling state.
    Forward,
    /// The backward scaling state.
    Backward,
    /// The quantised weights, with their scaling state.
    Cache,
    /// The gradients.
    Gradient,
}

impl Cell {
    /// As messages call it, before `of stage 3`.
    pub const fn name(self) -> &'static str {
        match self {
            Cell::Forward => "the forward scaling state",
            Cell::Backward => "the backward scaling state",
            Cell::Cache => "the weight cache",
            Cell::Gradient => "the gradient",
        }
    }
}

/// How a cell is touched.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Access {
    /// Read.
    Read,
    /// Changed in a way that commutes with the same change by others: a maximum, or a contribution with a place
    /// of its own.
    Fold,
    /// Changed.
    Write,
}

impl Access {
    /// Whether the two may happen in either order, or at once.
    pub const fn commutes(self, other: Access) -> bool {
        matches!((self, other), (Access::Read, Access::Read) | (Access::Fold, Access::Fold))
    }
}

/// What a stage has of one cell, and what its ops declare to do to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CellEffect {
    /// Whether the stage has state of this kind.
    pub owned: bool,
    /// The strongest access that an op declares; `None`: no op touches it.
    pub access: Option<Access>,
}

impl CellEffect {
    /// Not there, and not touched.
    pub const NOTHING: CellEffect = CellEffect { owned: false, access: None };
}

/// The effects that a stage declares. Its gradients are the arena's to check.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct StageEffects {
    /// The forward scaling state.
    pub forward: CellEffect,
    /// The backward scaling state.
    pub backward: CellEffect,
    /// The quantised weights.
    pub cache: CellEffect,
}

impl StageEffects {
    /// Of a stage without hidden state.
    pub const NONE: StageEffects =
        StageEffects { forward: CellEffect::NOTHING, backward: CellEffect::NOTHING, cache: CellEffect::NOTHING };

    /// Of a stage whose ops quantise inputs and gradients, and read quantised weights.
    pub const SCALED: StageEffects = {
        let moved = CellEffect { owned: true, access: Some(Access::Write) };
        let read = CellEffect { owned: true, access: Some(Access::Read) };
        StageEffects { forward: moved, backward: moved, cache: read }
    };

    /// How strict an order this stage asks for, under a recipe that moves its state so often.
    pub const fn update(&self, recipe: Update) -> Update {
        if self.forward.owned || self.backward.owned { recipe } else { Update::None }
    }
}

/// The cells that an action touches, and how. `eval`: the schedule is forward-only.
pub fn effects(kind: Kind, update: Update, eval: bool) -> impl Iterator<Item = (Cell, Access)> {
    let roll = match update {
        Update::Microbatch => Some(Access::Write),
        Update::Step => Some(Access::Fold),
        Update::None => None,
    };
    let reads = Some((Cell::Cache, Access::Read));
    let adds = Some((Cell::Gradient, Access::Fold));
    let table = match kind {
        Kind::Forward => [roll.filter(|_| !eval).map(|access| (Cell::Forward, access)), reads, None, None],
        Kind::Recompute => [reads, None, None, None],
        Kind::InputGrad | Kind::FullBackward => [roll.map(|access| (Cell::Backward, access)), reads, adds, None],
        Kind::WeightGrad | Kind::WeightGradJoin => [adds, None, None, None],
        Kind::Refresh => [Some((Cell::Cache, Access::Write)), None, None, None],
        Kind::Reduce => [Some((Cell::Gradient, Access::Write)), None, None, None],
        Kind::Commit => {
            [Cell::Forward, Cell::Backward, Cell::Cache, Cell::Gradient].map(|cell| Some((cell, Access::Write)))
        }
        Kind::OverlapBegin | Kind::OverlapBranch | Kind::OverlapEnd => [None; 4],
    };
    table.into_iter().flatten()
}

/// A cell that both actions of a rank touch and that keeps them from running in either order.
pub fn conflict(a: &Item, b: &Item, update: Update, eval: bool) -> Option<(Cell, Access, Access)> {
    if a.stage != b.stage && a.kind != Kind::Commit && b.kind != Kind::Commit {
        return None;
    }
    effects(a.kind, update, eval).find_map(|(cell, access)| {
        let other = effects(b.kind, update, eval).find(|(other, with)| *other == cell && !access.commutes(*with))?;
        Some((cell, access, other.1))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Kind; 9] = [
        Kind::Forward,
        Kind::InputGrad,
        Kind::WeightGrad,
        Kind::FullBackward,
        Kind::Recompute,
        Kind::WeightGradJoin,
        Kind::Refresh,
        Kind::Reduce,
        Kind::Commit,
    ];

    /// Pairs of kinds that may not be reordered, on one stage, written out by hand.
    #[test]
    fn conflicts_are_those_of_the_table() {
        let letters = ["F", "I", "W", "B", "R", "w", "refresh", "reduce", "commit"];
        let pairs = |update: Update| {
            let mut found = Vec::new();
            for (n, a) in ALL.into_iter().enumerate() {
                for (k, b) in ALL.into_iter().enumerate().skip(n) {
                    let [a, b] = [a, b].map(|kind| Item::new(kind, 0, 0, 0));
                    assert_eq!(conflict(&a, &b, update, false).is_some(), conflict(&b, &a, update, false).is_some());
                    if conflict(&a, &b, update, false).is_some() {
                        found.push(format!("{} {}", letters[n], letters[k]));
                    }
                }
            }
            found
        };
        let folded = [
            "F refresh",
            "F commit",
            "I refresh",
            "I reduce",
            "I commit",
            "W reduce",
            "W commit",
            "B refresh",
            "B reduce",
            "B commit",
            "R refresh",
            "R commit",
            "w reduce",
            "w commit",
            "refresh refresh",
            "refresh commit",
            "reduce reduce",
            "reduce commit",
            "commit commit",
        ];
        assert_eq!(pairs(Update::None), folded);
        assert_eq!(pairs(Update::Step), folded);
        let mut rolled = pairs(Update::Microbatch);
        rolled.retain(|pair| !folded.contains(&pair.as_str()));
        assert_eq!(rolled, ["F F", "I I", "I B", "B B"]);
    }

    #[test]
    fn stages_do_not_meet_but_at_commit() {
        let on = |kind, stage| Item::new(kind, stage, 0, 0);
        assert_eq!(conflict(&on(Kind::Forward, 0), &on(Kind::Forward, 1), Update::Microbatch, false), None);
        assert!(conflict(&on(Kind::WeightGrad, 1), &on(Kind::Commit, 0), Update::Microbatch, false).is_some());
        assert_eq!(conflict(&on(Kind::Forward, 0), &on(Kind::Forward, 0), Update::Microbatch, true), None);
    }
}
