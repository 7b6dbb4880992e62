//! The checks that every transition shares, and what a refusal says.

use super::stage::{Rolls, StageState, did};
use super::{Action, Ledger, LedgerError, Pending, Phase, Site};
use crate::code::Code;
use crate::ids::{Microbatch, Stage};
use crate::plan::Peaks;
use crate::slots::SlotError;
use crate::tape::{TapeKey, TapeRef, WorkRef};
use crate::token::{Bwd, Token};
use crate::version::Stale;

impl Ledger {
    pub(super) fn find(&self, stage: Stage) -> Option<&StageState> {
        self.stages.iter().find(|s| s.stage() == stage)
    }

    pub(super) fn locate(&self, action: Action, stage: Stage) -> Result<usize, LedgerError> {
        self.stages.iter().position(|s| s.stage() == stage).ok_or_else(|| self.wrong_rank(action))
    }

    pub(super) fn locate_microbatch(
        &self,
        action: Action,
        stage: Stage,
        microbatch: Microbatch,
    ) -> Result<usize, LedgerError> {
        let at = self.locate(action, stage)?;
        let count = self.stages[at].microbatches();
        if microbatch.0 < count {
            return Ok(at);
        }
        let fault = "names a microbatch that does not exist";
        Err(self.refuse(Code::OutOfRange, action, fault, format!("below {count}"), microbatch.to_string()))
    }

    /// Nothing begun is unfinished.
    pub(super) fn settled(&self, action: Action) -> Result<(), LedgerError> {
        match self.pending {
            None => Ok(()),
            Some(pending) => {
                let found = format!("{pending} begun and not finished; abort the step");
                Err(self.refuse(Code::NotQuiescent, action, "begins too early", "nothing pending", found))
            }
        }
    }

