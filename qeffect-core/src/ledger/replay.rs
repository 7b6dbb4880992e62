//! A step that is replayed as a whole: one transaction with the effects that its rehearsal had.

use super::stage::{Rolls, StageState, did};
use super::{Action, Ledger, LedgerError, Phase};
use crate::code::Code;
use crate::ids::Stage;
use crate::plan::Peaks;

/// What one good step does to the ledger of a rank, summed over its actions.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StepEffects {
    /// Rolls per stage.
    rolls: Vec<(Stage, Rolls)>,
    microbatches: u32,
    /// New generations per slot.
    leases: Vec<u64>,
    peaks: Peaks,
}

impl StepEffects {
    /// Rolls of a stage by one step.
    pub fn rolls(&self, stage: Stage) -> Option<Rolls> {
        self.rolls.iter().find(|(id, _)| *id == stage).map(|(_, rolls)| *rolls)
    }
}

impl Ledger {
    /// A ledger in the same state, to run a step on that does not count.
    ///
    /// # Errors
    ///
    /// QE0306 unless nothing is in flight.
    pub fn rehearsal(&self) -> Result<Ledger, LedgerError> {
        self.quiescent(Action::Step)?;
        Ok(Ledger {
            rank: self.rank,
            microbatches: self.microbatches,
            stages: self.stages.iter().map(StageState::at_rest).collect(),
            pool: self.pool.at_rest(),
            attempts: self.attempts,
            commits: self.commits,
            phase: Phase::Quiescent,
            pending: None,
            group: Vec::new(),
            seeds: self.seeds.at_rest(),
            peaks: Peaks::default(),
        })
    }

    /// The effects of the one good step that `rehearsed`, a [`rehearsal`](Ledger::rehearsal) of this ledger, has run.
    ///
    /// # Errors
    ///
    /// QE0306 if something is in flight on either; QE0305 if it was not exactly one good step.
    pub fn effects_of(&self, rehearsed: &Ledger) -> Result<StepEffects, LedgerError> {
        self.quiescent(Action::Step)?;
        rehearsed.quiescent(Action::Step)?;
        let steps = [rehearsed.attempts.checked_sub(self.attempts), rehearsed.commits.checked_sub(self.commits)];
        if steps != [Some(1), Some(1)] {
            let fault = "is to be replayed from a rehearsal that is not one good step";
            let found = format!("{steps:?} steps and commits");
            return Err(self.refuse(Code::CommitMissing, Action::Step, fault, "one of each", found));
        }
        let difference = |(before, after): (&StageState, &StageState)| {
            let (start, end) = (before.rolls(), after.rolls());
            let rolls = Rolls { forward: end.forward - start.forward, backward: end.backward - start.backward };
            (before.stage(), rolls)
        };
        let generation = |slot| rehearsed.pool.generation(slot).unwrap_or(0) - self.pool.generation(slot).unwrap_or(0);
        Ok(StepEffects {
            rolls: self.stages.iter().zip(&rehearsed.stages).map(difference).collect(),
            microbatches: self.microbatches,
            leases: (0..self.pool.len()).map(generation).collect(),
            peaks: rehearsed.peaks,
        })
    }

    /// Starts a replayed step: everything that its actions would check is checked now, and all their effects are
    /// entered. The step is provisional until [`settle`](Ledger::settle). `counted`: rolls of each stage so far, by the
    /// state itself. Returns the step's number.
    ///
    /// # Errors
    ///
    /// QE0306 if anything is in flight or provisional; QE0301 if a cache does not hold the current weights; QE0203 if
    /// a stage's state has moved otherwise than its tokens; QE0903 if the effects are those of other stages.
    pub fn begin_replay(
        &mut self,
        effects: &StepEffects,
        mut counted: impl FnMut(Stage) -> Rolls,
    ) -> Result<u64, LedgerError> {
        self.quiescent(Action::Step)?;
        let stages = || self.stages.iter().map(StageState::stage);
        let same = effects.rolls.iter().map(|(stage, _)| *stage).eq(stages())
            && effects.microbatches == self.microbatches
            && effects.leases.len() == self.pool.len() as usize;
        if !same {
            let fault = "replays the effects of another program";
            let found = format!("{} stages, {} microbatches", effects.rolls.len(), effects.microbatches);
            let expected = format!("{} stages, {} microbatches", self.stages.len(), self.microbatches);
            return Err(self.refuse(Code::StageMismatch, Action::Step, fault, expected, found));
        }
        for state in &self.stages {
            if state.forward.is_none() || state.backward.is_none() {
                return Err(self.tokenless(Action::Step));
            }
            state.version.require_filled().map_err(|stale| self.stale(Action::Step, stale))?;
            self.same_rolls(Action::Step, state, counted(state.stage()))?;
        }
        for (state, (_, rolls)) in self.stages.iter_mut().zip(&effects.rolls) {
            state.begin(effects.microbatches);
            state.replay(*rolls, did::ALL);
        }
        self.pool.advance(&effects.leases);
        self.peaks = effects.peaks;
        self.attempts += 1;
        self.phase = Phase::Provisional;
        Ok(self.step())
    }
}

#[cfg(test)]
mod tests;
