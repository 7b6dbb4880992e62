//! The ledger: the contract of one rank, checked on the host, action by action.
//!
//! It keeps two tokens per stage, the slot pool, the weight versions and what every microbatch has
//! contributed. Each action is two calls: `begin_*` checks and hands out the tokens, and returns a
//! [`Pending`]; [`Pending::finish`] commits the transition once the action has succeeded. A pending
//! transition that is dropped instead has changed nothing, but its references are gone and the rank
//! accepts nothing more until [`abort_step`](Ledger::abort_step) puts back the step's start.
//!
//! A step is `begin_step`, its actions, `agree`, `commit`, and then [`settle`](Ledger::settle): commit is gated on the
//! device, so until the verdict is known the step is *provisional*, and nothing may read what it has decided. A step
//! that is replayed as a whole is one transaction instead, [`begin_replay`](Ledger::begin_replay), settled alike. The
//! step counter counts attempts; the weights' epoch counts good commits.

mod checks;
mod error;
mod pending;
mod replay;
mod seeds;
mod stage;
#[cfg(test)]
mod tests;

pub use error::{Action, LedgerError};
pub use pending::{
    Agree, Commit, Evaluate, Forward, FullBackward, InputGrad, Message, Pending, Recompute, Reduce, Refresh, Site,
    WeightGrad,
};
pub use replay::StepEffects;
pub use stage::{Rolls, StageContract};

use crate::code::Code;
use crate::ids::{Microbatch, Rank, Stage};
use crate::plan::{Direction, Op, Peaks};
use crate::slots::SlotPool;
use crate::tape::{TapeRef, WorkRef};
use crate::token::{Bwd, Fwd, Token};
use crate::version::WeightVersion;
use seeds::Seeds;
use stage::{StageState, did};

/// What all ranks agree on before commit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Verdict {
    /// Every value was finite: commit.
    Good,
    /// Some rank saw a value that is not finite: the step changes nothing.
    Skip,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Quiescent,
    Training {
        agreed: bool,
    },
    /// Committed as far as the verdict allows, which is not known yet.
    Provisional,
    Evaluating,
}

/// The contract state of one rank.
#[derive(Debug)]
pub struct Ledger {
    rank: Rank,
    microbatches: u32,
    stages: Vec<StageState>,
    pool: SlotPool,
    /// Attempts begun.
    attempts: u64,
    /// Good commits (e_W).
    commits: u64,
    phase: Phase,
    /// Begun and neither finished nor aborted.
    pending: Option<Action>,
    group: Vec<(Microbatch, WorkRef)>,
    seeds: Seeds,
    peaks: Peaks,
}

type Begun<'l, T> = Result<Pending<'l, T>, LedgerError>;

impl Ledger {
    /// A ledger at start: `stages` are those of the rank, `slots` its slots by the plan.
    pub fn new(rank: Rank, stages: &[StageContract], microbatches: u32, slots: u32) -> Ledger {
        Ledger::resumed(rank, stages, microbatches, slots, 0, 0)
    }

    /// A ledger after `attempts` steps of which `commits` were good. Ephemeral state starts anew.
    pub fn resumed(
        rank: Rank,
        stages: &[StageContract],
        microbatches: u32,
        slots: u32,
        attempts: u64,
        commits: u64,
    ) -> Ledger {
        Ledger {
            rank,
            microbatches,
            stages: stages.iter().map(|c| StageState::new(*c, microbatches, commits)).collect(),
            pool: SlotPool::new(slots),
            attempts,
            commits,
            phase: Phase::Quiescent,
            pending: None,
            group: Vec::new(),
            seeds: Seeds::default(),
            peaks: Peaks::default(),
        }
    }

    /// The same, told which forwards the plan recomputes: they leave no tape before R.
    pub fn recomputing(self, again: impl IntoIterator<Item = (Stage, Microbatch)>) -> Ledger {
        Ledger { seeds: Seeds::new(again), ..self }
    }

    /// The rank.
    pub const fn rank(&self) -> Rank {
        self.rank
    }

