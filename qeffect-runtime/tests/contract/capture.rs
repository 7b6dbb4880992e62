//! Captured steps: they allocate nothing, evaluation between them leaves no trace, and a value that is not finite,
//! wherever it arises, changes nothing in any mode.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use crate::common::batch;
use crate::common::how::{HOW, How};
use crate::common::spoil::{KINDS, kept, output};
use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::plan::Checked;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cmd::effects::Mode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::{Buf, BufSpec, Device, DeviceError, GraphId};
use qeffect_runtime::error::Error;
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{OnNonFinite, Session, SessionConfig};
use qeffect_schedules::{eval_loop, eval_v, one_f_one_b, zb_h1, zb_v};

const OPTIM: OptimConfig = OptimConfig {
    steps: 200,
    warmup: 2,
    peak: 4e-3,
    floor: 1e-3,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    clip: 1.0,
};

fn model() -> GptConfig {
    let recipe = "fp8-delayed:history=4".parse().unwrap();
    GptConfig { vocab: 32, hidden: 16, heads: 2, ffn: 32, layers: 2, seq: 8, sequences: 2, recipe }
}

/// What a device under test does beside its work, and what it has seen.
#[derive(Default)]
struct Watch {
    allocs: usize,
    launches: usize,
    /// Commands since the last [`Watch::arm`], by name; only those that [`output`] knows.
    seen: Vec<&'static str>,
    /// Which of them leaves a NaN behind.
    spoil: Option<usize>,
    /// Names of the buffers that casts have written since the last [`Watch::arm`], before and after `Settle`.
    casts: [Vec<String>; 2],
    /// Buffers of gradients that commands have touched since the last [`Watch::arm`]: the command's name, and whether it
    /// only reads.
    gradients: BTreeSet<(String, Buf, &'static str, bool)>,
    settled: bool,
}

impl Watch {
    fn arm(&mut self, spoil: Option<usize>) {
        self.seen.clear();
        self.spoil = spoil;
        self.casts.iter_mut().for_each(Vec::clear);
        self.gradients.clear();
        self.settled = false;
    }
}

/// A cpu device that runs lists command by command, so that it can spoil one in every mode.
struct Watched {
    device: CpuDevice,
    graphs: Vec<Vec<Cmd>>,
    watch: Arc<Mutex<Watch>>,
}

impl Watched {
    fn boxed(watch: &Arc<Mutex<Watch>>) -> Box<dyn Device> {
        Box::new(Watched { device: CpuDevice::new(), graphs: Vec::new(), watch: watch.clone() })
    }
}

impl Device for Watched {
    qeffect_runtime::hand_on!(device: caps spec write read poison);

    fn name(&self) -> &str {
        "watched"
    }
    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        self.watch.lock().unwrap().allocs += 1;
        self.device.alloc(spec)
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        self.device.issue(cmd)?;
        let mut watch = self.watch.lock().unwrap();
        watch.settled |= matches!(cmd, Cmd::Settle { .. });
        if let Cmd::Quantise { codes, .. } = cmd {
            let commits = usize::from(watch.settled);
            watch.casts[commits].push(self.device.spec(*codes)?.name.clone());
        }
        for access in cmd.effects(|_| None) {
            let name = &self.device.spec(access.buf)?.name;
            if name.contains("(gradient") {
                watch.gradients.insert((name.clone(), access.buf, cmd.name(), access.mode == Mode::Read));
            }
        }
        let Some(buf) = output(cmd) else { return Ok(()) };
        watch.seen.push(cmd.name());
        if watch.spoil != Some(watch.seen.len() - 1) {
            return Ok(());
        }
        let spec = self.device.spec(buf)?.clone();
        let mut bytes = vec![0; spec.bytes()];
        self.device.read(buf, &mut bytes)?;
        match spec.dtype {
            Dtype::Bf16 => bytes[..2].copy_from_slice(&[0xC0, 0x7F]),
            Dtype::F32 => bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes()),
            Dtype::U64 => bytes[8] ^= 1, // the microbatch of a tag
            dtype => panic!("{} writes {dtype}", cmd.name()),
        }
        self.device.write(buf, &bytes)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        self.graphs.push(cmds);
        self.device.instantiate(Vec::new()) // its number is that of our list
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.watch.lock().unwrap().launches += 1;
        let cmds = std::mem::take(&mut self.graphs[graph.index()]);
        let result = cmds.iter().try_for_each(|cmd| self.issue(cmd));
        self.graphs[graph.index()] = cmds;
        result
    }
    fn drop_graph(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.graphs[graph.index()].clear();
        self.device.drop_graph(graph)
    }
}

