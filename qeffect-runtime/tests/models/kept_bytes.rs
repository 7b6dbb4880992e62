//! What a GPT block retains, computed from its shapes and counted by the pool while a step runs.
//!
//! PyTorch's split backward of the same block in bf16 keeps 32 bytes per token and element of the hidden size from F to I,
//! and 54 from I to W (`scripts/kept_bytes.py`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use qeffect_core::action::Kind;
use qeffect_core::dtype::Dtype;
use qeffect_core::plan::Checked;
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Buf, Caps, Device};
use qeffect_runtime::error::Result;
use qeffect_runtime::gpt::{GptConfig, GptStage, GptTape, GptWork};
use qeffect_runtime::op::Effects;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::pool::{KeptBytes, RegionBytes};
use qeffect_runtime::retained::{Layout, Retained};
use qeffect_runtime::session::{Session, SessionConfig, StepReport};
use qeffect_runtime::stage::{Stage, StageSpec};
use qeffect_schedules::{gpipe, zb_h1, zb_v};

/// Of the stage in the middle, which is one block.
fn kept(recipe: &str, fp8_needs_transposes: bool) -> (GptConfig, KeptBytes) {
    let (hidden, recipe) = (64, recipe.parse().unwrap());
    let config = GptConfig { vocab: 32, hidden, heads: 4, ffn: 4 * hidden, layers: 3, seq: 16, sequences: 2, recipe };
    let caps = Caps { fp8_needs_transposes, ..Caps::default() };
    let device = |_| Ok(Box::new(CpuDevice::with_caps(caps)) as Box<dyn Device>);
    let optim = SessionConfig::new(OptimConfig::default(), config.tokens());
    let stages = config.stages(&[1, 1, 1]).unwrap();
    let mut session = Session::with_devices(gpipe::build(3, 1).unwrap(), stages, optim, device).unwrap();
    let tokens: Vec<u32> = (0..config.tokens() as u32).map(|t| t % 32).collect();
    let report = session.step(vec![Windows { targets: tokens.clone(), tokens }]).unwrap();
    (config, report.kept[1])
}

#[test]
fn kept_bytes_of_the_gpt_block() {
    for (recipe, activation, code, factors) in [("bf16", 2, 2, 0), ("fp8-delayed", 2, 1, 4)] {
        for fp8_needs_transposes in [false, true] {
            let (config, found) = kept(recipe, fp8_needs_transposes);
            let (tokens, unit) = (config.tokens(), config.tokens() * config.hidden);
            // Of each norm mean and 1/deviation of each row, of attention one number per row and head, all f32.
            let statistics = 4 * tokens * (2 * 2 + config.heads);
            // The inputs of both norms, q, k and v, the input of GELU; inputs of the four matrices, once each.
            let tape = unit * (activation * (2 + 3 + 4) + code * (1 + 1 + 1 + 4)) + statistics + 4 * factors;
            // Those four, and the gradients of their outputs.
            let work = unit * code * ((1 + 1 + 1 + 4) + (3 + 1 + 4 + 1)) + 4 * 2 * factors;
            assert_eq!(found, KeptBytes { input: 0, tape, work }, "{recipe}, transposes: {fp8_needs_transposes}");
        }
    }
}

/// What a rank retains, action by action, in the order in which it ran them.
type Log = Arc<Mutex<Vec<Event>>>;

struct Event {
    kind: Kind,
    /// What I or W consumes.
    consumed: Entries,
    /// What F or I leaves.
    left: Entries,
}

/// Retained tensors by name. After I has given up a tensor of the tape, its buffer may hold one of the work.
type Entries = Vec<(String, Act)>;

/// A stage of a GPT that writes down what it retains.
struct Logged {
    inner: GptStage,
    log: Log,
}

impl Logged {
    fn note(&self, kind: Kind, consumed: Entries, left: Entries) {
        self.log.lock().unwrap().push(Event { kind, consumed, left });
    }
}

fn entries(retained: &impl Retained) -> Entries {
    Layout::of(retained).entries
}

impl Stage for Logged {
    type Tape = GptTape;
    type Work = GptWork;

    fn spec(&self) -> &StageSpec {
        self.inner.spec()
    }

    fn effects(&self) -> Effects {
        self.inner.effects()
    }

    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], token: Token<Fwd>) -> Result<(Vec<Act>, GptTape, Token<Fwd>)> {
        let (y, tape, token) = self.inner.forward(cx, x, token)?;
        self.note(Kind::Forward, Vec::new(), entries(&tape));
        Ok((y, tape, token))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: GptTape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, GptWork, Token<Bwd>)> {
        let consumed = entries(&tape);
        let (dx, work, token) = self.inner.input_grad(cx, dy, tape, token)?;
        self.note(Kind::InputGrad, consumed, entries(&work));
        Ok((dx, work, token))
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, work: GptWork) -> Result<()> {
        self.note(Kind::WeightGrad, entries(&work), Vec::new());
        self.inner.weight_grad(cx, work)
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        self.inner.evaluate(cx, x)
    }
}

