//! The Llama on the GPU: its loss follows the cpu's, and tied or not it has the same bits however it is cut and captured.

use qeffect_core::plan::Checked;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Caps, Device};
use qeffect_runtime::llama::{LlamaConfig, LlamaStage};
use qeffect_runtime::rng;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::{one_f_one_b, zb_h1, zb_v};

use crate::rig::beside_others;
use crate::training::{MICROBATCHES, OPTIM, RECIPES, STEPS, Values, follows, same};

fn model(recipe: &str, tied: bool) -> LlamaConfig {
    LlamaConfig {
        vocab: 64,
        hidden: 64,
        heads: 4,
        kv_heads: 2,
        ffn: 96,
        layers: 4,
        seq: 16,
        sequences: 2,
        rotary_base: 1e4,
        tied,
        recipe: recipe.parse().unwrap(),
    }
}

fn batch(config: &LlamaConfig, step: u64) -> Vec<Windows> {
    let token = |m: u32, i: usize| {
        let u = rng::uniform(rng::draw(&[9, step, u64::from(m), i as u64]));
        (u * u * config.vocab as f64) as u32
    };
    let ids = |m: u32, shift: usize| (0..config.tokens()).map(|i| token(m, i + shift)).collect();
    (0..MICROBATCHES).map(|m| Windows { tokens: ids(m, 0), targets: ids(m, 1) }).collect()
}

fn session(
    config: &LlamaConfig,
    checked: Checked,
    blocks: &[usize],
    capture: CaptureMode,
    device: Box<dyn Device>,
) -> Session<LlamaStage> {
    let stages = config.stages(blocks).unwrap();
    let session_config = SessionConfig { capture, ..SessionConfig::new(OPTIM, config.tokens()) };
    Session::on_one_device(checked, stages, session_config, device).unwrap()
}

fn gpu() -> Box<dyn Device> {
    Box::new(CudaDevice::new(0).unwrap())
}

fn unsplit(config: &LlamaConfig, device: Box<dyn Device>) -> Session<LlamaStage> {
    let checked = one_f_one_b::build(1, i64::from(MICROBATCHES)).unwrap();
    session(config, checked, &[config.layers], CaptureMode::Eager, device)
}

#[test]
fn its_loss_follows_that_of_the_cpu() {
    let Some(_turn) = beside_others() else { return };
    for recipe in RECIPES {
        let config = model(recipe, true);
        let caps = Caps { fp8_needs_transposes: true, ..Caps::default() };
        let mut cpu = unsplit(&config, Box::new(CpuDevice::with_caps(caps)));
        let mut found = unsplit(&config, gpu());
        let mut losses = |step| [&mut cpu, &mut found].map(|session| session.step(batch(&config, step)).unwrap().loss);
        let (want, found): (Vec<f64>, Vec<f64>) = (0..STEPS).map(|step| losses(step).into()).unzip();
        follows(&want, &found, recipe);
    }
}

// Case B40: one token table for both ends of the pipeline.
#[test]
fn it_has_the_same_bits_however_it_is_cut_and_captured() {
    let Some(_turn) = beside_others() else { return };
    const FEW: u64 = 6;
    for recipe in RECIPES {
        for tied in [false, true] {
            let config = model(recipe, tied);
            let mut whole = unsplit(&config, gpu());
            let want: Vec<Values> = (0..FEW)
                .map(|step| {
                    whole.step(batch(&config, step)).unwrap();
                    whole.snapshot().unwrap().values
                })
                .collect();
            let m = i64::from(MICROBATCHES);
            let cuts: [(Checked, &[usize]); 2] =
                [(zb_h1::build(2, m).unwrap(), &[1, 3]), (zb_v::build(2, m).unwrap(), &[0, 2, 1, 1])];
            for (checked, blocks) in cuts {
                for capture in CaptureMode::ALL {
                    let name = checked.schedule.name.clone();
                    let mut found = session(&config, checked.clone(), blocks, capture, gpu());
                    for step in 0..FEW {
                        found.step(batch(&config, step)).unwrap();
                        let what = format!("{recipe}, tied {tied}, {name}, {capture}, step {step}");
                        same(&want[step as usize], &found.snapshot().unwrap().values, &what);
                    }
                }
            }
        }
    }
}
