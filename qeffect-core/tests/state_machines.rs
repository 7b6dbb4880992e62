//! The slot pool and the whole ledger as state machines, against models written from the contract: random
//! sequences of legal and illegal calls. What breaks no rule succeeds and has the effect that the model
//! says; what breaks one is refused with the code of a rule that it breaks, and changes nothing.
//!
//! References are affine and cannot be copied, so copies are forged: a pool of its own is led to the
//! wanted slot and generation.
#![allow(missing_docs)]

use std::collections::BTreeSet;

use proptest::prelude::*;
use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::ledger::{Ledger, LedgerError, Rolls, StageContract, Verdict};
use qeffect_core::plan::Direction;
use qeffect_core::slots::SlotPool;
use qeffect_core::tape::{TapeKey, TapeRef, WorkRef};

/// A tape reference to a slot at a generation from 1 on.
fn forged_tape(slot: u32, generation: u64) -> TapeRef {
    let mut pool = SlotPool::new(slot + 1);
    let key = TapeKey::stage(0, Stage(0), Microbatch(0));
    loop {
        let tape = pool.lease(key, slot).unwrap();
        if tape.generation() == generation {
            return tape;
        }
        let work = pool.consume_tape(tape, &key).unwrap();
        pool.consume_work(work, &key).unwrap();
    }
}

/// The same for work.
fn forged_work(slot: u32, generation: u64) -> WorkRef {
    let mut pool = SlotPool::new(slot + 1);
    let key = TapeKey::stage(0, Stage(0), Microbatch(0));
    loop {
        let tape = pool.lease(key, slot).unwrap();
        let (reached, work) = (tape.generation() == generation, pool.consume_tape(tape, &key).unwrap());
        if reached {
            return work;
        }
        pool.consume_work(work, &key).unwrap();
    }
}

// --- slots ----------------------------------------------------------------------------------------

/// What lives in a slot: its key, and whether I has taken the tape.
type Record = (TapeKey, bool);

#[derive(Clone, Debug)]
struct Slots {
    records: Vec<Option<Record>>,
    generations: Vec<u64>,
}

impl Slots {
    fn new(count: u32) -> Slots {
        Slots { records: vec![None; count as usize], generations: vec![0; count as usize] }
    }

    fn tapes(&self) -> u32 {
        self.records.iter().flatten().filter(|(_, taken)| !taken).count() as u32
    }

    fn live(&self) -> u32 {
        self.records.iter().flatten().count() as u32
    }

    fn lease_breaks(&self, key: TapeKey, slot: u32) -> BTreeSet<Code> {
        let mut broken = BTreeSet::new();
        if self.records.get(slot as usize).is_none_or(Option::is_some) {
            broken.insert(Code::SlotsExhausted);
        }
        if self.records.iter().flatten().any(|(live, _)| *live == key) {
            broken.insert(Code::ForwardRepeated);
        }
        broken
    }

    fn reference_breaks(&self, key: TapeKey, slot: u32, generation: u64, work: bool) -> BTreeSet<Code> {
        let Some(current) = self.generations.get(slot as usize) else { return [Code::SlotsExhausted].into() };
        let consumed = if work { Code::WorkConsumedTwice } else { Code::TapeConsumedTwice };
        if generation != *current {
            return [Code::StaleReference].into();
        }
        let Some((holder, taken)) = self.records[slot as usize] else { return [consumed].into() };
        let mut broken = BTreeSet::new();
        if holder != key {
            broken.insert(Code::KeyMismatch);
        }
        match (work, taken) {
            (false, true) => broken.insert(consumed),
            (true, false) => broken.insert(Code::WorkBeforeInputGrad),
            _ => false,
        };
        broken
    }

    fn lease(&mut self, key: TapeKey, slot: u32) {
        self.generations[slot as usize] += 1;
        self.records[slot as usize] = Some((key, false));
    }

    fn purge(&mut self, step: u64) -> u32 {
        let mut purged = 0;
        for (record, generation) in self.records.iter_mut().zip(&mut self.generations) {
            if record.is_some_and(|(key, _)| key.step == step) {
                *record = None;
                *generation += 1;
                purged += 1;
            }
        }
        purged
    }
}

