//! The ledger's contract as a model: what each call requires, by code, and what it does.

use std::collections::BTreeSet;

use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Stage};
use qeffect_core::ledger::Verdict;
use qeffect_core::tape::TapeKey;

use crate::calls::{Call, Finish};
use crate::slots::{SLOTS, Slots};

pub const STAGES: [Stage; 2] = [Stage(1), Stage(3)];
pub const ROLLS: [(u32, u32); 2] = [(3, 2), (1, 0)];
pub const MICROBATCHES: u32 = 2;
pub const FORWARD: u8 = 1;
pub const INPUT_GRAD: u8 = 2;
pub const WEIGHT_GRAD: u8 = 4;
pub const RECOMPUTED: u8 = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    Rest,
    /// Whether the ranks have agreed.
    Training(bool),
    /// Committed, without its verdict.
    Provisional,
    Evaluating,
}

/// What one stage has done, per microbatch, and its version and rolls.
#[derive(Clone, Debug)]
pub struct StageModel {
    pub did: Vec<u8>,
    pub messages: BTreeSet<(u8, u32)>,
    pub refreshed: bool,
    pub reduced: bool,
    pub cache: Option<u64>,
    pub filled: Option<u64>,
    pub rolls: [u64; 2],
}

#[derive(Clone, Debug)]
pub struct Model {
    pub stages: Vec<StageModel>,
    pub slots: Slots,
    pub attempts: u64,
    pub weights: u64,
    pub phase: Phase,
    pub pending: bool,
    /// Cache, filled and rolls of each stage as the pass found them.
    pub start: Vec<(Option<u64>, Option<u64>, [u64; 2])>,
    /// How often a W was joined and a step replayed.
    pub joined: u32,
    pub replayed: u32,
}

/// The slot in which the rehearsed step keeps a microbatch.
pub const fn rehearsed_slot(stage: u32, microbatch: u32) -> u32 {
    (stage + microbatch) % SLOTS
}

impl Model {
    pub fn new() -> Model {
        let stage = StageModel {
            did: vec![0; MICROBATCHES as usize],
            messages: BTreeSet::new(),
            refreshed: false,
            reduced: false,
            cache: None,
            filled: None,
            rolls: [0; 2],
        };
        let stages = vec![stage; STAGES.len()];
        let start = vec![(None, None, [0; 2]); STAGES.len()];
        let (slots, phase) = (Slots::new(SLOTS), Phase::Rest);
        Model { stages, slots, attempts: 0, weights: 0, phase, pending: false, start, joined: 0, replayed: 0 }
    }

    pub fn step(&self) -> u64 {
        if matches!(self.phase, Phase::Training(_) | Phase::Provisional) { self.attempts - 1 } else { self.attempts }
    }

    fn key(&self, stage: u32, microbatch: u32) -> TapeKey {
        TapeKey::stage(self.step(), Stage(stage), Microbatch(microbatch))
    }

    fn at(stage: u32) -> Option<usize> {
        STAGES.iter().position(|held| held.0 == stage)
    }

    fn all_did(&self, at: usize) -> bool {
        self.stages[at].did.iter().all(|did| did & !RECOMPUTED == FORWARD | INPUT_GRAD | WEIGHT_GRAD)
    }

