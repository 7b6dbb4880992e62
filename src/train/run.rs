//! One run: from a configuration to metrics, a plot, a sample and a table.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use comfy_table::{Cell, CellAlignment, Table};
use indicatif::{ProgressBar, ProgressStyle};
use qeffect_core::check::{self, Options};
use qeffect_core::index::Index;
use qeffect_core::plan::{Checked, Peaks, Proved};
use qeffect_core::sim::{self, CostModel};
use qeffect_runtime::data::{ByteData, Windows};
use qeffect_runtime::device::Device;
use qeffect_runtime::error::Error;
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::pool::{KeptBytes, RegionBytes};
use qeffect_runtime::sample::{self, Sampling};
use qeffect_runtime::session::{Session, SessionConfig, StepReport};

use super::config::Config;
use super::health;
use super::held_out::HeldOut;
use super::report::{Metric, RunFolder, TraceFile, short};
use super::{Result, TrainError};

/// What a run has come to.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// Mean loss over the held-out bytes, at the end, in nats per byte.
    pub held_out: f64,
    /// Bytes that it was measured on.
    pub held_out_bytes: usize,
    /// Loss of every step.
    pub losses: Vec<f64>,
    /// The run's folder.
    pub folder: PathBuf,
}

/// Trains, with progress and results on standard output.
///
/// # Errors
///
/// Sizes that do not fit the schedule; text that is too short; files that cannot be written; errors of the runtime.
pub fn run(config: &Config, checked: Checked) -> Result<Outcome> {
    let started = Instant::now();
    let evaluation = check::check(checked.schedule.forward_only(), &Options::AT_START).map_err(TrainError::Schedule)?;
    let checked = config.pipeline.gradients.apply(checked).map_err(TrainError::Schedule)?;
    let schedule = checked.schedule.name.to_string();
    let model = config.model.gpt();
    let data = ByteData::open(&config.data.path, model.seq)?;
    let stages = checked.schedule.stages as usize;
    if stages > model.layers {
        return Err(TrainError::Config(format!(
            "`{schedule}` on {} has {stages} stages, but the model only {}: give it {stages} (`--layers {stages}`, in a file \
             `model.layers = {stages}`) or take fewer ranks",
            count(checked.schedule.ranks, "rank"),
            count(model.layers as u32, "block")
        )));
    }
    if config.run.evaluations == 0 {
        return Err(TrainError::Config("a run has at least one evaluation".into()));
    }
    let trace = config.run.trace.as_deref().map(TraceFile::create).transpose()?;
    let session_config = SessionConfig {
        seed: config.run.seed,
        gradients: config.pipeline.gradients.gradients,
        allow_order_dependent: config.run.allow_order_dependent,
        capture: config.run.capture,
        on_nonfinite: config.run.on_nonfinite,
        grad_dtype: config.pipeline.grad_dtype,
        fast_accumulation: config.pipeline.fast_accumulation,
        verify: config.run.verify,
        ..SessionConfig::new(config.optimizer.adamw(), model.tokens())
    };
    let (mut session, device) = open(config, &model, &checked, session_config)?;
    let held_out = HeldOut::new(&data, &session, evaluation, model.sequences)?;
    let name = format!("{schedule}-{}-seed{}", model.recipe.name(), config.run.seed);
    let mut folder = RunFolder::create(&config.run.out, &name)?;

    let parameters = model.parameters()?;
    introduce(config, &checked, (&model, parameters), &data, &device);
    let identity = short(&session.identity());
    folder.record(&Metric::Run {
        schedule: &schedule,
        proved: proved(&checked),
        recipe: &model.recipe.to_string(),
        ranks: checked.schedule.ranks,
        stages: checked.schedule.stages,
        microbatches: checked.schedule.microbatches,
        parameters,
        seed: config.run.seed,
        identity: &identity,
    })?;

    let history = train(config, &data, &mut session, &held_out, &mut folder, trace)?;
    let text = generate(config, &data, &mut session, &held_out)?;
    println!("\nsample, after {:?}:\n{text}\n", config.run.prompt);
    let title = format!(
        "{schedule} · {} · {} · {}",
        model.recipe.name(),
        count(checked.schedule.ranks, "rank"),
        count(checked.schedule.microbatches, "microbatch")
    );
    let plot = folder.finish(&title, &history.train, &history.held_out)?;
    println!("{}", summary(&checked, &identity, &history, started.elapsed()));
    println!("metrics  {}\nplot     {}", folder.path().join("metrics.jsonl").display(), plot.display());
    if let Some(trace) = &config.run.trace {
        println!("trace    {}", trace.display());
    }
    Ok(Outcome {
        held_out: history.held_out.last().map_or(f64::NAN, |point| point.1),
        held_out_bytes: history.held_out_bytes,
        losses: history.train.iter().map(|point| point.1).collect(),
        folder: folder.path().to_owned(),
    })
}