    /// Attempt number of the step that runs, or of the next one.
    pub const fn step(&self) -> u64 {
        match self.phase {
            Phase::Training { .. } | Phase::Provisional => self.attempts - 1,
            _ => self.attempts,
        }
    }

    /// Good commits (e_W). Refused while a step is provisional.
    pub fn epoch(&self) -> Result<u64, LedgerError> {
        self.known()?;
        Ok(self.commits)
    }

    /// The slots.
    pub const fn pool(&self) -> &SlotPool {
        &self.pool
    }

    /// Most of everything that was live at once in the last or current step.
    pub const fn peaks(&self) -> Peaks {
        self.peaks
    }

    /// The version of a stage's weights, if the rank holds it. Refused while a step is provisional.
    pub fn version(&self, stage: Stage) -> Result<Option<WeightVersion>, LedgerError> {
        self.known()?;
        Ok(self.find(stage).map(|s| s.version))
    }

    /// Rolls of a stage by its tokens.
    pub fn rolls(&self, stage: Stage) -> Option<Rolls> {
        self.find(stage).map(StageState::rolls)
    }

    /// Gradient contributions of a stage in this step: by I (vectors), by W (matrices).
    pub fn contributions(&self, stage: Stage) -> Option<(u32, u32)> {
        self.find(stage).map(|s| (s.count(did::INPUT_GRAD), s.count(did::WEIGHT_GRAD)))
    }

    /// Refuses unless nothing is in flight: what checkpoints and reads of the whole state ask first.
    pub fn quiescent(&self, action: Action) -> Result<(), LedgerError> {
        self.settled(action)?;
        if self.phase == Phase::Quiescent && self.pool.live() == 0 {
            return Ok(());
        }
        let found = match self.phase {
            Phase::Quiescent => self.live_keys(),
            Phase::Training { .. } => format!("step {} running", self.step()),
            Phase::Provisional => self.provisional(),
            Phase::Evaluating => "an evaluation running".into(),
        };
        Err(self.refuse(Code::NotQuiescent, action, "finds the rank at work", "a quiescent rank", found))
    }

    /// Starts a training step. The step counter advances whatever becomes of the step.
    pub fn begin_step(&mut self) -> Result<u64, LedgerError> {
        self.quiescent(Action::Step)?;
        for stage in &mut self.stages {
            stage.begin(self.microbatches);
        }
        self.peaks = Peaks::default();
        self.seeds.clear();
        self.phase = Phase::Training { agreed: false };
        self.attempts += 1;
        Ok(self.step())
    }

    /// A step that this rank refused to start, and others may have started: an attempt like any other.
    pub fn miss_step(&mut self) {
        self.attempts += u64::from(self.phase == Phase::Quiescent);
    }

    /// Puts everything back as `begin_step` (or `begin_evaluation`) found it, except the step counter and
    /// generations: every record of the step is purged, and all references to them are stale. Returns how many.
    ///
    /// The caller puts its own state (scales, histories) back too.
    pub fn abort_step(&mut self) -> u32 {
        self.group.clear();
        self.seeds.clear();
        self.pending = None;
        let step = self.step();
        if self.phase != Phase::Quiescent {
            self.stages.iter_mut().for_each(StageState::restore);
        }
        self.phase = Phase::Quiescent;
        self.pool.purge(step)
    }

    /// Starts a forward-only pass over `microbatches` microbatches.
    pub fn begin_evaluation(&mut self, microbatches: u32) -> Result<(), LedgerError> {
        self.quiescent(Action::Evaluation)?;
        for stage in &mut self.stages {
            stage.begin(microbatches);
        }
        self.phase = Phase::Evaluating;
        Ok(())
    }

    /// Ends a forward-only pass: every stage ran every microbatch.
    pub fn end_evaluation(&mut self) -> Result<(), LedgerError> {
        self.settled(Action::Evaluation)?;
        if self.phase != Phase::Evaluating {
            let fault = "ends outside an evaluation";
            return Err(self.refuse(Code::NotQuiescent, Action::Evaluation, fault, "an evaluation", "none"));
        }
        if let Some((stage, m)) = self.stages.iter().find_map(|s| Some((s.stage(), s.first_without(did::FORWARD)?))) {
            let fault = format!("ends without F({stage}, {m})");
            return Err(self.refuse(Code::ForwardMissing, Action::Evaluation, fault, "every forward", "none"));
        }
        self.phase = Phase::Quiescent;
        Ok(())
    }

