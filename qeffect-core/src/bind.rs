//! Binding: a checked schedule meets a model, a recipe and a run.
//!
//! The checker proves what a schedule says; whether a run may use it depends on facts that only the
//! run has. [`bind`] compares them once, at start, and its result is the only way to a [`Ledger`]
//! for a rank of the schedule.

mod choice;
mod declared;

use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::{Diagnostic, Report};
use crate::effects::{Cell, StageEffects};
use crate::ids::{Rank, Stage};
use crate::ledger::{Ledger, StageContract};
use crate::plan::{Checked, Op};
use crate::schedule::{Schedule, Update};

pub use choice::GradientChoice;

/// How weight gradients reach the optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Gradients {
    /// One contribution per (stage, microbatch), summed in microbatch order: any order of W.
    #[default]
    Copied,
    /// W adds into the gradient: the bits of `Copied` only where W ascends.
    Direct,
    /// One W per group of microbatches.
    Coalesced,
}

impl Gradients {
    const fn name(self) -> &'static str {
        match self {
            Gradients::Copied => "copied",
            Gradients::Direct => "direct",
            Gradients::Coalesced => "coalesced",
        }
    }
}

/// What only the run knows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RunFacts {
    /// The transitions that the recipe needs: [`Recipe::update`](crate::recipe::Recipe::update).
    pub update: Update,
    /// Microbatches of a batch.
    pub microbatches: u32,
    /// Placement of gradients.
    pub gradients: Gradients,
    /// Accept a schedule whose order of F's or I's gives other numbers than the ascending one.
    pub allow_order_dependent: bool,
}

/// A schedule that fits its run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bound {
    checked: Checked,
    facts: RunFacts,
    stages: Vec<StageEffects>,
}

impl Bound {
    /// The schedule and its plan.
    pub const fn checked(&self) -> &Checked {
        &self.checked
    }

    /// The run's facts.
    pub const fn facts(&self) -> &RunFacts {
        &self.facts
    }

    /// What of schedule and run decides bits, as text that is equal exactly where they agree in it: the number of
    /// microbatches, when state moves, and which weight gradients are summed before they are added to others. Where
    /// stages live, and in which of the allowed orders they run, decides nothing.
    ///
    /// A run records it: two runs of one model, recipe, seed and data on one kind of device can have the same bits only where
    /// it is the same, so it is the first thing to compare where they differ.
    pub fn identity(&self) -> String {
        let schedule = &self.checked.schedule;
        let microbatches = self.facts.microbatches;
        let mut text = format!("{microbatches} microbatches, state moves per {}", name(self.facts.update));
        match self.facts.gradients {
            Gradients::Copied | Gradients::Direct => text.push_str(", gradients summed one by one"),
            Gradients::Coalesced => {
                text.push_str(", gradients summed in groups");
                for first in (0..microbatches).step_by(schedule.coalesce.max(1) as usize) {
                    let last = (first + schedule.coalesce.max(1)).min(microbatches) - 1;
                    text.push_str(&format!(" {first}-{last}"));
                }
            }
        }
        if declared::disordered(schedule, &self.facts, &self.stages).is_some() {
            text.push_str(&format!(", in the order of `{}`", schedule.name));
        }
        text
    }

    /// How often F and I of a stage roll its cells.
    pub fn rolls(&self, stage: Stage) -> (u32, u32) {
        let effects = self.stages.get(stage.index()).copied().unwrap_or(StageEffects::NONE);
        let rolls = |owned: bool| u32::from(owned && self.facts.update == Update::Microbatch);
        (rolls(effects.forward.owned), rolls(effects.backward.owned))
    }

    /// The ledger of a rank, at start.
    pub fn ledger(&self, rank: Rank) -> Ledger {
        let contracts: Vec<StageContract> = self
            .checked
            .schedule
            .stages_of(rank)
            .map(|stage| {
                let (forward_rolls, backward_rolls) = self.rolls(stage);
                StageContract { stage, forward_rolls, backward_rolls }
            })
            .collect();
        let slots = self.checked.plan.peaks.get(rank.index()).map_or(0, |peaks| peaks.slots);
        let nodes = self.checked.plan.rank(rank).iter().filter(|node| node.op == Op::Recompute);
        let again = nodes.map(|node| (node.stage, node.microbatch));
        Ledger::new(rank, &contracts, self.facts.microbatches, slots).recomputing(again)
    }

    /// Binds a forward-only schedule to the same run: it must find every stage where training put it.
    ///
    /// # Errors
    ///
    /// QE0903 if ranks, stages or placement differ, or if the schedule trains.
    pub fn evaluation(&self, checked: Checked) -> Result<Bound, Report> {
        let (training, evaluation) = (&self.checked.schedule, &checked.schedule);
        if !evaluation.eval {
            let message = format!("`{}` trains, and is used for evaluation", evaluation.name);
            return Err(one(fault(evaluation, Code::StageMismatch, message).help("add `eval` to its header")));
        }
        if training.ranks != evaluation.ranks || training.placement != evaluation.placement {
            let message = format!("`{}` places stages otherwise than `{}`", evaluation.name, training.name);
            let note = |s: &Schedule| {
                let ranks: Vec<String> = s.placement.iter().map(Rank::to_string).collect();
                format!("`{}`: stages on ranks {} of {}", s.name, ranks.join(", "), s.ranks)
            };
            let fault = fault(evaluation, Code::StageMismatch, message).note(note(training)).note(note(evaluation));
            return Err(one(fault.help("evaluation uses the weights where training keeps them")));
        }
        let facts = RunFacts { microbatches: evaluation.microbatches, ..self.facts };
        Ok(Bound { checked, facts, stages: self.stages.clone() })
    }
}

