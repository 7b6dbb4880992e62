//! What stages declare to do to their state, against what the schedule has their actions do.
//!
//! A schedule is checked by the table of [`effects`](crate::effects): F rolls the forward cell, I the backward cell,
//! `refresh` alone the weight cells, and nothing else moves any. A stage whose ops do otherwise would run where nothing was
//! checked.

use super::{RunFacts, fault};
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::effects::{Access, Cell, CellEffect, StageEffects, effects};
use crate::schedule::{Schedule, Update};

/// Every stage that does not fit.
pub(super) fn check(schedule: &Schedule, facts: &RunFacts, stages: &[StageEffects]) -> Vec<Diagnostic> {
    let mut faults = Vec::new();
    for (id, stage) in stages.iter().enumerate() {
        for (cell, declared) in cells(stage) {
            if let Some((message, help)) = misfit(cell, declared, facts.update) {
                let message = format!("stage {id} {message}");
                faults.push(fault(schedule, Code::EffectMismatch, message).help(help));
            }
        }
    }
    faults
}

/// The first stage whose state rolls in another order than that of microbatches, and which state that is.
pub(super) fn disordered(schedule: &Schedule, facts: &RunFacts, stages: &[StageEffects]) -> Option<(usize, Cell)> {
    let mut all = stages.iter().enumerate().flat_map(|(id, stage)| cells(stage).map(|(cell, of)| (id, cell, of)));
    let found = all.find(|(id, cell, declared)| depends_on_order(schedule, *id, *cell, *declared, facts.update));
    found.map(|(id, cell, _)| (id, cell))
}

const fn cells(stage: &StageEffects) -> [(Cell, CellEffect); 3] {
    [(Cell::Forward, stage.forward), (Cell::Backward, stage.backward), (Cell::Cache, stage.cache)]
}

/// What is wrong with a declaration, and how to mend it.
fn misfit(cell: Cell, declared: CellEffect, update: Update) -> Option<(String, &'static str)> {
    let state = cell.name();
    match (cell, declared.owned, declared.access) {
        (Cell::Cache, _, Some(Access::Fold | Access::Write)) => {
            let message =
                format!("moves {state}: the schedule has `refresh` alone move it, before the first F of a step");
            Some((message, "ops read it: `#[effect(read(weight))]`"))
        }
        (Cell::Cache, true, None) => Some((
            format!("has {state}, and none of its ops declares to read it"),
            "`#[effect(read(weight))]`: what F and I read is refreshed before them",
        )),
        (Cell::Forward, true, None | Some(Access::Read)) => Some((
            format!("has {state}, which F rolls, and none of its ops declares to move it"),
            "`#[effect(write(input))]` on the op that quantises its input",
        )),
        (Cell::Backward, true, None | Some(Access::Read)) => Some((
            format!("has {state}, which I rolls, and none of its ops declares to move it"),
            "`#[effect(write(grad_output))]` on the op that quantises its gradient",
        )),
        (Cell::Forward | Cell::Backward, true, Some(Access::Fold)) if update == Update::Microbatch => Some((
            format!("declares to fold {state} in any order, and the recipe rolls it with each microbatch"),
            "`write(..)` in place of `fold(..)`, or a recipe with `update=step`",
        )),
        _ => None,
    }
}

/// Whether the schedule runs the actions that move a cell of this stage in an order that changes its numbers.
fn depends_on_order(schedule: &Schedule, stage: usize, cell: Cell, declared: CellEffect, update: Update) -> bool {
    if !declared.owned || declared.access != Some(Access::Write) {
        return false;
    }
    let rolls = |item: &&Item| {
        let of_stage = item.stage.index() == stage && item.kind != Kind::Commit;
        of_stage && effects(item.kind, update, schedule.eval).any(|effect| effect == (cell, Access::Write))
    };
    !schedule.items.iter().filter(rolls).is_sorted_by_key(|item| item.microbatch)
}
