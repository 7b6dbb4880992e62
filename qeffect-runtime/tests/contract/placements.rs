//! Placements of gradients: `direct` gives the bits of `copied` wherever `bind` lets it, and `coalesced` the same bits for
//! every schedule that has the same groups.
//!
//! The reference is one stage on one rank without plan, ledger, threads or messages.

use std::collections::BTreeMap;

use crate::common::how::{Case, HOW, How, RANKS, cases, cut, training, weight_gradients_ascend};
use crate::common::settings::{TRANSPOSES, adamw, tiny};
use crate::common::{Solo, batch};
use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::ids::Stage as StageId;
use qeffect_core::plan::Checked;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::Caps;
use qeffect_runtime::error::Result;
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::shard::Named;
use qeffect_runtime::stage::{ParamKind, Stage};
use qeffect_schedules::zb_h1;

const STEPS: u64 = 6;
const MICROBATCHES: u32 = 4;

const OPTIM: OptimConfig = adamw(STEPS, 2, 8e-3, 1e-3);

const RECIPES: [&str; 3] = ["fp8-delayed:history=4,update=microbatch", "fp8-delayed:history=4,update=step", "bf16"];

/// What a run leaves: per step the norm, at the end every value by name.
#[derive(PartialEq, Debug)]
struct Trace {
    norms: Vec<u64>,
    values: BTreeMap<String, Named>,
}

impl Trace {
    /// The same bits as `want`; else fails with what differs.
    fn equals(&self, want: &Trace, what: &str) {
        if self == want {
            return;
        }
        let step = self.norms.iter().zip(&want.norms).position(|(found, want)| found != want);
        let differ = self.values.iter().filter(|(name, value)| want.values.get(*name) != Some(value));
        let names: Vec<&String> = differ.map(|(name, _)| name).collect();
        panic!("{what}: norms differ from step {step:?} on, and {} values: {names:?}", names.len());
    }
}

/// Everything but what only such a device has.
fn without_transposed(mut values: BTreeMap<String, Named>) -> BTreeMap<String, Named> {
    values.retain(|name, _| !name.ends_with("/transposed"));
    values
}

fn new_solo(config: &GptConfig, gradients: Gradients, coalesce: u32, caps: Caps) -> Solo {
    solo_of(config, MICROBATCHES, gradients, coalesce, caps)
}

fn solo_of(config: &GptConfig, microbatches: u32, gradients: Gradients, coalesce: u32, caps: Caps) -> Solo {
    let device = Box::new(CpuDevice::with_caps(caps));
    Solo::on(device, config, &[config.layers], microbatches, OPTIM, (gradients, coalesce))
}

fn solo(config: &GptConfig, gradients: Gradients, coalesce: u32, caps: Caps) -> Trace {
    trace(new_solo(config, gradients, coalesce, caps), config)
}

fn trace(mut solo: Solo, config: &GptConfig) -> Trace {
    let microbatches = solo.microbatches;
    let steps = (0..STEPS).map(|step| solo.step(&batch(config, step, microbatches)).1.norm.to_bits());
    let norms = steps.collect();
    Trace { norms, values: without_transposed(solo.shard.export().unwrap()) }
}

fn run(how: How, config: &GptConfig, checked: &Checked, gradients: Gradients, caps: Caps) -> Result<Trace> {
    let mut session = started(how, config, checked, gradients, caps)?;
    let mut norms = Vec::new();
    for step in 0..STEPS {
        norms.push(session.step(batch(config, step, checked.schedule.microbatches))?.grad_norm.to_bits());
    }
    Ok(Trace { norms, values: without_transposed(session.snapshot()?.values) })
}

/// A session that has taken no step yet.
fn started(
    how: How,
    config: &GptConfig,
    checked: &Checked,
    gradients: Gradients,
    caps: Caps,
) -> Result<Session<GptStage>> {
    let stages = config.stages(cut(checked.schedule.stages))?;
    let session_config = SessionConfig { gradients, ..SessionConfig::new(OPTIM, config.tokens()) };
    how.session(checked.clone(), stages, session_config, || Box::new(CpuDevice::with_caps(caps)))
}

// case B13, case B55: the first executed W overwrites, every other one adds. In sessions: `bit_for_bit`.
#[test]
fn direct_gives_the_bits_of_copied() {
    for recipe in RECIPES {
        let config = tiny(recipe, 6);
        let want = solo(&config, Gradients::Copied, 1, Caps::default());
        solo(&config, Gradients::Copied, 1, TRANSPOSES).equals(&want, recipe);
        for caps in [Caps::default(), TRANSPOSES] {
            solo(&config, Gradients::Direct, 1, caps).equals(&want, recipe);
        }
    }
}

