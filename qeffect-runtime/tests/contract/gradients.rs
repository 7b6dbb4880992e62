//! Gradients of the whole model, op by op, against finite differences in f64; and those of a step against those of its
//! microbatches.

use std::collections::BTreeMap;

use crate::common::how::HOW;
use crate::common::settings::small;
use crate::common::{Solo, batch};
use qeffect_core::bind::Gradients;
use qeffect_core::plan::Checked;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::rng;
use qeffect_runtime::session::{GradDtype, Session, SessionConfig};
use qeffect_runtime::stage::{ParamKind, Stage};
use qeffect_schedules::{zb_h1, zb_v};

/// Every parameter reaches the loss through different ops, so its gradient checks their backward: norms, attention, GELU,
/// residual sums, embeddings, cross-entropy, and every linear layer. The second has sequences of one token, the third sizes
/// that are no multiples of anything.
#[test]
fn gradients_equal_finite_differences() {
    let config = small("f64");
    let one = GptConfig { hidden: 6, heads: 2, ffn: 5, seq: 1, sequences: 3, ..config };
    let odd = GptConfig { vocab: 11, hidden: 9, heads: 3, ffn: 7, seq: 7, ..config };
    for config in [config, one, odd] {
        equal_finite_differences(&config);
    }
}

fn equal_finite_differences(config: &GptConfig) {
    let (microbatches, step) = (2, 1e-5);
    let mut solo = Solo::new(config, &[1, 2, 1], microbatches, OptimConfig::default());
    // Away from the start, where biases are zero and gains one.
    let paths = solo.paths();
    for path in &paths {
        let stream = rng::name(path);
        let values: Vec<f64> = solo.shard.param(path).unwrap();
        let moved: Vec<f64> =
            values.iter().enumerate().map(|(i, x)| x + 0.15 * rng::normal(3, stream, i as u64)).collect();
        solo.shard.set_param(path, &moved).unwrap();
    }
    solo.shard.prologue().unwrap();
    let data = batch(config, 0, microbatches);

    solo.begin(&data);
    for m in 0..microbatches {
        let tapes = solo.forward(m);
        let works = solo.input_grad(m, tapes);
        solo.weight_grad(m, works);
    }
    for stage in 0..solo.stages {
        solo.shard.reduce(qeffect_core::ids::Stage(stage)).unwrap();
    }
    let losses = solo.shard.losses().unwrap();
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    assert_eq!(solo.evaluate(&data), mean, "evaluation computes the same loss");

    let mut checked = 0;
    for path in &paths {
        let values = solo.shard.param(path).unwrap();
        let gradient = solo.shard.gradient(path).unwrap();
        let norm = (gradient.iter().map(|x| x * x).sum::<f64>() / gradient.len() as f64).sqrt();
        assert!(norm > 1e-6, "`{path}` does not reach the loss");
        for pick in 0..6 {
            let index = rng::below(rng::draw(&[pick, rng::name(path)]), values.len() as u64) as usize;
            let mut at = |delta: f64| {
                let mut moved = values.clone();
                moved[index] += delta;
                solo.shard.set_param(path, &moved).unwrap();
                solo.evaluate(&data)
            };
            // Fourth order: the error is of the order of step^4.
            let difference = (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
            let error = (difference - gradient[index]).abs();
            assert!(error < 1e-9 + 1e-6 * norm, "`{path}`[{index}]: {difference} and {}", gradient[index]);
            checked += 1;
        }
        solo.shard.set_param(path, &values).unwrap();
    }
    assert_eq!(checked, paths.len() * 6);
}

/// The same bits however the model is cut, in every recipe.
#[test]
fn cutting_the_model_changes_no_bit() {
    let optim = OptimConfig { steps: 6, warmup: 2, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
    for recipe in ["f32", "bf16", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step", "fp8-delayed:head=bf16"]
    {
        let config = small(recipe);
        let mut runs = [&[4][..], &[2, 2], &[1, 1, 1, 1], &[0, 3, 1, 0]].map(|blocks| {
            let mut solo = Solo::new(&config, blocks, 3, optim);
            let losses: Vec<(u64, u64)> = (0..6)
                .map(|step| {
                    let (loss, verdict) = solo.step(&batch(&config, step, 3));
                    assert!(verdict.commit);
                    (loss.to_bits(), verdict.norm.to_bits())
                })
                .collect();
            (losses, solo.shard.export().unwrap())
        });
        let (first, rest) = runs.split_first_mut().unwrap();
        assert!(first.0[5].0 != first.0[0].0);
        for other in rest {
            assert_eq!(first.0, other.0, "{recipe}");
            assert_eq!(first.1.keys().collect::<Vec<_>>(), other.1.keys().collect::<Vec<_>>());
            for (name, value) in &first.1 {
                assert!(*value == other.1[name], "{recipe}: `{name}` differs");
            }
        }
    }
}

// Cases B19 and B26: in every mode and step the gradient of a parameter is the sum of what each microbatch gives that very
// parameter, added in order; so a replay neither keeps an alias of what the next one overwrites nor starts from what
// the last one left. Of parameters with equal shapes no two have the same gradient, so each has its own. In bf16 nothing
// but the weights is carried on, and they are put back before each step.
#[test]
fn gradients_of_a_step_are_sums_over_its_microbatches_by_name() {
    let config = small("bf16");
    let (checked, microbatches) = (zb_h1::<2, 4>(), 4);
    let optim = OptimConfig { steps: 3, ..OptimConfig::default() };
    let steps: Vec<BTreeMap<String, Vec<f64>>> = (0..3)
        .map(|step| {
            let mut sums = BTreeMap::new();
            for windows in batch(&config, step, microbatches) {
                let mut solo = Solo::new(&config, &[config.layers], 1, optim);
                solo.step(&[windows]);
                for path in solo.paths() {
                    let gradient = solo.shard.gradient(&path).unwrap();
                    let sum = sums.entry(path).or_insert_with(|| vec![0.0; gradient.len()]);
                    sum.iter_mut().zip(gradient).for_each(|(sum, x)| *sum = f64::from((*sum + x) as f32));
                }
            }
            sums.values_mut().flatten().for_each(|sum| *sum /= f64::from(microbatches));
            sums
        })
        .collect();
    let gradients: Vec<&Vec<f64>> = steps[0].values().collect();
    for (i, a) in gradients.iter().enumerate() {
        assert!(gradients[..i].iter().all(|b| a != b), "two parameters have one gradient");
    }
    for (gradients, how) in [Gradients::Copied, Gradients::Direct].into_iter().flat_map(|g| HOW.map(|how| (g, how))) {
        let session_config = SessionConfig { gradients, ..SessionConfig::new(optim, config.tokens()) };
        let stages = config.stages(&[3, 1]).unwrap();
        let mut session = how.session(checked.clone(), stages, session_config, || Box::new(CpuDevice::new())).unwrap();
        let start: BTreeMap<String, Vec<f64>> =
            steps[0].keys().map(|path| (path.clone(), session.param(path).unwrap())).collect();
        for (step, want) in steps.iter().enumerate() {
            session.set_params(start.clone()).unwrap();
            session.step(batch(&config, step as u64, microbatches)).unwrap();
            for (path, want) in want {
                assert!(session.gradient(path).unwrap() == *want, "{gradients:?}, {how:?}, step {step}: `{path}`");
            }
        }
    }
}

/// Gradients stored in bf16: the same bits in every mode, for every number of ranks and for every schedule with equal groups;
/// near those that are not rounded.
#[test]
fn gradients_in_bf16_are_rounded_once() {
    let config = small("fp8-delayed:history=4");
    let (gradients, steps) = (Gradients::Coalesced, 6);
    let optim = OptimConfig { steps, warmup: 2, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
    let run = |checked: Checked, capture, grad_dtype| {
        let stages = config.stages(&config.split(checked.schedule.stages as usize).unwrap()).unwrap();
        let told = SessionConfig { gradients, grad_dtype, capture, ..SessionConfig::new(optim, config.tokens()) };
        let mut session = Session::new(checked.coalesced(2).unwrap(), stages, told).unwrap();
        let reports: Vec<_> = (0..steps).map(|step| session.step(batch(&config, step, 4)).unwrap()).collect();
        let losses: Vec<f64> = reports.iter().flat_map(|report| report.losses.clone()).collect();
        let bytes: usize = reports[0].arena_bytes.iter().sum();
        (losses, session.snapshot().unwrap().values, session.gradient("blocks.0.fc1.weight").unwrap(), bytes)
    };
    let (exact, _, of_exact, bytes_of_exact) = run(zb_h1::<2, 4>().clone(), CaptureMode::Step, GradDtype::Master);
    let first = run(zb_h1::<2, 4>().clone(), CaptureMode::Eager, GradDtype::Bf16);
    for (checked, capture) in [
        (zb_h1::<2, 4>().clone(), CaptureMode::Action),
        (zb_h1::<2, 4>().clone(), CaptureMode::Step),
        (zb_v::<2, 4>().clone(), CaptureMode::Step),
        (zb_h1::build(1, 4).unwrap(), CaptureMode::Step),
    ] {
        let name = checked.schedule.name.clone();
        assert!(run(checked, capture, GradDtype::Bf16) == first, "{name}, {capture}");
    }
    let matrices: usize = config
        .stages(&[config.layers])
        .unwrap()
        .iter()
        .flat_map(|stage| stage.spec().params.iter())
        .filter(|param| param.kind == ParamKind::Matrix)
        .map(|param| param.rows * param.cols)
        .sum();
    assert_eq!(first.3 + 2 * matrices, bytes_of_exact);
    for (a, b) in first.0.iter().zip(&exact) {
        assert!((a - b).abs() < 2e-2 * b.abs(), "{a} and {b}");
    }
    let (norm, error) = first
        .2
        .iter()
        .zip(&of_exact)
        .fold((0.0, 0.0), |(norm, error), (a, b)| (norm + b * b, error + (a - b) * (a - b)));
    assert!(error < 0.15 * norm && error > 0.0, "{error} of {norm}");
}

#[test]
fn gradients_in_bf16_are_refused_where_they_are_not_rounded_once() {
    let refused = |recipe, gradients| {
        let config = small(recipe);
        let stages = config.stages(&config.split(2).unwrap()).unwrap();
        let told = SessionConfig {
            gradients,
            grad_dtype: GradDtype::Bf16,
            ..SessionConfig::new(OptimConfig::default(), config.tokens())
        };
        Session::new(zb_h1::<2, 4>().clone().coalesced(2).unwrap(), stages, told).err().unwrap().to_string()
    };
    let found = refused("fp8-delayed", Gradients::Direct);
    assert!(found.contains("they must be coalesced"), "{found}");
    let found = refused("f64", Gradients::Coalesced);
    assert!(found.contains("need masters in f32, recipe `f64` has others"), "{found}");
}
