//! Memory, measured while no other test runs: what is taken is what was predicted, replays take nothing, and where little is
//! left the bits are the same.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use qeffect_core::bind::Gradients;
use qeffect_core::plan::Checked;
use qeffect_kernels::cache::Cache;
use qeffect_kernels::gemm::{Product, Products, Type, WORKSPACE};
use qeffect_kernels::{Buffer, CudaContext, module};
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::{Buf, BufSpec, Device, DeviceError, GraphId};
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::zb_h1;

use crate::common::batch;
use crate::common::how::{Case, RANKS, training};
use crate::rig::alone;
use crate::sessions::{PLACEMENTS, all_in_turn, blocks, follows, in_groups, reference, wide};
use crate::training::{MICROBATCHES, OPTIM, RECIPES, STEPS, model};

/// Free bytes of the GPU, and all.
fn memory(context: &CudaContext) -> (usize, usize) {
    context.mem_get_info().unwrap()
}

/// Takes memory until less than `left` bytes are free.
fn fill(context: &Arc<CudaContext>, left: usize) -> Vec<Buffer<u8>> {
    let mut filled = Vec::new();
    let mut piece = memory(context).0.saturating_sub(left);
    while piece >= 1 << 20 {
        match Buffer::poisoned(context, piece) {
            Ok(buffer) => filled.push(buffer),
            Err(_) => piece /= 2, // no room in one piece
        }
        piece = piece.min(memory(context).0.saturating_sub(left));
    }
    filled
}

/// Does `job` for each, by so many threads.
fn spread<T: Sync>(over: &[T], threads: usize, job: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(item) = over.get(next.fetch_add(1, Ordering::Relaxed)) {
            job(item);
        }
    };
    thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
}

// Case B47.
#[test]
fn a_gpu_that_is_nearly_full_gives_the_same_bits() {
    /// More than a session here takes, the workspaces of its device among it.
    const EACH: usize = 3 << 29;
    let Some(_turn) = alone() else { return };
    let all = all_in_turn();
    let config = |case: &Case| wide(RECIPES[0], case.layers());
    // As long as it lives, so does the table of algorithms of this process.
    let keeper = CudaDevice::new(0).unwrap();
    let context = module::context(0).unwrap();
    let total = memory(&context).1;
    let threads = (total / 10 / EACH).clamp(1, 12);
    // What is wanted is computed while there is room.
    spread(&all, threads, |(case, gradients, _)| {
        reference(&config(case), case, *gradients);
    });
    let run = |what: &str, some: &[(Case, Gradients, CaptureMode)]| {
        let ran = Mutex::new(BTreeSet::new());
        spread(some, threads, |(case, gradients, capture)| {
            if follows(&config(case), case, (*gradients, *capture), &[STEPS - 1], what) {
                ran.lock().unwrap().insert((case.schedule, case.ranks(), format!("{gradients:?}")));
            }
        });
        (ran.into_inner().unwrap(), keeper.algorithms().digest())
    };
    // The same products in every mode.
    let in_step: Vec<_> = all.iter().filter(|(.., mode)| *mode == CaptureMode::Step).cloned().collect();
    let (_, empty) = run("empty", &in_step);
    let filled = fill(&context, total / 10);
    assert!(memory(&context).0 <= total / 10 + (1 << 20));
    println!("{} of {total} bytes were filled", filled.iter().map(|buffer| buffer.span().len()).sum::<usize>());
    let (ran, full) = run("nearly full", &all);
    assert_eq!(full, empty, "the same algorithms");
    let trained = training().filter(|entry| entry.name != "looped_bfs"); // refused: its state moves with every microbatch
    let each = trained
        .flat_map(|entry| RANKS.map(|ranks| PLACEMENTS.map(|placed| (entry.name, ranks, format!("{placed:?}")))));
    assert_eq!(ran, each.flatten().collect::<BTreeSet<_>>());
}

