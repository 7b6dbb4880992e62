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
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Buf, Caps, Device};
use qeffect_runtime::error::Result;
use qeffect_runtime::gpt::{GptConfig, GptStage, GptTape, GptWork};
use qeffect_runtime::op::Effects;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::pool::KeptBytes;
use qeffect_runtime::retained::{Layout, Retained};
use qeffect_runtime::session::{Session, SessionConfig};
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
    consumed: Vec<Act>,
    /// What F or I leaves.
    left: Vec<Act>,
}

/// A stage of a GPT that writes down what it retains.
struct Logged {
    inner: GptStage,
    log: Log,
}

impl Logged {
    fn note(&self, kind: Kind, consumed: Vec<Act>, left: Vec<Act>) {
        self.log.lock().unwrap().push(Event { kind, consumed, left });
    }
}

fn acts(retained: &impl Retained) -> Vec<Act> {
    Layout::of(retained).entries.into_iter().map(|(_, act)| act).collect()
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
        self.note(Kind::Forward, Vec::new(), acts(&tape));
        Ok((y, tape, token))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: GptTape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, GptWork, Token<Bwd>)> {
        let consumed = acts(&tape);
        let (dx, work, token) = self.inner.input_grad(cx, dy, tape, token)?;
        self.note(Kind::InputGrad, consumed, acts(&work));
        Ok((dx, work, token))
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, work: GptWork) -> Result<()> {
        self.note(Kind::WeightGrad, acts(&work), Vec::new());
        self.inner.weight_grad(cx, work)
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        self.inner.evaluate(cx, x)
    }
}

/// Buffers of one kind of life: of each type and size, how many are live, and the most that were.
#[derive(Default)]
struct Region(BTreeMap<(Dtype, usize), [usize; 2]>, BTreeMap<Buf, usize>);

impl Region {
    fn take(&mut self, act: &Act) {
        let shares = self.1.entry(act.buf).or_default();
        *shares += 1;
        if *shares == 1 {
            let [now, most] = self.0.entry((act.dtype, act.bytes())).or_default();
            (*now, *most) = (*now + 1, (*most).max(*now + 1));
        }
    }

    fn give(&mut self, act: &Act) {
        let shares = self.1.get_mut(&act.buf).unwrap();
        *shares -= 1;
        if *shares == 0 {
            self.0.get_mut(&(act.dtype, act.bytes())).unwrap()[0] -= 1;
        }
    }

    /// Of buffers that are shared where type and size are the same: so many bytes at least.
    fn bytes(&self) -> usize {
        self.0
            .iter()
            .map(|((_, bytes), [now, most])| {
                assert_eq!(*now, 0);
                bytes * most
            })
            .sum()
    }
}

/// Bytes that one rank needs for what it retains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Needed {
    /// Of the buffers that the pool gave for it.
    pool: usize,
    /// Of the most that is retained at once, of each type and size.
    least: usize,
    /// Of regions for what ends with I, what stays from F to W, and what I adds.
    apart: usize,
}

