//! Recomputation: the tape that R makes has the bytes that F's would have had, and nothing moves twice.

use crate::common::batch;
use crate::common::how::{HOW, How, with_recomputation};
use crate::common::settings::{TRANSPOSES, alone, small};
use std::collections::BTreeMap;

use qeffect_core::bind::Gradients;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::plan::Checked;
use qeffect_core::token::Token;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::Caps;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{SessionConfig, Snapshot};
use qeffect_runtime::shard::{Named, Shard};
use qeffect_schedules::{gpipe, one_f_one_b, zb_h1, zb_v};

const MICROBATCHES: u32 = 3;

/// All F's of a step, then R and I and W of each microbatch, in ascending order. Gives losses, all state, the bytes that
/// were held between the F's and the first R.
fn run(config: &GptConfig, caps: Caps, recompute: bool) -> (Vec<u64>, BTreeMap<String, Named>, usize) {
    let stages = config.stages(&[1, 2, 1]).unwrap();
    let count = stages.len() as u32;
    let stages = stages.into_iter().enumerate().map(|(id, stage)| (StageId(id as u32), stage)).collect();
    let optim = OptimConfig { steps: 6, warmup: 2, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
    let shard_config = alone(MICROBATCHES, config.tokens(), optim, config.norm_plan().unwrap());
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
            let mut x = Vec::new();
            for id in ids() {
                let token = fwd[id.0 as usize].take().unwrap();
                let y = if recompute {
                    let (y, seed, token) = shard.forward_for_recompute(id, Microbatch(m), &x, token).unwrap();
                    fwd[id.0 as usize] = Some(token);
                    seeds.push(seed);
                    y
                } else {
                    let (y, tape, token) = shard.forward(id, Microbatch(m), &x, token).unwrap();
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
            let mut dy = Vec::new();
            for (id, tape) in ids().zip(of_stages).rev() {
                let token = bwd[id.0 as usize].take().unwrap();
                let (dx, work, token) = shard.input_grad(id, Microbatch(m), &dy, tape, token).unwrap();
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

/// Losses of every step, all state, bytes of seeds and of tapes by stage.
type Outcome = (Vec<u64>, Snapshot, Vec<[usize; 2]>);

fn train(config: &GptConfig, checked: &Checked, how: How, caps: Caps, gradients: Gradients) -> Outcome {
    let stages = config.stages(&config.split(checked.schedule.stages as usize).unwrap()).unwrap();
    let optim = OptimConfig { steps: 6, warmup: 2, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
    let session_config = SessionConfig { gradients, ..SessionConfig::new(optim, config.tokens()) };
    let mut session =
        how.session(checked.clone(), stages, session_config, || Box::new(CpuDevice::with_caps(caps))).unwrap();
    let (mut losses, mut kept) = (Vec::new(), Vec::new());
    for step in 0..6 {
        let report = session.step(batch(config, step, checked.schedule.microbatches)).unwrap();
        assert_eq!(report.peaks, checked.plan.peaks.to_vec());
        losses.extend(report.losses.iter().copied().chain([report.grad_norm]).map(f64::to_bits));
        kept = report.kept.iter().map(|kept| [kept.input, kept.tape]).collect();
    }
    (losses, session.snapshot().unwrap(), kept)
}

const RECIPES: [&str; 3] = ["bf16", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step"];

#[test]
fn a_schedule_with_r_has_the_bits_of_the_one_without_in_every_mode() {
    for recipe in RECIPES {
        let config = small(recipe);
        for plain in [one_f_one_b::<2, 4>(), zb_h1::<2, 4>(), zb_v::<2, 4>()] {
            let what = format!("{recipe}, {}", plain.schedule.name);
            let all = with_recomputation(plain, |_| true);
            let some = with_recomputation(plain, |item| (item.stage.0 + item.microbatch.0).is_multiple_of(2));
            let (losses, state, _) = train(&config, plain, How::EAGER, Caps::default(), Gradients::Copied);
            for how in HOW {
                for again in [&all, &some] {
                    let (found, state_again, _) = train(&config, again, how, Caps::default(), Gradients::Copied);
                    assert_eq!(found, losses, "{what}, {how:?}");
                    assert_eq!(state_again, state, "{what}, {how:?}");
                }
            }
        }
    }
}

/// Groups of microbatches are joined by R, not by the F before it.
#[test]
fn r_has_the_bits_of_the_run_without_in_every_placement_of_gradients() {
    for recipe in RECIPES {
        let config = small(recipe);
        let plain = zb_h1::<2, 4>().clone();
        let again = with_recomputation(&plain, |item| item.microbatch.0 != 1);
        for caps in [Caps::default(), TRANSPOSES] {
            let pairs = [
                (Gradients::Direct, plain.clone(), again.clone()),
                (Gradients::Coalesced, plain.clone().coalesced(2).unwrap(), again.clone().coalesced(2).unwrap()),
            ];
            for (gradients, plain, again) in pairs {
                let (losses, state, _) = train(&config, &plain, How::EAGER, caps, gradients);
                for how in [How::EAGER, How::STEP] {
                    let (found, state_again, _) = train(&config, &again, how, caps, gradients);
                    assert_eq!(found, losses, "{recipe}, {gradients:?}, {how:?}");
                    assert_eq!(state_again, state, "{recipe}, {gradients:?}, {how:?}");
                }
            }
        }
    }
}

/// Four microbatches wait as inputs instead of tapes, and one at a time as a tape.
#[test]
fn what_is_retained_between_f_and_r_is_the_input() {
    let config = small("bf16");
    let plain = gpipe::<2, 4>();
    let eager = |checked: &Checked| train(&config, checked, How::EAGER, Caps::default(), Gradients::Copied).2;
    let (kept, again) = (eager(plain), eager(&with_recomputation(plain, |_| true)));
    let boundary = config.tokens() * config.hidden * 2;
    for (stage, (without, with)) in kept.iter().zip(&again).enumerate() {
        assert_eq!(without[0], 0);
        assert_eq!(with[0], if stage == 0 { 0 } else { 4 * boundary }, "the first stage starts from tokens");
        assert_eq!(4 * with[1], without[1], "stage {stage}");
    }
}
