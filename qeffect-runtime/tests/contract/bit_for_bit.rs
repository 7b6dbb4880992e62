//! Every schedule of the library, on 1, 2 and 4 ranks, eager and captured, gives the bits of the unsplit model, with
//! evaluations in between; its gradients copied or, where they ascend, accumulated in place. What would give other bits is
//! refused at start.
//!
//! The reference is one stage on one rank, F(m) then its backward for m ascending, without plan, ledger, threads or
//! messages. Compared over 20 steps, which is several times through the amax history: the loss of each microbatch and
//! the gradient norm of every step, and again and again every gradient, parameter, moment, amax history, scale, cached
//! weight, and the epochs.

use std::collections::BTreeMap;

use crate::common::how::{Case, HOW, How, RANKS, cases, cut, training, weight_gradients_ascend};
use crate::common::settings::{adamw, tiny};
use crate::common::{Solo, batch};
use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::schedule::Update;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::shard::Named;

const STEPS: u64 = 20;
const MICROBATCHES: u32 = 4;

const OPTIM: OptimConfig = adamw(STEPS, 3, 8e-3, 1e-3);

struct Reference {
    losses: Vec<f64>,
    norm: f64,
    values: BTreeMap<String, Named>,
}

fn reference(config: &GptConfig, steps: u64, microbatches: u32) -> Vec<Reference> {
    let mut solo = Solo::new(config, &[config.layers], microbatches, OPTIM);
    (0..steps)
        .map(|step| {
            let (_, verdict) = solo.step(&batch(config, step, microbatches));
            assert!(verdict.commit, "step {step}");
            let losses = solo.shard.losses().unwrap();
            Reference { losses, norm: verdict.norm, values: solo.shard.export().unwrap() }
        })
        .collect()
}

fn same(reference: &BTreeMap<String, Named>, found: &BTreeMap<String, Named>, what: &str) {
    let names = |values: &BTreeMap<String, Named>| values.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(reference), "{what}");
    let differ: Vec<&String> = reference.keys().filter(|name| found[*name] != reference[*name]).collect();
    assert!(differ.is_empty(), "{what}: {} of {} values differ: {differ:?}", differ.len(), reference.len());
}

/// Backwards of `looped_bfs` descend: a recipe that rolls with every microbatch refuses it, and where state moves with the
/// step, or there is none, copied gradients are summed by microbatch, while those that are added in place are refused.
fn every_schedule_gives_the_bits_of(recipe: &str) {
    let rolls = recipe.ends_with("update=microbatch");
    let mut references = BTreeMap::new();
    let mut ran = BTreeMap::new();
    for case in cases(MICROBATCHES) {
        let config = tiny(recipe, case.layers());
        let reference = references.entry((case.layers(), case.microbatches())).or_insert_with(|| {
            let reference = reference(&config, STEPS, case.microbatches());
            // The run is one: weights learn, and the reference's own steps differ from each other.
            assert!(reference[19].losses.iter().sum::<f64>() < 0.97 * reference[0].losses.iter().sum::<f64>());
            reference
        });
        for (gradients, how) in [Gradients::Copied, Gradients::Direct].into_iter().flat_map(|g| HOW.map(|how| (g, how)))
        {
            let what = format!("{recipe}, {gradients:?}, {} on {} ranks, {how:?}", case.schedule, case.ranks());
            let stages = config.stages(case.blocks).unwrap();
            let session_config = SessionConfig { gradients, ..SessionConfig::new(OPTIM, config.tokens()) };
            let session = how.session(case.checked.clone(), stages, session_config, || Box::new(CpuDevice::new()));
            let adds_in_order = gradients == Gradients::Copied || weight_gradients_ascend(&case.checked, 1);
            let refusal = match rolls && case.checked.order_dependent {
                true => Some(Code::OrderDependent),
                false => (!adds_in_order).then_some(Code::GradientsUnsupported),
            };
            assert_eq!(session.as_ref().err().map(|error| error.code()), refusal.map(Some), "{what}");
            let times = ran.entry((case.schedule, case.ranks())).or_insert(0);
            if let Ok(mut session) = session {
                run(&mut session, &case, &config, reference, &what);
                *times += 1;
            }
        }
    }
    let times = |schedule: &str| match (schedule, rolls) {
        ("looped_bfs", true) => 0,
        ("looped_bfs", false) => HOW.len(),
        _ => 2 * HOW.len(),
    };
    let all = training().flat_map(|entry| RANKS.map(|ranks| ((entry.name, ranks), times(entry.name))));
    assert_eq!(ran, all.collect::<BTreeMap<_, _>>(), "{recipe}");
}