#[derive(Clone, Copy, Debug)]
enum PoolCall {
    Lease(TapeKey, u32),
    ConsumeTape(TapeKey, u32, u64),
    ConsumeWork(TapeKey, u32, u64),
    Purge(u64),
}

const SLOTS: u32 = 3;

impl PoolCall {
    fn breaks(&self, slots: &Slots) -> BTreeSet<Code> {
        match *self {
            PoolCall::Lease(key, slot) => slots.lease_breaks(key, slot),
            PoolCall::ConsumeTape(key, slot, generation) => slots.reference_breaks(key, slot, generation, false),
            PoolCall::ConsumeWork(key, slot, generation) => slots.reference_breaks(key, slot, generation, true),
            PoolCall::Purge(_) => BTreeSet::new(),
        }
    }

    /// Every call on a small pool: all keys, slots (one too many), and generations around the current one.
    fn all(slots: &Slots) -> Vec<PoolCall> {
        let mut calls = Vec::new();
        for key in (0..2).flat_map(|step| (0..4).map(move |m| TapeKey::stage(step, Stage(0), Microbatch(m)))) {
            for slot in 0..=SLOTS {
                calls.push(PoolCall::Lease(key, slot));
                let current = slots.generations.get(slot as usize).copied().unwrap_or(1);
                for generation in current.saturating_sub(1).max(1)..=current + 1 {
                    calls.push(PoolCall::ConsumeTape(key, slot, generation));
                    calls.push(PoolCall::ConsumeWork(key, slot, generation));
                }
            }
        }
        calls.extend([PoolCall::Purge(0), PoolCall::Purge(1)]);
        calls
    }
}

/// A call for a choice: mostly one that breaks no rule and is likely, else one that breaks some rule, each rule
/// as often as any other.
fn choose<C: Copy>(
    (kind, n): (u8, u16),
    all: &[C],
    breaks: impl Fn(&C) -> BTreeSet<Code>,
    likely: impl Fn(&C) -> bool,
) -> C {
    let judged: Vec<(C, BTreeSet<Code>)> = all.iter().map(|call| (*call, breaks(call))).collect();
    let n = usize::from(n);
    let fine: Vec<C> =
        judged.iter().filter(|(call, broken)| broken.is_empty() && likely(call)).map(|(c, _)| *c).collect();
    if kind % 4 != 0 && !fine.is_empty() {
        return fine[n % fine.len()];
    }
    let codes: BTreeSet<Code> = judged.iter().flat_map(|(_, broken)| broken).copied().collect();
    let Some(code) = codes.iter().nth(n % codes.len().max(1)) else { return all[n % all.len()] };
    let broken: Vec<C> = judged.iter().filter(|(_, broken)| broken.contains(code)).map(|(c, _)| *c).collect();
    broken[n / codes.len() % broken.len()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn the_slot_pool_is_its_model(choices in prop::collection::vec(any::<(u8, u16)>(), 0..60)) {
        let (mut pool, mut model) = (SlotPool::new(SLOTS), Slots::new(SLOTS));
        for choice in choices {
            let call = choose(choice, &PoolCall::all(&model), |call| call.breaks(&model), |_| true);
            let broken = call.breaks(&model);
            let before = format!("{pool:?}");
            let refused = match call {
                PoolCall::Lease(key, slot) => pool.lease(key, slot).map(|tape| {
                    assert_eq!((tape.slot(), tape.generation()), (slot, model.generations[slot as usize] + 1));
                }),
                PoolCall::ConsumeTape(key, slot, generation) => {
                    pool.consume_tape(forged_tape(slot, generation), &key).map(|work| {
                        assert_eq!((work.slot(), work.generation()), (slot, generation));
                    })
                }
                PoolCall::ConsumeWork(key, slot, generation) => pool.consume_work(forged_work(slot, generation), &key),
                PoolCall::Purge(step) => {
                    let purged = model.clone().purge(step);
                    assert_eq!(pool.purge(step), purged);
                    Ok(())
                }
            }
            .err();
            match refused {
                Some(error) => {
                    prop_assert!(broken.contains(&error.code()), "{call:?}: {error}, breaks {broken:?}");
                    prop_assert_eq!(format!("{pool:?}"), before, "a refused call changed the pool");
                }
                None => {
                    prop_assert!(broken.is_empty(), "{call:?} breaks {broken:?} and succeeds");
                    match call {
                        PoolCall::Lease(key, slot) => model.lease(key, slot),
                        PoolCall::ConsumeTape(key, slot, _) => model.records[slot as usize] = Some((key, true)),
                        PoolCall::ConsumeWork(_, slot, _) => model.records[slot as usize] = None,
                        PoolCall::Purge(step) => {
                            model.purge(step);
                        }
                    }
                }
            }
            prop_assert_eq!((pool.live(), pool.tapes()), (model.live(), model.tapes()));
            prop_assert_eq!(pool.works(), model.live() - model.tapes());
            for slot in 0..SLOTS {
                prop_assert_eq!(pool.generation(slot), Some(model.generations[slot as usize]));
            }
            let keys: Vec<(u32, TapeKey)> = pool.keys().collect();
            let records = model.records.iter().enumerate();
            let expected: Vec<_> = records.filter_map(|(slot, r)| Some((slot as u32, r.as_ref()?.0))).collect();
            prop_assert_eq!(keys, expected);
        }
    }
}

// --- the ledger -----------------------------------------------------------------------------------

const STAGES: [Stage; 2] = [Stage(1), Stage(3)];
const ROLLS: [(u32, u32); 2] = [(3, 2), (1, 0)];
const MICROBATCHES: u32 = 2;
const FORWARD: u8 = 1;
const INPUT_GRAD: u8 = 2;
const WEIGHT_GRAD: u8 = 4;
const RECOMPUTED: u8 = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Rest,
    Training(Option<Verdict>),
    Evaluating,
}

