//! Where the time of a training step on cpu goes: `cargo run --release -p qeffect-runtime --example profile_step [recipe]`.
//!
//! One thread, one rank, the model of the main command.

use std::time::Instant;

use qeffect_core::bind::Gradients;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::recipe::Recipe;
use qeffect_core::token::Token;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::profile::Profile;
use qeffect_runtime::rng;
use qeffect_runtime::shard::{Shard, ShardConfig};

const MICROBATCHES: u32 = 8;
const STEPS: u64 = 20;
const STAGE: StageId = StageId(0);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let text = std::env::args().nth(1).unwrap_or_else(|| "fp8-delayed".into());
    let recipe: Recipe = text.parse()?;
    let config = GptConfig { vocab: 256, hidden: 128, heads: 4, ffn: 512, layers: 4, seq: 64, sequences: 2, recipe };
    let profile = Profile::new();
    let shard_config = ShardConfig {
        microbatches: MICROBATCHES,
        gradients: Gradients::Copied,
        grad_dtype: qeffect_runtime::gradients::GradDtype::Master,
        fast_accumulation: Default::default(),
        coalesce: 1,
        data_parallel: 1,
        tokens: config.tokens(),
        rank: 0,
        ranks: 1,
        lists: false,
        optim: OptimConfig { steps: STEPS + 1, ..OptimConfig::default() },
        norm: config.norm_plan()?,
    };
    let stages = config.stages(&[config.layers])?.into_iter().map(|stage| (STAGE, stage)).collect();
    let mut shard = Shard::new(profile.watch(Box::new(CpuDevice::new())), stages, shard_config)?;
    shard.init(1)?;
    shard.prologue()?;

    let id = |words: [u64; 3]| rng::below(rng::draw(&words), config.vocab as u64) as u32;
    let mut tokens = (Some(Token::first(STAGE)), Some(Token::first(STAGE)));
    let mut start = Instant::now();
    for step in 0..=STEPS {
        if step == 1 {
            profile.clear(); // the first step makes the buffers
            start = Instant::now();
        }
        let batch: Vec<Windows> = (0..u64::from(MICROBATCHES))
            .map(|m| {
                let ids = |kind| (0..config.tokens() as u64).map(|i| id([step, m, 2 * i + kind])).collect();
                Windows { tokens: ids(0), targets: ids(1) }
            })
            .collect();
        shard.begin_step(&batch)?;
        shard.refresh(STAGE)?;
        for m in (0..MICROBATCHES).map(Microbatch) {
            let (Some(fwd), Some(bwd)) = (tokens.0.take(), tokens.1.take()) else { return Err("no token".into()) };
            let (_, tape, fwd) = shard.forward(STAGE, m, &[], fwd)?;
            let (_, work, bwd) = shard.input_grad(STAGE, m, &[], tape, bwd)?;
            shard.weight_grad(STAGE, m, work)?;
            tokens = (Some(fwd), Some(bwd));
        }
        shard.reduce(STAGE)?;
        shard.measure()?;
        let measured = shard.offer()?;
        shard.accept(&[measured])?;
        shard.settle()?;
        shard.commit()?;
    }
    let seconds = start.elapsed().as_secs_f64() / STEPS as f64;
    let per_step = f64::from(MICROBATCHES) * config.tokens() as f64;
    println!("{recipe}, {} parameters, {MICROBATCHES} x {} tokens", config.parameters()?, config.tokens());
    println!("{:.2} ms per step, {:.0} tokens/s on one thread; {STEPS} steps:\n", seconds * 1e3, per_step / seconds);
    println!("{profile}");
    Ok(())
}
