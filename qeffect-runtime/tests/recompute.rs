//! Recomputation: the tape that R makes has the bytes that F's would have had, and nothing moves twice.

mod common;

use common::{batch, small};
use qeffect_core::bind::Gradients;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::token::Token;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::Caps;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::shard::{Named, Shard, ShardConfig};
use std::collections::BTreeMap;

const MICROBATCHES: u32 = 3;

/// All F's of a step, then R and I and W of each microbatch, in ascending order. Gives losses, all state, the bytes that
/// were held between the F's and the first R.
fn run(config: &GptConfig, caps: Caps, recompute: bool) -> (Vec<u64>, BTreeMap<String, Named>, usize) {
    let stages = config.stages(&[1, 2, 1]).unwrap();
    let count = stages.len() as u32;
    let stages = stages.into_iter().enumerate().map(|(id, stage)| (StageId(id as u32), stage)).collect();
    let shard_config = ShardConfig {
        microbatches: MICROBATCHES,
        data_parallel: 1,
        tokens: config.tokens(),
        rank: 0,
        ranks: 1,
        optim: OptimConfig { steps: 6, warmup: 2, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() },
        norm: config.norm_plan().unwrap(),
        gradients: Gradients::Copied,
        coalesce: 1,
    };
    let mut shard = Shard::new(Box::new(CpuDevice::with_caps(caps)), stages, shard_config).unwrap();
    shard.init(1).unwrap();
    shard.prologue().unwrap();
    let ids = || (0..count).map(StageId);
    let mut fwd: Vec<_> = ids().map(|id| Some(Token::first(id))).collect();
    let mut bwd: Vec<_> = ids().map(|id| Some(Token::first(id))).collect();
    let (mut losses, mut held) = (Vec::new(), 0);
    for step in 0..6 {
        shard.begin_step(&batch(config, step, MICROBATCHES)).unwrap();
        ids().for_each(|id| shard.refresh(id).unwrap());
        let (mut tapes, mut seeds) = (Vec::new(), Vec::new());
        for m in 0..MICROBATCHES {
            let mut x = None;
            for id in ids() {
                let token = fwd[id.0 as usize].take().unwrap();
                let y = if recompute {
                    let (y, seed, token) = shard.forward_for_recompute(id, Microbatch(m), x, token).unwrap();
                    fwd[id.0 as usize] = Some(token);
                    seeds.push(seed);
                    y
                } else {
                    let (y, tape, token) = shard.forward(id, Microbatch(m), x, token).unwrap();
                    fwd[id.0 as usize] = Some(token);
                    tapes.push(tape);
                    y
                };
                x.into_iter().for_each(|x| shard.free(x).unwrap());
                x = y;
            }
        }
        held = shard.pool().bytes();
        let (mut tapes, mut seeds) = (tapes.into_iter(), seeds.into_iter());
        for m in 0..MICROBATCHES {
            let mut of_stages = Vec::new();
            for id in ids() {
                of_stages.push(match recompute {
                    true => shard.recompute(id, Microbatch(m), seeds.next().unwrap()).unwrap(),
                    false => tapes.next().unwrap(),
                });
            }
            let mut dy = None;
            for (id, tape) in ids().zip(of_stages).rev() {
                let token = bwd[id.0 as usize].take().unwrap();
                let (dx, work, token) = shard.input_grad(id, Microbatch(m), dy, tape, token).unwrap();
                bwd[id.0 as usize] = Some(token);
                dy.into_iter().for_each(|dy| shard.free(dy).unwrap());
                dy = dx;
                shard.weight_grad(id, Microbatch(m), work).unwrap();
            }
        }
        ids().for_each(|id| shard.reduce(id).unwrap());
        shard.measure().unwrap();
        let measured = shard.offer().unwrap();
        shard.accept(&[measured]).unwrap();
        shard.settle().unwrap();
        shard.commit().unwrap();
        assert!(shard.verdict().unwrap().commit);
        losses.extend(shard.losses().unwrap().into_iter().map(f64::to_bits));
    }
    (losses, shard.export().unwrap(), held)
}

/// History 4 and 6 steps of 3 microbatches: the window of amax turns over several times between F and R.
#[test]
fn recomputed_tapes_change_no_bit() {
    for recipe in ["bf16", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step"] {
        for caps in [Caps::default(), Caps { fp8_needs_transposes: true, ..Caps::default() }] {
            let config = small(recipe);
            let (losses, state, bytes) = run(&config, caps, false);
            let (again, state_again, fewer) = run(&config, caps, true);
            assert_ne!(losses.first(), losses.last());
            assert_eq!(losses, again, "{recipe}");
            for (name, value) in &state {
                assert!(*value == state_again[name], "{recipe}: `{name}` differs");
            }
            assert!(fewer * 4 < bytes, "{recipe}: {fewer} bytes are held instead of {bytes}");
        }
    }
}
