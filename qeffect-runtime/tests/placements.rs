//! Placements of gradients: `direct` gives the bits of `copied` wherever `bind` lets it.
//!
//! The reference is one stage on one rank without plan, ledger, threads or messages, with a slot per microbatch.

mod common;

use std::collections::BTreeMap;

use common::{Solo, batch};
use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::plan::Checked;
use qeffect_core::recipe::Recipe;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::shard::Named;
use qeffect_schedules::{further, library};

const STEPS: u64 = 6;
const MICROBATCHES: u32 = 4;

const OPTIM: OptimConfig = OptimConfig {
    steps: STEPS,
    warmup: 2,
    peak: 8e-3,
    floor: 1e-3,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip: 1.0,
};

const RECIPES: [&str; 3] = ["fp8-delayed:history=4,update=microbatch", "fp8-delayed:history=4,update=step", "bf16"];

fn model(recipe: &str) -> GptConfig {
    let recipe: Recipe = recipe.parse().unwrap();
    GptConfig { vocab: 32, hidden: 16, heads: 2, ffn: 32, layers: 4, seq: 8, sequences: 2, recipe }
}

/// What a run leaves: per step the norm, at the end every value by name.
#[derive(PartialEq, Debug)]
struct Trace {
    norms: Vec<u64>,
    values: BTreeMap<String, Named>,
}

fn solo(config: &GptConfig, gradients: Gradients) -> Trace {
    let mut solo = Solo::with_gradients(config, &[config.layers], MICROBATCHES, OPTIM, gradients);
    let steps = (0..STEPS).map(|step| solo.step(&batch(config, step, MICROBATCHES)).1.norm.to_bits());
    let norms = steps.collect();
    Trace { norms, values: solo.shard.export().unwrap() }
}

fn run(config: &GptConfig, checked: Checked, gradients: Gradients) -> Result<Trace, qeffect_runtime::error::Error> {
    let stages = config.stages(&config.split(checked.schedule.stages as usize)?)?;
    let session_config = SessionConfig { gradients, ..SessionConfig::new(OPTIM, config.tokens()) };
    let mut session = Session::new(checked, stages, session_config)?;
    let mut norms = Vec::new();
    for step in 0..STEPS {
        norms.push(session.step(batch(config, step, MICROBATCHES))?.grad_norm.to_bits());
    }
    Ok(Trace { norms, values: session.snapshot()?.values })
}

/// Every training schedule of the library on 1, 2 and 4 ranks, as far as the model has blocks for its stages.
fn schedules(layers: u32) -> Vec<(String, Checked)> {
    let mut all = Vec::new();
    let entries = library().iter().chain(further()).filter(|entry| !entry.eval);
    for entry in entries {
        for ranks in [1, 2, 4] {
            let Ok(checked) = entry.checked(ranks, i64::from(MICROBATCHES)) else { continue };
            let checked = checked.into_owned();
            if checked.schedule.stages <= layers && !checked.order_dependent {
                all.push((format!("{} on {ranks} ranks", entry.name), checked));
            }
        }
    }
    all
}

// case B13, case B55: the first executed W overwrites, every other one adds.
#[test]
fn direct_gives_the_bits_of_copied() {
    for recipe in RECIPES {
        let config = model(recipe);
        let want = solo(&config, Gradients::Copied);
        assert_eq!(solo(&config, Gradients::Direct), want, "{recipe}");
        let (mut same, mut refused) = (0, 0);
        for (name, checked) in schedules(4) {
            match run(&config, checked, Gradients::Direct) {
                Ok(found) => {
                    assert!(found == want, "{recipe}, {name}");
                    same += 1;
                }
                Err(error) => {
                    assert_eq!(error.code(), Some(Code::GradientsUnsupported), "{recipe}, {name}: {error}");
                    refused += 1;
                }
            }
        }
        assert!(same >= 12, "{same} schedules ran, {refused} were refused");
    }
}
