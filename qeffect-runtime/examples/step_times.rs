//! Times of whole training steps on one GPU: capture modes, gradient placements, the floor of the same plan, and where
//! the time goes.
//!
//! `cargo run --release -p qeffect-runtime --example step_times -- A step coalesced` takes a shape (`A`, `B`, `small`), a
//! list of capture modes and a list of gradient placements, each separated by commas; further words are `table` (time per
//! kind of command), `floor` (matrix products, AdamW and norm of this plan alone), `lanes=N`, `schedule=NAME`,
//! `grad_dtype=bf16` and `fast=none` or `fast=all` (which FP8 products are summed in fewer bits; those of F otherwise). Tokens
//! are random, the model is a GPT of 4 blocks, the schedule 1F1B unless another is named, on one rank.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use qeffect_core::bind::Gradients;
use qeffect_core::recipe::Recipe;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cmd::fused::Producer;
use qeffect_runtime::cuda::{CudaDevice, LANES};
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Buf, BufSpec, Device, DeviceError, GraphId, SharedDevice};
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::rng;
use qeffect_runtime::session::{FastAccumulation, GradDtype, Session, SessionConfig};

type Fault = Box<dyn std::error::Error>;

const STEPS: u64 = 30;
const WARM: u64 = 5;

struct Shape {
    hidden: usize,
    ffn: usize,
    heads: usize,
    microbatches: u32,
    vocab: usize,
}

fn shape(name: &str) -> Result<Shape, Fault> {
    Ok(match name {
        "A" => Shape { hidden: 2048, ffn: 8192, heads: 16, microbatches: 4, vocab: 32_768 },
        "B" => Shape { hidden: 4096, ffn: 11_008, heads: 32, microbatches: 8, vocab: 32_768 },
        "small" => Shape { hidden: 512, ffn: 2048, heads: 8, microbatches: 4, vocab: 4096 },
        _ => return Err(format!("there is no shape `{name}`; one of: A, B, small").into()),
    })
}

/// What the host spent in calls of the device.
#[derive(Clone, Copy, Default)]
struct Host {
    writes: Duration,
    launches: Duration,
    reads: Duration,
    captures: Duration,
    /// Commands that were issued by themselves, in no graph.
    issued: usize,
}

#[derive(Default)]
struct Seen {
    lists: Vec<Vec<Cmd>>,
    host: Host,
}

/// A device that remembers the lists that are made graphs of it, and how long its calls take.
struct Tap {
    device: SharedDevice,
    seen: Arc<Mutex<Seen>>,
}

impl Tap {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timed<R>(&mut self, run: impl FnOnce(&mut SharedDevice) -> R, of: fn(&mut Host) -> &mut Duration) -> R {
        let start = Instant::now();
        let result = run(&mut self.device);
        let took = start.elapsed();
        *of(&mut self.seen().host) += took;
        result
    }
}

impl Device for Tap {
    qeffect_runtime::hand_on!(device: name caps alloc spec poison drop_graph);

    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        self.seen().host.issued += 1;
        self.device.issue(cmd)
    }
    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        self.timed(|device| device.write(buf, bytes), |host| &mut host.writes)
    }
    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.timed(|device| device.read(buf, bytes), |host| &mut host.reads)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        self.seen().lists.push(cmds.clone());
        self.timed(|device| device.instantiate(cmds), |host| &mut host.captures)
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.timed(|device| device.launch(graph), |host| &mut host.launches)
    }
}