/// Groups of `n` give the same bits under every schedule in every mode. Only the groups of `looped_bfs` descend, which is
/// refused at start.
fn groups_give_the_same_bits(recipe: &str, n: u32, caps: Caps) {
    let rolls = recipe.ends_with("update=microbatch");
    let mut wanted = BTreeMap::new();
    let mut ran = BTreeMap::new();
    for case in cases(MICROBATCHES) {
        let config = tiny(recipe, case.layers());
        let of = (case.layers(), case.microbatches());
        let want = wanted.entry(of).or_insert_with(|| {
            trace(solo_of(&config, case.microbatches(), Gradients::Coalesced, n, Caps::default()), &config)
        });
        let checked = case.checked.clone().coalesced(n).unwrap();
        let refusal = match rolls && checked.order_dependent {
            true => Some(Code::OrderDependent),
            false => (!weight_gradients_ascend(&checked, n)).then_some(Code::GradientsUnsupported),
        };
        for how in HOW {
            let what = format!("{recipe}, groups of {n}, {} on {} ranks, {how:?}", case.schedule, case.ranks());
            let times = ran.entry((case.schedule, case.ranks())).or_insert(0);
            match run(how, &config, &checked, Gradients::Coalesced, caps) {
                Ok(found) => {
                    assert_eq!(refusal, None, "{what}: was not refused");
                    found.equals(want, &what);
                    *times += 1;
                }
                Err(error) => assert!(error.code().is_some() && error.code() == refusal, "{what}: {error}"),
            }
        }
    }
    let times = |schedule: &str| if schedule == "looped_bfs" { 0 } else { HOW.len() };
    let all = training().flat_map(|entry| RANKS.map(|ranks| ((entry.name, ranks), times(entry.name))));
    assert_eq!(ran, all.collect::<BTreeMap<_, _>>(), "{recipe}, groups of {n}");
}

/// Weight gradients that descend are summed by microbatch where they are copied; to be added in place, one by one or in
/// groups, they are refused at start. Inside a group any order will do.
#[test]
fn weight_gradients_that_descend_are_not_added_in_place() {
    qeffect_schedules::schedule! {
        /// Forwards and input gradients in order, weight gradients against it.
        descending<P, M>;

        ranks: P;
        microbatches: M;
        stages: P;
        place: |s| s;

        rank |r| {
            for m in 0..M { F(r, m); }
            for m in 0..M { I(r, m); }
            for m in (0..M).rev() { W(r, m); }
        }
    }
    let checked = descending::build(2, i64::from(MICROBATCHES)).unwrap();
    assert!(!checked.order_dependent, "no state sees the order");
    for recipe in RECIPES {
        let (config, caps) = (tiny(recipe, 3), Caps::default());
        let want = solo(&config, Gradients::Copied, 1, caps);
        for how in HOW {
            let what = format!("{recipe}, {how:?}");
            run(how, &config, &checked, Gradients::Copied, caps).unwrap().equals(&want, &what);
            for (gradients, n) in [(Gradients::Direct, 1), (Gradients::Coalesced, 2), (Gradients::Coalesced, 3)] {
                let checked = checked.clone().coalesced(n).unwrap();
                let error = started(how, &config, &checked, gradients, caps).map(drop).unwrap_err();
                assert_eq!(error.code(), Some(Code::GradientsUnsupported), "{what}, {gradients:?}: {error}");
                let text = error.to_string();
                assert!(text.contains("stand in ascending order"), "{what}, {gradients:?}: {text}");
            }
            let one = checked.clone().coalesced(MICROBATCHES).unwrap();
            run(how, &config, &one, Gradients::Coalesced, caps).unwrap().equals(&want, &what);
        }
    }
}

#[test]
fn groups_under_delayed_scaling_that_moves_with_every_microbatch() {
    groups_give_the_same_bits(RECIPES[0], 2, Caps::default());
}

/// Regions of transposed codes are padded to blocks.
#[test]
fn groups_of_transposed_codes() {
    groups_give_the_same_bits(RECIPES[0], 2, TRANSPOSES);
}

#[test]
fn groups_under_delayed_scaling_that_moves_with_every_step() {
    groups_give_the_same_bits(RECIPES[1], 2, Caps::default());
}