/// Buffers of one kind of life: of each type and size, how many are live, and the most that were.
#[derive(Default)]
struct Lives {
    count: BTreeMap<(Dtype, usize), [usize; 2]>,
    shares: BTreeMap<Buf, usize>,
    most: usize,
}

impl Lives {
    fn take(&mut self, act: &Act) {
        let shares = self.shares.entry(act.buf).or_default();
        *shares += 1;
        if *shares == 1 {
            let [now, most] = self.count.entry((act.dtype, act.bytes())).or_default();
            (*now, *most) = (*now + 1, (*most).max(*now + 1));
        }
        self.most = self.most.max(self.count.iter().map(|((_, bytes), [now, _])| bytes * now).sum());
    }

    fn give(&mut self, act: &Act) {
        let shares = self.shares.get_mut(&act.buf).unwrap();
        *shares -= 1;
        if *shares == 0 {
            self.count.get_mut(&(act.dtype, act.bytes())).unwrap()[0] -= 1;
        }
    }

    /// Of buffers that are shared where type and size are the same: so many bytes at least.
    fn bytes(&self) -> usize {
        assert!(self.count.values().all(|[now, _]| *now == 0));
        self.count.iter().map(|((_, bytes), [_, most])| bytes * most).sum()
    }
}

/// Bytes that one rank needs for what it retains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Needed {
    /// Of the most that is retained at once, of each type and size.
    least: usize,
    /// Of the most that waits for W at once, of each type and size.
    works: usize,
    /// Of the most that waits for W at once.
    works_at_once: usize,
    /// Of regions that lend nothing: for what ends with I, what stays from F to W, and what I adds.
    apart: usize,
}

fn needed(log: &[Event]) -> Needed {
    let [mut all, mut tapes, mut both, mut added, mut works] = [0; 5].map(|_| Lives::default());
    let bufs = |entries: &Entries| entries.iter().map(|(_, act)| (act.buf, *act)).collect::<BTreeMap<Buf, Act>>();
    // What W will want of a tape is known when its I has run, so lives are found from the end.
    let mut survive = BTreeMap::new();
    for (at, event) in log.iter().enumerate().filter(|(_, event)| event.kind == Kind::InputGrad) {
        let survivors = event.consumed.iter().filter(|tensor| event.left.contains(tensor)).map(|(_, act)| act.buf);
        let survivors: BTreeSet<Buf> = survivors.collect();
        let forward = log[..at].iter().rposition(|f| f.left == event.consumed).unwrap();
        let weights = log[at..].iter().position(|w| w.kind == Kind::WeightGrad && w.consumed == event.left).unwrap();
        for at in [forward, at, at + weights] {
            survive.insert(at, survivors.clone());
        }
    }
    for (at, event) in log.iter().enumerate() {
        let (consumed, left, survivors) = (bufs(&event.consumed), bufs(&event.left), &survive[&at]);
        let survives = |act: &&Act| survivors.contains(&act.buf);
        let passes = |act: &&Act| !survives(act);
        left.values().for_each(|act| all.take(act));
        match event.kind {
            Kind::Forward => {
                left.values().filter(survives).for_each(|act| both.take(act));
                left.values().filter(passes).for_each(|act| tapes.take(act));
            }
            Kind::InputGrad => {
                left.values().for_each(|act| works.take(act));
                left.values().filter(passes).for_each(|act| added.take(act));
                consumed.values().filter(passes).for_each(|act| tapes.give(act));
            }
            _ => {
                consumed.values().for_each(|act| works.give(act));
                consumed.values().filter(survives).for_each(|act| both.give(act));
                consumed.values().filter(passes).for_each(|act| added.give(act));
            }
        }
        consumed.values().for_each(|act| all.give(act));
    }
    let apart = tapes.bytes() + both.bytes() + added.bytes();
    Needed { least: all.bytes(), works: works.bytes(), works_at_once: works.most, apart }
}

/// What a rank needs, what its regions have, and the most works of each of its stages.
type Measured = (Needed, RegionBytes, Vec<usize>);

