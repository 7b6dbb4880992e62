//! A replayed step leaves the ledger as the same step run action by action does.

use super::*;
use crate::ids::{Microbatch, Rank};
use crate::ledger::{StageContract, Verdict};
use crate::version::WeightVersion;

const STAGES: [Stage; 2] = [Stage(0), Stage(3)];
const M: u32 = 3;

fn ledger() -> Ledger {
    let contract = |stage| StageContract { stage, forward_rolls: 1, backward_rolls: 2 };
    let mut ledger = Ledger::new(Rank(1), &STAGES.map(contract), M, 2);
    STAGES.into_iter().for_each(|stage| ledger.fill(stage).unwrap());
    ledger
}

/// One step, action by action, up to its commit.
fn run(ledger: &mut Ledger) {
    ledger.begin_step().unwrap();
    for stage in STAGES {
        ledger.begin_refresh(stage).unwrap().finish();
        for m in 0..M {
            let (pending, token) = ledger.begin_forward(stage, Microbatch(m), m % 2).unwrap();
            let tape = pending.finish(token.rolled()).unwrap();
            let (pending, token) = ledger.begin_input_grad(stage, Microbatch(m), tape).unwrap();
            let work = pending.finish(token.rolled().rolled()).unwrap();
            ledger.begin_weight_grad(stage, Microbatch(m), work).unwrap().finish().unwrap();
        }
        ledger.begin_reduce(stage).unwrap().finish();
    }
    let rolls = STAGES.map(|stage| ledger.rolls(stage).unwrap());
    ledger.begin_agree(|stage| rolls[usize::from(stage == STAGES[1])]).unwrap().finish();
    ledger.begin_commit().unwrap().finish();
}

fn effects(ledger: &Ledger) -> StepEffects {
    let mut rehearsal = ledger.rehearsal().unwrap();
    run(&mut rehearsal);
    rehearsal.settle(Verdict::Good).unwrap();
    ledger.effects_of(&rehearsal).unwrap()
}

/// Everything that can be seen of a settled ledger.
type Seen = (u64, u64, Peaks, Vec<Option<u64>>, Vec<(Rolls, WeightVersion, (u32, u32))>);

fn seen(ledger: &Ledger) -> Seen {
    let stage = |stage| {
        let version = ledger.version(stage).unwrap().unwrap();
        (ledger.rolls(stage).unwrap(), version, ledger.contributions(stage).unwrap())
    };
    let generations = (0..2).map(|slot| ledger.pool().generation(slot)).collect();
    (ledger.step(), ledger.epoch().unwrap(), ledger.peaks(), generations, STAGES.into_iter().map(stage).collect())
}

fn replay(ledger: &mut Ledger, effects: &StepEffects) -> Result<u64, LedgerError> {
    let rolls = STAGES.map(|stage| ledger.rolls(stage).unwrap());
    ledger.begin_replay(effects, |stage| rolls[usize::from(stage == STAGES[1])])
}

#[test]
fn a_replay_has_the_effects_of_its_rehearsal() {
    let (mut eager, mut replayed) = (ledger(), ledger());
    let effects = effects(&replayed);
    assert_eq!(seen(&replayed), seen(&ledger()), "a rehearsal leaves no trace");
    assert_eq!(effects.rolls(STAGES[0]), Some(Rolls { forward: 3, backward: 6 }));
    for (step, verdict) in (0..).zip([Verdict::Good, Verdict::Skip, Verdict::Good, Verdict::Good]) {
        run(&mut eager);
        assert_eq!(replay(&mut replayed, &effects), Ok(step));
        assert_eq!(eager.settle(verdict), replayed.settle(verdict));
        assert_eq!(seen(&eager), seen(&replayed), "step {step}");
    }
    assert_eq!((replayed.step(), replayed.epoch()), (4, Ok(3)), "a skipped step counts as an attempt");
}