fn batch(step: u64, microbatches: u32, model: &GptConfig) -> Vec<Windows> {
    let id = |words: [u64; 3]| rng::below(rng::draw(&words), model.vocab as u64) as u32;
    (0..u64::from(microbatches))
        .map(|m| {
            let ids = |kind| (0..model.tokens() as u64).map(|i| id([step, m, 2 * i + kind])).collect();
            Windows { tokens: ids(0), targets: ids(1) }
        })
        .collect()
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// Median time of a list of commands as one graph, in ms. What it computes is of no use afterwards.
fn time(device: &mut SharedDevice, cmds: Vec<Cmd>, probe: Buf) -> Result<f64, Fault> {
    const LAUNCHES: u32 = 5;
    let mut bytes = vec![0; device.spec(probe)?.bytes()];
    let graph = device.instantiate(cmds)?;
    let mut times = Vec::new();
    for _ in 0..9 {
        device.launch(graph)?;
        device.read(probe, &mut bytes)?; // waits
        let start = Instant::now();
        for _ in 0..LAUNCHES {
            device.launch(graph)?;
        }
        device.read(probe, &mut bytes)?;
        times.push(start.elapsed() / LAUNCHES);
    }
    device.drop_graph(graph)?;
    Ok(median(times))
}

fn is_floor(cmd: &Cmd) -> bool {
    match cmd {
        Cmd::Gemm { .. } | Cmd::GroupGemm { .. } | Cmd::AdamW { .. } | Cmd::SumSquares { .. } => true,
        Cmd::Fused(fused) => matches!(fused.producer, Producer::AdamW { .. }),
        _ => false,
    }
}

/// Operations of a matrix product.
fn flops(cmd: &Cmd) -> f64 {
    match cmd {
        Cmd::Gemm { m, n, k, .. } => 2.0 * *m as f64 * *n as f64 * *k as f64,
        Cmd::GroupGemm { m, n, k, members, .. } => 2.0 * (*m * *n * *k * *members) as f64,
        _ => 0.0,
    }
}

/// Bytes that a command must move.
fn traffic(cmd: &Cmd, device: &SharedDevice) -> f64 {
    let spec = |buf| device.find(buf);
    let effects = cmd.effects(|buf| spec(buf).map(|spec| spec.elements()));
    let bytes = |access: &qeffect_runtime::cmd::effects::Access| {
        let Some(spec) = spec(access.buf) else { return 0.0 };
        let elements = access.range.end.min(spec.elements()).saturating_sub(access.range.start);
        let twice = matches!(access.mode, qeffect_runtime::cmd::effects::Mode::Update);
        (elements * spec.dtype.size()) as f64 * if twice { 2.0 } else { 1.0 }
    };
    effects.iter().map(bytes).sum()
}

fn label(cmd: &Cmd) -> String {
    match cmd {
        Cmd::Gemm { m, n, k, accumulate, a, .. } => {
            let kind = if a.scale_inv.is_some() { "fp8" } else { "bf16" };
            format!("gemm {kind} {m}x{n}x{k}{}", if *accumulate { ", added" } else { "" })
        }
        Cmd::GroupGemm { m, n, k, members, .. } => format!("gemm of {members} microbatches {m}x{n}x{k}"),
        Cmd::Fused(fused) => {
            let producer = format!("{:?}", fused.producer);
            let name = producer.split([' ', '{', '(']).next().unwrap_or("?").to_owned();
            format!("fused {name} {}x{}", fused.rows, fused.cols)
        }
        cmd => cmd.name().to_owned(),
    }
}

/// Prints the time of each kind of command of a list, every kind alone.
fn table(device: &mut SharedDevice, cmds: &[Cmd], probe: Buf) -> Result<(), Fault> {
    let mut kinds: BTreeMap<String, Vec<Cmd>> = BTreeMap::new();
    for cmd in cmds {
        kinds.entry(label(cmd)).or_default().push(cmd.clone());
    }
    let mut rows = Vec::new();
    for (label, cmds) in kinds {
        let (work, bytes) = (cmds.iter().map(flops).sum::<f64>(), cmds.iter().map(|c| traffic(c, device)).sum::<f64>());
        let count = cmds.len();
        // Short lists are repeated, else their launch is what is timed.
        let repeat = (100 / count).clamp(1, 50);
        let list: Vec<Cmd> = (0..repeat).flat_map(|_| cmds.iter().cloned()).collect();
        rows.push((time(device, list, probe)? / repeat as f64, label, count, work, bytes));
    }
    rows.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("| command | times | ms | TFLOP/s | TB/s |\n|---|---|---|---|---|");
    for (ms, label, count, work, bytes) in &rows {
        let rate = if *work > 0.0 { format!("{:.0}", work / ms / 1e9) } else { String::new() };
        println!("| {label} | {count} | {ms:.3} | {rate} | {:.2} |", bytes / ms / 1e9);
    }
    println!("| all, each alone | {} | {:.3} | | |", cmds.len(), rows.iter().map(|row| row.0).sum::<f64>());
    Ok(())
}

struct Wanted {
    table: bool,
    floor: bool,
    lanes: usize,
    grad_dtype: GradDtype,
    fast: FastAccumulation,
    schedule: String,
}

fn run(shape: &Shape, mode: CaptureMode, gradients: Gradients, wanted: &Wanted) -> Result<(), Fault> {
    let recipe: Recipe = "fp8-delayed".parse()?;
    let Shape { hidden, ffn, heads, microbatches, vocab } = *shape;
    let model = GptConfig { vocab, hidden, heads, ffn, layers: 4, seq: 256, sequences: 1, recipe };
    let entry = qeffect_schedules::by_name(&wanted.schedule).ok_or("no such schedule")?;
    let mut checked = entry.checked(1, i64::from(microbatches)).map_err(|report| report.to_string())?.into_owned();
    if gradients == Gradients::Coalesced {
        checked = checked.coalesced(microbatches).map_err(|report| report.to_string())?;
    }
    // As long as it lives, there is a context to ask what is free.
    let keeper = CudaDevice::with_lanes(0, 1)?;
    let free = keeper.free_bytes()?;
    let start = Instant::now();
    let cuda = CudaDevice::with_lanes(0, wanted.lanes)?;
    let mut device = SharedDevice::new(Box::new(cuda));
    let seen = Arc::new(Mutex::new(Seen::default()));
    let tap = Tap { device: device.clone(), seen: Arc::clone(&seen) };
    let config = SessionConfig {
        capture: mode,
        gradients,
        grad_dtype: wanted.grad_dtype,
        fast_accumulation: wanted.fast,
        ..SessionConfig::new(OptimConfig { steps: 10_000, ..OptimConfig::default() }, model.tokens())
    };
    let takes = Session::footprint(checked.clone(), model.stages(&[4])?, config)?.bytes();
    let mut session = Session::on_one_device(checked, model.stages(&[4])?, config, Box::new(tap))?;
    let opened = start.elapsed();
    let captures = seen.lock().unwrap_or_else(PoisonError::into_inner).host.captures;
    let mut times = Vec::new();
    let mut last = None;
    for step in 0..WARM + STEPS {
        let batch = batch(step, microbatches, &model);
        if step == WARM {
            seen.lock().unwrap_or_else(PoisonError::into_inner).host = Host::default();
        }
        let start = Instant::now();
        let report = session.step(batch)?;
        if step >= WARM {
            times.push(start.elapsed());
        }
        last = Some(report);
    }
    let report = last.ok_or("no step")?;
    let taken = free.saturating_sub(keeper.free_bytes()?);
    let ms = median(times);
    let tokens = f64::from(microbatches) * model.tokens() as f64;
    let probe = device.alloc(BufSpec::new("probe", qeffect_core::dtype::Dtype::U32, 1, 1))?;
    let Seen { lists, host } = std::mem::take(&mut *seen.lock().unwrap_or_else(PoisonError::into_inner));
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    println!(
        "| {} | {gradients:?} | {ms:.3} | {:.0} | {} | {} | {:.1} | {:.1} | {:.2} | {:.2} | {:.0} | {:.0} | {:.0} | {:.4} |",
        mode.name(),
        tokens / ms * 1e3,
        report.graphs,
        report.launches + host.issued / STEPS as usize,
        captures.as_secs_f64() * 1e3,
        opened.as_secs_f64(),
        takes as f64 / 1e9,
        taken as f64 / 1e9,
        report.regions.iter().map(|region| mib(region.tape.owned)).sum::<f64>(),
        report.regions.iter().map(|region| mib(region.work.owned)).sum::<f64>(),
        report.arena_bytes.iter().map(|bytes| mib(*bytes)).sum::<f64>(),
        report.loss,
    );
    let mean = |of: Duration| of.as_secs_f64() * 1e3 / STEPS as f64;
    println!(
        "host, means of a step in ms: writes {:.3}, launch {:.3}, waiting and reads {:.3}",
        mean(host.writes),
        mean(host.launches),
        mean(host.reads)
    );
    let cmds: Vec<Cmd> = lists.into_iter().flatten().collect();
    if wanted.floor {
        let floor: Vec<Cmd> = cmds.iter().filter(|cmd| is_floor(cmd)).cloned().collect();
        let products: Vec<Cmd> = floor.iter().filter(|cmd| flops(cmd) > 0.0).cloned().collect();
        let count = floor.len();
        let [floor, products] = [time(&mut device, floor, probe)?, time(&mut device, products, probe)?];
        println!(
            "floor: {floor:.3} ms for {count} commands, of it products {products:.3} ms; step over floor {:.2}",
            ms / floor
        );
        let start = Instant::now();
        let graph = device.instantiate(cmds.clone())?;
        let again = start.elapsed().as_secs_f64() * 1e3;
        device.drop_graph(graph)?;
        let alone = time(&mut device, cmds.clone(), probe)?;
        println!(
            "all {} commands, replayed without the host: {alone:.3} ms; captured again in {again:.1} ms",
            cmds.len()
        );
    }
    if wanted.table {
        table(&mut device, &cmds, probe)?;
    }
    Ok(())
}

fn main() -> Result<(), Fault> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let at = |index: usize, default: &str| words.get(index).cloned().unwrap_or_else(|| default.to_owned());
    let shape = shape(&at(0, "A"))?;
    let grad_dtype =
        words.iter().find_map(|word| word.strip_prefix("grad_dtype=")).map_or(Ok(GradDtype::Master), str::parse)?;
    let fast = words.iter().find_map(|word| word.strip_prefix("fast="));
    let fast = fast.map_or(Ok(FastAccumulation::Forward), str::parse)?;
    let lanes = words.iter().find_map(|word| word.strip_prefix("lanes=")).map_or(Ok(LANES), str::parse)?;
    let schedule = words.iter().find_map(|word| word.strip_prefix("schedule=")).unwrap_or("one_f_one_b").to_owned();
    let has = |word: &str| words.iter().any(|found| found == word);
    let wanted = Wanted { table: has("table"), floor: has("floor"), lanes, grad_dtype, fast, schedule };
    println!(
        "| capture | gradients | ms | tokens/s | graphs | launches | ms to capture | s to start | GB counted | by the driver | \
         tapes, MiB | works, MiB | arena, MiB | loss |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    );
    for mode in at(1, "step").split(',') {
        for placement in at(2, "copied,direct,coalesced").split(',') {
            let gradients = match placement {
                "copied" => Gradients::Copied,
                "direct" => Gradients::Direct,
                "coalesced" => Gradients::Coalesced,
                other => return Err(format!("there is no placement `{other}`").into()),
            };
            if let Err(error) = run(&shape, mode.parse()?, gradients, &wanted) {
                println!("| {mode} | {placement} | failed: {error} |");
            }
        }
    }
    Ok(())
}
