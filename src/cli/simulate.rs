//! `qeffect schedule simulate`: numbers of a run.

use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use qeffect_core::ids::{Rank, Stage};
use qeffect_core::plan::Checked;
use qeffect_core::sim::peak_memory_by;
use qeffect_view::Scene;
use serde_json::json;

use super::costs::{CostArgs, describe};
use super::output::{Failure, Screen, table};
use super::source::{self, Parameters, SCHEDULE_HELP, SCHEDULE_LONG_HELP};

/// Arguments of `schedule simulate`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  qeffect schedule simulate zb_h1 -p 4 -m 8 --costs 10,12,7
  qeffect schedule simulate mine.csv --costs measured.json --tape-bytes 67108864 --work-bytes 33554432
  qeffect schedule simulate zb_v --costs 40,50,30 --latency 5 --message-bytes 8388608 --bandwidth 400000
  qeffect schedule simulate dualpipe_v --costs 4,4,3 --overlap 9 --pair 0,7=10
  qeffect schedule simulate zb_v --costs trace.json
  qeffect --json schedule simulate zb_v -p 8 -m 32")]
pub struct Simulate {
    #[arg(help = SCHEDULE_HELP, long_help = SCHEDULE_LONG_HELP)]
    schedule: String,
    #[command(flatten)]
    parameters: Parameters,
    #[command(flatten)]
    costs: CostArgs,
    /// Bytes that a stage keeps of one microbatch from F to I: one number for all, or one for each stage
    #[arg(long, value_name = "BYTES,..", value_delimiter = ',', requires = "work_bytes")]
    tape_bytes: Vec<i64>,
    /// The part of them that lives on to W
    #[arg(long, value_name = "BYTES,..", value_delimiter = ',', requires = "tape_bytes")]
    work_bytes: Vec<i64>,
}