fn session(
    how: How,
    checked: &Checked,
    blocks: &[usize],
    on_nonfinite: OnNonFinite,
) -> (Session<GptStage>, Vec<Arc<Mutex<Watch>>>) {
    let session_config = SessionConfig { on_nonfinite, verify: true, ..SessionConfig::new(OPTIM, model().tokens()) };
    session_with(how, checked, blocks, session_config)
}

fn session_with(
    how: How,
    checked: &Checked,
    blocks: &[usize],
    session_config: SessionConfig,
) -> (Session<GptStage>, Vec<Arc<Mutex<Watch>>>) {
    let stages = model().stages(blocks).unwrap();
    let watches: Vec<Arc<Mutex<Watch>>> = match how {
        How::PerRank(_) => (0..checked.schedule.ranks).map(|_| Arc::default()).collect(),
        How::OneDevice => vec![Arc::default()],
    };
    let session = match how {
        How::PerRank(capture) => {
            let session_config = SessionConfig { capture, ..session_config };
            Session::with_devices(checked.clone(), stages, session_config, |r| Ok(Watched::boxed(&watches[r.index()])))
        }
        How::OneDevice => Session::on_one_device(checked.clone(), stages, session_config, Watched::boxed(&watches[0])),
    };
    (session.unwrap(), watches)
}

#[test]
fn a_replayed_step_allocates_nothing_and_launches_what_was_captured() {
    let config = model();
    for how in HOW {
        let (mut session, watches) = session(how, zb_v::<2, 4>(), &[0, 1, 1, 0], OnNonFinite::Skip);
        let sum = |of: fn(&Watch) -> usize| watches.iter().map(|watch| of(&watch.lock().unwrap())).sum::<usize>();
        assert_eq!(sum(|watch| watch.launches), 0, "{how:?}: capture carries nothing out");
        let captured = how != How::PerRank(CaptureMode::Eager);
        let mut before = sum(|watch| watch.allocs);
        for step in 0..3u64 {
            let report = session.step(batch(&config, step, 4)).unwrap();
            let (allocs, launches) = (sum(|watch| watch.allocs), sum(|watch| watch.launches));
            assert!(allocs == before || step == 0 && !captured, "{how:?}: step {step} allocated");
            before = allocs;
            assert_eq!((report.graphs, report.launches * (step as usize + 1)), (report.launches, launches), "{how:?}");
            match how {
                How::PerRank(CaptureMode::Eager) => assert_eq!(report.launches, 0),
                // F, I and W of 4 stages and microbatches, and per rank at least begin, agree and commit.
                How::PerRank(CaptureMode::Action) => assert!(report.launches >= 4 * 4 * 3 + 2 * 3, "{report:?}"),
                How::PerRank(CaptureMode::Step) => assert!((2..60).contains(&report.launches), "{report:?}"),
                How::OneDevice => assert_eq!(report.launches, 1),
            }
        }
    }
}

#[test]
fn evaluation_between_captured_steps_leaves_no_trace() {
    let config = model();
    let mut wanted = None;
    for how in HOW {
        let run = |evaluates: bool| {
            let (mut session, _) = session(how, zb_v::<2, 4>(), &[0, 1, 1, 0], OnNonFinite::Skip);
            let evaluation = session.evaluation(eval_v::<2, 4>().clone()).unwrap();
            for step in 0..6 {
                session.step(batch(&config, step, 4)).unwrap();
                if evaluates {
                    session.evaluate(&evaluation, batch(&config, 100 + step, 4)).unwrap();
                }
            }
            session.snapshot().unwrap()
        };
        let (with, without) = (run(true), run(false));
        assert_eq!(with, without, "{how:?}");
        assert_eq!(*wanted.get_or_insert_with(|| with.clone()), with, "{how:?}");
    }
}

