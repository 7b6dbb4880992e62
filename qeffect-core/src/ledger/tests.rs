//! Random legal steps pass; any single wrong action in between is refused with its code, and leaves
//! no trace.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const STAGES: [Stage; 2] = [Stage(2), Stage(5)];
const M: u32 = 4;

fn contracts() -> Vec<StageContract> {
    STAGES.iter().map(|stage| StageContract { stage: *stage, forward_rolls: 1, backward_rolls: 1 }).collect()
}

fn ledger(slots: u32) -> Ledger {
    Ledger::new(Rank(1), &contracts(), M, slots)
}

/// What a microbatch of a stage has reached, kept apart from the ledger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Reached {
    Nothing,
    Forward { slot: u32 },
    InputGrad { slot: u32 },
    WeightGrad,
}

struct Machine {
    ledger: Ledger,
    reached: BTreeMap<(Stage, u32), Reached>,
    free: Vec<u32>,
    tapes: BTreeMap<(Stage, u32), TapeRef>,
    works: BTreeMap<(Stage, u32), WorkRef>,
    peak: u32,
}

impl Machine {
    fn begin(mut ledger: Ledger) -> Machine {
        ledger.begin_step().unwrap();
        for stage in STAGES {
            ledger.begin_refresh(stage).unwrap().finish();
        }
        let reached = STAGES.iter().flat_map(|s| (0..M).map(|m| ((*s, m), Reached::Nothing))).collect();
        let free = (0..ledger.pool().len()).rev().collect();
        Machine { ledger, reached, free, tapes: BTreeMap::new(), works: BTreeMap::new(), peak: 0 }
    }

    /// Everything that may happen next.
    fn enabled(&self) -> Vec<(Stage, u32)> {
        let has_slot = !self.free.is_empty();
        let may = |r: &Reached| *r != Reached::WeightGrad && (*r != Reached::Nothing || has_slot);
        self.reached.iter().filter(|(_, r)| may(r)).map(|(k, _)| *k).collect()
    }

    fn advance(&mut self, at: (Stage, u32), full: bool) {
        let (stage, m) = (at.0, Microbatch(at.1));
        let next = match self.reached[&at] {
            Reached::Nothing => {
                let slot = self.free.pop().unwrap();
                let (pending, token) = self.ledger.begin_forward(stage, m, slot).unwrap();
                self.tapes.insert(at, pending.finish(token.rolled()).unwrap());
                self.peak = self.peak.max(self.ledger.pool().len() - self.free.len() as u32);
                Reached::Forward { slot }
            }
            Reached::Forward { slot } if full => {
                let tape = self.tapes.remove(&at).unwrap();
                let (pending, token) = self.ledger.begin_full_backward(stage, m, tape).unwrap();
                pending.finish(token.rolled()).unwrap();
                self.free.push(slot);
                Reached::WeightGrad
            }
            Reached::Forward { slot } => {
                let tape = self.tapes.remove(&at).unwrap();
                let (pending, token) = self.ledger.begin_input_grad(stage, m, tape).unwrap();
                self.works.insert(at, pending.finish(token.rolled()).unwrap());
                Reached::InputGrad { slot }
            }
            Reached::InputGrad { slot } => {
                let work = self.works.remove(&at).unwrap();
                self.ledger.begin_weight_grad(stage, m, work).unwrap().finish().unwrap();
                self.free.push(slot);
                Reached::WeightGrad
            }
            Reached::WeightGrad => unreachable!(),
        };
        self.reached.insert(at, next);
    }

