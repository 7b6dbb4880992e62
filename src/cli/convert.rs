//! `qeffect schedule convert`: from one form to another.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use qeffect_core::text::{write_comms, write_csv, write_plan};
use qeffect_view::json;
use serde_json::json as value;

use super::output::{Failure, Refusal, Screen};
use super::source::{self, Parameters, SCHEDULE_HELP, SCHEDULE_LONG_HELP};

/// What to write.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// PyTorch's CSV of compute actions (`compute_only`)
    #[value(alias = "csv")]
    Pytorch,
    /// PyTorch's CSV with communication actions (`compute_comms`)
    PytorchComms,
    /// The lowered program as QEffect runs it, with sends, receives, waits and bookkeeping
    Lowered,
    /// JSON, as docs/schedule.schema.json says
    Json,
}

/// Arguments of `schedule convert`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  qeffect schedule convert zb_h1 -p 4 -m 8 -o zb_h1.csv
  qeffect schedule convert mine.csv --to lowered
  qeffect schedule convert dualpipe_v -p 4 -m 8 --to pytorch-comms -o dualpipe_v.csv
  qeffect schedule convert mine.sched -p 4 -m 8 -o mine.json

A schedule is checked before it is written: what is refused is not converted.")]
pub struct Convert {
    #[arg(help = SCHEDULE_HELP, long_help = SCHEDULE_LONG_HELP)]
    schedule: String,
    #[command(flatten)]
    parameters: Parameters,
    /// What to write [default: told from the name of --output]
    #[arg(short, long, value_enum)]
    to: Option<Target>,
    /// File to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Convert {
    /// Converts.
    ///
    /// # Errors
    ///
    /// If the schedule is refused or cannot be said in that form, or a file cannot be read or written.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let target = self.to.or_else(|| self.output.as_deref().and_then(told));
        let target = target.ok_or_else(|| Failure::Usage(format!("say what to write: --to {}", Target::names())))?;
        let checked = source::load(&self.schedule, &self.parameters)?;
        let unwritable =
            |report| Failure::Refused(Box::new(Refusal { name: self.schedule.clone(), report, map: None }));
        let text = match target {
            Target::Pytorch => write_csv(&checked.schedule).map_err(unwritable)?,
            Target::PytorchComms => write_comms(&checked).map_err(unwritable)?,
            Target::Lowered => write_plan(&checked.plan),
            Target::Json => json::write_schedule(&checked.schedule),
        };
        if screen.json && self.output.is_none() {
            screen.value(&value!({"schedule": self.schedule, "ok": true, "text": text}))?;
        } else {
            screen.to(self.output.as_deref(), &text)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Target {
    /// `a, b or c`.
    fn names() -> String {
        let names: Vec<String> = Self::value_variants()
            .iter()
            .filter_map(|target| Some(target.to_possible_value()?.get_name().to_owned()))
            .collect();
        names.split_last().map_or_else(String::new, |(last, rest)| format!("{} or {last}", rest.join(", ")))
    }
}

fn told(file: &Path) -> Option<Target> {
    match file.extension()?.to_str()? {
        "csv" => Some(Target::Pytorch),
        "json" => Some(Target::Json),
        _ => None,
    }
}
