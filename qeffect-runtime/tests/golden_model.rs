//! The whole model against PyTorch: loss, logits and every gradient of a step, and a training run of 20 steps.

mod common;
mod golden;

use common::Solo;
use golden::{Golden, TOLERANCE, relative_error};
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_runtime::data::Windows;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;

/// As in the script that made the files.
fn config(recipe: &str) -> GptConfig {
    let recipe = recipe.parse().unwrap();
    GptConfig { vocab: 64, hidden: 32, heads: 4, ffn: 64, layers: 4, seq: 16, sequences: 2, recipe }
}

const CURVE: OptimConfig = OptimConfig {
    steps: 20,
    warmup: 4,
    peak: 4e-3,
    floor: 4e-4,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip: 1.0,
};

fn started(golden: &Golden, recipe: &str, blocks: &[usize]) -> (Solo, Vec<Vec<Windows>>) {
    let config = config(recipe);
    let microbatches = 4;
    let mut solo = Solo::new(&config, blocks, microbatches, CURVE);
    let names = golden.names("param/");
    assert_eq!(names.len(), 2 + 4 * 12 + 3);
    for name in names {
        let values: Vec<f64> = golden.floats(&format!("param/{name}")).into_iter().map(f64::from).collect();
        solo.shard.set_param(&name, &values).unwrap();
    }
    solo.shard.prologue().unwrap();
    let (tokens, targets) = (golden.ids("tokens"), golden.ids("targets"));
    let windows: Vec<Windows> = tokens
        .chunks(config.tokens())
        .zip(targets.chunks(config.tokens()))
        .map(|(tokens, targets)| Windows { tokens: tokens.into(), targets: targets.into() })
        .collect();
    (solo, windows.chunks(microbatches as usize).map(<[Windows]>::to_vec).collect())
}

fn rounded(values: Vec<f64>) -> Vec<f32> {
    values.into_iter().map(|x| x as f32).collect()
}

#[test]
fn losses_logits_and_gradients_of_a_step() {
    let golden = Golden::open("model");
    for blocks in [&[4][..], &[1, 2, 1]] {
        let (mut solo, steps) = started(&golden, "f32", blocks);
        let [batch] = &steps[..] else { panic!("one step") };

        solo.shard.load(batch).unwrap();
        let mut x = None;
        for stage in 0..solo.stages {
            let y = solo.shard.evaluate(StageId(stage), Microbatch(0), x, false).unwrap();
            x.into_iter().for_each(|x| solo.shard.free(x).unwrap());
            x = y;
        }
        let logits = x.unwrap();
        golden.compare("logits", &rounded(solo.shard.reals(logits).unwrap()));
        solo.shard.free(logits).unwrap();

        let (loss, verdict) = solo.step(batch);
        golden.compare("losses", &rounded(solo.shard.losses().unwrap()));
        golden.compare("loss", &[loss as f32]);
        golden.compare("norm", &[verdict.norm as f32]);
        let names = golden.names("grad/");
        assert_eq!(names, golden.names("param/"));
        for name in names {
            let gradient = solo.shard.gradient(&name).unwrap();
            golden.compare(&format!("grad/{name}"), &rounded(gradient));
        }
    }
}

#[test]
fn learning_rates_of_a_run() {
    let golden = Golden::open("curve");
    let rates: Vec<f32> = (0..20).map(|t| CURVE.learning_rate(t)).collect();
    assert_eq!(rates, golden.floats("lr"));
}

/// Losses and norms of a run; the largest relative error of both, and of the final parameters.
fn run(recipe: &str) -> [f64; 3] {
    let golden = Golden::open("curve");
    let (mut solo, steps) = started(&golden, recipe, &[2, 2]);
    let (losses, norms) = (golden.floats("loss"), golden.floats("norm"));
    assert_eq!((steps.len(), losses.len()), (20, 20));
    assert!(losses[19] < 0.8 * losses[0], "the run learns something");
    let mut worst = [0f64; 3];
    for (step, batch) in steps.iter().enumerate() {
        let (loss, verdict) = solo.step(batch);
        assert!(verdict.commit);
        worst[0] = worst[0].max((loss / f64::from(losses[step]) - 1.0).abs());
        worst[1] = worst[1].max((verdict.norm / f64::from(norms[step]) - 1.0).abs());
    }
    for name in golden.names("final/") {
        let error =
            relative_error(&rounded(solo.shard.param(&name).unwrap()), &golden.floats(&format!("final/{name}")));
        worst[2] = worst[2].max(error);
    }
    println!("{recipe}: loss {:e}, norm {:e}, parameters {:e}", worst[0], worst[1], worst[2]);
    worst
}

#[test]
fn a_run_in_f32() {
    let [loss, norm, parameters] = run("f32");
    assert!(loss < TOLERANCE && norm < TOLERANCE, "{loss:e} {norm:e}");
    // AdamW divides by the root of small second moments: noise of the last bits grows.
    assert!(parameters < 2e-3, "{parameters:e}");
}

#[test]
fn a_run_in_bf16() {
    let [loss, ..] = run("bf16");
    assert!(loss < 0.01, "{loss:e}");
}

#[test]
fn a_run_in_fp8() {
    for recipe in ["fp8-delayed", "fp8-delayed:history=4", "fp8-delayed:update=step", "fp8-delayed:head=bf16"] {
        let [loss, ..] = run(recipe);
        assert!(loss < 0.03, "{recipe}: {loss:e}");
    }
}