// Case B20: the buffers that take gradients, and those that the optimizer reads, are the same in the twentieth step as in
// the first, whatever ran in between.
#[test]
fn gradients_stay_where_they_were_captured() {
    let config = model();
    let plain = zb_h1::<2, 4>();
    let grouped = plain.clone().coalesced(2).unwrap();
    let placements = [(Gradients::Copied, plain), (Gradients::Direct, plain), (Gradients::Coalesced, &grouped)];
    for ((gradients, checked), how) in placements.into_iter().flat_map(|placement| HOW.map(|how| (placement, how))) {
        let what = format!("{gradients:?}, {how:?}");
        let session_config = SessionConfig { gradients, ..SessionConfig::new(OPTIM, config.tokens()) };
        let (mut session, watches) = session_with(how, checked, &[1, 1], session_config);
        let evaluation = session.evaluation(eval_loop::build(2, 4, 1).unwrap()).unwrap();
        let step = |session: &mut Session<GptStage>, step: u64| {
            watches.iter().for_each(|watch| watch.lock().unwrap().arm(None));
            session.step(batch(&config, step, 4)).unwrap();
            watches.iter().map(|watch| watch.lock().unwrap().gradients.clone()).collect::<Vec<_>>()
        };
        let first = step(&mut session, 0);
        for n in 1..19 {
            session.evaluate(&evaluation, batch(&config, 100 + n, 4)).unwrap();
            step(&mut session, n);
        }
        assert_eq!(step(&mut session, 19), first, "{what}");
        let mut updated = 0;
        for touched in &first {
            let (optimizer, others): (Vec<_>, Vec<_>) = touched.iter().partition(|(_, _, cmd, _)| *cmd == "adamw");
            let written: BTreeSet<Buf> = others.iter().filter(|(.., reads)| !reads).map(|(_, buf, ..)| *buf).collect();
            assert!(optimizer.iter().all(|(_, buf, _, reads)| *reads && written.contains(buf)), "{what}: {touched:?}");
            updated += optimizer.len();
        }
        let values = session.snapshot().unwrap().values;
        assert_eq!(updated, values.keys().filter(|name| name.ends_with("/gradient")).count(), "{what}");
    }
}

// Case B11: a weight is cast by commit, once, and by no forward, whatever the mode; so there is no flag that a kernel could
// ignore. Activations are cast by every forward.
#[test]
fn a_replayed_forward_casts_no_weight() {
    let config = model();
    for how in HOW {
        let (mut session, watches) = session(how, zb_h1::<2, 4>(), &[1, 1], OnNonFinite::Skip);
        for step in 0..3 {
            watches.iter().for_each(|watch| watch.lock().unwrap().arm(None));
            session.step(batch(&config, step, 4)).unwrap();
            let casts = |at: usize| {
                let of = |watch: &Arc<Mutex<Watch>>| watch.lock().unwrap().casts[at].clone();
                let mut names: Vec<String> = watches.iter().flat_map(of).collect();
                names.sort();
                names
            };
            let (before, commit) = (casts(0), casts(1));
            // x of nine products in F, dy of them in I, of every microbatch.
            assert_eq!(before.len(), 4 * 2 * 9, "{how:?}");
            assert!(before.iter().all(|name| !name.contains("weight")), "{how:?}: {before:?}");
            assert_eq!(commit.len(), 9, "{how:?}: {commit:?}");
            assert!(commit.windows(2).all(|pair| pair[0] != pair[1]), "{how:?}: {commit:?}");
            assert!(commit.iter().all(|name| name.contains("weight")), "{how:?}: {commit:?}");
        }
    }
}