    /// The rules that a call breaks, by code.
    pub fn breaks(&self, call: &Call) -> BTreeSet<Code> {
        let mut broken = BTreeSet::new();
        if self.pending && *call != Call::Abort {
            broken.insert(Code::NotQuiescent);
        }
        // Whether a training step runs in which nothing is agreed yet.
        let training = |broken: &mut BTreeSet<Code>| match self.phase {
            Phase::Training(false) => {}
            Phase::Training(true) => drop(broken.insert(Code::CommitWithWork)),
            _ => drop(broken.insert(Code::NotQuiescent)),
        };
        let stage = match *call {
            Call::Fill(stage) | Call::Refresh(stage) | Call::Reduce(stage) => Some((stage, 0)),
            Call::Forward { stage, microbatch, .. }
            | Call::Evaluate { stage, microbatch }
            | Call::Recompute { stage, microbatch, .. }
            | Call::InputGrad { stage, microbatch, .. }
            | Call::FullBackward { stage, microbatch, .. }
            | Call::WeightGrad { stage, microbatch, .. }
            | Call::Join { stage, microbatch, .. }
            | Call::Send { stage, microbatch, .. }
            | Call::Wait { stage, microbatch, .. } => Some((stage, microbatch)),
            _ => None,
        };
        let mut here = None;
        if let Some((stage, microbatch)) = stage {
            match Model::at(stage) {
                None => drop(broken.insert(Code::WrongRank)),
                Some(_) if microbatch >= MICROBATCHES => drop(broken.insert(Code::OutOfRange)),
                Some(at) => here = Some(at),
            }
            if here.is_none() {
                return broken;
            }
        }
        let state = here.map(|at| &self.stages[at]);
        let did = |microbatch: u32, bit: u8| state.is_some_and(|state| state.did[microbatch as usize] & bit != 0);
        let current = state.is_some_and(|s| s.cache == Some(self.weights) && s.filled == Some(self.weights));
        let at_rest = self.phase == Phase::Rest && self.slots.live() == 0;
        match *call {
            Call::Abort => {}
            Call::Step | Call::Evaluation | Call::Fill(_) => {
                if !at_rest {
                    broken.insert(Code::NotQuiescent);
                }
            }
            Call::EndEvaluation => {
                if self.phase != Phase::Evaluating {
                    broken.insert(Code::NotQuiescent);
                }
                if self.stages.iter().any(|stage| stage.did.iter().any(|did| did & FORWARD == 0)) {
                    broken.insert(Code::ForwardMissing);
                }
            }
            Call::Forward { stage, microbatch, slot, .. } => {
                training(&mut broken);
                if !current {
                    broken.insert(Code::StaleCache);
                }
                if did(microbatch, FORWARD) {
                    broken.insert(Code::ForwardRepeated);
                }
                broken.extend(self.slots.lease_breaks(self.key(stage, microbatch), slot));
            }
            Call::Evaluate { microbatch, .. } => {
                if self.phase != Phase::Evaluating {
                    broken.insert(Code::NotQuiescent);
                }
                if state.is_some_and(|state| state.filled != Some(self.weights)) {
                    broken.insert(Code::StaleCache);
                }
                if did(microbatch, FORWARD) {
                    broken.insert(Code::ForwardRepeated);
                }
            }
            Call::Recompute { stage, microbatch, slot, generation }
            | Call::InputGrad { stage, microbatch, slot, generation, .. }
            | Call::FullBackward { stage, microbatch, slot, generation, .. } => {
                training(&mut broken);
                if !current {
                    broken.insert(Code::StaleCache);
                }
                broken.extend(self.slots.reference_breaks(self.key(stage, microbatch), slot, generation, false));
                if matches!(call, Call::Recompute { .. }) && did(microbatch, RECOMPUTED) {
                    broken.insert(Code::RecomputeMisplaced);
                }
            }
            Call::WeightGrad { stage, microbatch, slot, generation, .. }
            | Call::Join { stage, microbatch, slot, generation, .. } => {
                training(&mut broken);
                broken.extend(self.slots.reference_breaks(self.key(stage, microbatch), slot, generation, true));
            }
            Call::Send { backward, microbatch, .. } => {
                if self.phase != Phase::Evaluating {
                    training(&mut broken);
                }
                if !did(microbatch, if backward { INPUT_GRAD } else { FORWARD }) {
                    broken.insert(Code::MessageEarly);
                }
                if state.is_some_and(|state| state.messages.contains(&(u8::from(backward), microbatch))) {
                    broken.insert(Code::MessageDoubled);
                }
            }
            Call::Wait { backward, microbatch, .. } => {
                if self.phase != Phase::Evaluating {
                    training(&mut broken);
                }
                if did(microbatch, if backward { INPUT_GRAD } else { FORWARD }) {
                    broken.insert(Code::MessageEarly);
                }
                if state.is_some_and(|state| state.messages.contains(&(2 + u8::from(backward), microbatch))) {
                    broken.insert(Code::MessageDoubled);
                }
            }
            Call::Refresh(_) => {
                training(&mut broken);
                if state.is_some_and(|s| s.refreshed || s.did.iter().any(|did| did & FORWARD != 0)) {
                    broken.insert(Code::RefreshMisplaced);
                }
            }
            Call::Reduce(_) => {
                training(&mut broken);
                if here.is_some_and(|at| self.stages[at].reduced || !self.all_did(at)) {
                    broken.insert(Code::ReduceMisplaced);
                }
            }
            Call::Agree { honest } => {
                training(&mut broken);
                self.incomplete(&mut broken);
                if !honest {
                    broken.insert(Code::TokenOutOfOrder);
                }
            }
            Call::Commit => {
                self.incomplete(&mut broken);
                if self.phase != Phase::Training(true) {
                    broken.insert(Code::CommitWithWork);
                }
            }
            Call::Settle(_) => {
                if self.phase != Phase::Provisional {
                    broken.insert(Code::CommitWithWork);
                }
            }
            Call::Replay { honest, foreign } => {
                if !at_rest {
                    broken.insert(Code::NotQuiescent);
                }
                if foreign {
                    broken.insert(Code::StageMismatch);
                }
                if self.stages.iter().any(|stage| stage.filled != Some(self.weights)) {
                    broken.insert(Code::StaleCache);
                }
                if !honest {
                    broken.insert(Code::TokenOutOfOrder);
                }
            }
        }
        broken
    }