/// A session on the device that was asked for, and how the device is introduced. Ranks that share a GPU are one list of it.
fn open(
    config: &Config,
    model: &GptConfig,
    checked: &Checked,
    session_config: SessionConfig,
) -> Result<(Session<GptStage>, String)> {
    let stages = model.stages(&model.split(checked.schedule.stages as usize)?)?;
    let choice = config.run.device.choose(&model.recipe)?;
    let device = introduction(choice.gpu.as_ref().map_or("cpu", Device::name), choice.passed_over.as_ref());
    let session = match choice.gpu {
        Some(gpu) => Session::on_one_device(checked.clone(), stages, session_config, Box::new(gpu))?,
        None => Session::new(checked.clone(), stages, session_config)?,
    };
    Ok((session, device))
}

/// The device, and in a line of its own why it is no GPU, where there is one.
fn introduction(device: &str, passed_over: Option<&Error>) -> String {
    let Some(why) = passed_over else { return device.to_owned() };
    let why = why.to_string().replace('\n', "; ");
    format!("{device}\n         note: there is a GPU that cannot be used: {why}; `qeffect doctor` says what is missing")
}

/// What the run will do, before it does it.
fn introduce(
    config: &Config,
    checked: &Checked,
    (model, parameters): (&GptConfig, usize),
    data: &ByteData,
    device: &str,
) {
    let schedule = &checked.schedule;
    println!(
        "schedule {} for {}, {}, {}: {}",
        schedule.name,
        count(schedule.ranks, "rank"),
        count(schedule.stages, "stage"),
        count(schedule.microbatches, "microbatch"),
        match checked.proved {
            Proved::AtCompileTime => "proved by the compiler",
            Proved::AtStart => "not declared in the program, so checked now, at start, by the same checker",
        }
    );
    for note in checked.notes.iter() {
        println!("         note: {note}");
    }
    println!(
        "model    {} blocks, hidden {}, {} parameters, recipe {}",
        model.layers,
        model.hidden,
        thousands(parameters),
        model.recipe
    );
    println!("device   {device}");
    println!(
        "data     {}: {} bytes to train on, the last {} held out\n",
        config.data.path.display(),
        thousands(data.train().len()),
        thousands(data.held_out().len())
    );
}

fn proved(checked: &Checked) -> &'static str {
    match checked.proved {
        Proved::AtCompileTime => "at compile time",
        Proved::AtStart => "at start",
    }
}

/// Everything measured in a run.
#[derive(Default)]
struct History {
    /// (tokens, loss) of each step.
    train: Vec<(f64, f64)>,
    /// (tokens, loss) of each evaluation.
    held_out: Vec<(f64, f64)>,
    /// Bytes of the last evaluation.
    held_out_bytes: usize,
    tokens: usize,
    /// Time in training steps.
    stepping: Duration,
    bubble: f64,
    peaks: Vec<Peaks>,
    bytes: Vec<usize>,
    regions: Vec<RegionBytes>,
    arena_bytes: Vec<usize>,
    kept: Vec<KeptBytes>,
    graphs: usize,
    launches: usize,
    skipped: usize,
}