/// What one stage has done, per microbatch, and its version and rolls.
#[derive(Clone, Debug)]
struct StageModel {
    did: Vec<u8>,
    messages: BTreeSet<(u8, u32)>,
    refreshed: bool,
    reduced: bool,
    cache: Option<u64>,
    filled: Option<u64>,
    rolls: [u64; 2],
}

#[derive(Clone, Debug)]
struct Model {
    stages: Vec<StageModel>,
    slots: Slots,
    attempts: u64,
    weights: u64,
    phase: Phase,
    pending: bool,
    /// Cache, filled and rolls of each stage as the pass found them.
    start: Vec<(Option<u64>, Option<u64>, [u64; 2])>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Call {
    Step,
    Evaluation,
    EndEvaluation,
    Abort,
    Fill(u32),
    Forward { stage: u32, microbatch: u32, slot: u32, finish: Finish },
    Evaluate { stage: u32, microbatch: u32 },
    Recompute { stage: u32, microbatch: u32, slot: u32, generation: u64 },
    InputGrad { stage: u32, microbatch: u32, slot: u32, generation: u64, finish: Finish },
    FullBackward { stage: u32, microbatch: u32, slot: u32, generation: u64, finish: Finish },
    WeightGrad { stage: u32, microbatch: u32, slot: u32, generation: u64, finish: Finish },
    Send { backward: bool, stage: u32, microbatch: u32 },
    Wait { backward: bool, stage: u32, microbatch: u32 },
    Refresh(u32),
    Reduce(u32),
    Agree { verdict: Verdict, honest: bool },
    Commit,
}

/// How the caller of an action ends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Finish {
    Right,
    /// Drops the transition: the action failed.
    Dropped,
    /// Returns a token that was rolled once more than the action rolls.
    RolledTwice,
}

impl Model {
    fn new() -> Model {
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
        Model { stages, slots: Slots::new(SLOTS), attempts: 0, weights: 0, phase: Phase::Rest, pending: false, start }
    }

