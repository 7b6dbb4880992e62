//! Whole sessions on the GPU: every mode, placement and schedule gives the bits of the unsplit model run command by
//! command, whatever else happens between steps.
//!
//! Compared over 20 steps: the loss of each microbatch, the gradient norm and the epoch of every step, again and again every
//! gradient, parameter, moment, amax history, scale, cached weight and version, and at the end an evaluation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, OnceLock, PoisonError};

use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::plan::Checked;
use qeffect_core::schedule::Update;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::Device;
use qeffect_runtime::error::Error;
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::session::{GradDtype, Session, SessionConfig};
use qeffect_schedules::zb_h1;

use crate::common::how::{Case, RANKS, cases, training, weight_gradients_ascend, with_recomputation};
use crate::common::{Solo, batch};
use crate::rig::{beside_others, reals};
use crate::training::{MICROBATCHES, OPTIM, RECIPES, STEPS, Values, model, same};

/// Microbatches of a group, where gradients are coalesced.
const GROUP: u32 = 2;
/// Steps after which everything is compared: the first, and before and after the first scales leave the history.
pub const COMPARED: [u64; 4] = [0, 4, 9, STEPS - 1];
/// Steps after which something is evaluated.
const EVALUATED: [u64; 3] = [0, 4, 12];

pub const PLACEMENTS: [Gradients; 3] = [Gradients::Copied, Gradients::Direct, Gradients::Coalesced];

/// What the unsplit model computes, command by command.
pub struct Wanted {
    /// Of each step, the loss of each microbatch.
    pub losses: Vec<Vec<f64>>,
    /// Of each step, the norm of the whole gradient.
    norms: Vec<f64>,
    pub values: BTreeMap<u64, Values>,
    /// After all steps, the loss of each microbatch of other data. Nothing has been evaluated before.
    evaluated: Vec<f64>,
}

pub fn wanted(config: &GptConfig, gradients: Gradients) -> Wanted {
    unsplit(config, MICROBATCHES, gradients)
}

fn unsplit(config: &GptConfig, microbatches: u32, gradients: Gradients) -> Wanted {
    let device = Box::new(CudaDevice::new(0).unwrap());
    let mut solo = Solo::on(device, config, &[config.layers], microbatches, OPTIM, (gradients, group(gradients)));
    let (mut losses, mut norms, mut values) = (Vec::new(), Vec::new(), BTreeMap::new());
    for step in 0..STEPS {
        let verdict = solo.step(&batch(config, step, microbatches)).1;
        assert!(verdict.commit);
        norms.push(verdict.norm);
        losses.push(solo.shard.losses().unwrap());
        if COMPARED.contains(&step) {
            values.insert(step, solo.shard.export().unwrap());
        }
    }
    // Equality says something: every weight has moved in between.
    for pair in COMPARED.windows(2) {
        let [before, after]: [&Values; 2] = [&values[&pair[0]], &values[&pair[1]]];
        let mut masters = before.keys().filter(|name| name.ends_with("/master"));
        assert!(masters.all(|name| before[name] != after[name]), "between {pair:?}");
    }
    solo.evaluate(&other(config, STEPS, microbatches));
    Wanted { losses, norms, values, evaluated: solo.shard.losses().unwrap() }
}

/// Data that no step trains with.
fn other(config: &GptConfig, step: u64, microbatches: u32) -> Vec<Windows> {
    batch(config, 100 + step, microbatches)
}

/// The same for a case of the library, made once for all tests. Gradients that are added in place have the bits of those
/// that are copied; those of groups are other sums.
pub fn reference(config: &GptConfig, case: &Case, gradients: Gradients) -> &'static Wanted {
    /// By model, microbatches and size of groups.
    type Key = (String, u32, u32);
    static MADE: Mutex<BTreeMap<Key, &'static OnceLock<Wanted>>> = Mutex::new(BTreeMap::new());
    let key = (format!("{config:?}"), case.microbatches(), group(gradients));
    let made =
        *MADE.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_insert_with(|| Box::leak(Box::default()));
    let of = if gradients == Gradients::Direct { Gradients::Copied } else { gradients };
    made.get_or_init(|| unsplit(config, case.microbatches(), of))
}