impl Simulate {
    /// Simulates.
    ///
    /// # Errors
    ///
    /// If the schedule is refused, or a file cannot be read.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let checked = source::load(&self.schedule, &self.parameters)?;
        let model = self.costs.model(&checked)?;
        let scene = Scene::new(&checked, &model);
        let bytes = self.bytes(&checked)?;
        if screen.json {
            screen.value(&value(&checked, &scene, bytes.as_deref()))?;
        } else {
            let mut out = format!("{}, {}\n\n", screen.bold(&scene.title()), describe(&model));
            totals(&mut out, &scene);
            out.push('\n');
            out.push_str(&table(screen, &rows(&checked, &scene, bytes.as_deref())));
            screen.text(&out)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn bytes(&self, checked: &Checked) -> Result<Option<Vec<i64>>, Failure> {
        const MOST: i64 = 1 << 40;
        if self.tape_bytes.is_empty() {
            return Ok(None);
        }
        let schedule = &checked.schedule;
        let count = schedule.stages as usize;
        for (name, sizes) in [("--tape-bytes", &self.tape_bytes), ("--work-bytes", &self.work_bytes)] {
            if sizes.len() != 1 && sizes.len() != count {
                let found = sizes.len();
                return Err(Failure::Usage(format!("{name} has {found} numbers, but the schedule has {count} stages")));
            }
        }
        let of = |sizes: &[i64], stage: Stage| sizes.get(stage.index()).copied().unwrap_or(sizes[0]);
        let sizes = |stage| [of(&self.tape_bytes, stage), of(&self.work_bytes, stage)];
        let wrong = |[tape, work]: [i64; 2]| !(0..=MOST).contains(&tape) || !(0..=tape).contains(&work);
        if (0..schedule.stages).any(|stage| wrong(sizes(Stage(stage)))) {
            return Err(Failure::Usage(format!("bytes must be 0 <= --work-bytes <= --tape-bytes <= {MOST}")));
        }
        Ok(Some((0..schedule.ranks).map(|rank| peak_memory_by(schedule, Rank(rank), sizes)).collect()))
    }
}

/// Kinds of the actions on the critical path, and messages between them.
fn path(scene: &Scene) -> (Vec<(char, usize)>, usize) {
    let path: Vec<_> = scene.critical_path().iter().map(|at| &scene.bars[*at as usize]).collect();
    let letters = "FBIWR".chars().map(|letter| (letter, path.iter().filter(|bar| bar.letter() == letter).count()));
    let messages = path.windows(2).filter(|pair| pair[0].rank != pair[1].rank).count();
    (letters.filter(|(_, count)| *count > 0).collect(), messages)
}

fn totals(out: &mut String, scene: &Scene) {
    let (letters, messages) = path(scene);
    let letters: Vec<String> = letters.iter().map(|(letter, count)| format!("{count} {letter}")).collect();
    let width = scene.makespan.to_string().len();
    let percent = scene.bubble_percent();
    let _ = writeln!(out, "makespan       {:width$}", scene.makespan);
    let _ = writeln!(
        out,
        "bubble         {:width$}  {percent:.1} % of the makespan: the most that a rank idles up to the global end",
        scene.bubble
    );
    let _ = writeln!(
        out,
        "idle           {:width$}  the most that a rank idles between its own first start and last end",
        scene.idle
    );
    let _ = writeln!(out, "critical path  {}, {messages} messages", letters.join(", "));
}

/// Receive buffers of a rank.
fn buffers(checked: &Checked, rank: u32) -> u32 {
    let crossing = checked.plan.edges.iter().filter(|edge| edge.from_rank != edge.to_rank);
    crossing.filter(|edge| edge.to_rank.0 == rank).map(|edge| edge.buffers).sum()
}

fn span(scene: &Scene, rank: u32) -> (i64, i64) {
    let bars = scene.rank(rank);
    (bars.first().map_or(0, |bar| bar.start), bars.last().map_or(0, |bar| bar.end))
}

fn rows(checked: &Checked, scene: &Scene, bytes: Option<&[i64]>) -> Vec<Vec<String>> {
    let mut head = vec!["rank", "busy", "bubble", "idle", "slots", "tapes", "works", "receive buffers"];
    head.extend(bytes.map(|_| "peak bytes"));
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    for rank in 0..scene.ranks {
        let at = rank as usize;
        let (first, last) = span(scene, rank);
        let peaks = scene.peaks[at];
        let mut row = vec![
            rank.to_string(),
            scene.busy[at].to_string(),
            (scene.makespan - scene.busy[at]).to_string(),
            (last - first - scene.busy[at]).to_string(),
            peaks.slots.to_string(),
            peaks.tapes.to_string(),
            peaks.works.to_string(),
            buffers(checked, rank).to_string(),
        ];
        row.extend(bytes.map(|bytes| bytes[at].to_string()));
        rows.push(row);
    }
    rows
}

fn value(checked: &Checked, scene: &Scene, bytes: Option<&[i64]>) -> serde_json::Value {
    let (letters, messages) = path(scene);
    let ranks: Vec<_> = (0..scene.ranks)
        .map(|rank| {
            let at = rank as usize;
            let (first, last) = span(scene, rank);
            json!({
                "busy": scene.busy[at],
                "bubble": scene.makespan - scene.busy[at],
                "idle": last - first - scene.busy[at],
                "first_start": first,
                "last_end": last,
                "slots": scene.peaks[at].slots,
                "tapes": scene.peaks[at].tapes,
                "works": scene.peaks[at].works,
                "receive_buffers": buffers(checked, rank),
                "peak_bytes": bytes.map(|bytes| bytes[at]),
            })
        })
        .collect();
    let critical: Vec<String> = scene.critical_path().iter().map(|at| scene.bars[*at as usize].key()).collect();
    json!({
        "schedule": scene.name,
        "params": scene.params.iter().map(|(name, value)| json!([name, value])).collect::<Vec<_>>(),
        "makespan": scene.makespan,
        "bubble": scene.bubble,
        "bubble_percent": scene.bubble_percent(),
        "idle": scene.idle,
        "critical_path": { "actions": critical, "kinds": letters.into_iter().map(|(l, n)| (l.to_string(), json!(n))).collect::<serde_json::Map<_, _>>(), "messages": messages },
        "ranks": ranks,
    })
}