#[test]
fn what_a_provisional_step_decides_is_not_read_before_its_verdict() {
    let mut ledger = ledger();
    let effects = effects(&ledger);
    run(&mut ledger);
    ledger.settle(Verdict::Good).unwrap();
    let before = seen(&ledger);
    // Both ways into it.
    for replayed in [false, true] {
        if replayed {
            replay(&mut ledger, &effects).unwrap();
        } else {
            run(&mut ledger);
        }
        let refused = [
            ledger.quiescent(Action::Checkpoint).unwrap_err(),
            ledger.rehearsal().unwrap_err(),
            ledger.begin_evaluation(1).unwrap_err(),
            ledger.begin_step().unwrap_err(),
            replay(&mut ledger, &effects).unwrap_err(),
            ledger.fill(STAGES[0]).unwrap_err(),
            ledger.epoch().unwrap_err(),
            ledger.version(STAGES[0]).unwrap_err(),
        ];
        for error in refused {
            assert_eq!(error.code, Code::NotQuiescent, "{error}");
            assert!(error.found.contains("waiting for its verdict"), "{error}");
        }
        assert_eq!(ledger.begin_commit().unwrap_err().code, Code::CommitWithWork, "once");
        ledger.settle(Verdict::Skip).unwrap();
        let (attempts, rest) = (ledger.step(), seen(&ledger));
        assert_eq!((rest.1, &rest.4[0].0, &rest.4[0].1), (before.1, &before.4[0].0, &before.4[0].1));
        assert_eq!(attempts, if replayed { 3 } else { 2 });
    }
    assert_eq!(ledger.settle(Verdict::Good).unwrap_err().code, Code::CommitWithWork, "there is nothing to settle");
    assert_eq!(ledger.begin_evaluation(1), Ok(()));
}

#[test]
fn a_replay_is_refused_before_anything_has_moved() {
    let good = effects(&ledger());
    let mut ledger = ledger();
    let before = seen(&ledger);
    // case B53: the state moved otherwise than its tokens
    let error = ledger.begin_replay(&good, |_| Rolls { forward: 1, backward: 0 }).unwrap_err();
    assert_eq!(error.code, Code::TokenOutOfOrder, "{error}");
    let foreign = StepEffects { rolls: good.rolls[..1].to_vec(), ..good.clone() };
    assert_eq!(replay(&mut ledger, &foreign).unwrap_err().code, Code::StageMismatch);
    let longer = StepEffects { microbatches: M + 1, ..good.clone() };
    assert_eq!(replay(&mut ledger, &longer).unwrap_err().code, Code::StageMismatch);
    // case B08: the cache holds other weights
    ledger.stages[1].version.invalidate();
    assert_eq!(replay(&mut ledger, &good).unwrap_err().code, Code::StaleCache);
    ledger.fill(STAGES[1]).unwrap();
    ledger.begin_evaluation(1).unwrap();
    assert_eq!(replay(&mut ledger, &good).unwrap_err().code, Code::NotQuiescent);
    ledger.abort_step();
    assert_eq!((ledger.step(), ledger.epoch()), (before.0, Ok(before.1)), "none of this was a step");
    // A step that ended early, and one that was skipped, are no rehearsals.
    let mut rehearsal = ledger.rehearsal().unwrap();
    rehearsal.begin_step().unwrap();
    assert_eq!(ledger.effects_of(&rehearsal).unwrap_err().code, Code::NotQuiescent);
    rehearsal.abort_step();
    assert_eq!(ledger.effects_of(&rehearsal).unwrap_err().code, Code::CommitMissing);
}

#[test]
fn an_abort_takes_a_replay_back() {
    let mut ledger = ledger();
    let effects = effects(&ledger);
    let before = seen(&ledger);
    replay(&mut ledger, &effects).unwrap();
    ledger.abort_step();
    let after = seen(&ledger);
    assert_eq!((after.1, &after.4[1].0, &after.4[1].1), (before.1, &before.4[1].0, &before.4[1].1));
    assert_eq!(replay(&mut ledger, &effects), Ok(1));
}
