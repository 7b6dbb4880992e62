//! Pretrains a byte-level GPT through a pipeline schedule that the Rust compiler has proved.
//!
//! `cargo run --release --example pretrain -- --help` lists what can be changed.

mod args;
mod held_out;
mod report;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use args::Args;
use clap::Parser;
use comfy_table::{Cell, CellAlignment, Table};
use held_out::HeldOut;
use indicatif::{ProgressBar, ProgressStyle};
use qeffect::core::index::Index;
use qeffect::core::plan::{Checked, Peaks, Proved};
use qeffect::core::sim::{self, CostModel};
use qeffect::runtime::data::{ByteData, Windows};
use qeffect::runtime::gpt::{GptConfig, GptStage};
use qeffect::runtime::optim::OptimConfig;
use qeffect::runtime::sample::{self, Sampling};
use qeffect::runtime::session::{Session, SessionConfig, StepReport};
use report::{Metric, RunFolder};

/// Bytes per sequence.
const SEQ: usize = 64;
/// Sequences of a microbatch.
const SEQUENCES: usize = 2;
fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let started = Instant::now();
    let entry = args.schedule;
    let (ranks, microbatches) = (i64::from(args.ranks), i64::from(args.microbatches));
    let checked = entry.checked(ranks, microbatches).context("the schedule is refused")?.into_owned();
    let evaluation = entry.evaluation().checked(ranks, microbatches).context("the evaluation schedule is refused")?;
    let data = ByteData::open(&args.data, SEQ)?;
    let model = GptConfig {
        vocab: 256,
        hidden: 128,
        heads: 4,
        ffn: 512,
        layers: args.layers,
        seq: SEQ,
        sequences: SEQUENCES,
        recipe: args.recipe,
    };
    let stages = checked.schedule.stages as usize;
    if stages > model.layers {
        bail!(
            "`{}` on {ranks} ranks has {stages} stages, but the model only {} blocks: use `--layers {stages}` or fewer ranks",
            entry.name,
            model.layers
        );
    }
    let config = SessionConfig {
        optim: OptimConfig {
            steps: args.steps,
            warmup: args.steps / 10,
            peak: args.lr,
            floor: args.lr / 10.0,
            ..OptimConfig::default()
        },
        tokens: model.tokens(),
        seed: args.seed,
        allow_order_dependent: false,
    };
    let mut session = Session::new(checked.clone(), model.stages(&model.split(stages)?)?, config)?;
    let held_out = HeldOut::new(&data, &session, evaluation.into_owned(), SEQUENCES)?;
    let mut folder = RunFolder::create(&args.out, &format!("{}-{}-seed{}", entry.name, args.recipe.name(), args.seed))?;

    introduce(args, &checked, &model, &data);
    folder.record(&Metric::Run {
        schedule: entry.name,
        proved: proved(&checked),
        recipe: &args.recipe.to_string(),
        ranks: args.ranks,
        stages: checked.schedule.stages,
        microbatches: args.microbatches,
        parameters: model.parameters(),
        seed: args.seed,
    })?;

    let history = train(args, &data, &mut session, &held_out, &mut folder)?;
    let text = generate(args, &data, &mut session, &held_out)?;
    println!("\nsample, after {:?}:\n{text}\n", PROMPT);
    let title =
        format!("{} · {} · {} ranks · {} microbatches", entry.name, args.recipe.name(), args.ranks, args.microbatches);
    let plot = folder.finish(&title, &history.train, &history.held_out)?;
    println!("{}", summary(&checked, &history, started.elapsed()));
    println!("metrics  {}\nplot     {}", folder.path().join("metrics.jsonl").display(), plot.display());
    Ok(())
}

/// What the run will do, before it does it.
fn introduce(args: &Args, checked: &Checked, model: &GptConfig, data: &ByteData) {
    let schedule = &checked.schedule;
    println!(
        "schedule {} for {}, {}, {}: {}",
        args.schedule.name,
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
        thousands(model.parameters()),
        args.recipe
    );
    println!(
        "data     {}: {} bytes to train on, the last {} held out\n",
        args.data.display(),
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
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.stepping.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

fn train(
    args: &Args,
    data: &ByteData,
    session: &mut Session<GptStage>,
    held_out: &HeldOut,
    folder: &mut RunFolder,
) -> Result<History> {
    let started = Instant::now();
    let mut history = History::default();
    let bar = ProgressBar::new(args.steps);
    bar.set_style(ProgressStyle::with_template(
        "{bar:30.cyan/240} {pos}/{len} steps  {msg}  {elapsed_precise} elapsed, {eta_precise} left",
    )?);
    let every = (args.steps / args.evaluations).max(1);
    let mut smooth = None;
    for step in 0..args.steps {
        let batch: Vec<Windows> =
            (0..args.microbatches).map(|m| data.microbatch(args.seed, step, m, SEQUENCES)).collect();
        let report = session.step(batch)?;
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
        let last = step + 1 == args.steps;
        if last || (step + 1) % every == 0 {
            let timer = Instant::now();
            let (loss, bytes) = if last { held_out.all(data, session)? } else { held_out.sample(data, session)? };
            history.held_out.push((history.tokens as f64, loss));
            history.held_out_bytes = bytes;
            let line =
                format!("step {:>5}  held-out loss {loss:.3} nats per byte over {} bytes", step + 1, thousands(bytes));
            if bar.is_hidden() {
                println!("{line}")
            } else {
                bar.println(line)
            }
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

/// What the sample continues.
const PROMPT: &str = "\n\nHAMLET.\n";

fn generate(args: &Args, data: &ByteData, session: &mut Session<GptStage>, held_out: &HeldOut) -> Result<String> {
    let prompt: Vec<u32> = PROMPT.bytes().map(u32::from).collect();
    let sampling = Sampling { seed: args.seed, ..Sampling::default() };
    let tokens = sample::generate(&prompt, args.sample, [data.seq(), SEQUENCES], &sampling, |windows| {
        held_out.logits(session, windows)
    })?;
    Ok(sample::text(&tokens[prompt.len()..]))
}

fn summary(checked: &Checked, history: &History, elapsed: Duration) -> Table {
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
    let mib: Vec<String> = history.bytes.iter().map(|b| format!("{:.1}", *b as f64 / f64::from(1 << 20))).collect();
    row("activations, tapes and works, MiB by rank", mib.join(" "));
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
