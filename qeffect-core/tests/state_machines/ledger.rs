//! The ledger, driven beside its model.

use std::collections::BTreeSet;

use proptest::prelude::*;
use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::ledger::{Ledger, LedgerError, Rolls, StageContract};
use qeffect_core::plan::Direction;

use crate::model::{Call, Finish, INPUT_GRAD, MICROBATCHES, Model, Phase, ROLLS, STAGES, WEIGHT_GRAD};
use crate::slots::SLOTS;
use crate::{choose, forged_tape, forged_work};

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
        Call::Agree { honest } => {
            let counted: Vec<Rolls> = STAGES.iter().map(|stage| ledger.rolls(*stage).unwrap()).collect();
            let of = |stage: Stage| counted[STAGES.iter().position(|held| *held == stage).unwrap()];
            let pending = ledger.begin_agree(|stage| {
                let rolls = of(stage);
                Rolls { forward: rolls.forward + u64::from(!honest), ..rolls }
            })?;
            pending.finish();
            Ok(None)
        }
        Call::Commit => {
            ledger.begin_commit()?.finish();
            Ok(None)
        }
        Call::Settle(verdict) => ledger.settle(verdict).map(|_| None),
    }
}

/// What is read of a weight epoch: nothing while a step is provisional.
fn expected(provisional: bool, weights: u64) -> Result<u64, Code> {
    if provisional { Err(Code::NotQuiescent) } else { Ok(weights) }
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
            let ends = finish != Finish::Right || *call == Call::Abort;
            !ends || model.pending || choice.0 > 240
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