    /// The rules that a call breaks after it was begun: the action is then pending, until the step is aborted.
    pub fn breaks_later(&self, call: &Call) -> BTreeSet<Code> {
        match *call {
            Call::Forward { finish: Finish::RolledTwice, .. }
            | Call::InputGrad { finish: Finish::RolledTwice, .. }
            | Call::FullBackward { finish: Finish::RolledTwice, .. } => [Code::TokenOutOfOrder].into(),
            Call::Join { stage, with, .. } => match Model::at(with.stage) {
                None => [Code::WrongRank].into(),
                Some(_) if with.microbatch >= MICROBATCHES => [Code::OutOfRange].into(),
                Some(_) => {
                    let key = self.key(with.stage, with.microbatch);
                    let mut broken = self.slots.reference_breaks(key, with.slot, with.generation, true);
                    if with.stage != stage {
                        broken.insert(Code::KeyMismatch);
                    }
                    broken
                }
            },
            _ => BTreeSet::new(),
        }
    }

    fn incomplete(&self, broken: &mut BTreeSet<Code>) {
        if self.slots.live() > 0 || self.stages.iter().any(|stage| !stage.reduced) {
            broken.insert(Code::CommitWithWork);
        }
        if (0..self.stages.len()).any(|at| !self.all_did(at)) {
            broken.insert(Code::ArenaMissing);
        }
    }

