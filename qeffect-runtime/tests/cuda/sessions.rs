//! Whole sessions on the GPU: every mode, placement and schedule gives the bits of the unsplit model run command by
//! command, whatever else happens between steps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::plan::Checked;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::Device;
use qeffect_runtime::error::Error;
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::session::{Evaluation, GradDtype, Session, SessionConfig};
use qeffect_schedules::{eval_loop, eval_v, further, library, zb_h1, zb_v};

use crate::common::{Solo, batch};
use crate::rig::{beside_others, reals};
use crate::training::{MICROBATCHES, OPTIM, RECIPES, STEPS, Values, model, same};

/// Microbatches of a group, where gradients are coalesced.
const GROUP: u32 = 2;
/// Steps after which everything is compared: before and after the first scales leave the history.
pub const COMPARED: [u64; 2] = [2, STEPS - 1];
/// Steps after which something is evaluated.
const EVALUATED: [u64; 3] = [0, 5, 12];

/// What the unsplit model computes, command by command.
pub struct Wanted {
    pub losses: Vec<Vec<f64>>,
    pub values: BTreeMap<u64, Values>,
}

pub fn wanted(config: &GptConfig, gradients: Gradients) -> Wanted {
    let group = if gradients == Gradients::Coalesced { GROUP } else { 1 };
    let device = Box::new(CudaDevice::new(0).unwrap());
    let mut solo = Solo::on(device, config, &[config.layers], MICROBATCHES, OPTIM, (gradients, group));
    let mut wanted = Wanted { losses: Vec::new(), values: BTreeMap::new() };
    for step in 0..STEPS {
        assert!(solo.step(&batch(config, step, MICROBATCHES)).1.commit);
        wanted.losses.push(solo.shard.losses().unwrap());
        if COMPARED.contains(&step) {
            wanted.values.insert(step, solo.shard.export().unwrap());
        }
    }
    wanted
}

pub fn in_groups(checked: Checked, gradients: Gradients) -> Checked {
    if gradients == Gradients::Coalesced { checked.coalesced(GROUP).unwrap() } else { checked }
}

/// Stages of unequal size where there are blocks enough.
pub fn blocks(config: &GptConfig, stages: u32) -> Vec<usize> {
    match (config.layers, stages) {
        (4, 2) => vec![1, 3],
        (4, 4) => vec![1, 2, 1, 0],
        _ => config.split(stages as usize).unwrap(),
    }
}

pub fn session(
    config: &GptConfig,
    checked: Checked,
    (gradients, capture): (Gradients, CaptureMode),
    device: Box<dyn Device>,
) -> Result<Session<GptStage>, Error> {
    let stages = config.stages(&blocks(config, checked.schedule.stages)).unwrap();
    let session_config = SessionConfig { gradients, capture, ..SessionConfig::new(OPTIM, config.tokens()) };
    Session::on_one_device(checked, stages, session_config, device)
}

/// An evaluation on the ranks of a session, if one of the library has its stages where they are.
fn evaluation(session: &Session<GptStage>) -> Option<Evaluation> {
    let schedule = &session.schedule().schedule;
    let (ranks, microbatches) = (i64::from(schedule.ranks), i64::from(MICROBATCHES));
    let looped = eval_loop::build(ranks, microbatches, i64::from(schedule.stages) / ranks).ok();
    let mirrored = eval_v::build(ranks, microbatches).ok();
    [looped, mirrored].into_iter().flatten().find_map(|checked| session.evaluation(checked).ok())
}

/// Runs all steps, with evaluations between them, and compares.
pub fn follows(config: &GptConfig, session: &mut Session<GptStage>, wanted: &Wanted, what: &str) -> bool {
    let evaluation = evaluation(session);
    for step in 0..STEPS {
        let what = format!("{what}, step {step}");
        let report = session.step(batch(config, step, MICROBATCHES)).unwrap();
        assert_eq!(report.losses, wanted.losses[step as usize], "{what}");
        if COMPARED.contains(&step) {
            same(&wanted.values[&step], &session.snapshot().unwrap().values, &what);
        }
        if let Some(evaluation) = evaluation.as_ref().filter(|_| EVALUATED.contains(&step)) {
            let losses = session.evaluate(evaluation, batch(config, 100 + step, MICROBATCHES)).unwrap();
            assert!(losses.iter().all(|loss| loss.is_finite()), "{what}");
        }
    }
    evaluation.is_some()
}

/// Wide enough that library and kernels use whole tiles of several blocks; a microbatch is one block of scales.
fn wide(recipe: &str) -> GptConfig {
    let recipe = recipe.parse().unwrap();
    GptConfig { vocab: 64, hidden: 512, heads: 8, ffn: 2048, layers: 4, seq: 64, sequences: 2, recipe }
}