fn needed(log: &[Event]) -> Needed {
    let (mut all, mut given) = (Region::default(), BTreeMap::new());
    let [mut tapes, mut both, mut works] = [0; 3].map(|_| Region::default());
    let bufs = |acts: &[Act]| acts.iter().map(|act| (act.buf, *act)).collect::<BTreeMap<Buf, Act>>();
    // What W will want of a tape is known when its I has run, so lives are found from the end.
    let mut survive = BTreeMap::new();
    for (at, event) in log.iter().enumerate().filter(|(_, event)| event.kind == Kind::InputGrad) {
        let (tape, work) = (bufs(&event.consumed), bufs(&event.left));
        let forward = log[..at].iter().rposition(|f| f.kind == Kind::Forward && bufs(&f.left) == tape).unwrap();
        survive.insert(forward, work.keys().copied().collect::<BTreeSet<Buf>>());
        survive.insert(at, tape.keys().copied().collect::<BTreeSet<Buf>>());
        let weights = log[at..].iter().position(|w| w.kind == Kind::WeightGrad && bufs(&w.consumed) == work).unwrap();
        survive.insert(at + weights, tape.keys().copied().collect::<BTreeSet<Buf>>());
    }
    for (at, event) in log.iter().enumerate() {
        let (consumed, left, survives) = (bufs(&event.consumed), bufs(&event.left), &survive[&at]);
        left.values().for_each(|act| {
            all.take(act);
            given.insert(act.buf, act.bytes());
        });
        match event.kind {
            Kind::Forward => {
                left.iter().for_each(|(buf, act)| if survives.contains(buf) { both.take(act) } else { tapes.take(act) })
            }
            Kind::InputGrad => {
                left.iter().filter(|(buf, _)| !survives.contains(buf)).for_each(|(_, act)| works.take(act));
                consumed.iter().filter(|(buf, _)| !left.contains_key(buf)).for_each(|(_, act)| tapes.give(act));
            }
            _ => consumed.iter().for_each(
                |(buf, act)| {
                    if survives.contains(buf) { both.give(act) } else { works.give(act) }
                },
            ),
        }
        consumed.values().for_each(|act| all.give(act));
    }
    let apart = tapes.bytes() + both.bytes() + works.bytes();
    Needed { pool: given.values().sum(), least: all.bytes(), apart }
}

/// By rank, of models of one block per stage.
fn ranks(recipe: &str, checked: &Checked) -> (usize, Vec<Needed>) {
    let (stages, hidden, recipe) = (checked.schedule.stages as usize, 64, recipe.parse().unwrap());
    let config =
        GptConfig { vocab: 32, hidden, heads: 4, ffn: 4 * hidden, layers: stages, seq: 16, sequences: 2, recipe };
    let logs: Vec<Log> = (0..checked.schedule.ranks).map(|_| Log::default()).collect();
    let blocks = config.stages(&vec![1; stages]).unwrap().into_iter().zip(checked.schedule.placement.iter());
    let logged = blocks.map(|(inner, rank)| Logged { inner, log: logs[rank.index()].clone() }).collect();
    // The step is written down once; later ones use the same buffers.
    let session_config = SessionConfig::new(OptimConfig::default(), config.tokens());
    drop(Session::new(checked.clone(), logged, session_config).unwrap());
    (config.tokens() * config.hidden, logs.iter().map(|log| needed(&log.lock().unwrap())).collect())
}

/// Tapes and works share buffers where type and size are the same: under ZB-V in bf16 that saves up to a third of what
/// regions of their own would take. In FP8 activations, codes of tapes and codes of gradients differ in type, so that they lie
/// apart in one pool too. What passes through the pool between F, I and W may leave a retained tensor in another buffer than
/// the lowest that would do; that costs some percent.
#[test]
fn one_pool_takes_little_more_than_is_retained_at_once() {
    for recipe in ["bf16", "fp8-delayed"] {
        for checked in [zb_h1::<4, 8>(), zb_v::<4, 8>()] {
            let (unit, ranks) = ranks(recipe, checked);
            for (rank, needed) in ranks.iter().enumerate() {
                let Needed { pool, least, apart } = *needed;
                let what = format!("{recipe}, {}, rank {rank}: {needed:?}", checked.schedule.name);
                assert!(least <= pool && pool * 100 <= least * 107, "{what}");
                assert!(least <= apart, "{what}");
                let per = |bytes: usize| bytes as f64 / unit as f64;
                println!("{what}, per token and element: {:.2}, {:.2}, {:.2}", per(pool), per(least), per(apart));
                if recipe == "bf16" && checked.schedule.name == "zb_v" {
                    assert!(pool < apart, "{what}");
                }
            }
            if recipe == "bf16" && checked.schedule.name == "zb_v" {
                // Two blocks, without embedding and head.
                assert_eq!(ranks[3], Needed { pool: 280 * unit, least: 278 * unit, apart: 394 * unit });
            }
        }
    }
}