    /// One wrong action, by number. Returns the codes that fit; `None` if it is not wrong here.
    fn wrong(&mut self, which: u8, at: (Stage, u32)) -> Option<(LedgerError, Vec<Code>)> {
        let (stage, m) = (at.0, Microbatch(at.1));
        let reached = self.reached[&at];
        let live = self.free.len() as u32 != self.ledger.pool().len();
        let all = self.reached.values().all(|r| *r == Reached::WeightGrad);
        let free = self.free.last().copied();
        let generations: Vec<u64> =
            (0..self.ledger.pool().len()).map(|s| self.ledger.pool().generation(s).unwrap()).collect();
        let generation = |slot: u32| generations[slot as usize];
        let ledger = &mut self.ledger;
        Some(match which % 18 {
            0 if reached != Reached::Nothing => {
                let slot = free?;
                (ledger.begin_forward(stage, m, slot).unwrap_err(), vec![Code::ForwardRepeated])
            }
            1 if reached == Reached::Nothing => {
                let occupied = (0..ledger.pool().len()).find(|s| !self.free.contains(s))?;
                (ledger.begin_forward(stage, m, occupied).unwrap_err(), vec![Code::SlotsExhausted])
            }
            2 if reached == Reached::Nothing => {
                (ledger.begin_forward(stage, m, 99).unwrap_err(), vec![Code::SlotsExhausted])
            }
            3 => (ledger.begin_forward(Stage(3), m, 0).unwrap_err(), vec![Code::WrongRank]),
            4 => (ledger.begin_forward(stage, Microbatch(M), 0).unwrap_err(), vec![Code::OutOfRange]),
            5 => {
                let Reached::Forward { slot } = reached else { return None };
                let stale = TapeRef::new(slot, generation(slot) - 1);
                (ledger.begin_input_grad(stage, m, stale).unwrap_err(), vec![Code::StaleReference])
            }
            6 => {
                let Reached::Forward { slot } = reached else { return None };
                let foreign = TapeRef::new(slot, generation(slot));
                let other = Microbatch((m.0 + 1) % M);
                (ledger.begin_input_grad(stage, other, foreign).unwrap_err(), vec![Code::KeyMismatch])
            }
            7 => {
                let Reached::InputGrad { slot } = reached else { return None };
                let again = TapeRef::new(slot, generation(slot));
                (ledger.begin_full_backward(stage, m, again).unwrap_err(), vec![Code::TapeConsumedTwice])
            }
            8 => {
                let Reached::Forward { slot } = reached else { return None };
                let early = WorkRef::new(slot, generation(slot));
                (ledger.begin_weight_grad(stage, m, early).unwrap_err(), vec![Code::WorkBeforeInputGrad])
            }
            9 if reached == Reached::WeightGrad => {
                // case B17: "already consumed", not "missing"
                (ledger.nothing_held(Op::WeightGrad, stage, m), vec![Code::WorkConsumedTwice])
            }
            9 if matches!(reached, Reached::Nothing | Reached::Forward { .. }) => {
                let early = ledger.nothing_held(Op::WeightGrad, stage, m);
                (early, vec![Code::WorkBeforeInputGrad])
            }
            10 => (ledger.begin_refresh(stage).unwrap_err(), vec![Code::RefreshMisplaced]),
            11 if (0..M).any(|m| self.reached[&(stage, m)] != Reached::WeightGrad) => {
                (ledger.begin_reduce(stage).unwrap_err(), vec![Code::ReduceMisplaced])
            }
            12 => {
                let code = if live { Code::CommitWithWork } else { Code::ArenaMissing };
                let codes = if all { vec![Code::CommitWithWork] } else { vec![code] };
                (ledger.begin_agree(|_| Rolls::default()).unwrap_err(), codes)
            }
            13 => (ledger.begin_commit().unwrap_err(), vec![Code::CommitWithWork, Code::ArenaMissing]),
            14 => (ledger.begin_step().unwrap_err(), vec![Code::NotQuiescent]),
            15 => (ledger.begin_evaluation(M).unwrap_err(), vec![Code::NotQuiescent]),
            16 => (ledger.quiescent(Action::Checkpoint).unwrap_err(), vec![Code::NotQuiescent]),
            17 if matches!(reached, Reached::Nothing | Reached::Forward { .. }) => {
                (ledger.begin_send(Direction::Backward, stage, m).unwrap_err(), vec![Code::MessageEarly])
            }
            _ => return None,
        })
    }
}

