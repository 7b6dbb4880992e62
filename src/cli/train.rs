//! `qeffect train`.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use qeffect::runtime::error::Error;
use qeffect::runtime::place::Place;
use qeffect::train::{self, Config, TrainError};

use super::output::{Failure, Refusal, Screen};
use super::source::{self, Parameters};

/// Train a model
///
/// What is trained, and how, stands in a TOML file of which every key may be left out; `--print-config` shows all of
/// them. The schedule is one of the library or a file, as for `qeffect schedule check`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  qeffect train                                        the defaults: what `examples/pretrain` does
  qeffect train --config run.toml                      a run from a file
  qeffect train --config run.toml --schedule mine.csv  with another schedule
  qeffect train --set optimizer.steps=100 --set model.recipe=bf16
  qeffect train --config run.toml --device cuda:0      on the first GPU; `auto`: there if it can, else on the processor
  qeffect train --config run.toml --verify             with every tape and work checked on its way from F to I and W
  qeffect train --trace trace.json                     what each rank did when, in the last step
  qeffect train --health 50                            how the FP8 scales fare, every 50 steps
  qeffect schedule simulate zb_v -p 2 -m 8 --costs trace.json      the same costs, simulated
  qeffect train --print-config > run.toml              a file to start from")]
pub struct Train {
    /// The run, as TOML
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Another schedule than the file's
    #[arg(long, value_name = "SCHEDULE")]
    schedule: Option<String>,
    /// Where to compute: auto, cpu, or cuda:N, a GPU that all ranks share
    ///
    /// As `run.device`. `auto` takes the first GPU that can be used and computes the recipe, and says why it took none.
    #[arg(long, value_name = "DEVICE", value_parser = |text: &str| text.parse::<Place>())]
    device: Option<Place>,
    /// Another value of one key, written as in the file; a string needs no quotes
    #[arg(long, value_name = "TABLE.KEY=VALUE")]
    set: Vec<String>,
    /// Write a trace of the last step, as Chrome and Perfetto open it
    ///
    /// That step runs action by action, whatever `run.capture` says, and is timed; the bits are the same. `--costs FILE`
    /// of the schedule commands takes the trace as measured costs.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Every N steps, tell what casts to FP8 lose and whether scales move
    ///
    /// The worst cells in a table, all of them in the run's metrics. Such a step runs command by command, whatever
    /// `run.capture` says; the bits are the same. A traced step is not counted.
    #[arg(long, value_name = "N")]
    health: Option<NonZeroU64>,
    /// Tag what F keeps and have I and W compare the tags on the device
    ///
    /// As `run.verify`. A mismatch makes the step bad and is named; the bits are the same.
    #[arg(long)]
    verify: bool,
    /// Print the run as a whole file, and do not start it
    #[arg(long)]
    print_config: bool,
}

impl Train {
    /// Runs the command.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or is wrong, a schedule that is refused, and what ends a run.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let config = self.config()?;
        if self.print_config {
            let text = toml::to_string(&config).map_err(|error| Failure::Usage(error.to_string()))?;
            screen.bytes(text.as_bytes())?;
            return Ok(ExitCode::SUCCESS);
        }
        let pipeline = &config.pipeline;
        let named = qeffect_schedules::by_name(&pipeline.schedule).is_some();
        let parameters = Parameters {
            // A program in a file has parameters of its own; the other forms have none.
            ranks: named.then(|| i64::from(pipeline.ranks)),
            microbatches: named.then(|| i64::from(pipeline.microbatches)),
            ..Parameters::default()
        };
        let checked = source::load(&pipeline.schedule, &parameters)?;
        match train::run(&config, checked) {
            Ok(_) => Ok(ExitCode::SUCCESS),
            Err(TrainError::Schedule(report)) => {
                Err(Failure::Refused(Box::new(Refusal { name: pipeline.schedule.clone(), report, map: None })))
            }
            Err(error @ (TrainError::File { .. } | TrainError::Data(_))) => Err(Failure::File(error.to_string())),
            Err(error @ (TrainError::Config(_) | TrainError::Runtime(Error::Config(_)))) => {
                Err(Failure::Usage(error.to_string()))
            }
            Err(error) => Err(Failure::Run(error.to_string())),
        }
    }

    fn config(&self) -> Result<Config, Failure> {
        let (name, text) = match &self.config {
            None => ("--set".to_owned(), String::new()),
            Some(path) => {
                let name = path.display().to_string();
                let text = std::fs::read_to_string(path).map_err(|error| Failure::file(&name, &error))?;
                (name, text)
            }
        };
        let wrong = |error: toml::de::Error| Failure::Usage(format!("{name}: {}", error.to_string().trim_end()));
        // The file alone first: its errors have lines.
        let file: Config = toml::from_str(&text).map_err(wrong)?;
        let mut config = if self.set.is_empty() {
            file
        } else {
            let mut table: toml::Table = text.parse().map_err(wrong)?;
            for set in &self.set {
                merge(&mut table, change(set)?);
            }
            table.try_into().map_err(|error: toml::de::Error| {
                Failure::Usage(format!("--set {}: {}", self.set.join(" --set "), error.message()))
            })?
        };
        if let Some(schedule) = &self.schedule {
            config.pipeline.schedule.clone_from(schedule);
        }
        if self.trace.is_some() {
            config.run.trace.clone_from(&self.trace);
        }
        config.run.health = self.health.or(config.run.health);
        config.run.device = self.device.unwrap_or(config.run.device);
        config.run.verify |= self.verify;
        Ok(config)
    }
}

/// What `change` says replaces what `table` says, key by key.
fn merge(table: &mut toml::Table, change: toml::Table) {
    for (key, value) in change {
        match (table.get_mut(&key), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) => merge(old, new),
            (_, value) => {
                table.insert(key, value);
            }
        }
    }
}

/// `KEY=VALUE` as a table. A value that is no TOML is a string: quotes rarely survive a shell.
fn change(set: &str) -> Result<toml::Table, Failure> {
    let bare = || {
        let (key, value) = set.split_once('=')?;
        format!("{key} = {}", toml::Value::from(value.trim())).parse().ok()
    };
    match set.parse::<toml::Table>() {
        Ok(table) => Ok(table),
        Err(error) => bare().ok_or_else(|| Failure::Usage(format!("--set {set}: {}", error.message()))),
    }
}
