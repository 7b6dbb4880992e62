//! `qeffect schedule synthesize`: the automatic scheduler.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use qeffect_core::plan::Checked;
use qeffect_core::synth::{Found, Infeasible, Objective, Request, Shape, synthesize};
use qeffect_view::json;
use serde_json::json as value;

use super::costs::{CostArgs, describe};
use super::output::{Failure, Screen, counted};
use super::source::{self, DEFAULT_SIZE, Parameters};

/// How stages are placed.
#[derive(Clone, Copy, ValueEnum)]
enum Placed {
    /// Whichever is better
    Any,
    /// Stage s on rank s mod P
    Loop,
    /// Down the ranks and back up again
    V,
}

/// What is made as small as possible.
#[derive(Clone, Copy, ValueEnum)]
enum Aim {
    /// The time of the whole step
    Makespan,
    /// Idle time between a rank's own first start and last end
    Idle,
}

/// Arguments of `schedule synthesize`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  qeffect schedule synthesize -p 4 -m 16 --costs 4,5,3 --latency 1 --limit 4
  qeffect schedule synthesize -p 4 -m 16 -v 2 --costs measured.json --tape 3 --work 1 --limit 24 -o best.json
  qeffect schedule show best.json --costs measured.json

The result is never worse than a schedule of the library that keeps the limit.
Exit code 1 if no schedule keeps it.")]
pub struct Synthesize {
    /// Ranks
    #[arg(short = 'p', long, value_name = "N", default_value_t = DEFAULT_SIZE.0 as u32)]
    ranks: u32,
    /// Microbatches per step
    #[arg(short = 'm', long, value_name = "N", default_value_t = DEFAULT_SIZE.1 as u32)]
    microbatches: u32,
    /// Stages per rank
    #[arg(short = 'v', long, value_name = "N", default_value_t = 1)]
    virtual_stages: u32,
    #[command(flatten)]
    costs: CostArgs,
    /// Memory that one microbatch takes on one stage from F to I, in any unit
    #[arg(long, value_name = "UNITS", default_value_t = 1)]
    tape: i64,
    /// The part of it that lives on to W [default: all]
    #[arg(long, value_name = "UNITS")]
    work: Option<i64>,
    /// Most memory of a rank, in the same unit [default: no limit]
    #[arg(long, value_name = "UNITS")]
    limit: Option<i64>,
    /// How stages are placed
    #[arg(long, value_enum, default_value_t = Placed::Any)]
    shape: Placed,
    /// What is made as small as possible
    #[arg(long, value_enum, default_value_t = Aim::Makespan)]
    objective: Aim,
    /// File for the schedule, as JSON
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

impl Synthesize {
    /// Finds a schedule.
    ///
    /// # Errors
    ///
    /// If the request contradicts itself, or a file cannot be read or written.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let stages = self.ranks.checked_mul(self.virtual_stages);
        let stages = stages.ok_or_else(|| Failure::Usage("there are more stages than can be counted".into()))?;
        let request = Request {
            ranks: self.ranks,
            stages,
            microbatches: self.microbatches,
            costs: self.costs.model_for(stages)?,
            tape: self.tape,
            work: self.work.unwrap_or(self.tape),
            limit: self.limit.unwrap_or(i64::MAX / 4),
            shape: match self.shape {
                Placed::Any => Shape::Any,
                Placed::Loop => Shape::Loop,
                Placed::V => Shape::V,
            },
            objective: match self.objective {
                Aim::Makespan => Objective::Makespan,
                Aim::Idle => Objective::Idle,
            },
        };
        let (names, given) = self.handwritten();
        let found = match synthesize(&request, &given) {
            Ok(found) => found,
            Err(Infeasible::Request(what)) => return Err(Failure::Usage(what)),
            Err(limit @ Infeasible::Limit { .. }) => {
                if screen.json {
                    screen.value(&value!({"ok": false, "message": limit.to_string()}))?;
                } else {
                    eprintln!("error: {limit}");
                }
                return Ok(ExitCode::from(1));
            }
        };
        if let Some(file) = &self.output {
            screen.to(Some(file), &json::write_schedule(&found.checked.schedule))?;
        }
        let from = found.given.map(|n| names[n]);
        if screen.json {
            screen.value(&value!({
                "ok": true,
                "from_library": from,
                "makespan": found.makespan,
                "bubble": found.bubble,
                "idle": found.idle,
                "memory": found.memory,
                "schedule": serde_json::from_str::<serde_json::Value>(&json::write_schedule(&found.checked.schedule)).unwrap_or_default(),
            }))?;
        } else {
            screen.text(&self.text(screen, &request, &found, from))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// What the library has of that size and shape.
    fn handwritten(&self) -> (Vec<&'static str>, Vec<Checked>) {
        let size = Parameters {
            ranks: Some(i64::from(self.ranks)),
            microbatches: Some(i64::from(self.microbatches)),
            ..Parameters::default()
        };
        let fits = |v_shaped: bool| match self.shape {
            Placed::Any => true,
            Placed::Loop => !v_shaped,
            Placed::V => v_shaped,
        };
        let entries = source::everything().filter(|entry| !entry.eval && fits(entry.v_shaped));
        let built = entries.filter_map(|entry| {
            let general = entry.params.contains(&"V");
            let size = Parameters {
                virtual_stages: general.then_some(i64::from(self.virtual_stages)).filter(|v| *v > 1),
                ..size.clone()
            };
            Some((entry.name, source::library(entry.name, &size).ok()?))
        });
        built.unzip()
    }

    fn text(&self, screen: &Screen, request: &Request, found: &Found, from: Option<&str>) -> String {
        let schedule = &found.checked.schedule;
        let mut out = format!(
            "{} on {}, {}, {}, {}\n\n",
            screen.bold(from.map_or("a new schedule", |name| name)),
            counted(request.ranks as usize, "rank"),
            counted(request.stages as usize, "stage"),
            counted(request.microbatches as usize, "microbatch"),
            describe(&request.costs)
        );
        let memory: Vec<String> = found.memory.iter().map(i64::to_string).collect();
        let limit = self.limit.map_or("none".to_owned(), |limit| limit.to_string());
        let rows = [
            vec!["makespan".to_owned(), found.makespan.to_string()],
            vec!["bubble".to_owned(), found.bubble.to_string()],
            vec!["idle inside a rank".to_owned(), found.idle.to_string()],
            vec!["memory by rank".to_owned(), memory.join(" ")],
            vec!["limit".to_owned(), limit],
            vec!["stages by rank".to_owned(), stages(schedule)],
        ];
        for row in &rows {
            out.push_str(&format!("{:20}{}\n", row[0], row[1]));
        }
        if self.output.is_none() {
            out.push_str("\n`-o FILE` writes it as JSON; `qeffect schedule show FILE` draws it\n");
        }
        out
    }
}

/// `0 7, 1 6, 2 5, 3 4`.
fn stages(schedule: &qeffect_core::schedule::Schedule) -> String {
    let of = |rank: u32| {
        let stages: Vec<String> = schedule.stages_of(qeffect_core::ids::Rank(rank)).map(|s| s.to_string()).collect();
        stages.join(" ")
    };
    (0..schedule.ranks).map(of).collect::<Vec<_>>().join(", ")
}