    /// The effect of a call that breaks no rule.
    pub fn apply(&mut self, call: &Call) {
        let keys = |stage: u32, microbatch: u32| self.key(stage, microbatch);
        let finish = match *call {
            Call::Forward { finish, .. }
            | Call::InputGrad { finish, .. }
            | Call::FullBackward { finish, .. }
            | Call::WeightGrad { finish, .. }
            | Call::Join { finish, .. } => finish,
            _ => Finish::Right,
        };
        if finish == Finish::Dropped || !self.breaks_later(call).is_empty() {
            self.pending = true;
            return;
        }
        match *call {
            Call::Step | Call::Evaluation => {
                self.start = self.stages.iter().map(|s| (s.cache, s.filled, s.rolls)).collect();
                self.clear();
                self.phase = if *call == Call::Step { Phase::Training(false) } else { Phase::Evaluating };
                self.attempts += u64::from(*call == Call::Step);
            }
            Call::EndEvaluation => self.phase = Phase::Rest,
            Call::Abort => {
                let step = self.step();
                self.slots.purge(step);
                if self.phase != Phase::Rest {
                    self.restore();
                }
                self.pending = false;
                self.phase = Phase::Rest;
            }
            Call::Fill(stage) => self.of(stage).filled = Some(self.weights),
            Call::Forward { stage, microbatch, slot, .. } => {
                let key = keys(stage, microbatch);
                self.slots.lease(key, slot);
                self.of(stage).did[microbatch as usize] |= FORWARD;
                self.of(stage).rolls[0] += u64::from(Model::rolls(stage).0);
            }
            Call::Evaluate { stage, microbatch } => self.of(stage).did[microbatch as usize] |= FORWARD,
            Call::Recompute { stage, microbatch, .. } => self.of(stage).did[microbatch as usize] |= RECOMPUTED,
            Call::InputGrad { stage, microbatch, slot, .. } => {
                self.slots.records[slot as usize] = Some((keys(stage, microbatch), true));
                self.of(stage).did[microbatch as usize] |= INPUT_GRAD;
                self.of(stage).rolls[1] += u64::from(Model::rolls(stage).1);
            }
            Call::FullBackward { stage, microbatch, slot, .. } => {
                self.slots.records[slot as usize] = None;
                self.of(stage).did[microbatch as usize] |= INPUT_GRAD | WEIGHT_GRAD;
                self.of(stage).rolls[1] += u64::from(Model::rolls(stage).1);
            }
            Call::WeightGrad { stage, microbatch, slot, .. } => {
                self.slots.records[slot as usize] = None;
                self.of(stage).did[microbatch as usize] |= WEIGHT_GRAD;
            }
            Call::Join { stage, microbatch, slot, with, .. } => {
                for (microbatch, slot) in [(microbatch, slot), (with.microbatch, with.slot)] {
                    self.slots.records[slot as usize] = None;
                    self.of(stage).did[microbatch as usize] |= WEIGHT_GRAD;
                }
                self.joined += 1;
            }
            Call::Send { backward, stage, microbatch } => {
                self.of(stage).messages.insert((u8::from(backward), microbatch));
            }
            Call::Wait { backward, stage, microbatch } => {
                self.of(stage).messages.insert((2 + u8::from(backward), microbatch));
            }
            Call::Refresh(stage) => {
                let weights = self.weights;
                let state = self.of(stage);
                (state.cache, state.filled, state.refreshed) = (Some(weights), Some(weights), true);
            }
            Call::Reduce(stage) => self.of(stage).reduced = true,
            Call::Agree { .. } => self.phase = Phase::Training(true),
            Call::Commit => {
                self.weights += 1;
                let weights = self.weights;
                self.stages.iter_mut().for_each(|stage| stage.filled = Some(weights));
                self.phase = Phase::Provisional;
            }
            Call::Settle(verdict) => {
                if verdict == Verdict::Skip {
                    self.restore();
                }
                self.phase = Phase::Rest;
            }
            Call::Replay { .. } => {
                self.apply(&Call::Step);
                for stage in STAGES {
                    self.apply(&Call::Refresh(stage.0));
                    let (forward, backward) = Model::rolls(stage.0);
                    let state = self.of(stage.0);
                    state.did.fill(FORWARD | INPUT_GRAD | WEIGHT_GRAD);
                    state.rolls[0] += u64::from(MICROBATCHES * forward);
                    state.rolls[1] += u64::from(MICROBATCHES * backward);
                    for microbatch in 0..MICROBATCHES {
                        self.slots.generations[rehearsed_slot(stage.0, microbatch) as usize] += 1;
                    }
                    self.apply(&Call::Reduce(stage.0));
                }
                self.apply(&Call::Commit);
                self.replayed += 1;
            }
        }
    }

    /// As the pass began.
    fn restore(&mut self) {
        for (stage, start) in self.stages.iter_mut().zip(&self.start) {
            (stage.cache, stage.filled, stage.rolls) = *start;
        }
        self.weights -= u64::from(self.phase == Phase::Provisional);
        self.clear();
    }

    fn clear(&mut self) {
        for stage in &mut self.stages {
            stage.did.fill(0);
            stage.messages.clear();
            (stage.refreshed, stage.reduced) = (false, false);
        }
    }

    fn of(&mut self, stage: u32) -> &mut StageModel {
        &mut self.stages[Model::at(stage).unwrap()]
    }

    pub fn rolls(stage: u32) -> (u32, u32) {
        ROLLS[Model::at(stage).unwrap()]
    }
}