/// Every schedule on 1, 2 and 4 ranks whose stages the model has blocks for.
fn schedules() -> impl Iterator<Item = (String, Checked)> {
    let entries = library().iter().chain(further()).filter(|entry| !entry.eval);
    entries.flat_map(|entry| {
        [1, 2, 4].into_iter().filter_map(|ranks| {
            let checked = entry.checked(ranks, i64::from(MICROBATCHES)).ok()?.into_owned();
            (checked.schedule.stages <= 4).then(|| (format!("{} on {ranks}", entry.name), checked))
        })
    })
}

/// None of the library is left out of them, whatever ranks it takes.
#[test]
fn these_are_all_schedules() {
    let of = |name: &str| name.split(" on ").next().unwrap_or_default().to_owned();
    let found: BTreeSet<String> = schedules().map(|(name, _)| of(&name)).collect();
    let all = library().iter().chain(further()).filter(|entry| !entry.eval).map(|entry| entry.name.to_owned());
    assert_eq!(found, all.collect());
}

/// Gradients that are added in place have the bits of those that are copied; those of groups are other sums.
fn every_schedule(gradients: Gradients, capture: CaptureMode) {
    static COPIED: OnceLock<Wanted> = OnceLock::new();
    static COALESCED: OnceLock<Wanted> = OnceLock::new();
    let Some(_turn) = beside_others() else { return };
    let config = wide(RECIPES[0]);
    let wanted = match gradients {
        Gradients::Copied | Gradients::Direct => COPIED.get_or_init(|| wanted(&config, Gradients::Copied)),
        Gradients::Coalesced => COALESCED.get_or_init(|| wanted(&config, Gradients::Coalesced)),
    };
    let (mut ran, mut evaluated, mut refused, mut ranks) = (0, 0, 0, BTreeSet::new());
    for (name, checked) in schedules().filter(|(_, checked)| !checked.order_dependent) {
        let what = format!("{name}, {gradients:?}, {capture}");
        let on = checked.schedule.ranks;
        let device = Box::new(CudaDevice::new(0).unwrap());
        match session(&config, in_groups(checked, gradients), (gradients, capture), device) {
            Ok(mut session) => {
                evaluated += usize::from(follows(&config, &mut session, wanted, &what));
                ran += 1;
                ranks.insert(on);
            }
            Err(error) => {
                assert_eq!(error.code(), Some(Code::GradientsUnsupported), "{what}: {error}");
                assert_ne!(gradients, Gradients::Copied);
                refused += 1;
            }
        }
    }
    println!("{gradients:?}, {capture}: {ran} sessions, {evaluated} with evaluations, {refused} refused");
    assert!(ran >= 12 && evaluated > ran / 2, "{ran} ran, {evaluated} evaluated, {refused} were refused");
    assert!(ranks.into_iter().eq([1, 2, 4]));
}

macro_rules! every_schedule_gives_the_bits_of_the_unsplit_model {
    ($($name:ident: $gradients:ident, $capture:ident;)*) => {
        /// Every schedule gives the bits of the unsplit model.
        mod every_schedule_gives_the_bits_of_the_unsplit_model {
            use super::*;
            $(#[test]
            fn $name() {
                every_schedule(Gradients::$gradients, CaptureMode::$capture);
            })*
        }
    };
}

// Cases B19, B20 and B26.
every_schedule_gives_the_bits_of_the_unsplit_model! {
    copied_eager: Copied, Eager;
    copied_action: Copied, Action;
    copied_step: Copied, Step;
    direct_eager: Direct, Eager;
    direct_action: Direct, Action;
    direct_step: Direct, Step;
    coalesced_eager: Coalesced, Eager;
    coalesced_action: Coalesced, Action;
    coalesced_step: Coalesced, Step;
}

