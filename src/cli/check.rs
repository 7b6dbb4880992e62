//! `qeffect schedule check`: the verdict.

use std::fmt::Write;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use qeffect_core::plan::Checked;
use qeffect_core::schedule::Transport;
use serde_json::{Value, json};

use super::output::{Failure, Screen, counted, explain_hint};
use super::source::{self, Parameters, SCHEDULE_HELP, SCHEDULE_LONG_HELP};

/// Arguments of `schedule check`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  qeffect schedule check mine.csv lowered.csv
  qeffect schedule check mine.sched -p 4 -m 8
  qeffect schedule check lowered.csv --transport rendezvous
  qeffect --json schedule check mine.json

Exit code 1 if one of them is refused.")]
pub struct Check {
    #[arg(required = true, value_name = "SCHEDULE", help = SCHEDULE_HELP, long_help = SCHEDULE_LONG_HELP)]
    schedules: Vec<String>,
    #[command(flatten)]
    parameters: Parameters,
    /// How messages travel, if not as the schedule says
    ///
    /// A lowered program's own sends and receives are judged on it, the communication that is made for all others.
    #[arg(long, value_enum, value_name = "TRANSPORT")]
    transport: Option<Way>,
}

/// How messages travel.
#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Way {
    /// One queue per boundary between stages and direction
    Edge,
    /// One queue per pair of ranks and direction
    RankEdge,
    /// A send and its receive wait for each other, one after the other on each rank
    Rendezvous,
}

impl From<Way> for Transport {
    fn from(way: Way) -> Transport {
        match way {
            Way::Edge => Transport::Edge,
            Way::RankEdge => Transport::RankEdge,
            Way::Rendezvous => Transport::Rendezvous,
        }
    }
}

impl Check {
    /// Judges.
    ///
    /// # Errors
    ///
    /// If a file cannot be read or an argument is wrong; refused schedules are an exit code.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let mut refused = false;
        let mut values = Vec::new();
        for name in &self.schedules {
            match source::load_on(name, &self.parameters, self.transport.map(Transport::from)) {
                Ok((checked, form)) => {
                    if screen.json {
                        values.push(accepted(name, &checked));
                    } else {
                        screen.text(&verdict(screen, name, &checked, form.map_or("library", source::Form::name)))?;
                    }
                }
                Err(Failure::Refused(refusal)) => {
                    refused = true;
                    if screen.json {
                        values.push(refusal.value());
                    } else {
                        let hint = explain_hint(&refusal.report);
                        screen.text(&format!("{}\n{name}: refused; {hint}\n\n", refusal.draw(screen.color)))?;
                    }
                }
                Err(other) => return Err(other),
            }
        }
        if screen.json {
            screen.value(&Value::Array(values))?;
        }
        Ok(if refused { ExitCode::from(1) } else { ExitCode::SUCCESS })
    }
}

fn verdict(screen: &Screen, name: &str, checked: &Checked, form: &str) -> String {
    let schedule = &checked.schedule;
    let actions = schedule.items.iter().filter(|item| item.kind.is_compute()).count();
    let mut out = format!(
        "{}: accepted ({form}: {}, {}, {}, {})\n",
        screen.bold(name),
        counted(schedule.ranks as usize, "rank"),
        counted(schedule.stages as usize, "stage"),
        counted(schedule.microbatches as usize, "microbatch"),
        counted(actions, "action"),
    );
    if checked.order_dependent {
        out.push_str("  note: some stage runs its F's or I's out of microbatch order: recipes whose state moves with every microbatch refuse it unless allowed by name\n");
    }
    for note in checked.notes.iter() {
        let _ = writeln!(out, "  note: {note}");
    }
    out
}

fn accepted(name: &str, checked: &Checked) -> Value {
    let schedule = &checked.schedule;
    json!({
        "schedule": name,
        "ok": true,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "eval": schedule.eval,
        "order_dependent": checked.order_dependent,
        "notes": checked.notes,
        "peaks": peaks(checked),
    })
}

/// Peaks per rank, for programs.
pub fn peaks(checked: &Checked) -> Vec<Value> {
    checked.plan.peaks.iter().map(|p| json!({"slots": p.slots, "tapes": p.tapes, "works": p.works})).collect()
}