#[test]
fn groups_of_which_the_last_is_short() {
    groups_give_the_same_bits(RECIPES[1], 3, Caps::default());
}

#[test]
fn groups_in_bf16() {
    groups_give_the_same_bits(RECIPES[2], 2, Caps::default());
}

/// A device whose FP8 products take one factor per operand runs groups whose members have the same, and is refused others
/// before anything runs, however a session runs steps.
#[test]
fn groups_with_factors_of_their_own_need_a_device_that_has_them() {
    let one_factor = Caps { one_factor: true, ..TRANSPOSES };
    groups_give_the_same_bits(RECIPES[1], 2, one_factor);
    let ascends = |case: &Case| weight_gradients_ascend(&case.checked.clone().coalesced(2).unwrap(), 2);
    let case = cases(MICROBATCHES).into_iter().find(ascends).unwrap();
    let tried = |recipe, how| {
        let config = tiny(recipe, case.layers());
        run(how, &config, &case.checked.clone().coalesced(2).unwrap(), Gradients::Coalesced, one_factor)
    };
    for how in HOW {
        let refused = tried(RECIPES[0], how).unwrap_err().to_string();
        for part in ["each of the 2 microbatches", "Hopper", "`direct`", "`update=step`", "bf16"] {
            assert!(refused.contains(part), "{how:?}: {refused}");
        }
        tried(RECIPES[2], how).unwrap(); // bf16 has no factors
    }
}

/// What the search for algorithms takes is that of the largest product: of fc2's weight gradient, over all tokens of a group.
/// Members with factors of their own begin at multiples of 128 tokens, and have block scales.
#[test]
fn groups_with_one_factor_lie_without_gaps() {
    let search = |recipe: &str| {
        let recipe = recipe.parse().unwrap();
        let config =
            GptConfig { vocab: 32, hidden: 128, heads: 2, ffn: 1024, layers: 1, seq: 16, sequences: 2, recipe };
        let checked = zb_h1::build(1, i64::from(MICROBATCHES)).unwrap().coalesced(MICROBATCHES).unwrap();
        let session_config =
            SessionConfig { gradients: Gradients::Coalesced, ..SessionConfig::new(OPTIM, config.tokens()) };
        Session::footprint(checked, config.stages(&[1]).unwrap(), session_config).unwrap().search
    };
    let of = |tokens: usize, scales: usize| (1024 + 128) * tokens + 4 * 1024 * 128 + scales + (160 << 20);
    // One factor on each side, in 256 bytes.
    assert_eq!(search(RECIPES[1]), of(4 * 32, 2 * 256));
    // Squares of all 128 rows for four blocks of tokens, and vectors of 1024 columns for each block.
    assert_eq!(search(RECIPES[0]), of(4 * 128, 256 + 4 * 1024 * 4));
}

/// With one group products are added as `copied` adds its slots; with two the additions are others, and so are the bits.
#[test]
fn one_group_of_all_microbatches_has_the_bits_of_copied() {
    for recipe in RECIPES {
        let config = tiny(recipe, 6);
        let want = solo(&config, Gradients::Copied, 1, Caps::default());
        for caps in [Caps::default(), TRANSPOSES] {
            for n in [MICROBATCHES, MICROBATCHES + 3] {
                solo(&config, Gradients::Coalesced, n, caps).equals(&want, recipe);
            }
            assert!(solo(&config, Gradients::Coalesced, 2, caps) != want, "{recipe}: the comparison can fail");
        }
    }
}