const fn group(gradients: Gradients) -> u32 {
    match gradients {
        Gradients::Coalesced => GROUP,
        Gradients::Copied | Gradients::Direct => 1,
    }
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
    how: (Gradients, CaptureMode),
    device: Box<dyn Device>,
) -> Result<Session<GptStage>, Error> {
    let blocks = blocks(config, checked.schedule.stages);
    cut(config, checked, &blocks, how, device)
}

fn cut(
    config: &GptConfig,
    checked: Checked,
    blocks: &[usize],
    (gradients, capture): (Gradients, CaptureMode),
    device: Box<dyn Device>,
) -> Result<Session<GptStage>, Error> {
    let stages = config.stages(blocks).unwrap();
    let session_config = SessionConfig { gradients, capture, ..SessionConfig::new(OPTIM, config.tokens()) };
    Session::on_one_device(checked, stages, session_config, device)
}

/// Why a case is refused at start, if it is. A recipe that rolls with every microbatch wants it in order; where state moves
/// with the step, or there is none, copied gradients are summed by microbatch, and those that are added in place want order.
fn refusal(config: &GptConfig, case: &Case, gradients: Gradients) -> Option<Code> {
    if config.recipe.update() == Update::Microbatch && case.checked.order_dependent {
        return Some(Code::OrderDependent);
    }
    let checked = in_groups(case.checked.clone(), gradients);
    let adds_in_order = gradients == Gradients::Copied || weight_gradients_ascend(&checked, group(gradients));
    (!adds_in_order).then_some(Code::GradientsUnsupported)
}

/// Runs all steps of a case and compares them with those of the unsplit model, and everything after the chosen ones. False
/// if it is refused at start, as it has to be.
pub fn follows(config: &GptConfig, case: &Case, how: (Gradients, CaptureMode), compared: &[u64], what: &str) -> bool {
    let (gradients, capture) = how;
    let what = format!("{what}, {} on {}, {gradients:?}, {capture}", case.schedule, case.ranks());
    let device = Box::new(CudaDevice::new(0).unwrap());
    let session = cut(config, in_groups(case.checked.clone(), gradients), case.blocks, how, device);
    let refusal = refusal(config, case, gradients);
    assert_eq!(session.as_ref().err().map(Error::code), refusal.map(Some), "{what}");
    let Ok(mut session) = session else { return false };
    let wanted = reference(config, case, gradients);
    let evaluation = session.evaluation(case.evaluation.clone()).unwrap();
    let peaks = session.schedule().plan.peaks.to_vec();
    for step in 0..STEPS {
        let what = format!("{what}, step {step}");
        let report = session.step(batch(config, step, case.microbatches())).unwrap();
        assert_eq!(report.losses, wanted.losses[step as usize], "{what}");
        assert_eq!(report.grad_norm.to_bits(), wanted.norms[step as usize].to_bits(), "{what}: norm");
        assert_eq!((report.step, report.epoch, report.skipped), (step, step + 1, false), "{what}");
        assert_eq!(report.peaks, peaks, "{what}: what was live is what the plan says");
        if EVALUATED.contains(&step) {
            let losses = session.evaluate(&evaluation, other(config, step, case.microbatches())).unwrap();
            assert!(losses.iter().all(|loss| loss.is_finite()), "{what}");
        }
        if compared.contains(&step) {
            let snapshot = session.snapshot().unwrap();
            same(&wanted.values[&step], &snapshot.values, &what);
            assert_eq!(snapshot.versions.len(), case.blocks.len(), "{what}");
            for version in snapshot.versions {
                assert_eq!((version.weights(), version.cache()), (step + 1, Some(step)), "{what}");
            }
        }
    }
    let evaluated = session.evaluate(&evaluation, other(config, STEPS, case.microbatches())).unwrap();
    assert_eq!(evaluated, wanted.evaluated, "{what}: evaluated");
    true
}

/// Wide enough that library and kernels use whole tiles of several blocks; a microbatch is one block of scales.
pub fn wide(recipe: &str, layers: usize) -> GptConfig {
    let recipe = recipe.parse().unwrap();
    GptConfig { vocab: 64, hidden: 512, heads: 8, ffn: 1024, layers, seq: 64, sequences: 2, recipe }
}