fn finish_step(ledger: &mut Ledger) {
    for stage in STAGES {
        ledger.begin_reduce(stage).unwrap().finish();
    }
    let rolls: Vec<Rolls> = STAGES.iter().map(|s| ledger.rolls(*s).unwrap()).collect();
    let counted = |stage| rolls[STAGES.iter().position(|s| *s == stage).unwrap()];
    ledger.begin_agree(counted).unwrap().finish();
    ledger.begin_commit().unwrap().finish();
    ledger.settle(Verdict::Good).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn legal_steps_pass_and_wrong_actions_leave_no_trace(
        slots in 1..6u32,
        choices in proptest::collection::vec((any::<u8>(), any::<bool>(), any::<u8>(), any::<u8>()), 40),
        steps in 1..3u64,
    ) {
        let mut ledger = ledger(slots);
        for step in 0..steps {
            prop_assert_eq!(ledger.step(), step);
            let mut machine = Machine::begin(ledger);
            let mut choices = choices.iter().cycle();
            while let Some(enabled) = Some(machine.enabled()).filter(|e| !e.is_empty()) {
                let (choice, full, which, victim) = choices.next().unwrap();
                let keys: Vec<(Stage, u32)> = machine.reached.keys().copied().collect();
                let before = format!("{:?}", machine.ledger);
                if let Some((error, codes)) = machine.wrong(*which, keys[*victim as usize % keys.len()]) {
                    prop_assert!(codes.contains(&error.code), "{error}, wanted {codes:?}");
                    prop_assert_eq!(format!("{:?}", machine.ledger), before, "after {}", error);
                }
                machine.advance(enabled[*choice as usize % enabled.len()], *full);
            }
            prop_assert_eq!(machine.ledger.peaks().slots, machine.peak);
            ledger = machine.ledger;
            finish_step(&mut ledger);
            for stage in STAGES {
                prop_assert_eq!(ledger.contributions(stage), Some((M, M))); // case B55
                let rolls = ledger.rolls(stage).unwrap();
                prop_assert_eq!(rolls, Rolls { forward: (step + 1) * u64::from(M), backward: (step + 1) * u64::from(M) });
            }
            prop_assert_eq!(ledger.epoch(), Ok(step + 1));
            prop_assert!(ledger.quiescent(Action::Checkpoint).is_ok());
        }
    }

    #[test]
    fn an_abort_at_any_point_puts_back_the_start(
        choices in proptest::collection::vec((any::<u8>(), any::<bool>()), 0..24),
        mid_action in any::<bool>(),
    ) {
        let mut machine = Machine::begin(ledger(8));
        while let Some(at) = machine.enabled().first().copied() {
            machine.advance(at, true);
        }
        finish_step(&mut machine.ledger);
        let ledger = machine.ledger;
        let start: Vec<_> = STAGES.iter().map(|s| (ledger.rolls(*s), ledger.version(*s))).collect();
        let mut machine = Machine::begin(ledger);
        for (choice, full) in choices {
            let enabled = machine.enabled();
            if !enabled.is_empty() {
                machine.advance(enabled[choice as usize % enabled.len()], full);
            }
        }
        if mid_action && let Some((stage, m)) = machine.enabled().first().copied() {
            let m = Microbatch(m);
            match machine.reached[&(stage, m.0)] {
                Reached::Nothing => drop(machine.ledger.begin_forward(stage, m, machine.free[0]).unwrap()),
                Reached::Forward { .. } => {
                    let tape = machine.tapes.remove(&(stage, m.0)).unwrap();
                    drop(machine.ledger.begin_input_grad(stage, m, tape).unwrap());
                }
                _ => {
                    let work = machine.works.remove(&(stage, m.0)).unwrap();
                    drop(machine.ledger.begin_weight_grad(stage, m, work).unwrap());
                }
            }
            // Poisoned: nothing more begins.
            prop_assert_eq!(machine.ledger.begin_refresh(stage).unwrap_err().code, Code::NotQuiescent);
            prop_assert_eq!(machine.ledger.begin_commit().unwrap_err().code, Code::NotQuiescent);
        }
        let live = machine.ledger.pool().live();
        prop_assert_eq!(machine.ledger.abort_step(), live);
        for (stage, start) in STAGES.iter().zip(start) {
            prop_assert_eq!((machine.ledger.rolls(*stage), machine.ledger.version(*stage)), start);
        }
        prop_assert_eq!((machine.ledger.step(), machine.ledger.epoch()), (2, Ok(1)), "attempts count, commits do not");
        // References of the aborted step stay refused, also once their slot lives again.
        let stale: Vec<_> = std::mem::take(&mut machine.tapes).into_iter().collect();
        let mut machine = Machine::begin(machine.ledger);
        for ((stage, m), tape) in stale {
            let error = machine.ledger.begin_input_grad(stage, Microbatch(m), tape).unwrap_err();
            prop_assert_eq!(error.code, Code::StaleReference);
        }
        while let Some(at) = machine.enabled().first().copied() {
            machine.advance(at, false);
        }
        finish_step(&mut machine.ledger);
        prop_assert_eq!(machine.ledger.epoch(), Ok(2));
    }
}

