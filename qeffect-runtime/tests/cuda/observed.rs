//! What is told of a session on the GPU beside its results, and what may be chosen of its sums: nothing that is looked at
//! changes a bit, in any mode.

use std::time::Duration;

use qeffect_core::bind::Gradients;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::session::{FastAccumulation, Session, SessionConfig};
use qeffect_schedules::{zb_h1, zb_v};

use crate::common::batch;
use crate::common::spans::{COMPUTE, one_clock};
use crate::rig::beside_others;
use crate::sessions::{COMPARED, blocks, in_groups, session, wanted};
use crate::training::{MICROBATCHES, OPTIM, RECIPES, STEPS, Values, model, same};

/// However products of FP8 are summed, in every mode and on one rank or two; and each choice gives bits of its own.
#[test]
fn each_way_to_accumulate_gives_the_same_bits_in_every_mode() {
    let Some(_turn) = beside_others() else { return };
    let recipe = RECIPES[0].parse().unwrap();
    let config = GptConfig { vocab: 256, hidden: 512, heads: 8, ffn: 512, layers: 2, seq: 64, sequences: 2, recipe };
    let mut results: Vec<Values> = Vec::new();
    for fast_accumulation in FastAccumulation::ALL {
        let mut first: Option<(Vec<Vec<f64>>, Values)> = None;
        for (ranks, capture) in [1, 2].into_iter().flat_map(|ranks| CaptureMode::ALL.map(|capture| (ranks, capture))) {
            let checked = zb_h1::build(ranks, i64::from(MICROBATCHES)).unwrap();
            let stages = config.stages(&blocks(&config, checked.schedule.stages)).unwrap();
            let session_config = SessionConfig {
                gradients: Gradients::Direct,
                fast_accumulation,
                capture,
                ..SessionConfig::new(OPTIM, config.tokens())
            };
            let device = Box::new(CudaDevice::new(0).unwrap());
            let mut session = Session::on_one_device(checked, stages, session_config, device).unwrap();
            let losses = (0..6).map(|step| session.step(batch(&config, step, MICROBATCHES)).unwrap().losses).collect();
            let values = session.snapshot().unwrap().values;
            let what = format!("{fast_accumulation}, {ranks} ranks, {capture}");
            let (wanted, values_of_first) = first.get_or_insert_with(|| (Vec::clone(&losses), values.clone()));
            assert_eq!(*wanted, losses, "{what}");
            same(values_of_first, &values, &what);
        }
        results.extend(first.map(|(_, values)| values));
    }
    assert!(results[0] != results[1] && results[1] != results[2], "sums in fewer bits are other sums");
}

/// Steps in which casts are counted have the bits of the others, and count the same in every mode.
#[test]
fn counting_what_casts_lose_changes_nothing_in_any_mode() {
    let Some(_turn) = beside_others() else { return };
    let config = model(RECIPES[0]);
    let wanted = wanted(&config, Gradients::Direct);
    let mut first = None;
    for capture in CaptureMode::ALL {
        let device = Box::new(CudaDevice::new(0).unwrap());
        let mut session = session(&config, zb_v::<2, 4>().clone(), (Gradients::Direct, capture), device).unwrap();
        let mut told = Vec::new();
        for step in 0..STEPS {
            let batch = batch(&config, step, MICROBATCHES);
            let report = if step % 3 == 1 {
                let (report, cells) = session.step_health(batch).unwrap();
                assert!(cells.iter().all(|cell| cell.elements > 0 && cell.not_finite == 0 && !cell.frozen));
                told.push(cells);
                report
            } else {
                session.step(batch).unwrap()
            };
            assert_eq!(report.losses, wanted.losses[step as usize], "{capture}, step {step}");
            if COMPARED.contains(&step) {
                let values = session.snapshot().unwrap().values;
                same(&wanted.values[&step], &values, &format!("{capture}, step {step}"));
            }
        }
        assert!(*first.get_or_insert_with(|| told.clone()) == told, "{capture}: other counts");
    }
}

/// The bits of any other step; every action once, in the order of its rank, and on a GPU that ranks share one at a time.
#[test]
fn measured_steps_time_every_action_on_the_gpu() {
    let Some(_turn) = beside_others() else { return };
    let config = model(RECIPES[0]);
    for gradients in [Gradients::Direct, Gradients::Coalesced] {
        let wanted = wanted(&config, gradients);
        let checked = in_groups(zb_v::<2, 4>().clone(), gradients);
        for capture in CaptureMode::ALL {
            let device = Box::new(CudaDevice::new(0).unwrap());
            let mut session = session(&config, checked.clone(), (gradients, capture), device).unwrap();
            for step in 0..STEPS {
                let what = format!("{gradients:?}, {capture}, step {step}");
                let batch = batch(&config, step, MICROBATCHES);
                let report = if [1, 2, 7].contains(&step) {
                    let (report, ranks) = session.step_measured(batch).unwrap();
                    one_clock(&checked, &ranks);
                    let ends = ranks.iter().flatten().map(|span| span.end).max().unwrap();
                    assert!(ends <= report.wall, "{what}: {ends:?} of {:?}", report.wall);
                    let computing = ranks.iter().flatten().filter(|span| COMPUTE.contains(&span.op));
                    let mut computing: Vec<_> = computing.map(|span| (span.start, span.end)).collect();
                    computing.sort_unstable();
                    assert!(computing.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{what}: one at a time");
                    let busy: Duration = computing.iter().map(|(start, end)| *end - *start).sum();
                    println!("{what}: {busy:?} of {:?} in {} actions", report.wall, computing.len());
                    assert!(busy <= report.wall, "{what}");
                    report
                } else {
                    session.step(batch).unwrap()
                };
                assert_eq!(report.losses, wanted.losses[step as usize], "{what}");
                if COMPARED.contains(&step) {
                    same(&wanted.values[&step], &session.snapshot().unwrap().values, &what);
                }
            }
        }
    }
}