/// The products of microbatches are the same numbers in both; a sum of M floats in any order is off by at most
/// (M - 1)·u/(1 - (M - 1)·u) times the sum of their magnitudes, u = 2⁻²⁴, so two such sums differ by at most twice that.
#[test]
fn coalesced_differs_from_direct_by_the_rounding_of_additions() {
    let config = tiny("bf16", 6); // without hidden state a microbatch's product does not depend on the others
    let batch = batch(&config, 0, MICROBATCHES);
    let gradients = |gradients, coalesce| {
        let mut solo = new_solo(&config, gradients, coalesce, Caps::default());
        solo.step(&batch);
        solo
    };
    let (mut direct, mut coalesced) = (gradients(Gradients::Direct, 1), gradients(Gradients::Coalesced, 2));
    let mut single: Vec<Solo> = (0..MICROBATCHES as usize)
        .map(|m| {
            let mut solo = Solo::new(&config, &[config.layers], 1, OPTIM);
            solo.step(&batch[m..=m]);
            solo
        })
        .collect();
    let u = f64::powi(2.0, -24);
    let terms = f64::from(MICROBATCHES - 1) * u;
    let mut differ = 0;
    for path in
        ["blocks.0.qkv.weight", "blocks.1.proj.weight", "blocks.2.fc1.weight", "blocks.3.fc2.weight", "head.weight"]
    {
        let products: Vec<Vec<f64>> = single.iter_mut().map(|solo| solo.shard.gradient(path).unwrap()).collect();
        let (a, b) = (direct.shard.gradient(path).unwrap(), coalesced.shard.gradient(path).unwrap());
        for i in 0..a.len() {
            let exact = products.iter().map(|product| product[i]).sum::<f64>() / f64::from(MICROBATCHES);
            let magnitude = products.iter().map(|product| product[i].abs()).sum::<f64>() / f64::from(MICROBATCHES);
            let bound = terms / (1.0 - terms) * magnitude;
            assert!((a[i] - exact).abs() <= bound && (b[i] - exact).abs() <= bound, "{path}[{i}]");
            assert!((a[i] - b[i]).abs() <= 2.0 * bound);
            differ += usize::from(a[i] != b[i]);
        }
    }
    assert!(differ > 100, "{differ} elements differ");
}

/// A group whose first member is done holds regions and a product; an abort drops both.
#[test]
fn an_aborted_step_leaves_nothing_of_a_group_behind() {
    let config = tiny("bf16", 6);
    let data = batch(&config, 0, MICROBATCHES);
    let step = |solo: &mut Solo| {
        let verdict = solo.step(&data).1;
        (verdict.norm.to_bits(), solo.shard.export().unwrap())
    };
    let want = step(&mut new_solo(&config, Gradients::Coalesced, 2, Caps::default()));
    let mut solo = new_solo(&config, Gradients::Coalesced, 2, Caps::default());
    solo.begin(&data);
    for m in [0, 2] {
        let tapes = solo.forward(m);
        let works = solo.input_grad(m, tapes);
        solo.weight_grad(m, works); // waits for its neighbour
    }
    assert_eq!(solo.shard.reduce(StageId(0)).unwrap_err().code(), Some(Code::ArenaMissing));
    solo.shard.abort().unwrap();
    assert_eq!(solo.shard.reduce(StageId(0)).unwrap_err().code(), Some(Code::ArenaPoisoned));
    solo.shard.pool().quiescent().unwrap();
    assert!(step(&mut solo) == want);
}

/// What the placements cost: `copied` has a destination per microbatch and matrix or embedding, the others have one; a group keeps the
/// works of all its members.
#[test]
fn destinations_and_works_are_counted() {
    let config = tiny("fp8-delayed:history=4", 6);
    let report = |gradients, coalesce| {
        let mut solo = new_solo(&config, gradients, coalesce, Caps::default());
        solo.step(&batch(&config, 0, MICROBATCHES));
        (solo.shard.arena_bytes(), solo.shard.kept_bytes()[0].1)
    };
    let spec = config.stages(&[config.layers]).unwrap().remove(0);
    let elements = |kind| {
        let params = spec.spec().params.iter();
        params.filter(|param| (param.kind != ParamKind::Vector) == kind).map(|param| param.elements()).sum::<usize>()
    };
    let (matrices, others, m) = (elements(true), elements(false), MICROBATCHES as usize);
    let (copied, single) = report(Gradients::Copied, 1);
    let (direct, _) = report(Gradients::Direct, 1);
    let (coalesced, pair) = report(Gradients::Coalesced, 2);
    assert_eq!(copied, 4 * m * (matrices + others));
    assert_eq!(direct, 4 * (matrices + m * others));
    assert_eq!(coalesced, direct);
    // Codes of x and dy, and a factor for each of them.
    let (hidden, ffn, tokens) = (config.hidden, config.ffn, config.tokens());
    let columns = config.layers * (hidden + 3 * hidden + 2 * hidden + 2 * (hidden + ffn)) + hidden + config.vocab;
    let factors = 2 * (4 * config.layers + 1);
    let embedding = 2 * tokens * hidden; // dy of the embedding, bf16
    assert_eq!(single.work, tokens * columns + 4 * factors + embedding);
    assert!(pair.work > 2 * tokens * columns && pair.work < 2 * single.work + embedding, "{pair:?}, {single:?}");
}