/// Compares a training schedule with the run's facts, and with what the model's stages declare to do to their state.
///
/// # Errors
///
/// Every fact that does not fit, as QE09xx.
pub fn bind(checked: Checked, facts: RunFacts, stages: Vec<StageEffects>) -> Result<Bound, Report> {
    let schedule = &checked.schedule;
    let mut faults = Vec::new();
    if schedule.eval {
        let message = format!("`{}` is forward-only, and is used for training", schedule.name);
        return Err(one(fault(schedule, Code::StageMismatch, message)));
    }
    if schedule.stages as usize != stages.len() {
        let message = format!("`{}` runs {} stages, the model has {}", schedule.name, schedule.stages, stages.len());
        let help = format!("cut the model into {} stages", schedule.stages);
        faults.push(fault(schedule, Code::StageMismatch, message).help(help));
    }
    if schedule.microbatches != facts.microbatches {
        let message = format!(
            "`{}` runs {} microbatches, a batch has {}",
            schedule.name, schedule.microbatches, facts.microbatches
        );
        faults.push(fault(schedule, Code::BatchMismatch, message));
    }
    let update = stages.iter().map(|stage| stage.update(facts.update)).max().unwrap_or(Update::None);
    if update > schedule.update {
        let (needed, declared) = (name(update), name(schedule.update));
        let message =
            format!("the recipe moves its state per {needed}, `{}` only declares `update: {declared}`", schedule.name);
        let help = format!("declare `update: {needed}`, or choose a recipe with `update={declared}`");
        faults.push(fault(schedule, Code::RecipeTooStrict, message).help(help));
    }
    faults.extend(declared::check(schedule, &facts, &stages));
    if let Some((stage, cell)) =
        declared::disordered(schedule, &facts, &stages).filter(|_| !facts.allow_order_dependent)
    {
        let message =
            format!("`{}` runs microbatches out of order, and the recipe rolls its state with each", schedule.name);
        let action = if cell == Cell::Forward { "F" } else { "I" };
        let note =
            format!("{} of stage {stage} is rolled by its {action}'s in the order in which they run", cell.name());
        let help = "use `update=step`, or allow this schedule by name";
        faults.push(fault(schedule, Code::OrderDependent, message).note(note).help(help));
    }
    if let Some(reason) = unfit(schedule, facts.gradients) {
        let message =
            format!("gradient placement `{}` does not fit `{}`: {reason}", facts.gradients.name(), schedule.name);
        faults.push(fault(schedule, Code::GradientsUnsupported, message));
    }
    if faults.is_empty() {
        Ok(Bound { checked, facts, stages })
    } else {
        Err(Report { diagnostics: faults, omitted: 0 })
    }
}

/// Why a gradient placement does not fit.
fn unfit(schedule: &Schedule, gradients: Gradients) -> Option<String> {
    match gradients {
        Gradients::Copied | Gradients::Direct if schedule.coalesce > 1 => {
            Some(format!("it coalesces {} microbatches per weight gradient", schedule.coalesce))
        }
        Gradients::Copied => None,
        Gradients::Direct => {
            let mut next = vec![0u32; schedule.stages as usize];
            schedule.items.iter().find_map(|item| {
                let adds = matches!(item.kind, Kind::WeightGrad | Kind::WeightGradJoin | Kind::FullBackward);
                let next = next.get_mut(item.stage.index()).filter(|_| adds)?;
                let descends = item.microbatch.0 < *next;
                *next = item.microbatch.0 + 1;
                descends.then(|| format!("{item} does not stand in ascending order"))
            })
        }
        Gradients::Coalesced if schedule.coalesce > 1 => {
            let group = |item: &&Item| item.microbatch.0 / schedule.coalesce;
            let mut next = vec![0u32; schedule.stages as usize];
            let mut heads = schedule.items.iter().filter(|item| item.kind == Kind::WeightGrad);
            heads.find_map(|head| {
                let next = next.get_mut(head.stage.index())?;
                let descends = group(&head) < *next;
                *next = group(&head) + 1;
                descends.then(|| format!("the group of {head} does not stand in ascending order"))
            })
        }
        Gradients::Coalesced => Some("it coalesces nothing".into()),
    }
}

const fn name(update: Update) -> &'static str {
    match update {
        Update::None => "none",
        Update::Step => "step",
        Update::Microbatch => "microbatch",
    }
}

fn fault(schedule: &Schedule, code: Code, message: String) -> Diagnostic {
    Diagnostic::new(code, schedule.origins.name, message)
}

fn one(fault: Diagnostic) -> Report {
    Report::from_faults(vec![fault])
}

#[cfg(test)]
mod tests;