    fn step(&self) -> u64 {
        if matches!(self.phase, Phase::Training(_)) { self.attempts - 1 } else { self.attempts }
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
    fn breaks(&self, call: &Call) -> BTreeSet<Code> {
        let mut broken = BTreeSet::new();
        if self.pending && *call != Call::Abort {
            broken.insert(Code::NotQuiescent);
        }
        // Whether a training step runs in which nothing is agreed yet.
        let training = |broken: &mut BTreeSet<Code>| match self.phase {
            Phase::Training(None) => {}
            Phase::Training(_) => drop(broken.insert(Code::CommitWithWork)),
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
            Call::WeightGrad { stage, microbatch, slot, generation, .. } => {
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
            Call::Agree { honest, .. } => {
                training(&mut broken);
                self.incomplete(&mut broken);
                if !honest {
                    broken.insert(Code::TokenOutOfOrder);
                }
            }
            Call::Commit => {
                self.incomplete(&mut broken);
                if self.phase != Phase::Training(Some(Verdict::Good)) {
                    broken.insert(Code::CommitWithWork);
                }
            }
        }
        broken
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
    fn apply(&mut self, call: &Call) {
        let keys = |stage: u32, microbatch: u32| self.key(stage, microbatch);
        let finish = match *call {
            Call::Forward { finish, .. }
            | Call::InputGrad { finish, .. }
            | Call::FullBackward { finish, .. }
            | Call::WeightGrad { finish, .. } => finish,
            _ => Finish::Right,
        };
        let tokenless = matches!(call, Call::WeightGrad { .. });
        if finish == Finish::Dropped || (finish == Finish::RolledTwice && !tokenless) {
            self.pending = true;
            return;
        }
        match *call {
            Call::Step | Call::Evaluation => {
                self.start = self.stages.iter().map(|s| (s.cache, s.filled, s.rolls)).collect();
                self.clear();
                self.phase = if *call == Call::Step { Phase::Training(None) } else { Phase::Evaluating };
                self.attempts += u64::from(*call == Call::Step);
            }
            Call::EndEvaluation => self.phase = Phase::Rest,
            Call::Abort => {
                let step = self.step();
                self.slots.purge(step);
                if self.phase != Phase::Rest {
                    for (stage, start) in self.stages.iter_mut().zip(&self.start) {
                        (stage.cache, stage.filled, stage.rolls) = *start;
                    }
                    self.clear();
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
            Call::Agree { verdict, .. } => self.phase = Phase::Training(Some(verdict)),
            Call::Commit => {
                self.weights += 1;
                let weights = self.weights;
                self.stages.iter_mut().for_each(|stage| stage.filled = Some(weights));
                self.phase = Phase::Rest;
            }
        }
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

    fn rolls(stage: u32) -> (u32, u32) {
        ROLLS[Model::at(stage).unwrap()]
    }

    /// Every call with every argument in reach, a few beyond it.
    fn all(&self) -> Vec<Call> {
        let mut calls = vec![
            Call::Step,
            Call::Step,
            Call::Evaluation,
            Call::EndEvaluation,
            Call::Abort,
            Call::Commit,
            Call::Commit,
        ];
        for (verdict, honest) in
            [(Verdict::Good, true), (Verdict::Good, true), (Verdict::Skip, true), (Verdict::Good, false)]
        {
            calls.push(Call::Agree { verdict, honest });
        }
        for stage in [1, 2, 3] {
            calls.extend([Call::EndEvaluation; 6]);
            calls.extend([Call::Fill(stage), Call::Refresh(stage), Call::Refresh(stage), Call::Reduce(stage)]);
            for microbatch in 0..=MICROBATCHES {
                calls.push(Call::Evaluate { stage, microbatch });
                for backward in [false, true] {
                    calls.push(Call::Send { backward, stage, microbatch });
                    calls.push(Call::Wait { backward, stage, microbatch });
                }
                for slot in 0..=SLOTS {
                    let current = self.slots.generations.get(slot as usize).copied().unwrap_or(1);
                    for finish in [Finish::Right; 2].into_iter().chain([Finish::Dropped, Finish::RolledTwice]) {
                        calls.push(Call::Forward { stage, microbatch, slot, finish });
                        for generation in current.saturating_sub(1).max(1)..=current.max(1) {
                            calls.push(Call::InputGrad { stage, microbatch, slot, generation, finish });
                            calls.push(Call::FullBackward { stage, microbatch, slot, generation, finish });
                            calls.push(Call::WeightGrad { stage, microbatch, slot, generation, finish });
                        }
                    }
                    calls.push(Call::Recompute { stage, microbatch, slot, generation: current.max(1) });
                }
            }
        }
        calls
    }
}

/// Makes a call. `Ok(Some(error))`: it was begun, and refused at its end.
fn make(ledger: &mut Ledger, call: &Call) -> Result<Option<LedgerError>, LedgerError> {
    let (s, m) = (Stage, Microbatch);
    match *call {
        Call::Step => ledger.begin_step().map(|_| None),
        Call::Evaluation => ledger.begin_evaluation(MICROBATCHES).map(|()| None),
        Call::EndEvaluation => ledger.end_evaluation().map(|()| None),
        Call::Abort => {
            ledger.abort_step();
            Ok(None)
        }
        Call::Fill(stage) => ledger.fill(s(stage)).map(|()| None),
        Call::Forward { stage, microbatch, slot, finish } => {
            let (pending, token) = ledger.begin_forward(s(stage), m(microbatch), slot)?;
            let rolled = (0..Model::rolls(stage).0).fold(token, |token, _| token.rolled());
            match finish {
                Finish::Right => pending.finish(rolled).map(|_| None),
                Finish::Dropped => Ok(None),
                Finish::RolledTwice => Ok(Some(pending.finish(rolled.rolled()).unwrap_err())),
            }
        }
        Call::Evaluate { stage, microbatch } => {
            ledger.begin_evaluate(s(stage), m(microbatch))?.finish();
            Ok(None)
        }
        Call::Recompute { stage, microbatch, slot, generation } => {
            ledger.begin_recompute(s(stage), m(microbatch), &forged_tape(slot, generation))?.finish();
            Ok(None)
        }
        Call::InputGrad { stage, microbatch, slot, generation, finish } => {
            let tape = forged_tape(slot, generation);
            let (pending, token) = ledger.begin_input_grad(s(stage), m(microbatch), tape)?;
            let rolled = (0..Model::rolls(stage).1).fold(token, |token, _| token.rolled());
            match finish {
                Finish::Right => pending.finish(rolled).map(|_| None),
                Finish::Dropped => Ok(None),
                Finish::RolledTwice => Ok(Some(pending.finish(rolled.rolled()).unwrap_err())),
            }
        }
        Call::FullBackward { stage, microbatch, slot, generation, finish } => {
            let tape = forged_tape(slot, generation);
            let (pending, token) = ledger.begin_full_backward(s(stage), m(microbatch), tape)?;
            let rolled = (0..Model::rolls(stage).1).fold(token, |token, _| token.rolled());
            match finish {
                Finish::Right => pending.finish(rolled).map(|_| None),
                Finish::Dropped => Ok(None),
                Finish::RolledTwice => Ok(Some(pending.finish(rolled.rolled()).unwrap_err())),
            }
        }
        Call::WeightGrad { stage, microbatch, slot, generation, finish } => {
            let pending = ledger.begin_weight_grad(s(stage), m(microbatch), forged_work(slot, generation))?;
            if finish != Finish::Dropped {
                pending.finish()?;
            }
            Ok(None)
        }
        Call::Send { backward, stage, microbatch } => {
            let direction = if backward { Direction::Backward } else { Direction::Forward };
            ledger.begin_send(direction, s(stage), m(microbatch))?.finish();
            Ok(None)
        }
        Call::Wait { backward, stage, microbatch } => {
            let direction = if backward { Direction::Backward } else { Direction::Forward };
            ledger.begin_wait(direction, s(stage), m(microbatch))?.finish();
            Ok(None)
        }
        Call::Refresh(stage) => {
            ledger.begin_refresh(s(stage))?.finish();
            Ok(None)
        }
        Call::Reduce(stage) => {
            ledger.begin_reduce(s(stage))?.finish();
            Ok(None)
        }
        Call::Agree { verdict, honest } => {
            let counted: Vec<Rolls> = STAGES.iter().map(|stage| ledger.rolls(*stage).unwrap()).collect();
            let of = |stage: Stage| counted[STAGES.iter().position(|held| *held == stage).unwrap()];
            let pending = ledger.begin_agree(|stage| {
                let rolls = of(stage);
                Rolls { forward: rolls.forward + u64::from(!honest), ..rolls }
            })?;
            pending.finish(verdict);
            Ok(None)
        }
        Call::Commit => {
            ledger.begin_commit()?.finish();
            Ok(None)
        }
    }
}

/// Runs choices on both; returns how often each code was given.
fn play(choices: &[(u8, u16)]) -> Result<Vec<Code>, TestCaseError> {
    let contracts: Vec<StageContract> = (STAGES.iter().zip(ROLLS))
        .map(|(stage, (forward_rolls, backward_rolls))| StageContract { stage: *stage, forward_rolls, backward_rolls })
        .collect();
    let mut ledger = Ledger::new(Rank(0), &contracts, MICROBATCHES, SLOTS);
    let mut model = Model::new();
    let mut given = Vec::new();
    for choice in choices {
        let all = model.all();
        // Aborts and dropped actions only now and then, or no step would come to its end.
        let likely = |call: &Call| {
            let finish = match call {
                Call::Forward { finish, .. }
                | Call::InputGrad { finish, .. }
                | Call::FullBackward { finish, .. }
                | Call::WeightGrad { finish, .. } => *finish,
                _ => Finish::Right,
            };
            let skips = matches!(call, Call::Agree { verdict: Verdict::Skip, .. });
            let ends = finish != Finish::Right || skips || *call == Call::Abort;
            let stuck = model.pending || model.phase == Phase::Training(Some(Verdict::Skip));
            !ends || stuck || choice.0 > 240
        };
        let call = choose(*choice, &all, |call| model.breaks(call), likely);
        let broken = model.breaks(&call);
        let before = format!("{ledger:?}");
        match make(&mut ledger, &call) {
            Err(error) => {
                prop_assert!(broken.contains(&error.code), "{call:?}: {error}\nbreaks {broken:?}");
                prop_assert_eq!(format!("{ledger:?}"), before, "{:?} was refused and changed the ledger", call);
                given.push(error.code);
            }
            Ok(at_end) => {
                prop_assert!(broken.is_empty(), "{call:?} breaks {broken:?} and succeeds");
                if let Some(error) = at_end {
                    prop_assert_eq!(error.code, Code::TokenOutOfOrder);
                    given.push(error.code);
                }
                model.apply(&call);
            }
        }
        prop_assert_eq!((ledger.epoch(), ledger.step()), (model.weights, model.step()));
        prop_assert_eq!(ledger.pool().live(), model.slots.live());
        prop_assert_eq!(ledger.pool().tapes(), model.slots.tapes());
        for (stage, state) in STAGES.iter().zip(&model.stages) {
            let version = ledger.version(*stage).unwrap();
            prop_assert_eq!((version.weights(), version.cache()), (model.weights, state.cache));
            prop_assert_eq!(version.require_filled().is_ok(), state.filled == Some(model.weights));
            let count = |bit: u8| state.did.iter().filter(|did| **did & bit != 0).count() as u32;
            prop_assert_eq!(ledger.contributions(*stage), Some((count(INPUT_GRAD), count(WEIGHT_GRAD))));
            if !model.pending {
                let rolls = ledger.rolls(*stage).unwrap();
                prop_assert_eq!([rolls.forward, rolls.backward], state.rolls);
            }
        }
    }
    Ok(given)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, ..ProptestConfig::default() })]

    #[test]
    fn the_ledger_is_its_model(choices in prop::collection::vec(any::<(u8, u16)>(), 0..120)) {
        play(&choices)?;
    }
}

/// The random sequences reach every refusal, and commits.
#[test]
fn every_code_of_the_ledger_is_reached() {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u32
    };
    let mut given = BTreeSet::new();
    for _ in 0..40 {
        let choices: Vec<(u8, u16)> = (0..300).map(|_| (next() as u8, next() as u16)).collect();
        given.extend(play(&choices).unwrap());
    }
    let expected = [
        Code::RecomputeMisplaced,
        Code::TapeConsumedTwice,
        Code::WorkConsumedTwice,
        Code::WorkBeforeInputGrad,
        Code::StaleReference,
        Code::KeyMismatch,
        Code::TokenOutOfOrder,
        Code::StaleCache,
        Code::CommitWithWork,
        Code::RefreshMisplaced,
        Code::ReduceMisplaced,
        Code::NotQuiescent,
        Code::MessageDoubled,
        Code::MessageEarly,
        Code::SlotsExhausted,
        Code::WrongRank,
        Code::ForwardRepeated,
        Code::OutOfRange,
        Code::ForwardMissing,
        Code::ArenaMissing,
    ];
    for code in expected {
        assert!(given.contains(&code), "no sequence gets {code}: {given:?}");
    }
}
