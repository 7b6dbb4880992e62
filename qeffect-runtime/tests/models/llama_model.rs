//! The Llama: every gradient of a step against PyTorch in float32 and against finite differences in f64, at odd sizes, and
//! the same bits for every schedule, mode and cut.

use std::collections::BTreeMap;

use crate::common::how::{HOW, How};
use crate::golden::Golden;
use qeffect_core::plan::Checked;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::llama::{LlamaConfig, LlamaStage};
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::rng;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::stage::Stage;
use qeffect_schedules::{eval_loop, eval_v, gpipe, interleaved_1f1b, one_f_one_b, zb_h1, zb_v};

const MICROBATCHES: u32 = 4;

fn session(config: &LlamaConfig, checked: &Checked, blocks: &[usize], how: How) -> Session<LlamaStage> {
    let optim = OptimConfig { steps: 40, warmup: 2, peak: 8e-3, floor: 1e-3, ..OptimConfig::default() };
    let stages = config.stages(blocks).unwrap();
    let told = SessionConfig::new(optim, config.tokens());
    how.session(checked.clone(), stages, told, || Box::new(CpuDevice::new())).unwrap()
}

fn paths(config: &LlamaConfig) -> Vec<String> {
    let stages = config.stages(&[config.layers]).unwrap();
    let mut paths: Vec<String> = stages[0].spec().params.iter().map(|param| param.path.clone()).collect();
    paths.sort();
    paths
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|x| *x as f32).collect()
}

/// What `scripts/goldens.py` fixes.
fn golden_config(layers: usize, tied: bool) -> LlamaConfig {
    LlamaConfig {
        vocab: 64,
        hidden: 24,
        heads: 6,
        kv_heads: 2,
        ffn: 40,
        layers,
        seq: 13,
        sequences: 2,
        rotary_base: 500.0,
        tied,
        recipe: "f32".parse().unwrap(),
    }
}

/// One step of the model of a golden file: logits of an evaluation, losses, the norm, and every gradient.
fn is_that_of_pytorch(golden: &Golden, config: &LlamaConfig, session: &mut Session<LlamaStage>, evaluated: Checked) {
    let mut paths = paths(config);
    if config.tied {
        paths.retain(|path| path != "head.weight"); // it is `wte`
    }
    assert_eq!(golden.names("param/"), paths, "the same parameters, no more and no fewer");
    let value = |path: &String| golden.floats(&format!("param/{path}")).into_iter().map(f64::from).collect();
    session.set_params(paths.iter().map(|path| (path.clone(), value(path))).collect()).unwrap();
    let (tokens, targets) = (golden.ids("tokens"), golden.ids("targets"));
    let rows = tokens.chunks_exact(config.tokens()).zip(targets.chunks_exact(config.tokens()));
    let batch: Vec<Windows> =
        rows.map(|(tokens, targets)| Windows { tokens: tokens.to_vec(), targets: targets.to_vec() }).collect();

    let evaluation = session.evaluation(evaluated).unwrap();
    golden.compare("logits", &narrow(&session.logits(&evaluation, batch.clone()).unwrap()[0]));
    let report = session.step(batch).unwrap();
    golden.compare("losses", &narrow(&report.losses));
    golden.compare("norm", &[report.grad_norm as f32]);
    for path in &paths {
        golden.compare(&format!("grad/{path}"), &narrow(&session.gradient(path).unwrap()));
    }
    if config.tied {
        assert_eq!(session.gradient("head.weight").unwrap(), session.gradient("wte").unwrap());
    }
}

#[test]
fn every_gradient_of_one_step_is_that_of_pytorch() {
    let config = golden_config(3, false);
    let mut session = session(&config, zb_v::<2, 4>(), &[0, 1, 2, 0], How::STEP);
    is_that_of_pytorch(&Golden::open("llama"), &config, &mut session, eval_v::<2, 4>().clone());
}

