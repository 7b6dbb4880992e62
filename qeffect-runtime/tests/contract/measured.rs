//! Measured steps: the same bits as ever, every action once and in its order, on one clock for all ranks.

use crate::common::batch;
use crate::common::how::{HOW, How};
use crate::common::settings::small;
use crate::common::spans::one_clock;
use qeffect_core::bind::GradientChoice;
use qeffect_core::plan::Checked;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::gpt::GptStage;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::{one_f_one_b, zb_v};

fn session(checked: &Checked, blocks: &[usize], gradients: GradientChoice, how: How) -> Session<GptStage> {
    let config = small("fp8-delayed:history=4");
    let optim = OptimConfig { steps: 20, ..OptimConfig::default() };
    let told = SessionConfig { gradients: gradients.gradients, ..SessionConfig::new(optim, config.tokens()) };
    let stages = config.stages(blocks).unwrap();
    how.session(checked.clone(), stages, told, || Box::new(CpuDevice::new())).unwrap()
}

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
