//! The ledger, driven beside its model.

use std::collections::BTreeSet;

use proptest::prelude::*;
use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::ledger::{Ledger, LedgerError, Rolls, StageContract, StepEffects, Verdict};
use qeffect_core::plan::Direction;

use crate::calls::{Call, Finish};
use crate::model::{INPUT_GRAD, MICROBATCHES, Model, Phase, ROLLS, STAGES, WEIGHT_GRAD, rehearsed_slot};
use crate::slots::SLOTS;
use crate::{choose, forged_tape, forged_work};

/// A ledger at rest, and the effects of one good step with so many microbatches.
fn rehearsed(microbatches: u32) -> Result<(Ledger, StepEffects), LedgerError> {
    let contracts: Vec<StageContract> = (STAGES.iter().zip(ROLLS))
        .map(|(stage, (forward_rolls, backward_rolls))| StageContract { stage: *stage, forward_rolls, backward_rolls })
        .collect();
    let ledger = Ledger::new(Rank(0), &contracts, microbatches, SLOTS);
    let mut rehearsal = ledger.rehearsal()?;
    rehearsal.begin_step()?;
    for stage in STAGES {
        rehearsal.begin_refresh(stage)?.finish();
        let (forward, backward) = Model::rolls(stage.0);
        for m in (0..microbatches).map(Microbatch) {
            let (pending, token) = rehearsal.begin_forward(stage, m, rehearsed_slot(stage.0, m.0))?;
            let tape = pending.finish((0..forward).fold(token, |token, _| token.rolled()))?;
            let (pending, token) = rehearsal.begin_input_grad(stage, m, tape)?;
            let work = pending.finish((0..backward).fold(token, |token, _| token.rolled()))?;
            rehearsal.begin_weight_grad(stage, m, work)?.finish()?;
        }
        rehearsal.begin_reduce(stage)?.finish();
    }
    let counted = honest(&rehearsal);
    rehearsal.begin_agree(counted)?.finish();
    rehearsal.begin_commit()?.finish();
    rehearsal.settle(Verdict::Good)?;
    let effects = ledger.effects_of(&rehearsal)?;
    Ok((ledger, effects))
}

/// The rolls of each stage, as the state would count them.
fn honest(ledger: &Ledger) -> impl Fn(Stage) -> Rolls + use<> {
    let counted = STAGES.map(|stage| ledger.rolls(stage).unwrap());
    move |stage| counted[STAGES.iter().position(|held| *held == stage).unwrap()]
}