/// The ends of the tie on two ranks, and on one.
#[test]
fn every_gradient_of_a_tied_model_is_that_of_pytorch() {
    let (golden, config) = (Golden::open("llama_tied"), golden_config(2, true));
    let mut across = session(&config, zb_h1::<2, 4>(), &[1, 1], How::STEP);
    is_that_of_pytorch(&golden, &config, &mut across, eval_loop::build(2, 4, 1).unwrap());
    let mut within = session(&config, zb_v::<2, 4>(), &[0, 1, 1, 0], How::OneDevice);
    is_that_of_pytorch(&golden, &config, &mut within, eval_v::<2, 4>().clone());
}

fn batch(config: &LlamaConfig, step: u64) -> Vec<Windows> {
    let token = |m: u32, i: usize| {
        let u = rng::uniform(rng::draw(&[3, step, u64::from(m), i as u64]));
        (u * u * config.vocab as f64) as u32
    };
    let ids = |m: u32, shift: usize| (0..config.tokens()).map(|i| token(m, i + shift)).collect();
    (0..MICROBATCHES).map(|m| Windows { tokens: ids(m, 0), targets: ids(m, 1) }).collect()
}

/// A sequence of one token, lengths and widths that are no multiples of anything, one head of keys for all. Case B13: a tied
/// gradient is the sum of both ends.
#[test]
fn gradients_equal_finite_differences_at_odd_sizes() {
    for (seq, heads, kv_heads, head_dim, tied) in [(1, 2, 1, 2, false), (5, 3, 3, 2, true), (7, 4, 1, 6, false)] {
        let config = LlamaConfig {
            vocab: 11,
            hidden: heads * head_dim,
            heads,
            kv_heads,
            ffn: 5,
            layers: 2,
            seq,
            sequences: 3,
            rotary_base: 50.0,
            tied,
            recipe: "f64".parse().unwrap(),
        };
        let batch = batch(&config, 0);
        let mut session = session(&config, one_f_one_b::<2, 4>(), &[1, 1], How::EAGER);
        let evaluation = session.evaluation(eval_loop::build(2, 4, 1).unwrap()).unwrap();
        let values = |path: &str, elements: usize| -> Vec<f64> {
            let norm = if path.ends_with("norm.weight") { 1.0 } else { 0.0 };
            (0..elements as u64).map(|i| norm + 0.4 * rng::normal(7, rng::name(path), i)).collect()
        };
        let mut paths = paths(&config);
        if tied {
            paths.retain(|path| path != "head.weight"); // it is `wte`
        }
        let mut params: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for path in &paths {
            params.insert(path.clone(), values(path, session.param(path).unwrap().len()));
        }
        session.set_params(params.clone()).unwrap();
        let report = session.step(batch.clone()).unwrap();
        let gradients: Vec<Vec<f64>> = paths.iter().map(|path| session.gradient(path).unwrap()).collect();
        let norm = gradients.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
        assert!((report.grad_norm - norm).abs() < 1e-12 * norm, "a tied gradient counts once");
        for (path, gradient) in paths.iter().zip(gradients) {
            let norm = (gradient.iter().map(|x| x * x).sum::<f64>() / gradient.len() as f64).sqrt();
            // One token attends to itself alone: whatever its query and key are, it takes the whole of its value.
            assert!(norm > 1e-6, "seq {seq}: `{path}` does not reach the loss");
            for pick in 0..4 {
                let index = rng::below(rng::draw(&[pick, rng::name(path)]), gradient.len() as u64) as usize;
                let mut at = |delta: f64| {
                    let mut moved = params.clone();
                    moved.entry(path.clone()).and_modify(|values| values[index] += delta);
                    session.set_params(moved).unwrap();
                    let losses = session.evaluate(&evaluation, batch.clone()).unwrap();
                    losses.iter().sum::<f64>() / losses.len() as f64
                };
                let step = 1e-4;
                let difference = (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
                let error = (difference - gradient[index]).abs();
                assert!(error < 1e-9 + 1e-6 * norm, "`{path}`[{index}]: {difference} and {}", gradient[index]);
            }
        }
    }
}

fn trained(config: &LlamaConfig, checked: &Checked, blocks: &[usize], how: How) -> (Vec<u64>, Vec<(String, Vec<u8>)>) {
    let mut session = session(config, checked, blocks, how);
    let mut numbers = Vec::new();
    for step in 0..8 {
        let report = session.step(batch(config, step % 2)).unwrap();
        numbers.extend(report.losses.iter().copied().chain([report.grad_norm]).map(f64::to_bits));
    }
    if config.tied {
        assert_eq!(session.param("wte").unwrap(), session.param("head.weight").unwrap());
        assert_eq!(session.gradient("wte").unwrap(), session.gradient("head.weight").unwrap());
    }
    let values = session.snapshot().unwrap().values.into_iter().map(|(name, value)| (name, value.bytes));
    (numbers, values.collect())
}

// Case B40: ends of a tie on one rank or on two end with the same gradients and weights, whatever the order.
#[test]
fn every_schedule_gives_the_bits_of_the_uncut_model() {
    let recipes = ["fp8-delayed:history=4", "fp8-delayed:history=4,update=step", "bf16"];
    for (recipe, tied) in recipes.into_iter().flat_map(|recipe| [(recipe, false), (recipe, true)]) {
        let config = LlamaConfig {
            vocab: 32,
            hidden: 32,
            heads: 4,
            kv_heads: 2,
            ffn: 48,
            layers: 4,
            seq: 8,
            sequences: 2,
            rotary_base: 1e4,
            tied,
            recipe: recipe.parse().unwrap(),
        };
        let want = trained(&config, one_f_one_b::<1, 4>(), &[4], How::EAGER);
        let loss = |step: usize| f64::from_bits(want.0[5 * step]);
        assert!(loss(6) < loss(0), "{recipe}, tied: {tied}: it learns, the batch is the same");
        let runs: [(&Checked, &[usize]); 5] = [
            (zb_v::<2, 4>(), &[0, 1, 3, 0]),
            (zb_h1::<2, 4>(), &[3, 1]),
            (gpipe::<4, 4>(), &[1, 1, 2, 0]),
            (one_f_one_b::<4, 4>(), &[0, 2, 1, 1]),
            (&interleaved_1f1b::build(2, 4, 2).unwrap(), &[1, 1, 1, 1]),
        ];
        for (checked, blocks) in runs {
            for how in HOW {
                let found = trained(&config, checked, blocks, how);
                assert!(found == want, "{recipe}, tied: {tied}, {}, {how:?}", checked.schedule.name);
            }
        }
    }
}

#[test]
fn a_size_that_does_not_fit_is_named() {
    let config = LlamaConfig {
        vocab: 32,
        hidden: 32,
        heads: 4,
        kv_heads: 2,
        ffn: 48,
        layers: 1,
        seq: 8,
        sequences: 2,
        rotary_base: 1e4,
        tied: false,
        recipe: "fp8-delayed".parse().unwrap(),
    };
    let refused = |change: fn(&mut LlamaConfig)| {
        let mut config = config;
        change(&mut config);
        config.stages(&[1]).unwrap_err().to_string()
    };
    assert!(config.stages(&[1]).is_ok());
    assert!(refused(|c| c.kv_heads = 3).contains("3 heads of keys and values do not divide 4 heads"));
    assert!(refused(|c| c.hidden = 34).contains("4 heads do not divide a hidden size of 34"));
    assert!(refused(|c| c.hidden = 40).contains("`hidden` to be a multiple of 16, found 40"));
    assert!(refused(|c| c.ffn = 40).contains("`ffn` to be a multiple of 16, found 40"));
    assert!(refused(|c| c.seq = 7).contains("`seq · sequences` to be a multiple of 16, found 14"));
    assert!(refused(|c| c.vocab = 33).contains("`vocab` to be a multiple of 16, found 33"));
    assert!(refused(|c| (c.hidden, c.heads, c.kv_heads) = (48, 16, 4)).contains("`head_dim` is 3"));
    let q_k_v = |c: &mut LlamaConfig| (c.hidden, c.heads, c.kv_heads) = (32, 8, 1);
    assert!(refused(q_k_v).contains("`q, k and v` to be a multiple of 16, found 40"));
    assert!(refused(|c| c.rotary_base = 0.0).contains("the base is 0"));
    assert!(refused(|c| c.seq = 0).contains("`seq` must not be zero"));
}

#[test]
fn of_two_tied_parameters_one_value_is_enough_and_two_are_the_same() {
    let config = LlamaConfig {
        vocab: 8,
        hidden: 8,
        heads: 2,
        kv_heads: 1,
        ffn: 8,
        layers: 2,
        seq: 4,
        sequences: 1,
        rotary_base: 1e4,
        tied: true,
        recipe: "f32".parse().unwrap(),
    };
    let untied = LlamaConfig { tied: false, ..config };
    assert_eq!(untied.parameters().unwrap() - config.parameters().unwrap(), 8 * 8);
    let mut session = session(&config, gpipe::<2, 4>(), &[1, 1], How::EAGER);
    let values: Vec<f64> = (0..64).map(f64::from).collect();
    for path in ["wte", "head.weight"] {
        session.set_params(BTreeMap::from([(path.to_owned(), values.clone())])).unwrap();
        assert_eq!(
            (session.param("wte").unwrap(), session.param("head.weight").unwrap()),
            (values.clone(), values.clone())
        );
        session.set_params(BTreeMap::from([("wte".to_owned(), vec![0.5; 64])])).unwrap();
    }
    let two = BTreeMap::from([("wte".to_owned(), values), ("head.weight".to_owned(), vec![0.0; 64])]);
    let error = session.set_params(two).unwrap_err().to_string();
    assert_eq!(error, "`wte` and `head.weight` are tied, and are given different values");
}

/// Six heads that share two of keys and values: the views are unequal, and lie one behind the other in the packed rows.
#[test]
fn views_of_packed_parameters_are_read_and_written_by_name() {
    let config = golden_config(2, false);
    let mut session = session(&config, one_f_one_b::<2, 4>(), &[1, 1], How::EAGER);
    session.step(batch(&config, 0)).unwrap();
    for (packed, parts) in [("qkv", &[("q", 24), ("k", 8), ("v", 8)][..]), ("gate_up", &[("gate", 40), ("up", 40)])] {
        let packed = format!("blocks.1.{packed}.weight");
        let (values, gradient) = (session.param(&packed).unwrap(), session.gradient(&packed).unwrap());
        let mut row = 0;
        for (name, rows) in parts {
            let elements = row * config.hidden..(row + rows) * config.hidden;
            let name = format!("blocks.1.{name}.weight");
            assert_eq!(session.param(&name).unwrap(), values[elements.clone()], "{name}");
            assert_eq!(session.gradient(&name).unwrap(), gradient[elements], "{name}");
            row += rows;
        }
        assert_eq!(row * config.hidden, values.len());
    }
    let packed = session.param("blocks.0.qkv.weight").unwrap();
    session.set_params(BTreeMap::from([("blocks.0.k.weight".to_owned(), vec![0.25; 8 * 24])])).unwrap();
    let written = session.param("blocks.0.qkv.weight").unwrap();
    assert_eq!(written[24 * 24..32 * 24], [0.25; 8 * 24]);
    assert_eq!((&written[..24 * 24], &written[32 * 24..]), (&packed[..24 * 24], &packed[32 * 24..]));
    let error = session.set_params(BTreeMap::from([("blocks.0.k.weight".to_owned(), vec![0.0; 3])])).unwrap_err();
    assert!(error.to_string().contains("`blocks.0.k.weight` has 192 values, 3 were given"), "{error}");
}
