//! Measured steps: the same bits as ever, every action once and in its order, on one clock for all ranks.

use std::collections::BTreeMap;

use crate::common::{batch, small};
use qeffect_core::action::Kind;
use qeffect_core::bind::GradientChoice;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::measured::Span;
use qeffect_core::plan::{Checked, Op};
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::gpt::GptStage;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::{one_f_one_b, zb_v};

fn session(
    checked: &Checked,
    blocks: &[usize],
    gradients: GradientChoice,
    how: Option<CaptureMode>,
) -> Session<GptStage> {
    let config = small("fp8-delayed:history=4");
    let optim = OptimConfig { steps: 20, ..OptimConfig::default() };
    let plain = SessionConfig { gradients: gradients.gradients, ..SessionConfig::new(optim, config.tokens()) };
    let stages = config.stages(blocks).unwrap();
    match how {
        Some(capture) => Session::new(checked.clone(), stages, SessionConfig { capture, ..plain }),
        None => Session::on_one_device(checked.clone(), stages, plain, Box::new(CpuDevice::new())),
    }
    .unwrap()
}

/// One device for all ranks is the fourth.
const HOW: [Option<CaptureMode>; 4] =
    [Some(CaptureMode::Eager), Some(CaptureMode::Action), Some(CaptureMode::Step), None];

/// What the schedule has the rank do.
fn program(checked: &Checked, rank: Rank) -> Vec<(Op, Stage, Microbatch)> {
    let starts = &checked.schedule.starts;
    let items = &checked.schedule.items[starts[rank.index()] as usize..starts[rank.index() + 1] as usize];
    let op = |kind| match kind {
        Kind::Forward => Some(Op::Forward),
        Kind::InputGrad => Some(Op::InputGrad),
        Kind::WeightGrad | Kind::WeightGradJoin => Some(Op::WeightGrad),
        Kind::FullBackward => Some(Op::FullBackward),
        _ => None,
    };
    items.iter().filter_map(|item| Some((op(item.kind)?, item.stage, item.microbatch))).collect()
}

const COMPUTE: [Op; 4] = [Op::Forward, Op::InputGrad, Op::WeightGrad, Op::FullBackward];

fn holds(checked: &Checked, blocks: &[usize], gradients: &str) {
    let gradients: GradientChoice = gradients.parse().unwrap();
    let checked = gradients.apply(checked.clone()).unwrap();
    let config = small("fp8-delayed:history=4");
    let microbatches = checked.schedule.microbatches;
    for how in HOW {
        let mut plain = session(&checked, blocks, gradients, how);
        let mut measured = session(&checked, blocks, gradients, how);
        for step in 0..5 {
            let batch = batch(&config, step, microbatches);
            let wanted = plain.step(batch.clone()).unwrap();
            // Between replayed ones, and two in a row.
            if [1, 2, 4].contains(&step) {
                let (found, spans) = measured.step_measured(batch).unwrap();
                assert_eq!((found.losses, found.grad_norm), (wanted.losses, wanted.grad_norm), "{how:?}");
                assert!(spans.iter().flatten().all(|span| span.end <= found.wall), "{how:?}");
                one_clock(&checked, &spans);
            } else {
                let found = measured.step(batch).unwrap();
                assert_eq!(found.launches, wanted.launches, "{how:?}: a step that is not measured is replayed");
            }
        }
        assert_eq!(measured.snapshot().unwrap(), plain.snapshot().unwrap(), "{how:?}");
    }
}

fn one_clock(checked: &Checked, ranks: &[Vec<Span>]) {
    let mut forward = BTreeMap::new();
    let mut backward = BTreeMap::new();
    for (rank, spans) in ranks.iter().enumerate() {
        let done: Vec<_> = spans.iter().filter(|span| COMPUTE.contains(&span.op)).collect();
        let named: Vec<_> = done.iter().map(|span| (span.op, span.stage, span.microbatch)).collect();
        assert_eq!(named, program(checked, Rank(rank as u32)));
        assert!(done.iter().all(|span| span.start < span.end), "what computes takes time");
        assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start), "a rank does one thing after the other");
        assert_eq!(spans.iter().filter(|span| span.op == Op::Commit).count(), 1);
        for span in done {
            let key = (span.stage.0, span.microbatch);
            match span.op {
                Op::Forward => drop(forward.insert(key, *span)),
                Op::InputGrad | Op::FullBackward => drop(backward.insert(key, *span)),
                _ => {}
            }
        }
    }
    // Whatever the rank, nothing starts before what it needs has ended.
    let last = checked.schedule.stages - 1;
    for ((stage, m), span) in &forward {
        let before = stage.checked_sub(1).map(|before| forward[&(before, *m)]);
        assert!(before.is_none_or(|before| before.end <= span.start));
        let back = backward[&(*stage, *m)];
        let needed = if *stage == last { *span } else { backward[&(stage + 1, *m)] };
        assert!(needed.end <= back.start);
    }
}

#[test]
fn split_backwards() {
    holds(zb_v::<2, 4>(), &[1, 1, 1, 1], "copied");
}

#[test]
fn full_backwards() {
    holds(one_f_one_b::<2, 4>(), &[2, 2], "direct");
}

#[test]
fn groups_are_told_as_their_members() {
    holds(zb_v::<2, 4>(), &[1, 1, 1, 1], "coalesced:2");
}