/// Makes a call; `effects`: of a replayed step, and of one of another program. `Ok(Some(error))`: it was begun, and
/// refused at its end.
fn make(ledger: &mut Ledger, call: &Call, effects: &[StepEffects; 2]) -> Result<Option<LedgerError>, LedgerError> {
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
        Call::Join { stage, microbatch, slot, generation, with, finish } => {
            let mut pending = ledger.begin_weight_grad(s(stage), m(microbatch), forged_work(slot, generation))?;
            let work = forged_work(with.slot, with.generation);
            match pending.join(s(with.stage), m(with.microbatch), work) {
                Err(error) => return Ok(Some(error)),
                Ok(_) if finish == Finish::Dropped => {}
                Ok(_) => pending.finish()?,
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
        Call::Agree { honest: is_honest } => {
            let counted = rolled(honest(ledger), is_honest);
            ledger.begin_agree(counted)?.finish();
            Ok(None)
        }
        Call::Commit => {
            ledger.begin_commit()?.finish();
            Ok(None)
        }
        Call::Settle(verdict) => ledger.settle(verdict).map(|_| None),
        Call::Replay { honest: is_honest, foreign } => {
            let counted = rolled(honest(ledger), is_honest);
            ledger.begin_replay(&effects[usize::from(foreign)], counted).map(|_| None)
        }
    }
}

/// Once more than counted, if that is not to be honest.
fn rolled(counted: impl Fn(Stage) -> Rolls, is_honest: bool) -> impl Fn(Stage) -> Rolls {
    move |stage| {
        let rolls = counted(stage);
        Rolls { forward: rolls.forward + u64::from(!is_honest), ..rolls }
    }
}

/// What is read of a weight epoch: nothing while a step is provisional.
fn expected(provisional: bool, weights: u64) -> Result<u64, Code> {
    if provisional { Err(Code::NotQuiescent) } else { Ok(weights) }
}

/// Runs choices on both; returns the codes that were given, and the model as it ended.
fn play(choices: &[(u8, u16)]) -> Result<(Vec<Code>, Model), TestCaseError> {
    let (mut ledger, effects) = rehearsed(MICROBATCHES).unwrap();
    let effects = [effects, rehearsed(MICROBATCHES + 1).unwrap().1];
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
                | Call::WeightGrad { finish, .. }
                | Call::Join { finish, .. } => *finish,
                _ => Finish::Right,
            };
            let ends = finish != Finish::Right || *call == Call::Abort || !model.breaks_later(call).is_empty();
            !ends || model.pending || choice.0 > 240
        };
        let call = choose(*choice, &all, |call| model.breaks(call), likely);
        let broken = model.breaks(&call);
        let before = format!("{ledger:?}");
        match make(&mut ledger, &call, &effects) {
            Err(error) => {
                prop_assert!(broken.contains(&error.code), "{call:?}: {error}\nbreaks {broken:?}");
                prop_assert_eq!(format!("{ledger:?}"), before, "{:?} was refused and changed the ledger", call);
                given.push(error.code);
            }
            Ok(at_end) => {
                prop_assert!(broken.is_empty(), "{call:?} breaks {broken:?} and succeeds");
                let later = model.breaks_later(&call);
                prop_assert_eq!(at_end.is_some(), !later.is_empty(), "{:?}", call);
                if let Some(error) = at_end {
                    prop_assert!(later.contains(&error.code), "{call:?}: {error}\nbreaks {later:?}");
                    given.push(error.code);
                }
                model.apply(&call);
            }
        }
        let provisional = model.phase == Phase::Provisional;
        prop_assert_eq!(ledger.step(), model.step());
        prop_assert_eq!(ledger.epoch().map_err(|e| e.code), expected(provisional, model.weights));
        prop_assert_eq!(ledger.pool().live(), model.slots.live());
        prop_assert_eq!(ledger.pool().tapes(), model.slots.tapes());
        for (stage, state) in STAGES.iter().zip(&model.stages) {
            match ledger.version(*stage) {
                Err(error) => prop_assert!(provisional && error.code == Code::NotQuiescent),
                Ok(version) => {
                    let version = version.unwrap();
                    prop_assert!(!provisional);
                    prop_assert_eq!((version.weights(), version.cache()), (model.weights, state.cache));
                    prop_assert_eq!(version.require_filled().is_ok(), state.filled == Some(model.weights));
                }
            }
            let count = |bit: u8| state.did.iter().filter(|did| **did & bit != 0).count() as u32;
            prop_assert_eq!(ledger.contributions(*stage), Some((count(INPUT_GRAD), count(WEIGHT_GRAD))));
            if !model.pending {
                let rolls = ledger.rolls(*stage).unwrap();
                prop_assert_eq!([rolls.forward, rolls.backward], state.rolls);
            }
        }
    }
    Ok((given, model))
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
    let (mut joined, mut replayed) = (0, 0);
    for _ in 0..40 {
        let choices: Vec<(u8, u16)> = (0..300).map(|_| (next() as u8, next() as u16)).collect();
        let (codes, model) = play(&choices).unwrap();
        given.extend(codes);
        (joined, replayed) = (joined + model.joined, replayed + model.replayed);
    }
    assert!(joined > 20 && replayed > 20, "{joined} joined, {replayed} replayed");
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
        Code::StageMismatch,
    ];
    for code in expected {
        assert!(given.contains(&code), "no sequence gets {code}: {given:?}");
    }
}