    /// No step is provisional: what it decides may be read.
    pub(super) fn known(&self) -> Result<(), LedgerError> {
        match self.phase {
            Phase::Provisional => {
                let fault = "is read too early";
                Err(self.refuse(Code::NotQuiescent, Action::Epoch, fault, "a settled step", self.provisional()))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn provisional(&self) -> String {
        format!("step {} waiting for its verdict", self.step())
    }

    /// A training step runs, and its numbers are still open.
    pub(super) fn training(&self, action: Action) -> Result<(), LedgerError> {
        match self.phase {
            Phase::Training { agreed: false } => Ok(()),
            Phase::Training { .. } => {
                let fault = "runs between agree and commit";
                Err(self.refuse(Code::CommitWithWork, action, fault, "commit", "more work"))
            }
            _ => Err(self.refuse(Code::NotQuiescent, action, "runs outside a step", "a training step", "none")),
        }
    }

    pub(super) fn enter_compute(
        &self,
        action: Action,
        stage: Stage,
        microbatch: Microbatch,
    ) -> Result<usize, LedgerError> {
        self.settled(action)?;
        let at = self.locate_microbatch(action, stage, microbatch)?;
        self.stages[at].version.require_current().map_err(|e| self.stale(action, e))?;
        self.training(action)?;
        Ok(at)
    }

    pub(super) fn enter_backward(
        &mut self,
        action: Action,
        stage: Stage,
        microbatch: Microbatch,
        tape: &TapeRef,
    ) -> Result<(usize, Site, Token<Bwd>, u64), LedgerError> {
        let at = self.enter_compute(action, stage, microbatch)?;
        let site = self.site(stage, microbatch, tape.slot());
        self.pool.check_tape(tape, &site.key).map_err(|e| self.slot(action, e))?;
        let token = self.stages[at].backward.take().ok_or_else(|| self.tokenless(action))?;
        let peaks = Peaks { slots: self.pool.live(), tapes: self.tapes(), works: self.pool.works() + 1 };
        self.raise(peaks);
        let rolls = token.rolls() + u64::from(self.stages[at].contract.backward_rolls);
        Ok((at, site, token, rolls))
    }

    pub(super) fn enter_weight_grad(
        &self,
        action: Action,
        stage: Stage,
        microbatch: Microbatch,
        work: &WorkRef,
    ) -> Result<(usize, Site), LedgerError> {
        self.settled(action)?;
        let at = self.locate_microbatch(action, stage, microbatch)?;
        self.training(action)?;
        let site = self.site(stage, microbatch, work.slot());
        self.pool.check_work(work, &site.key).map_err(|e| self.slot(action, e))?;
        Ok((at, site))
    }

    pub(super) fn enter_message(
        &self,
        action: Action,
        stage: Stage,
        microbatch: Microbatch,
    ) -> Result<usize, LedgerError> {
        self.settled(action)?;
        let at = self.locate_microbatch(action, stage, microbatch)?;
        if self.phase != Phase::Evaluating {
            self.training(action)?;
        }
        Ok(at)
    }

    /// No live record, every contribution made, every reduction finished.
    pub(super) fn complete(&self, action: Action) -> Result<(), LedgerError> {
        if self.pool.live() > 0 {
            let fault = "runs while work is in flight";
            return Err(self.refuse(Code::CommitWithWork, action, fault, "no live record", self.live_keys()));
        }
        if !matches!(self.phase, Phase::Training { .. }) {
            return Ok(()); // refused by the caller
        }
        for state in &self.stages {
            if let Some(m) = state.first_without(did::ALL) {
                let fault = format!("runs before stage {} has the gradient of microbatch {m}", state.stage());
                let expected = format!("{} contributions", state.microbatches());
                return Err(self.refuse(
                    Code::ArenaMissing,
                    action,
                    fault,
                    expected,
                    state.count(did::ALL).to_string(),
                ));
            }
        }
        for state in &self.stages {
            if !state.reduced {
                let fault = format!("runs before reduce({})", state.stage());
                return Err(self.refuse(Code::CommitWithWork, action, fault, "final gradients", "open ones"));
            }
        }
        Ok(())
    }

    /// The state of a stage counted as many rolls as its tokens.
    pub(super) fn same_rolls(&self, action: Action, state: &StageState, counted: Rolls) -> Result<(), LedgerError> {
        let tokens = state.rolls();
        if tokens == counted {
            return Ok(());
        }
        let fault = format!("finds the state of stage {} moved otherwise than its tokens", state.stage());
        let expected = format!("{} forward and {} backward rolls", tokens.forward, tokens.backward);
        let found = format!("{} and {}", counted.forward, counted.backward);
        Err(self.refuse(Code::TokenOutOfOrder, action, fault, expected, found))
    }

    pub(super) fn site(&self, stage: Stage, microbatch: Microbatch, slot: u32) -> Site {
        Site { key: TapeKey::stage(self.step(), stage, microbatch), slot }
    }

    pub(super) fn pend<T>(&mut self, action: Action, transition: T) -> Pending<'_, T> {
        self.pending = Some(action);
        Pending::new(self, transition)
    }

    /// Live tapes: what waits for R is none yet.
    pub(super) const fn tapes(&self) -> u32 {
        self.pool.tapes().saturating_sub(self.seeds.live())
    }

    pub(super) fn raise(&mut self, now: Peaks) {
        let peaks = &mut self.peaks;
        peaks.slots = peaks.slots.max(now.slots);
        peaks.tapes = peaks.tapes.max(now.tapes);
        peaks.works = peaks.works.max(now.works);
    }

    pub(super) fn refuse(
        &self,
        code: Code,
        action: Action,
        fault: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> LedgerError {
        LedgerError {
            code,
            rank: self.rank,
            step: self.step(),
            action,
            fault: fault.into(),
            expected: expected.into(),
            found: found.into(),
        }
    }

    pub(super) fn slot(&self, action: Action, error: SlotError) -> LedgerError {
        self.refuse(error.code(), action, error.to_string(), "", "")
    }

    pub(super) fn stale(&self, action: Action, stale: Stale) -> LedgerError {
        self.refuse(Code::StaleCache, action, "reads a stale weight cache", "e_C = e_W", stale.to_string())
    }

    pub(super) fn tokenless(&self, action: Action) -> LedgerError {
        let fault = "moves state whose token is lost";
        self.refuse(Code::TokenOutOfOrder, action, fault, "the token of the stage", "none")
    }

    pub(super) fn wrong_rank(&self, action: Action) -> LedgerError {
        let held: Vec<String> = self.stages.iter().map(|s| s.stage().to_string()).collect();
        let found = format!("stages {}", held.join(", "));
        self.refuse(
            Code::WrongRank,
            action,
            "runs on a rank that does not hold its stage",
            "a stage of this rank",
            found,
        )
    }

    pub(super) fn live_keys(&self) -> String {
        let mut keys: Vec<String> = self.pool.keys().take(4).map(|(slot, key)| format!("slot {slot}: {key}")).collect();
        let more = self.pool.live() as usize - keys.len();
        if more > 0 {
            keys.push(format!("and {more} more"));
        }
        keys.join("; ")
    }
}