/// Gradients of groups against those that are added microbatch by microbatch, after one step: same weights, same scales,
/// the same codes. Both are sums of the same products, which are exact, times factors that are f32; what differs is where
/// tensor cores cut sums off and where f32 rounds them. The library's products stay within 1e-3 of float64 by norm (the
/// kernels' tests hold them to it), so two of them within twice that of each other.
#[test]
fn gradients_of_groups_are_near_those_that_are_added_in_place() {
    const BOUND: f64 = 2e-3;
    let Some(_turn) = beside_others() else { return };
    let config = wide(RECIPES[0]);
    let run = |gradients, group| {
        let checked = zb_h1::<2, 4>().clone().coalesced(group).unwrap();
        let device = Box::new(CudaDevice::new(0).unwrap());
        let mut session = session(&config, checked, (gradients, CaptureMode::Step), device).unwrap();
        let losses = session.step(batch(&config, 0, MICROBATCHES)).unwrap().losses;
        (losses, session.snapshot().unwrap().values)
    };
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let (losses, added) = run(Gradients::Direct, 1);
    for group in [2, 4] {
        let (found, of_groups) = run(Gradients::Coalesced, group);
        assert_eq!(found, losses, "gradients come after losses");
        let (mut compared, mut largest) = (0, 0.0f64);
        for (name, a) in added.iter().filter(|(name, _)| name.ends_with("/gradient")) {
            let b = &of_groups[name];
            let (a, b) = (reals(a.dtype, &a.bytes), reals(b.dtype, &b.bytes));
            let error = norm(&mut a.iter().zip(&b).map(|(a, b)| a - b));
            let scale = norm(&mut a.iter().copied());
            assert!(scale > 0.0 && error <= BOUND * scale, "{name} in groups of {group}: {error:e} of {scale:e}");
            (compared, largest) = (compared + 1, largest.max(error / scale));
        }
        println!("groups of {group}: {compared} gradients, at most {largest:.1e} apart by norm, bound {BOUND:.0e}");
        // Four weights and four biases of a block, two norms of two parameters; embedding, positions, the last norm, the head.
        assert!(compared >= 12 * config.layers + 4, "{compared}");
    }
}

/// Where state moves once per step, schedules that run microbatches in another order give the same bits too.
#[test]
fn other_orders_give_the_same_bits_where_state_moves_with_every_step() {
    let Some(_turn) = beside_others() else { return };
    let config = wide(RECIPES[1]);
    let wanted = wanted(&config, Gradients::Copied);
    let mut ran = BTreeSet::new();
    for (name, checked) in schedules().filter(|(_, checked)| checked.order_dependent) {
        for capture in CaptureMode::ALL {
            let device = Box::new(CudaDevice::new(0).unwrap());
            let mut session = session(&config, checked.clone(), (Gradients::Copied, capture), device).unwrap();
            follows(&config, &mut session, &wanted, &format!("{name}, {capture}"));
        }
        ran.insert(name);
    }
    assert!(ran.contains("looped_bfs on 2"), "{ran:?}");
}

/// The other recipes, and copied against direct, on one schedule.
#[test]
fn other_recipes_give_the_same_bits_in_every_mode() {
    let Some(_turn) = beside_others() else { return };
    for recipe in &RECIPES[1..] {
        let config = model(recipe);
        let copied = wanted(&config, Gradients::Copied);
        let coalesced = wanted(&config, Gradients::Coalesced);
        for capture in CaptureMode::ALL {
            for gradients in [Gradients::Copied, Gradients::Direct, Gradients::Coalesced] {
                let checked = in_groups(zb_v::<2, 4>().clone(), gradients);
                let device = Box::new(CudaDevice::new(0).unwrap());
                let mut session = session(&config, checked, (gradients, capture), device).unwrap();
                let wanted = if gradients == Gradients::Coalesced { &coalesced } else { &copied };
                follows(&config, &mut session, wanted, &format!("{recipe}, {gradients:?}, {capture}"));
            }
        }
    }
}

/// Gradients in bf16, in every mode and on one rank or two.
#[test]
fn gradients_in_bf16_give_the_same_bits_in_every_mode() {
    let Some(_turn) = beside_others() else { return };
    let recipe = RECIPES[0].parse().unwrap();
    let config = GptConfig { vocab: 256, hidden: 512, heads: 8, ffn: 512, layers: 2, seq: 64, sequences: 2, recipe };
    let mut first: Option<(Vec<Vec<f64>>, Values)> = None;
    for (ranks, capture) in [1, 2].into_iter().flat_map(|ranks| CaptureMode::ALL.map(|capture| (ranks, capture))) {
        let checked = in_groups(zb_h1::build(ranks, i64::from(MICROBATCHES)).unwrap(), Gradients::Coalesced);
        let stages = config.stages(&blocks(&config, checked.schedule.stages)).unwrap();
        let (gradients, grad_dtype) = (Gradients::Coalesced, GradDtype::Bf16);
        let session_config =
            SessionConfig { gradients, grad_dtype, capture, ..SessionConfig::new(OPTIM, config.tokens()) };
        let device = Box::new(CudaDevice::new(0).unwrap());
        let mut session = Session::on_one_device(checked, stages, session_config, device).unwrap();
        let step = |step| session.step(batch(&config, step, MICROBATCHES)).unwrap().losses;
        let losses: Vec<Vec<f64>> = (0..STEPS).map(step).collect();
        let values = session.snapshot().unwrap().values;
        let (losses_of_first, values_of_first) = first.get_or_insert_with(|| (losses.clone(), values.clone()));
        assert_eq!(*losses_of_first, losses, "{ranks} ranks, {capture}");
        same(values_of_first, &values, &format!("{ranks} ranks, {capture}"));
    }
}
