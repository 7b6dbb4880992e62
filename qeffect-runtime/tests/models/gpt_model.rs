//! The whole model against PyTorch in float32: every gradient of one step, and a training run of 20; sizes and cuts that
//! it does not take.

use crate::common::Solo;
use crate::common::settings::{adamw, small};
use crate::golden::{Golden, relative_error};
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::recipe::Recipe;
use qeffect_runtime::data::Windows;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;

const MICROBATCHES: u32 = 4;
const STEPS: u64 = 20;

/// What `scripts/goldens.py` fixes.
fn config(recipe: &str) -> GptConfig {
    let recipe = recipe.parse().unwrap();
    GptConfig { vocab: 64, hidden: 32, heads: 4, ffn: 64, layers: 4, seq: 16, sequences: 2, recipe }
}

fn optim() -> OptimConfig {
    adamw(STEPS, 4, 4e-3, 4e-4)
}

/// The model, with the golden file's parameters.
fn load(golden: &Golden, config: &GptConfig) -> Solo {
    let mut solo = Solo::new(config, &[1, 1, 1, 1], MICROBATCHES, optim());
    assert_eq!(golden.names("param/"), paths(&solo), "the same parameters, no more and no fewer");
    for path in paths(&solo) {
        let values: Vec<f64> = golden.floats(&format!("param/{path}")).into_iter().map(f64::from).collect();
        solo.shard.set_param(&path, &values).unwrap();
    }
    solo.shard.prologue().unwrap();
    solo
}

/// Names of all parameters, ascending.
fn paths(solo: &Solo) -> Vec<String> {
    let mut paths = solo.paths();
    paths.sort();
    paths
}

/// The batch of each step.
fn batches(golden: &Golden, config: &GptConfig) -> Vec<Vec<Windows>> {
    let (tokens, targets) = (golden.ids("tokens"), golden.ids("targets"));
    let microbatches: Vec<Windows> = tokens
        .chunks_exact(config.tokens())
        .zip(targets.chunks_exact(config.tokens()))
        .map(|(tokens, targets)| Windows { tokens: tokens.to_vec(), targets: targets.to_vec() })
        .collect();
    microbatches.chunks_exact(MICROBATCHES as usize).map(<[Windows]>::to_vec).collect()
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|x| *x as f32).collect()
}

#[test]
fn every_gradient_of_one_step() {
    let golden = Golden::open("model");
    let config = config("f32");
    let mut solo = load(&golden, &config);
    let batch = &batches(&golden, &config)[0];

    solo.shard.load(batch).unwrap();
    let mut x = Vec::new();
    for stage in 0..solo.stages {
        let y = solo.shard.evaluate(StageId(stage), Microbatch(0), &x, false).unwrap();
        x.into_iter().for_each(|x| solo.shard.free(x).unwrap());
        x = y;
    }
    let [logits] = x[..] else { panic!("the last stage gives logits") };
    golden.compare("logits", &narrow(&solo.shard.reals(logits).unwrap()));
    solo.shard.free(logits).unwrap();

    let (loss, verdict) = solo.step(batch);
    golden.compare("losses", &narrow(&solo.shard.losses().unwrap()));
    golden.compare("loss", &[loss as f32]);
    golden.compare("norm", &[verdict.norm as f32]);
    for path in paths(&solo) {
        let gradient = solo.shard.gradient(&path).unwrap();
        golden.compare(&format!("grad/{path}"), &narrow(&gradient));
    }
}

/// Runs the golden training run; the largest relative difference of any step's loss must not exceed `bound`.
fn train(recipe: &str, bound: f64) -> (Golden, Solo) {
    let golden = Golden::open("curve");
    let config = config(recipe);
    let rates: Vec<f32> = (0..STEPS).map(|t| optim().learning_rate(t)).collect();
    assert_eq!(golden.floats("lr"), rates);

    let mut solo = load(&golden, &config);
    let want = golden.floats("loss");
    assert!(want[19] < 0.8 * want[0], "the golden loss falls");
    let mut worst = 0.0f64;
    for (step, batch) in batches(&golden, &config).iter().enumerate() {
        let (loss, verdict) = solo.step(batch);
        assert!(verdict.commit, "{recipe}: step {step} is committed");
        let error = (loss - f64::from(want[step])).abs() / f64::from(want[step]);
        assert!(error <= bound, "{recipe}: step {step} has loss {loss}, PyTorch {}", want[step]);
        worst = worst.max(error);
    }
    println!("{recipe}: losses within {:.4} % of PyTorch's", 100.0 * worst);
    (golden, solo)
}

#[test]
fn training_in_f32_ends_at_the_same_parameters() {
    let (golden, mut solo) = train("f32", 1e-4);
    for path in paths(&solo) {
        let mut got = narrow(&solo.shard.param(&path).unwrap());
        let mut want = golden.floats(&format!("final/{path}"));
        if path.ends_with("qkv.bias") {
            // A key's bias moves nothing; its gradient is rounding noise, which AdamW turns into steps.
            let hidden = want.len() / 3;
            got.drain(hidden..2 * hidden);
            want.drain(hidden..2 * hidden);
        }
        let error = relative_error(&got, &want);
        assert!(error <= 1e-4, "`{path}` is off by {error:e} of its largest element after {STEPS} steps");
    }
}

#[test]
fn training_in_bf16_follows_float32() {
    train("bf16", 0.01);
}

#[test]
fn training_in_fp8_follows_float32() {
    for recipe in ["fp8-delayed", "fp8-delayed:history=4", "fp8-delayed:update=step", "fp8-delayed:head=bf16"] {
        train(recipe, 0.03);
    }
}

// case B46: sizes that a weight gradient in FP8 cannot take are refused when the model is made.
#[test]
fn sizes_that_do_not_fit_fp8_are_refused() {
    for (tokens, fits) in [(8, false), (16, true), (24, false), (32, true), (40, false)] {
        let mut config = small("fp8-delayed");
        (config.seq, config.sequences) = (tokens, 1);
        assert_eq!(config.stages(&[4]).is_ok(), fits, "{tokens} tokens");
    }
    let mut config = small("fp8-delayed");
    config.ffn = 24;
    let message = config.stages(&[4]).unwrap_err().to_string();
    assert_eq!(message, "model: products in FP8 need `ffn` to be a multiple of 16, found 24");
    config.recipe = Recipe::Bf16;
    assert!(config.stages(&[4]).is_ok());
    config.vocab = 24;
    config.ffn = 64;
    config.recipe = "fp8-delayed:head=bf16".parse().unwrap();
    assert!(config.stages(&[4]).is_ok());
    config.recipe = Recipe::fp8_delayed();
    assert!(config.stages(&[4]).is_err());
}

#[test]
fn cuts_that_leave_a_stage_empty_are_refused() {
    let config = small("f32");
    assert_eq!(config.split(3).unwrap(), [2, 1, 1]);
    assert!(config.split(0).is_err() && config.split(5).is_err());
    assert_eq!(config.stages(&[2, 0, 2]).unwrap_err().to_string(), "stage 1 holds nothing");
    assert_eq!(config.stages(&[2, 1]).unwrap_err().to_string(), "the stages hold 3 blocks, the model has 4");
    assert!(config.stages(&[0, 4, 0]).is_ok() && config.stages(&[]).is_err());
}