// Case B47: an algorithm that was chosen stays; where there is no room for a workspace or for a search, that is an error.
#[test]
fn without_room_for_a_workspace_nothing_else_is_chosen() {
    let Some(_turn) = alone() else { return };
    let _keeper = CudaDevice::new(0).unwrap();
    let context = module::context(0).unwrap();
    let stream = context.new_stream().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let open = || Products::open(&context, Some(Cache::at(folder.path()))).unwrap();
    let known = Product::fp8(128, 2048, 512, Type::E4M3, Type::E4M3);
    let unknown = Product::weight_gradient(2048, 512, 128, Type::E5M2, Type::E4M3);
    let mut before = open();
    let plan = before.plan(&stream, known).unwrap();
    before.warm(&stream, &plan).unwrap();
    context.synchronize().unwrap();
    let mut after = open();

    let filled = fill(&context, 16 << 20);
    assert!(Buffer::<u8>::poisoned(&context, WORKSPACE).is_err(), "{:?} left", memory(&context));
    let found = after.plan(&stream, known).unwrap();
    assert_eq!((after.searched(), after.algorithms().digest()), (0, before.algorithms().digest()));
    assert_eq!(found.workspace(), plan.workspace());
    for error in [after.warm(&stream, &found).unwrap_err(), after.plan(&stream, unknown).unwrap_err()] {
        assert!(error.to_string().contains("allocation of device memory"), "{error}");
    }
    assert_eq!(after.algorithms().digest(), before.algorithms().digest(), "nothing was chosen instead");
    let Err(error) = CudaDevice::new(0) else { panic!("its lanes have no workspace") };
    assert!(error.to_string().contains("allocation of a workspace for products"), "{error}");

    drop(filled);
    after.plan(&stream, unknown).unwrap();
    assert_eq!(after.searched(), 1);
}

/// What a device has been asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Taken {
    allocs: usize,
    bytes: usize,
}

/// A GPU that says what it has taken.
struct Counted {
    device: CudaDevice,
    taken: Arc<Mutex<Taken>>,
}

impl Counted {
    fn boxed() -> (Box<dyn Device>, Arc<Mutex<Taken>>) {
        let taken = Arc::default();
        (Box::new(Counted { device: CudaDevice::new(0).unwrap(), taken: Arc::clone(&taken) }), taken)
    }

    fn count(&self, allocs: usize) {
        let mut taken = self.taken.lock().unwrap();
        *taken = Taken { allocs: taken.allocs + allocs, bytes: self.device.bytes() };
    }
}

impl Device for Counted {
    qeffect_runtime::hand_on!(device: name caps spec write read poison launch drop_graph);

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let buf = self.device.alloc(spec)?;
        self.count(1);
        Ok(buf)
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        self.device.issue(cmd)?;
        self.count(0);
        Ok(())
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        let graph = self.device.instantiate(cmds)?;
        self.count(0);
        Ok(graph)
    }
}

/// Bytes of this process that lie in the machine's memory, where the system says so.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<usize>().ok()? << 10)
}

#[test]
fn thousands_of_replays_take_no_memory() {
    /// Replays after which everything has been loaded.
    const WARM: u64 = 200;
    const REPLAYS: u64 = 10_000;
    /// What the driver's free memory and the process may move by: less than a KB per replay.
    const SLACK: usize = 8 << 20;
    let Some(_turn) = alone() else { return };
    let config = GptConfig { layers: 2, ..model(RECIPES[0]) };
    let (device, taken) = Counted::boxed();
    let stages = config.stages(&[1, 1]).unwrap();
    let optim = OptimConfig { steps: WARM + REPLAYS, peak: 1e-3, ..OPTIM };
    let gradients = Gradients::Coalesced;
    let session_config = SessionConfig { gradients, ..SessionConfig::new(optim, config.tokens()) };
    let checked = in_groups(zb_h1::<2, 4>().clone(), gradients);
    let mut session = Session::on_one_device(checked, stages, session_config, device).unwrap();
    let batches: Vec<_> = (0..8).map(|step| batch(&config, step, MICROBATCHES)).collect();
    let context = module::context(0).unwrap();
    let now = || (*taken.lock().unwrap(), memory(&context).0, resident());
    let mut replay = |steps: u64| {
        let mut losses = Vec::new();
        for step in 0..steps {
            let report = session.step(batches[step as usize % batches.len()].clone()).unwrap();
            assert!(report.loss.is_finite() && !report.skipped, "step {step}: {report:?}");
            losses = vec![losses.first().copied().unwrap_or(report.loss), report.loss];
        }
        losses
    };
    let first = replay(WARM)[0];
    let (counted, free, held) = now();
    let last = replay(REPLAYS)[1];
    let (counted_then, free_then, held_then) = now();
    println!("{REPLAYS} replays, loss {first:.3} → {last:.3}, {counted:?}");
    println!("free {free} → {free_then}, resident {held:?} → {held_then:?}");
    assert_eq!(counted_then, counted);
    assert!(free_then + SLACK >= free, "{} bytes fewer are free", free - free_then);
    if let (Some(held), Some(then)) = (held, held_then) {
        assert!(then <= held + SLACK, "the process has grown by {} bytes", then - held);
    }
    assert!(last < 0.9 * first, "{first} → {last}");
}