/// The first, middle and last of every kind of command.
fn targets(seen: &[&'static str]) -> Vec<usize> {
    let mut places: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    seen.iter().enumerate().for_each(|(at, name)| places.entry(name).or_default().push(at));
    let mut targets: Vec<usize> = places.values().flat_map(|at| [at[0], at[at.len() / 2], at[at.len() - 1]]).collect();
    targets.sort_unstable();
    targets.dedup();
    targets
}

fn a_nan_anywhere_changes_nothing(checked: &Checked, blocks: &[usize], kinds: &[&str]) {
    let config = model();
    for how in HOW {
        let (mut clean, _) = session(how, checked, blocks, OnNonFinite::Skip);
        let (mut skips, watches) = session(how, checked, blocks, OnNonFinite::Skip);
        let (mut stops, stop_watches) = session(how, checked, blocks, OnNonFinite::Stop);
        watches.iter().for_each(|watch| watch.lock().unwrap().arm(None));
        for step in 0..2 {
            watches.iter().for_each(|watch| watch.lock().unwrap().arm(None));
            for session in [&mut clean, &mut skips, &mut stops] {
                session.step(batch(&config, step, 4)).unwrap();
            }
        }
        let before = kept(skips.snapshot().unwrap());
        let seen: Vec<Vec<&str>> = watches.iter().map(|watch| watch.lock().unwrap().seen.clone()).collect();
        for kind in kinds {
            assert!(seen.iter().flatten().any(|name| name == kind), "{how:?}: no {kind}");
        }
        let mut attempts = 2;
        for (at, watch) in watches.iter().enumerate() {
            for target in targets(&seen[at]) {
                let what = format!("{how:?}: a NaN from {} ({target}) of device {at}", seen[at][target]);
                watch.lock().unwrap().arm(Some(target));
                let report = skips.step(batch(&config, 2, 4)).unwrap();
                assert!(report.skipped, "{what}");
                let tags: Vec<String> = report.mismatches.iter().map(ToString::to_string).collect();
                match seen[at][target] {
                    "write_tag" => assert!(tags.len() == 1 && tags[0].starts_with("a slot holds stage "), "{tags:?}"),
                    _ => assert!(tags.is_empty(), "{what}: {tags:?}"),
                }
                assert_eq!((report.step, report.epoch), (attempts, 2), "{what}");
                assert!(kept(skips.snapshot().unwrap()) == before, "{what}");
                attempts += 1;
                if attempts % 8 == 0 {
                    stop_watches[at].lock().unwrap().arm(Some(target));
                    let error = stops.step(batch(&config, 2, 4)).unwrap_err();
                    match seen[at][target] {
                        "write_tag" => assert_eq!(error.code(), Some(Code::KeyMismatch), "{what}: {error}"),
                        _ => {
                            assert!(matches!(error, Error::NotFinite { .. }), "{what}: {error}");
                            assert_eq!(error.code(), Some(Code::NonFinite), "{what}: {error}");
                        }
                    }
                    assert!(error.to_string().contains("; nothing has changed"), "{error}");
                    assert!(kept(stops.snapshot().unwrap()) == before, "{what}");
                    stop_watches[at].lock().unwrap().arm(None);
                }
            }
            watch.lock().unwrap().arm(None);
        }
        assert!(attempts > 20, "{how:?}: {attempts}");
        // On with the next batch, as if the bad ones had never been.
        for step in 3..6 {
            let wanted = clean.step(batch(&config, step, 4)).unwrap();
            for session in [&mut skips, &mut stops] {
                let found = session.step(batch(&config, step, 4)).unwrap();
                assert_eq!(
                    (found.losses, found.grad_norm, found.epoch),
                    (wanted.losses.clone(), wanted.grad_norm, step)
                );
            }
        }
        let wanted = clean.snapshot().unwrap();
        assert_eq!(skips.snapshot().unwrap(), wanted, "{how:?}");
        assert_eq!(stops.snapshot().unwrap(), wanted, "{how:?}");
    }
}

#[test]
fn a_nan_in_f_i_w_refresh_or_reduce_changes_nothing() {
    a_nan_anywhere_changes_nothing(zb_h1::<2, 4>(), &[1, 1], KINDS);
}

#[test]
fn a_nan_in_b_changes_nothing() {
    a_nan_anywhere_changes_nothing(one_f_one_b::<2, 4>(), &[1, 1], KINDS);
}

#[test]
fn stop_says_which_loss_was_not_finite() {
    let config = model();
    for how in HOW {
        let (mut session, _) = session(how, zb_h1::<2, 4>(), &[1, 1], OnNonFinite::Stop);
        let evaluation = session.evaluation(eval_loop::build(2, 4, 1).unwrap()).unwrap();
        session.step(batch(&config, 0, 4)).unwrap();
        let path = "blocks.1.ln1.bias";
        let values = session.param(path).unwrap();
        let mut broken = values.clone();
        broken[0] = f64::INFINITY;
        session.set_params(BTreeMap::from([(path.to_owned(), broken)])).unwrap();
        let error = session.step(batch(&config, 1, 4)).unwrap_err().to_string();
        assert!(error.starts_with("step 1: "), "{how:?}: {error}");
        assert!(error.ends_with(" is not finite; nothing has changed [QE0906]"), "{how:?}: {error}");
        session.set_params(BTreeMap::from([(path.to_owned(), values)])).unwrap();
        let losses = session.evaluate(&evaluation, batch(&config, 2, 4)).unwrap();
        assert!(losses.iter().all(|loss| loss.is_finite()));
        assert_eq!(session.step(batch(&config, 1, 4)).unwrap().epoch, 2);
    }
}