/// Nothing of the library is left out, and each placement of stages is evaluated as it is placed.
#[test]
fn these_are_all_schedules() {
    let cases = cases(MICROBATCHES);
    let found: Vec<(&str, u32)> = cases.iter().map(|case| (case.schedule, case.ranks())).collect();
    assert_eq!(found, training().flat_map(|entry| RANKS.map(|ranks| (entry.name, ranks))).collect::<Vec<_>>());
    assert!(found.len() >= 36, "{found:?}");
    for case in &cases {
        let (trained, evaluated) = (&case.checked.schedule, &case.evaluation.schedule);
        assert_eq!(trained.placement, evaluated.placement, "{}", case.schedule);
        assert_eq!(trained.stages as usize, case.blocks.len(), "{}", case.schedule);
    }
    let stages: BTreeSet<u32> = cases.iter().map(|case| case.checked.schedule.stages).collect();
    assert!(stages.into_iter().eq([1, 2, 4, 8]));
    // In turn, each schedule meets every mode in some placement, each placement every mode on each number of ranks.
    let all = all_in_turn();
    let of_schedules: BTreeSet<_> =
        all.iter().map(|(case, _, mode)| (case.schedule, case.ranks(), mode.name())).collect();
    assert_eq!(of_schedules.len(), cases.len() * CaptureMode::ALL.len());
    let of_placements: BTreeSet<_> =
        all.iter().map(|(case, at, mode)| (format!("{at:?}"), case.ranks(), mode.name())).collect();
    assert_eq!(of_placements.len(), PLACEMENTS.len() * RANKS.len() * CaptureMode::ALL.len());
}

/// All schedules on so many ranks.
fn every_schedule(ranks: u32, gradients: Gradients, capture: CaptureMode) {
    let Some(_turn) = beside_others() else { return };
    let (mut ran, mut refused) = (Vec::new(), Vec::new());
    for case in cases(MICROBATCHES).into_iter().filter(|case| case.ranks() == ranks) {
        let config = wide(RECIPES[0], case.layers());
        let runs = follows(&config, &case, (gradients, capture), &COMPARED, "wide");
        if runs { &mut ran } else { &mut refused }.push(case.schedule);
    }
    println!("{ranks} ranks, {gradients:?}, {capture}: {ran:?}");
    assert_eq!(refused, ["looped_bfs"]);
    assert_eq!(ran, training().map(|entry| entry.name).filter(|name| !refused.contains(name)).collect::<Vec<_>>());
}