/// Of models of one block per stage, by rank, after two steps.
fn measure(recipe: &str, checked: &Checked) -> (usize, Vec<Measured>) {
    let (stages, hidden, recipe) = (checked.schedule.stages as usize, 64, recipe.parse().unwrap());
    let config =
        GptConfig { vocab: 32, hidden, heads: 4, ffn: 4 * hidden, layers: stages, seq: 16, sequences: 2, recipe };
    let logs: Vec<Log> = (0..checked.schedule.ranks).map(|_| Log::default()).collect();
    let placement = &checked.schedule.placement;
    let blocks = config.stages(&vec![1; stages]).unwrap().into_iter().zip(placement.iter());
    let logged = blocks.map(|(inner, rank)| Logged { inner, log: logs[rank.index()].clone() }).collect();
    let optim = OptimConfig { steps: 2, ..OptimConfig::default() };
    let eager = SessionConfig { capture: CaptureMode::Eager, ..SessionConfig::new(optim, config.tokens()) };
    let mut session = Session::new(checked.clone(), logged, eager).unwrap();
    let tokens: Vec<u32> = (0..config.tokens() as u32).map(|t| t % 32).collect();
    let batch = vec![Windows { targets: tokens.clone(), tokens }; checked.schedule.microbatches as usize];
    let step = |session: &mut Session<Logged>| session.step(batch.clone()).unwrap();
    let (first, second) = (step(&mut session), step(&mut session));
    let ranks = (0..logs.len()).map(|rank| {
        let total = |of: &StepReport| of.regions[rank].tape.owned + of.regions[rank].work.owned;
        assert_eq!(total(&first), total(&second), "a second step needs no more");
        let works = placement.iter().zip(&second.kept).filter(|(on, _)| on.index() == rank).map(|(_, kept)| kept.work);
        (needed(&logs[rank].lock().unwrap()), second.regions[rank], works.collect())
    });
    (config.tokens() * config.hidden, ranks.collect())
}

/// The work region has what works need at once, and no more. Both regions together have more than is retained at once, of each
/// type and size, since what F, I and W compute with lies in them too: up to 12 bytes per token and element of the hidden size in bf16,
/// where it has buffers in common with what is retained, and 30 in FP8, where it has none. Regions that lend nothing would take far
/// more where works pile up while tapes become few: in bf16 a third more under ZB-V. In FP8 activations, codes of tapes and codes
/// of gradients differ in type, so that there is nothing to lend between what is retained.
#[test]
fn regions_that_lend_take_little_more_than_is_retained_at_once() {
    for recipe in ["bf16", "fp8-delayed"] {
        for checked in [zb_h1::<4, 8>(), zb_v::<4, 8>()] {
            let (unit, ranks) = measure(recipe, checked);
            let zb_v = checked.schedule.name == "zb_v";
            for (rank, (needed, RegionBytes { tape, work }, stages)) in ranks.iter().enumerate() {
                let Needed { least, works, works_at_once, apart } = *needed;
                let owned = tape.owned + work.owned;
                let what = format!("{recipe}, {}, rank {rank}: {needed:?}, {tape:?}, {work:?}", checked.schedule.name);
                let per = |bytes: usize| bytes as f64 / unit as f64;
                println!(
                    "{what}; per token and element: tapes {:.2}, works {:.2}, least {:.2}, apart {:.2}, stages {:?}",
                    per(tape.owned),
                    per(work.owned),
                    per(least),
                    per(apart),
                    stages.iter().map(|works| per(*works)).collect::<Vec<_>>(),
                );
                assert_eq!((work.owned, work.most), (works, works_at_once), "{what}");
                assert!(least <= owned && least <= apart, "{what}");
                // A region for each stage would have the most that ever waits in it.
                assert!(work.most <= stages.iter().sum(), "{what}: {stages:?}");
                let beside = owned - least;
                assert!(beside <= if recipe == "bf16" { 12 } else { 30 } * unit + unit / 8, "{what}: {}", per(beside));
                if recipe == "bf16" {
                    assert!(owned < tape.most + work.most, "{what}");
                }
            }
            if recipe == "bf16" && zb_v {
                let (needed, RegionBytes { tape, work }, _) = &ranks[3];
                // A block has 18 bytes of tape that end with I, and a half of statistics, 14 that W reads too, and I adds 18.
                // At most 8 tapes and 7 works are live, and 8 of both together.
                assert_eq!([needed.least, needed.apart], [278 * unit, (8 * 18 + 8 / 2 + 8 * 14 + 7 * 18) * unit]);
                assert_eq!([tape.owned, work.owned], [66 * unit, 7 * (14 + 18) * unit]);
                // Works of its two stages never wait at once.
                let (_, regions, stages) = &ranks[0];
                assert_eq!((regions.work.most, stages.as_slice()), (35 * unit, [34 * unit, 35 * unit].as_slice()));
            }
        }
    }
}