/// A model on ranks, and how it runs.
struct Run {
    config: GptConfig,
    checked: Checked,
    session_config: SessionConfig,
    what: String,
}

impl Run {
    fn new(config: GptConfig, ranks: i64, capture: CaptureMode, gradients: Gradients) -> Run {
        let what = format!("hidden {}, {ranks} ranks, {capture}, {gradients:?}", config.hidden);
        let checked = in_groups(zb_h1::build(ranks, i64::from(MICROBATCHES)).unwrap(), gradients);
        let session_config = SessionConfig { gradients, capture, ..SessionConfig::new(OPTIM, config.tokens()) };
        Run { config, checked, session_config, what }
    }

    fn stages(&self) -> Vec<GptStage> {
        self.config.stages(&blocks(&self.config, self.checked.schedule.stages)).unwrap()
    }

    fn predicted(&self) -> usize {
        let footprint = Session::footprint(self.checked.clone(), self.stages(), self.session_config).unwrap();
        let error = footprint.fits(footprint.bytes() - 1).unwrap_err().to_string();
        assert!(error.contains("activations and tapes"), "{error}");
        assert!(footprint.tapes > 0 && footprint.works > 0);
        let joint = self.checked.schedule.ranks == 2 && self.session_config.capture == CaptureMode::Step;
        assert_eq!(footprint.messages > 0, joint, "{}", self.what);
        footprint.bytes()
    }

    /// A session that has taken steps: later ones take no more than the first.
    fn session(&self, device: Box<dyn Device>) -> Session<GptStage> {
        let mut session =
            Session::on_one_device(self.checked.clone(), self.stages(), self.session_config, device).unwrap();
        for step in 0..3 {
            session.step(batch(&self.config, step, MICROBATCHES)).unwrap();
        }
        session
    }
}

/// Within 2 %.
fn near(predicted: usize, taken: usize, what: &str) {
    println!("{what}: {predicted} bytes predicted, {taken} taken");
    assert!(predicted.abs_diff(taken) * 50 <= taken, "{what}: {predicted} predicted, {taken} taken");
}

/// Bytes are known before anything is allocated, on a machine without a GPU too; what is taken then is that, within 2 %.
#[test]
fn bytes_are_predicted() {
    let turn = alone();
    let narrow = model(RECIPES[0]);
    let wide = GptConfig { vocab: 2048, hidden: 256, heads: 4, ffn: 1024, seq: 128, ..narrow };
    for config in [narrow, wide] {
        for (ranks, capture, gradients) in [
            (1, CaptureMode::Eager, Gradients::Copied),
            (2, CaptureMode::Eager, Gradients::Coalesced),
            (1, CaptureMode::Step, Gradients::Direct),
            (2, CaptureMode::Action, Gradients::Coalesced),
            (2, CaptureMode::Step, Gradients::Coalesced),
        ] {
            let run = Run::new(config, ranks, capture, gradients);
            let predicted = run.predicted();
            if turn.is_some() {
                let (device, taken) = Counted::boxed();
                let _session = run.session(device);
                near(predicted, taken.lock().unwrap().bytes, &run.what);
            }
        }
    }
}

/// The same by what the driver says is free, of a model that fills gigabytes. Left out is what a GPU holds beside the
/// buffers of a session: its context, loaded kernels, and what the driver keeps for graphs. A session before the one that is
/// measured has them there already.
#[test]
fn predicted_bytes_are_what_the_driver_gives() {
    let turn = alone();
    let config = GptConfig {
        vocab: 4096,
        hidden: 2048,
        heads: 16,
        ffn: 8192,
        layers: 2,
        seq: 256,
        sequences: 1,
        ..model(RECIPES[0])
    };
    for (ranks, capture, gradients) in [
        (1, CaptureMode::Eager, Gradients::Coalesced),
        (1, CaptureMode::Step, Gradients::Direct),
        (2, CaptureMode::Step, Gradients::Coalesced),
    ] {
        let run = Run::new(config, ranks, capture, gradients);
        let predicted = run.predicted();
        assert!(predicted > 1 << 30, "{predicted}");
        if turn.is_none() {
            continue;
        }
        // As long as it lives, kernels stay loaded.
        let _keeper = CudaDevice::new(0).unwrap();
        let context = module::context(0).unwrap();
        drop(run.session(Box::new(CudaDevice::new(0).unwrap())));
        let before = memory(&context).0;
        let session = run.session(Box::new(CudaDevice::new(0).unwrap()));
        let after = memory(&context).0;
        drop(session);
        near(predicted, before - after, &format!("{}, by the driver", run.what));
    }
}