#[test]
fn tokens_are_held_to_stage_and_rolls() {
    let mut ledger = ledger(2);
    ledger.begin_step().unwrap();
    for stage in STAGES {
        ledger.begin_refresh(stage).unwrap().finish();
    }
    let (pending, token) = ledger.begin_forward(STAGES[0], Microbatch(0), 0).unwrap();
    let error = pending.finish(token).unwrap_err(); // not rolled
    assert_eq!(error.code, Code::TokenOutOfOrder);
    assert_eq!(ledger.pool().live(), 0, "nothing was leased");
    assert_eq!(ledger.begin_forward(STAGES[0], Microbatch(0), 0).unwrap_err().code, Code::NotQuiescent);
    ledger.abort_step();

    ledger.begin_step().unwrap();
    ledger.begin_refresh(STAGES[0]).unwrap().finish();
    let (pending, token) = ledger.begin_forward(STAGES[0], Microbatch(0), 0).unwrap();
    drop(token);
    let error = pending.finish(Token::first(STAGES[1]).rolled()).unwrap_err(); // of another stage
    assert_eq!(
        error.to_string(),
        "F(2, 0) returns another token than it is to return [QE0203]\n  \
         note: expected the token of stage 2 after 1 rolls, found the token of stage 5 after 1\n  \
         note: on rank 1, in step 1"
    );
}

#[test]
fn a_commit_without_refresh_stops_the_next_forward() {
    let mut machine = Machine::begin(ledger(8));
    while let Some(at) = machine.enabled().first().copied() {
        machine.advance(at, false);
    }
    finish_step(&mut machine.ledger);
    let mut ledger = machine.ledger;
    ledger.begin_step().unwrap();
    let error = ledger.begin_forward(STAGES[0], Microbatch(0), 0).unwrap_err(); // case B08
    assert_eq!(error.code, Code::StaleCache);
    assert!(error.to_string().contains("weights e_W = 1, cache e_C = 0"), "{error}");
    ledger.begin_refresh(STAGES[0]).unwrap().finish();
    let (pending, token) = ledger.begin_forward(STAGES[0], Microbatch(0), 0).unwrap();
    let _tape = pending.finish(token.rolled()).unwrap();
    assert_eq!(ledger.begin_refresh(STAGES[0]).unwrap_err().code, Code::RefreshMisplaced, "once per step");
}

#[test]
fn an_undrained_work_is_named_when_commit_is_refused() {
    let mut machine = Machine::begin(ledger(8));
    while let Some(at) = machine.enabled().into_iter().find(|at| *at != (STAGES[1], 3)) {
        machine.advance(at, false);
    }
    machine.advance((STAGES[1], 3), false);
    machine.advance((STAGES[1], 3), false); // F and I, no W
    machine.ledger.begin_reduce(STAGES[0]).unwrap().finish();
    let error = machine.ledger.begin_commit().unwrap_err(); // case B14
    assert_eq!(error.code, Code::CommitWithWork);
    assert!(error.found.contains("stage 5, microbatch 3, step 0"), "{error}");
    assert_eq!(machine.ledger.begin_reduce(STAGES[1]).unwrap_err().code, Code::ReduceMisplaced); // case B41
}