impl History {
    fn add(&mut self, report: &StepReport) {
        self.tokens += report.tokens;
        self.train.push((self.tokens as f64, report.loss));
        self.stepping += report.wall;
        self.bubble += report.bubble() * report.wall.as_secs_f64();
        self.skipped += usize::from(report.skipped);
        self.peaks.clone_from(&report.peaks);
        self.bytes.clone_from(&report.bytes);
        self.regions.clone_from(&report.regions);
        self.arena_bytes.clone_from(&report.arena_bytes);
        self.kept.clone_from(&report.kept);
        // A measured step may launch none of what was captured.
        (self.graphs, self.launches) = (self.graphs, self.launches).max((report.graphs, report.launches));
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.stepping.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

fn train(
    config: &Config,
    data: &ByteData,
    session: &mut Session<GptStage>,
    held_out: &HeldOut,
    folder: &mut RunFolder,
    mut trace: Option<TraceFile>,
) -> Result<History> {
    let started = Instant::now();
    let (steps, seed) = (config.optimizer.steps, config.run.seed);
    let microbatches = session.schedule().schedule.microbatches;
    let mut history = History::default();
    let bar = ProgressBar::new(steps);
    let style = "{bar:30.cyan/240} {pos}/{len} steps  {msg}  {elapsed_precise} elapsed, {eta_precise} left";
    bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
    let every = (steps / config.run.evaluations).max(1);
    let mut smooth = None;
    for step in 0..steps {
        let batch: Vec<Windows> =
            (0..microbatches).map(|m| data.microbatch(seed, step, m, config.model.sequences)).collect();
        let last = step + 1 == steps;
        let report = match trace.take_if(|_| last) {
            None if config.run.health.is_some_and(|every| (step + 1) % every == 0) => {
                let (report, cells) = session.step_health(batch)?;
                if !cells.is_empty() {
                    tell(&bar, &health::table(step + 1, &cells));
                }
                folder.record(&Metric::Health { step: report.step, cells: cells.iter().map(Into::into).collect() })?;
                report
            }
            None => session.step(batch)?,
            Some(trace) => {
                let (report, spans) = session.step_measured(batch)?;
                trace.write(&format!("{}, step {}", session.schedule().schedule.name, report.step), &spans)?;
                report
            }
        };
        history.add(&report);
        let mean = smooth.map_or(report.loss, |mean: f64| 0.95 * mean + 0.05 * report.loss);
        smooth = Some(mean);
        bar.set_message(format!("loss {mean:.3}  {:.1} k tokens/s", history.tokens_per_second() / 1e3));
        bar.inc(1);
        folder.record(&Metric::Step {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            lr: f64::from(report.learning_rate),
            tokens: history.tokens as u64,
            seconds: report.wall.as_secs_f64(),
            bubble: report.bubble(),
            skipped: report.skipped,
        })?;
        if last || (step + 1) % every == 0 {
            let timer = Instant::now();
            let (loss, bytes) = if last { held_out.all(data, session)? } else { held_out.sample(data, session)? };
            history.held_out.push((history.tokens as f64, loss));
            history.held_out_bytes = bytes;
            let line =
                format!("step {:>5}  held-out loss {loss:.3} nats per byte over {} bytes", step + 1, thousands(bytes));
            tell(&bar, &line);
            folder.record(&Metric::Eval {
                step: report.step,
                loss,
                bytes: bytes as u64,
                seconds: timer.elapsed().as_secs_f64(),
                elapsed: started.elapsed().as_secs_f64(),
            })?;
        }
    }
    bar.finish_and_clear();
    Ok(history)
}

/// Prints above the bar, or where there is none.
fn tell(bar: &ProgressBar, text: &str) {
    if bar.is_hidden() { println!("{text}") } else { bar.println(text) }
}

fn generate(config: &Config, data: &ByteData, session: &mut Session<GptStage>, held_out: &HeldOut) -> Result<String> {
    let prompt: Vec<u32> = config.run.prompt.bytes().map(u32::from).collect();
    let sampling = Sampling { seed: config.run.seed, ..Sampling::default() };
    let tokens =
        sample::generate(&prompt, config.run.sample, [data.seq(), config.model.sequences], &sampling, |windows| {
            held_out.logits(session, windows)
        })?;
    Ok(sample::text(&tokens[prompt.len()..]))
}

fn summary(checked: &Checked, identity: &str, history: &History, elapsed: Duration) -> Table {
    let schedule = &checked.schedule;
    let simulated = sim::run(schedule, &Index::new(schedule), &CostModel::unit()).map(|t| t.bubble_rate());
    let list = |of: fn(&Peaks) -> u32| history.peaks.iter().map(|p| of(p).to_string()).collect::<Vec<_>>().join(" ");
    let loss = |points: &[(f64, f64)]| points.last().map_or_else(|| "–".into(), |p| format!("{:.3}", p.1));
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_BORDERS_ONLY);
    let mut row = |name: &str, value: String| {
        table.add_row([Cell::new(name), Cell::new(value).set_alignment(CellAlignment::Right)]);
    };
    row("schedule", format!("{}, proved {}", schedule.name, proved(checked)));
    row("identity of the numbers", identity.to_owned());
    row(
        "held-out loss, nats per byte",
        format!("{} over {} bytes", loss(&history.held_out), thousands(history.held_out_bytes)),
    );
    row("last training loss", loss(&history.train));
    row("training tokens", thousands(history.tokens));
    row("tokens per second", thousands(history.tokens_per_second() as usize));
    row("bubble measured", format!("{:.1} %", 100.0 * history.bubble / history.stepping.as_secs_f64().max(1e-9)));
    row("bubble simulated, F = I = W", simulated.map_or("–".into(), |rate| format!("{:.1} %", 100.0 * rate)));
    row("peak tapes by rank", list(|p| p.tapes));
    row("peak works by rank", list(|p| p.works));
    row("peak slots by rank", list(|p| p.slots));
    let mib = |bytes: &mut dyn Iterator<Item = usize>| {
        bytes.map(|b| format!("{:.1}", b as f64 / f64::from(1 << 20))).collect::<Vec<_>>().join(" ")
    };
    row("activations, tapes and works, MiB by rank", mib(&mut history.bytes.iter().copied()));
    row("tape region, MiB by rank", mib(&mut history.regions.iter().map(|regions| regions.tape.owned)));
    row("work region, MiB by rank", mib(&mut history.regions.iter().map(|regions| regions.work.owned)));
    if history.kept.iter().any(|kept| kept.input > 0) {
        row("inputs to recompute from, MiB by stage", mib(&mut history.kept.iter().map(|kept| kept.input)));
    }
    row("tapes, MiB by stage", mib(&mut history.kept.iter().map(|kept| kept.tape)));
    row("works, MiB by stage", mib(&mut history.kept.iter().map(|kept| kept.work)));
    row("destinations of gradients, MiB by rank", mib(&mut history.arena_bytes.iter().copied()));
    row("captured lists of commands, launches per step", format!("{}, {}", history.graphs, history.launches));
    row("steps skipped as not finite", history.skipped.to_string());
    row("whole run", format!("{:.1} s", elapsed.as_secs_f64()));
    table
}

/// `1 rank`, `2 ranks`, `2 microbatches`.
fn count(n: u32, what: &str) -> String {
    let plural = if what.ends_with("ch") { "es" } else { "s" };
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}{plural}") }
}

/// `1234567` as `1 234 567`.
fn thousands(n: usize) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_was_passed_over_is_named_with_what_to_do() {
        assert_eq!(introduction("cuda:0", None), "cuda:0");
        let error = Error::Config("NVRTC: not found\nhelp: install it".into());
        let said = introduction("cpu", Some(&error));
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!((lines.len(), lines[0]), (2, "cpu"));
        for part in ["NVRTC: not found; help: install it", "`qeffect doctor`"] {
            assert!(lines[1].contains(part), "{said}");
        }
    }
}