    /// The weights of a stage are about to be replaced: nothing reads its cache before it is [filled](Ledger::fill) anew.
    ///
    /// # Errors
    ///
    /// QE0306 if anything is in flight.
    pub fn forget_cache(&mut self, stage: Stage) -> Result<(), LedgerError> {
        let action = Action::of(Op::Refresh, stage, Microbatch(0));
        let at = self.locate(action, stage)?;
        self.quiescent(action)?;
        self.stages[at].version.forget();
        Ok(())
    }

    /// The bytes of a stage's weight cache were made from its weights (prologue): rolls nothing.
    pub fn fill(&mut self, stage: Stage) -> Result<(), LedgerError> {
        let action = Action::of(Op::Refresh, stage, Microbatch(0));
        let at = self.locate(action, stage)?;
        self.quiescent(action)?;
        self.stages[at].version.fill();
        Ok(())
    }

    /// F of a training step, in `slot`.
    pub fn begin_forward(
        &mut self,
        stage: Stage,
        microbatch: Microbatch,
        slot: u32,
    ) -> Result<(Pending<'_, Forward>, Token<Fwd>), LedgerError> {
        let action = Action::of(Op::Forward, stage, microbatch);
        let at = self.enter_compute(action, stage, microbatch)?;
        if self.stages[at].did(microbatch, did::FORWARD) {
            return Err(self.refuse(Code::ForwardRepeated, action, "runs twice", "one forward", "a second"));
        }
        let site = self.site(stage, microbatch, slot);
        self.pool.check_lease(&site.key, slot).map_err(|e| self.slot(action, e))?;
        let token = self.stages[at].forward.take().ok_or_else(|| self.tokenless(action))?;
        let tapes = self.tapes() + u32::from(!self.seeds.planned(stage, microbatch));
        let peaks = Peaks { slots: self.pool.live() + 1, tapes, works: self.pool.works() };
        self.raise(peaks);
        let rolls = token.rolls() + u64::from(self.stages[at].contract.forward_rolls);
        Ok((self.pend(action, Forward { at, site, rolls }), token))
    }

