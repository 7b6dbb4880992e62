//! Every schedule of the library against the unsplit model, one microbatch after the other: the same
//! bits, whatever the schedule and the number of ranks.

mod common;

use common::{Solo, batch};
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig, Snapshot};
use qeffect_schedules::library;

const MICROBATCHES: u32 = 4;
/// With a history of 4, every amax of the first steps has left its window long before the end.
const STEPS: u64 = 20;
const OPTIM: OptimConfig = OptimConfig {
    steps: STEPS,
    warmup: 3,
    peak: 3e-3,
    floor: 3e-4,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip: 1.0,
};

/// Eight blocks, so that four ranks with two stages each have one per stage.
fn model(recipe: &str) -> GptConfig {
    GptConfig { layers: 8, ..common::small(recipe) }
}

/// What a step says: its loss and the norm of its gradient, as bits.
type Said = Vec<(u64, u64)>;

fn unsplit(config: &GptConfig, steps: u64) -> (Said, Snapshot) {
    let mut solo = Solo::new(config, &[config.layers], MICROBATCHES, OPTIM);
    let said = (0..steps)
        .map(|step| {
            let (loss, verdict) = solo.step(&batch(config, step, MICROBATCHES));
            assert!(verdict.commit);
            (loss.to_bits(), verdict.norm.to_bits())
        })
        .collect();
    (said, Snapshot { values: solo.shard.export().unwrap(), versions: Vec::new() })
}

fn compare(name: &str, found: &(Said, Snapshot), wanted: &(Said, Snapshot)) {
    assert_eq!(found.0, wanted.0, "{name}: losses and norms");
    assert!(found.1.values.keys().eq(wanted.1.values.keys()), "{name}: names");
    for (path, value) in &wanted.1.values {
        assert!(found.1.values[path] == *value, "{name}: `{path}` differs");
    }
}

#[test]
fn every_schedule_gives_the_bits_of_the_unsplit_model() {
    for recipe in ["fp8-delayed:history=4", "fp8-delayed:history=4,update=step", "bf16"] {
        let config = model(recipe);
        let wanted = unsplit(&config, STEPS);
        assert!(wanted.0[STEPS as usize - 1].0 != wanted.0[0].0, "{recipe}: it learns something");
        let mut runs = 0;
        for entry in library().iter().filter(|entry| !entry.eval) {
            for ranks in [1, 2, 4] {
                let name = format!("{recipe}, {} on {ranks} ranks", entry.name);
                let checked = entry.checked(ranks, i64::from(MICROBATCHES)).unwrap().into_owned();
                let stages = config.stages(&config.split(checked.schedule.stages as usize).unwrap()).unwrap();
                let session =
                    SessionConfig { optim: OPTIM, tokens: config.tokens(), seed: 1, allow_order_dependent: false };
                let mut session = Session::new(checked, stages, session).unwrap();
                let evaluation = entry.evaluation().checked(ranks, i64::from(MICROBATCHES)).unwrap().into_owned();
                let evaluation = session.evaluation(evaluation).unwrap();
                let mut said = Vec::new();
                for step in 0..STEPS {
                    let report = session.step(batch(&config, step, MICROBATCHES)).unwrap();
                    assert_eq!((report.step, report.epoch, report.skipped), (step, step + 1, false), "{name}");
                    said.push((report.loss.to_bits(), report.grad_norm.to_bits()));
                    if step == 7 {
                        // A look at other data in between changes nothing.
                        session.evaluate(&evaluation, batch(&config, 1000, MICROBATCHES)).unwrap();
                    }
                }
                let snapshot = session.snapshot().unwrap();
                for version in &snapshot.versions {
                    assert_eq!((version.weights(), version.cache()), (STEPS, Some(STEPS - 1)), "{name}");
                }
                compare(&name, &(said, snapshot), &wanted);
                runs += 1;
            }
        }
        assert_eq!(runs, 15);
    }
}