/// Steps with evaluations in between, each compared with the reference.
fn run(session: &mut Session<GptStage>, case: &Case, config: &GptConfig, reference: &[Reference], what: &str) {
    let peaks = case.checked.plan.peaks.to_vec();
    let evaluation = session.evaluation(case.evaluation.clone()).unwrap();
    for (step, want) in reference.iter().enumerate() {
        let what = format!("{what}, step {step}");
        let report = session.step(batch(config, step as u64, case.microbatches())).unwrap();
        assert_eq!(bits(&report.losses), bits(&want.losses), "{what}");
        assert_eq!(report.grad_norm.to_bits(), want.norm.to_bits(), "{what}");
        assert_eq!((report.step, report.epoch, report.skipped), (step as u64, step as u64 + 1, false), "{what}");
        assert_eq!(report.peaks, peaks, "{what}: what was live is what the plan says");
        if step % 7 == 0 {
            // A look at other data leaves no trace, in this step's state or in those that follow.
            session.evaluate(&evaluation, batch(config, 1000, case.microbatches())).unwrap();
        }
        if step % 5 == 4 || step < 2 {
            let snapshot = session.snapshot().unwrap();
            same(&want.values, &snapshot.values, &what);
            for version in snapshot.versions {
                let epochs = (version.weights(), version.cache());
                assert_eq!(epochs, (step as u64 + 1, Some(step as u64)), "{what}");
            }
        }
    }
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn delayed_scaling_that_moves_with_every_microbatch() {
    every_schedule_gives_the_bits_of("fp8-delayed:history=4,update=microbatch");
}

#[test]
fn delayed_scaling_that_moves_with_every_step() {
    every_schedule_gives_the_bits_of("fp8-delayed:history=4,update=step");
}

#[test]
fn bf16_whose_state_is_the_weights_alone() {
    every_schedule_gives_the_bits_of("bf16");
}

/// Witness that the comparison can fail: out of order, delayed scaling gives other bits, and is refused unless allowed.
/// I's and F's count alike; captured, an order that is allowed gives the bits that it has eagerly.
#[test]
fn an_order_that_does_not_ascend_is_refused_by_name_and_gives_other_bits() {
    qeffect_schedules::schedule! {
        /// Backwards in descending order.
        backwards<P, M>;

        ranks: P;
        microbatches: M;
        stages: P;
        place: |s| s;

        rank |r| {
            for m in 0..M { F(r, m); }
            for m in (0..M).rev() { B(r, m); }
        }
    }
    qeffect_schedules::schedule! {
        /// Forwards in descending order, backwards in ascending order.
        forwards<P, M>;

        ranks: P;
        microbatches: M;
        stages: P;
        place: |s| s;

        rank |r| {
            for m in (0..M).rev() { F(r, m); }
            for m in 0..M { I(r, m); W(r, m); }
        }
    }
    for checked in [backwards::build, forwards::build].map(|build| build(2, i64::from(MICROBATCHES)).unwrap()) {
        let name = checked.schedule.name.to_string();
        assert!(checked.order_dependent && checked.schedule.update == Update::Microbatch, "{name}");
        let run = |how: How, recipe: &str, allow_order_dependent: bool| {
            let config = tiny(recipe, 3);
            let stages = config.stages(cut(2)).unwrap();
            let session_config = SessionConfig { allow_order_dependent, ..SessionConfig::new(OPTIM, config.tokens()) };
            let mut session = how.session(checked.clone(), stages, session_config, || Box::new(CpuDevice::new()))?;
            for step in 0..4 {
                session.step(batch(&config, step, MICROBATCHES))?;
            }
            session.snapshot()
        };
        let (by_microbatch, by_step) = ("fp8-delayed:history=4,update=microbatch", "fp8-delayed:history=4,update=step");
        let ascending = reference(&tiny(by_microbatch, 3), 4, MICROBATCHES).pop().unwrap().values;
        // Folds commute: with one move per step the order is free.
        let folded = reference(&tiny(by_step, 3), 4, MICROBATCHES).pop().unwrap().values;
        let mut wanted = None;
        for how in HOW {
            let refused = run(how, by_microbatch, false).unwrap_err();
            assert_eq!(refused.code(), Some(Code::OrderDependent), "{name}, {how:?}");
            let allowed = run(how, by_microbatch, true).unwrap().values;
            assert_ne!(allowed, ascending, "{name}, {how:?}");
            assert!(*wanted.get_or_insert_with(|| allowed.clone()) == allowed, "{name}, {how:?}");
            same(&folded, &run(how, by_step, false).unwrap().values, &format!("{name}, {how:?}"));
        }
    }
}