    /// F of an evaluation pass: leases, retains and rolls nothing.
    pub fn begin_evaluate(&mut self, stage: Stage, microbatch: Microbatch) -> Begun<'_, Evaluate> {
        let action = Action::of(Op::Forward, stage, microbatch);
        self.settled(action)?;
        let at = self.locate_microbatch(action, stage, microbatch)?;
        self.stages[at].version.require_filled().map_err(|e| self.stale(action, e))?;
        if self.phase != Phase::Evaluating {
            return Err(self.refuse(Code::NotQuiescent, action, "runs outside an evaluation", "an evaluation", "none"));
        }
        if self.stages[at].did(microbatch, did::FORWARD) {
            return Err(self.refuse(Code::ForwardRepeated, action, "runs twice", "one forward", "a second"));
        }
        let site = self.site(stage, microbatch, crate::plan::NONE);
        Ok(self.pend(action, Evaluate { at, site }))
    }

    /// R: recomputes what I will need, once. Rolls nothing.
    pub fn begin_recompute(&mut self, stage: Stage, microbatch: Microbatch, tape: &TapeRef) -> Begun<'_, Recompute> {
        let action = Action::of(Op::Recompute, stage, microbatch);
        let at = self.enter_compute(action, stage, microbatch)?;
        let site = self.site(stage, microbatch, tape.slot());
        self.pool.check_tape(tape, &site.key).map_err(|e| self.slot(action, e))?;
        if self.stages[at].did(microbatch, did::RECOMPUTED) {
            let fault = "recomputes a second time";
            return Err(self.refuse(Code::RecomputeMisplaced, action, fault, "one recomputation", "two"));
        }
        let tapes = self.tapes() + u32::from(self.seeds.planned(stage, microbatch));
        self.raise(Peaks { slots: self.pool.live(), tapes, works: self.pool.works() });
        Ok(self.pend(action, Recompute { at, site }))
    }

    /// I, which consumes the tape.
    pub fn begin_input_grad(
        &mut self,
        stage: Stage,
        microbatch: Microbatch,
        tape: TapeRef,
    ) -> Result<(Pending<'_, InputGrad>, Token<Bwd>), LedgerError> {
        let action = Action::of(Op::InputGrad, stage, microbatch);
        let (at, site, token, rolls) = self.enter_backward(action, stage, microbatch, &tape)?;
        Ok((self.pend(action, InputGrad { at, site, tape, rolls }), token))
    }

    /// B: I and W as one action, which consumes the tape and the work that it becomes.
    pub fn begin_full_backward(
        &mut self,
        stage: Stage,
        microbatch: Microbatch,
        tape: TapeRef,
    ) -> Result<(Pending<'_, FullBackward>, Token<Bwd>), LedgerError> {
        let action = Action::of(Op::FullBackward, stage, microbatch);
        let (at, site, token, rolls) = self.enter_backward(action, stage, microbatch, &tape)?;
        Ok((self.pend(action, FullBackward { at, site, tape, rolls }), token))
    }

    /// W, which consumes the work. It is given no token: it cannot move scaling state.
    pub fn begin_weight_grad(&mut self, stage: Stage, microbatch: Microbatch, work: WorkRef) -> Begun<'_, WeightGrad> {
        let action = Action::of(Op::WeightGrad, stage, microbatch);
        let (at, site) = self.enter_weight_grad(action, stage, microbatch, &work)?;
        self.group.clear();
        self.group.push((microbatch, work));
        Ok(self.pend(action, WeightGrad { at, site }))
    }

    /// The refusal of I or R (or of W) for which no tape (or work) is held.
    pub fn nothing_held(&self, op: Op, stage: Stage, microbatch: Microbatch) -> LedgerError {
        let action = Action::of(op, stage, microbatch);
        let Some(state) = self.find(stage) else { return self.wrong_rank(action) };
        if op == Op::Recompute {
            let fault = "finds nothing to recompute";
            return self.refuse(
                Code::RecomputeMisplaced,
                action,
                fault,
                "a forward before and no input gradient",
                "none",
            );
        }
        let weight_grad = matches!(op, Op::WeightGrad | Op::WeightGradJoin);
        let (code, fault) = stage::missing(state, microbatch, weight_grad);
        self.refuse(code, action, fault, if weight_grad { "retained work" } else { "a live tape" }, "none")
    }

    /// The send of what F (forward) or I (backward) of `stage` made.
    pub fn begin_send(&mut self, direction: Direction, stage: Stage, m: Microbatch) -> Begun<'_, Message> {
        let (op, made, sent) = match direction {
            Direction::Forward => (Op::SendForward, did::FORWARD, did::SENT_FORWARD),
            Direction::Backward => (Op::SendBackward, did::INPUT_GRAD, did::SENT_BACKWARD),
        };
        let action = Action::of(op, stage, m);
        let at = self.enter_message(action, stage, m)?;
        if self.stages[at].did(m, sent) {
            return Err(self.refuse(Code::MessageDoubled, action, "sends a second time", "one send", "two"));
        }
        if !self.stages[at].did(m, made) {
            return Err(self.refuse(
                Code::MessageEarly,
                action,
                "sends what does not exist yet",
                "its producer",
                "none",
            ));
        }
        Ok(self.pend(action, Message { at, microbatch: m, bit: sent }))
    }

    /// The wait for what F (forward) or I (backward) of `stage` will use.
    pub fn begin_wait(&mut self, direction: Direction, stage: Stage, m: Microbatch) -> Begun<'_, Message> {
        let (op, used, waited) = match direction {
            Direction::Forward => (Op::WaitForward, did::FORWARD, did::WAITED_FORWARD),
            Direction::Backward => (Op::WaitBackward, did::INPUT_GRAD, did::WAITED_BACKWARD),
        };
        let action = Action::of(op, stage, m);
        let at = self.enter_message(action, stage, m)?;
        if self.stages[at].did(m, waited) {
            return Err(self.refuse(Code::MessageDoubled, action, "takes a message again", "one wait", "two"));
        }
        if self.stages[at].did(m, used) {
            return Err(self.refuse(
                Code::MessageEarly,
                action,
                "comes after its use",
                "a wait before the use",
                "the use",
            ));
        }
        Ok(self.pend(action, Message { at, microbatch: m, bit: waited }))
    }

    /// `refresh(s)`: before the step's first F of the stage, once.
    pub fn begin_refresh(&mut self, stage: Stage) -> Begun<'_, Refresh> {
        let action = Action::of(Op::Refresh, stage, Microbatch(0));
        self.settled(action)?;
        let at = self.locate(action, stage)?;
        self.training(action)?;
        let state = &self.stages[at];
        if state.refreshed || state.began() {
            let found = if state.refreshed { "a second refresh" } else { "a forward before it" };
            let fault = "rolls the weight's state out of turn";
            let expected = "one refresh per step, before the first forward";
            return Err(self.refuse(Code::RefreshMisplaced, action, fault, expected, found));
        }
        state.version.require_not_replaced().map_err(|e| self.stale(action, e))?;
        Ok(self.pend(action, Refresh { at }))
    }

    /// `reduce(s)`: after the last gradient of the stage, whatever mix of B and I with W made them, once.
    pub fn begin_reduce(&mut self, stage: Stage) -> Begun<'_, Reduce> {
        let action = Action::of(Op::Reduce, stage, Microbatch(0));
        self.settled(action)?;
        let at = self.locate(action, stage)?;
        self.training(action)?;
        let state = &self.stages[at];
        if state.reduced {
            let fault = "finishes gradients that are final";
            return Err(self.refuse(Code::ReduceMisplaced, action, fault, "one reduce per step", "a second"));
        }
        if let Some(m) = state.first_without(did::ALL) {
            let expected = format!("{} contributions", state.microbatches());
            let found = format!("{}; microbatch {m} is missing", state.count(did::ALL));
            return Err(self.refuse(Code::ReduceMisplaced, action, "runs before the last gradient", expected, found));
        }
        Ok(self.pend(action, Reduce { at }))
    }

    /// `agree`: everything of the step is done, and the state counted as many rolls as its tokens.
    pub fn begin_agree(&mut self, mut counted: impl FnMut(Stage) -> Rolls) -> Begun<'_, Agree> {
        let action = Action::of(Op::Agree, Stage(0), Microbatch(0));
        self.settled(action)?;
        self.training(action)?;
        self.complete(action)?;
        for state in &self.stages {
            self.same_rolls(action, state, counted(state.stage()))?;
        }
        Ok(self.pend(action, Agree))
    }

    /// `commit`: the optimizer step of the rank, gated by what all ranks agreed on.
    pub fn begin_commit(&mut self) -> Begun<'_, Commit> {
        let action = Action::of(Op::Commit, Stage(0), Microbatch(0));
        self.settled(action)?;
        self.complete(action)?;
        match self.phase {
            Phase::Training { agreed: true } => Ok(self.pend(action, Commit)),
            phase => {
                let found = match phase {
                    Phase::Training { .. } => "no agree in this step".into(),
                    Phase::Provisional => self.provisional(),
                    _ => "no step running".into(),
                };
                let fault = "runs without the consent of all ranks";
                Err(self.refuse(Code::CommitWithWork, action, fault, "an agree", found))
            }
        }
    }

    /// The verdict of the provisional step: a good one makes it final, any other puts back its start. Returns e_W.
    pub fn settle(&mut self, verdict: Verdict) -> Result<u64, LedgerError> {
        self.settled(Action::Step)?;
        if self.phase != Phase::Provisional {
            let fault = "is settled before its commit";
            return Err(self.refuse(Code::CommitWithWork, Action::Step, fault, "a provisional step", "none"));
        }
        match verdict {
            Verdict::Good => self.commits += 1,
            Verdict::Skip => self.stages.iter_mut().for_each(StageState::restore),
        }
        self.phase = Phase::Quiescent;
        Ok(self.commits)
    }
}
