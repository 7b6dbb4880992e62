//! Captured steps: they allocate nothing, and evaluation between them leaves no trace.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::common::batch;
use crate::common::how::{HOW, How};
use crate::watched::{OPTIM, Watch, model, session};
use qeffect_core::bind::Gradients;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::device::Buf;
use qeffect_runtime::gpt::GptStage;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::{eval_loop, eval_v, zb_h1, zb_v};

/// Tags are checked.
fn verified(gradients: Gradients) -> SessionConfig {
    SessionConfig { gradients, verify: true, ..SessionConfig::new(OPTIM, model().tokens()) }
}

#[test]
fn a_replayed_step_allocates_nothing_and_launches_what_was_captured() {
    let config = model();
    let (in_v, plain) = (zb_v::<2, 4>(), zb_h1::<2, 4>());
    let grouped = in_v.clone().coalesced(2).unwrap();
    let (four, two) = (config.stages(&[0, 1, 1, 0]).unwrap(), config.stages(&[1, 1]).unwrap());
    let placements =
        [(Gradients::Copied, in_v, &four), (Gradients::Direct, plain, &two), (Gradients::Coalesced, &grouped, &four)];
    for ((gradients, checked, stages), how) in placements.into_iter().flat_map(|p| HOW.map(|how| (p, how))) {
        let what = format!("{gradients:?}, {how:?}");
        let (mut session, watches) = session(how, checked, stages.clone(), verified(gradients));
        let sum = |of: fn(&Watch) -> usize| watches.iter().map(|watch| of(&watch.lock().unwrap())).sum::<usize>();
        assert_eq!(sum(|watch| watch.launches), 0, "{what}: capture carries nothing out");
        let captured = how != How::PerRank(CaptureMode::Eager);
        let mut before = sum(|watch| watch.allocs);
        for step in 0..3u64 {
            let report = session.step(batch(&config, step, 4)).unwrap();
            let (allocs, launches) = (sum(|watch| watch.allocs), sum(|watch| watch.launches));
            assert!(allocs == before || step == 0 && !captured, "{what}: step {step} allocated");
            before = allocs;
            assert_eq!((report.graphs, report.launches * (step as usize + 1)), (report.launches, launches), "{what}");
            // Work of a group is done by its last W.
            let actions = stages.len() * if gradients == Gradients::Coalesced { 4 + 4 + 2 } else { 4 * 3 };
            match how {
                How::PerRank(CaptureMode::Eager) => assert_eq!(report.launches, 0),
                // F, I and W of every stage and microbatch, and per rank at least begin, agree and commit.
                How::PerRank(CaptureMode::Action) => assert!(report.launches >= actions + 2 * 3, "{what}: {report:?}"),
                How::PerRank(CaptureMode::Step) => assert!((2..60).contains(&report.launches), "{what}: {report:?}"),
                How::OneDevice => assert_eq!(report.launches, 1),
            }
        }
    }
}

#[test]
fn evaluation_between_captured_steps_leaves_no_trace() {
    let config = model();
    let mut wanted = None;
    for how in HOW {
        let run = |evaluates: bool| {
            let (mut session, _) =
                session(how, zb_v::<2, 4>(), config.stages(&[0, 1, 1, 0]).unwrap(), verified(Gradients::Copied));
            let evaluation = session.evaluation(eval_v::<2, 4>().clone()).unwrap();
            for step in 0..6 {
                session.step(batch(&config, step, 4)).unwrap();
                if evaluates {
                    session.evaluate(&evaluation, batch(&config, 100 + step, 4)).unwrap();
                }
            }
            session.snapshot().unwrap()
        };
        let (with, without) = (run(true), run(false));
        assert_eq!(with, without, "{how:?}");
        assert_eq!(*wanted.get_or_insert_with(|| with.clone()), with, "{how:?}");
    }
}

// Case B20: the buffers that take gradients, and those that the optimizer reads, are the same in the twentieth step as in
// the first, whatever ran in between.
#[test]
fn gradients_stay_where_they_were_captured() {
    let config = model();
    let plain = zb_h1::<2, 4>();
    let grouped = plain.clone().coalesced(2).unwrap();
    let placements = [(Gradients::Copied, plain), (Gradients::Direct, plain), (Gradients::Coalesced, &grouped)];
    for ((gradients, checked), how) in placements.into_iter().flat_map(|placement| HOW.map(|how| (placement, how))) {
        let what = format!("{gradients:?}, {how:?}");
        let session_config = SessionConfig { gradients, ..SessionConfig::new(OPTIM, config.tokens()) };
        let (mut session, watches) = session(how, checked, config.stages(&[1, 1]).unwrap(), session_config);
        let evaluation = session.evaluation(eval_loop::build(2, 4, 1).unwrap()).unwrap();
        let step = |session: &mut Session<GptStage>, step: u64| {
            watches.iter().for_each(|watch| watch.lock().unwrap().arm(None));
            session.step(batch(&config, step, 4)).unwrap();
            watches.iter().map(|watch| watch.lock().unwrap().gradients.clone()).collect::<Vec<_>>()
        };
        let first = step(&mut session, 0);
        for n in 1..19 {
            session.evaluate(&evaluation, batch(&config, 100 + n, 4)).unwrap();
            step(&mut session, n);
        }
        assert_eq!(step(&mut session, 19), first, "{what}");
        let mut updated = 0;
        for touched in &first {
            let (optimizer, others): (Vec<_>, Vec<_>) = touched.iter().partition(|(_, _, cmd, _)| *cmd == "adamw");
            let written: BTreeSet<Buf> = others.iter().filter(|(.., reads)| !reads).map(|(_, buf, ..)| *buf).collect();
            assert!(optimizer.iter().all(|(_, buf, _, reads)| *reads && written.contains(buf)), "{what}: {touched:?}");
            updated += optimizer.len();
        }
        let values = session.snapshot().unwrap().values;
        assert_eq!(updated, values.keys().filter(|name| name.ends_with("/gradient")).count(), "{what}");
    }
}

// Case B11: a weight is cast by commit, once, and by no forward, whatever the mode; so there is no flag that a kernel could
// ignore. Activations are cast by every forward.
#[test]
fn a_replayed_forward_casts_no_weight() {
    let config = model();
    for how in HOW {
        let (mut session, watches) =
            session(how, zb_h1::<2, 4>(), config.stages(&[1, 1]).unwrap(), verified(Gradients::Copied));
        for step in 0..3 {
            watches.iter().for_each(|watch| watch.lock().unwrap().arm(None));
            session.step(batch(&config, step, 4)).unwrap();
            let casts = |at: usize| {
                let of = |watch: &Arc<Mutex<Watch>>| watch.lock().unwrap().casts[at].clone();
                let mut names: Vec<String> = watches.iter().flat_map(of).collect();
                names.sort();
                names
            };
            let (before, commit) = (casts(0), casts(1));
            // x of nine products in F, dy of them in I, of every microbatch.
            assert_eq!(before.len(), 4 * 2 * 9, "{how:?}");
            assert!(before.iter().all(|name| !name.contains("weight")), "{how:?}: {before:?}");
            assert_eq!(commit.len(), 9, "{how:?}: {commit:?}");
            assert!(commit.windows(2).all(|pair| pair[0] != pair[1]), "{how:?}: {commit:?}");
            assert!(commit.iter().all(|name| name.contains("weight")), "{how:?}: {commit:?}");
        }
    }
}