macro_rules! every_schedule_gives_the_bits_of_the_unsplit_model {
    ($($name:ident: $gradients:ident, $capture:ident;)*) => {
        /// Every schedule gives the bits of the unsplit model.
        mod every_schedule_gives_the_bits_of_the_unsplit_model {
            use super::*;
            $(mod $name {
                use super::*;

                #[test]
                fn on_1_rank() {
                    every_schedule(1, Gradients::$gradients, CaptureMode::$capture);
                }

                #[test]
                fn on_2_ranks() {
                    every_schedule(2, Gradients::$gradients, CaptureMode::$capture);
                }

                #[test]
                fn on_4_ranks() {
                    every_schedule(4, Gradients::$gradients, CaptureMode::$capture);
                }
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

/// Every case in every placement, ZB-V on two ranks in every mode, others in one each: modes take turns over schedules, ranks
/// and placements.
pub fn all_in_turn() -> Vec<(Case, Gradients, CaptureMode)> {
    let mut all = Vec::new();
    for (at, case) in cases(MICROBATCHES).into_iter().enumerate() {
        for (place, gradients) in PLACEMENTS.into_iter().enumerate() {
            let turn = CaptureMode::ALL[(at / RANKS.len() + at % RANKS.len() + place) % CaptureMode::ALL.len()];
            let every = (case.schedule, case.ranks()) == ("zb_v", 2);
            let modes = CaptureMode::ALL.into_iter().filter(|mode| every || *mode == turn);
            all.extend(modes.map(|mode| (case.clone(), gradients, mode)));
        }
    }
    all
}

/// Gradients of groups against those that are added microbatch by microbatch, after one step: same weights, same scales,
/// the same codes. Both are sums of the same products, which are exact, times factors that are f32; what differs is where
/// tensor cores cut sums off and where f32 rounds them. The library's products stay within 1e-3 of float64 by norm (the
/// kernels' tests hold them to it), so two of them within twice that of each other.
#[test]
fn gradients_of_groups_are_near_those_that_are_added_in_place() {
    const BOUND: f64 = 2e-3;
    let Some(_turn) = beside_others() else { return };
    let config = wide(RECIPES[0], 4);
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
    let mut ran = Vec::new();
    for case in cases(MICROBATCHES).into_iter().filter(|case| case.checked.order_dependent) {
        let config = wide(RECIPES[1], case.layers());
        for capture in CaptureMode::ALL {
            assert!(follows(&config, &case, (Gradients::Copied, capture), &COMPARED, RECIPES[1]));
            for added in [Gradients::Direct, Gradients::Coalesced] {
                assert!(!follows(&config, &case, (added, capture), &COMPARED, RECIPES[1]));
            }
        }
        ran.push((case.schedule, case.ranks()));
    }
    assert_eq!(ran, RANKS.map(|ranks| ("looped_bfs", ranks)));
}

/// The other recipes, on every schedule.
fn other_recipe(recipe: &str) {
    let Some(_turn) = beside_others() else { return };
    let (mut ran, mut refused) = (BTreeSet::new(), BTreeSet::new());
    for (case, gradients, capture) in all_in_turn() {
        let config = GptConfig { layers: case.layers(), ..model(recipe) };
        match follows(&config, &case, (gradients, capture), &[STEPS - 1], recipe) {
            true => ran.insert((format!("{gradients:?}"), capture.name())),
            false => refused.insert((format!("{gradients:?}"), case.schedule)),
        };
    }
    assert_eq!(ran.len(), PLACEMENTS.len() * CaptureMode::ALL.len(), "{ran:?}");
    let added = [Gradients::Direct, Gradients::Coalesced].map(|gradients| (format!("{gradients:?}"), "looped_bfs"));
    assert_eq!(refused, BTreeSet::from(added));
}

#[test]
fn scaling_that_moves_with_every_step_gives_the_same_bits() {
    other_recipe(RECIPES[1]);
}

#[test]
fn bf16_gives_the_same_bits() {
    other_recipe(RECIPES[2]);
}

/// Tapes that R makes anew have the bytes of those that F would have left.
#[test]
fn recomputation_gives_the_same_bits_in_every_mode() {
    let Some(_turn) = beside_others() else { return };
    for case in cases(MICROBATCHES).into_iter().filter(|case| ["zb_v", "one_f_one_b"].contains(&case.schedule)) {
        for recipe in RECIPES {
            let config = GptConfig { layers: case.layers(), ..model(recipe) };
            let again = Case { checked: with_recomputation(&case.checked, |_| true), ..case.clone() };
            for (gradients, capture) in PLACEMENTS.into_iter().zip(CaptureMode::ALL) {
                assert!(follows(&config, &again, (gradients, capture), &[STEPS - 1], &format!("{recipe}, R")));
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
    let run = |ranks, capture, grad_dtype| {
        let gradients = Gradients::Coalesced;
        let checked = in_groups(zb_h1::build(ranks, i64::from(MICROBATCHES)).unwrap(), gradients);
        let stages = config.stages(&blocks(&config, checked.schedule.stages)).unwrap();
        let session_config =
            SessionConfig { gradients, grad_dtype, capture, ..SessionConfig::new(OPTIM, config.tokens()) };
        let device = Box::new(CudaDevice::new(0).unwrap());
        let mut session = Session::on_one_device(checked, stages, session_config, device).unwrap();
        let step = |step| session.step(batch(&config, step, MICROBATCHES)).unwrap().losses;
        let losses: Vec<Vec<f64>> = (0..STEPS).map(step).collect();
        (losses, session.snapshot().unwrap().values)
    };
    let (losses, values) = run(1, CaptureMode::Eager, GradDtype::Bf16);
    for (ranks, capture) in [1, 2].into_iter().flat_map(|ranks| CaptureMode::ALL.map(|capture| (ranks, capture))) {
        let found = run(ranks, capture, GradDtype::Bf16);
        assert_eq!(found.0, losses, "{ranks} ranks, {capture}");
        same(&values, &found.1, &format!("{ranks} ranks, {capture}"));
    }
    assert_ne!(run(1, CaptureMode::Step, GradDtype::Master).0, losses, "sums that are rounded are others");
}
