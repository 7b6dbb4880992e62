//! `qeffect schedule diff`: what changes from one schedule to another.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use qeffect_core::action::Kind;
use qeffect_core::ids::Rank;
use qeffect_core::schedule::Schedule;
use qeffect_view::{Scene, html};
use serde_json::{Value, json};

use super::costs::{CostArgs, describe};
use super::output::{Failure, Screen, table};
use super::source::{self, Parameters, SCHEDULE_HELP, SCHEDULE_LONG_HELP};

/// Arguments of `schedule diff`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  qeffect schedule diff one_f_one_b zb_h1 -p 4 -m 8 --costs 4,5,3
  qeffect schedule diff mine.csv zb_h1 -p 4 -m 8
  qeffect schedule diff gpipe one_f_one_b -o compare.html

Exit code 1 if their programs differ. Parameters are for those of the two that have any.")]
pub struct Diff {
    #[arg(help = SCHEDULE_HELP, long_help = SCHEDULE_LONG_HELP)]
    before: String,
    /// The other schedule
    after: String,
    #[command(flatten)]
    parameters: Parameters,
    #[command(flatten)]
    costs: CostArgs,
    /// A page that shows both, with zoom and details
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Most differences that are shown per rank
    #[arg(long, value_name = "N", default_value_t = 6)]
    most: usize,
}

/// A run of actions that stand in one program and not, or elsewhere, in the other.
struct Hunk {
    step: usize,
    removed: Vec<String>,
    added: Vec<String>,
}

impl Diff {
    /// Compares.
    ///
    /// # Errors
    ///
    /// If one is refused, or a file cannot be read or written.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let [a, b] = [self.load(&self.before)?, self.load(&self.after)?];
        let model = self.costs.model(&a)?;
        let scenes = [Scene::new(&a, &model), Scene::new(&b, &self.costs.model(&b)?)];
        let ranks = a.schedule.ranks.max(b.schedule.ranks);
        let hunks: Vec<Vec<Hunk>> =
            (0..ranks).map(|rank| compare(&program(&a.schedule, rank), &program(&b.schedule, rank))).collect();
        if let Some(file) = &self.output {
            screen.to(Some(file), &html::render(&[&scenes[0], &scenes[1]]))?;
        }
        let moved: Vec<String> = (0..a.schedule.stages.max(b.schedule.stages))
            .filter_map(|stage| {
                let home = |s: &Schedule| s.placement.get(stage as usize).map(|rank| rank.0);
                let (from, to) = (home(&a.schedule), home(&b.schedule));
                let name = |home: Option<u32>| home.map_or("no rank".to_owned(), |rank| format!("rank {rank}"));
                (from != to).then(|| format!("stage {stage}: {} to {}", name(from), name(to)))
            })
            .collect();
        let same = hunks.iter().all(Vec::is_empty) && moved.is_empty();
        if screen.json {
            screen.value(&self.value(&scenes, &hunks, &moved, same))?;
        } else {
            let mut out = format!("{}\n\n{}", describe(&model), table(screen, &self.metrics(&scenes)));
            out.push('\n');
            self.programs(&mut out, &hunks, &moved);
            screen.text(&out)?;
        }
        Ok(if same { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }

    /// Parameters are for schedules that have any: files with fixed sizes go without.
    fn load(&self, source: &str) -> Result<qeffect_core::plan::Checked, Failure> {
        match source::load(source, &self.parameters) {
            Err(Failure::Usage(_)) => source::load(source, &Parameters::default()),
            other => other,
        }
    }

    fn metrics(&self, scenes: &[Scene; 2]) -> Vec<Vec<String>> {
        let peak = |scene: &Scene, value: fn(&qeffect_core::plan::Peaks) -> u32| {
            scene.peaks.iter().map(value).max().map_or(0, i64::from)
        };
        type Metric = (&'static str, fn(&Scene, &dyn Fn(&Scene, fn(&qeffect_core::plan::Peaks) -> u32) -> i64) -> i64);
        let metrics: [Metric; 9] = [
            ("ranks", |s, _| i64::from(s.ranks)),
            ("stages", |s, _| i64::from(s.stages)),
            ("microbatches", |s, _| i64::from(s.microbatches)),
            ("makespan", |s, _| s.makespan),
            ("bubble", |s, _| s.bubble),
            ("idle inside a rank", |s, _| s.idle),
            ("peak slots", |s, peak| peak(s, |p| p.slots)),
            ("peak tapes", |s, peak| peak(s, |p| p.tapes)),
            ("peak works", |s, peak| peak(s, |p| p.works)),
        ];
        let mut rows = vec![vec![String::new(), self.before.clone(), self.after.clone(), "change".to_owned()]];
        for (name, metric) in metrics {
            let [a, b] = [metric(&scenes[0], &peak), metric(&scenes[1], &peak)];
            let change = if a == b { String::new() } else { format!("{:+}", b - a) };
            rows.push(vec![name.to_owned(), a.to_string(), b.to_string(), change]);
        }
        rows
    }

    fn programs(&self, out: &mut String, hunks: &[Vec<Hunk>], moved: &[String]) {
        for stage in moved {
            let _ = writeln!(out, "{stage}");
        }
        if hunks.iter().all(Vec::is_empty) {
            let _ = writeln!(out, "every rank runs the same actions in the same order");
            return;
        }
        for (rank, hunks) in hunks.iter().enumerate() {
            match hunks.len() {
                0 => _ = writeln!(out, "rank {rank}: the same"),
                1 => _ = writeln!(out, "rank {rank}: 1 difference"),
                n => _ = writeln!(out, "rank {rank}: {n} differences"),
            }
            for hunk in hunks.iter().take(self.most) {
                let mut line = format!("  step {:<4}", hunk.step);
                if !hunk.removed.is_empty() {
                    let _ = write!(line, " - {}", hunk.removed.join(" "));
                }
                if !hunk.added.is_empty() {
                    let _ = write!(line, " + {}", hunk.added.join(" "));
                }
                let _ = writeln!(out, "{line}");
            }
            if hunks.len() > self.most {
                let _ = writeln!(out, "  and {} more", hunks.len() - self.most);
            }
        }
    }

    fn value(&self, scenes: &[Scene; 2], hunks: &[Vec<Hunk>], moved: &[String], same: bool) -> Value {
        let metrics: serde_json::Map<String, Value> = self
            .metrics(scenes)
            .into_iter()
            .skip(1)
            .map(|row| {
                let number = |text: &str| text.parse::<i64>().map_or(Value::Null, Value::from);
                (row[0].replace(' ', "_"), json!({"before": number(&row[1]), "after": number(&row[2])}))
            })
            .collect();
        let hunk = |h: &Hunk| json!({"step": h.step, "removed": h.removed, "added": h.added});
        json!({
            "before": self.before,
            "after": self.after,
            "same": same,
            "metrics": metrics,
            "moved_stages": moved,
            "ranks": hunks.iter().map(|hunks| hunks.iter().map(hunk).collect::<Vec<_>>()).collect::<Vec<_>>(),
        })
    }
}

/// The actions of a rank as words. Bookkeeping is left out: where none is written, it is inserted.
fn program(schedule: &Schedule, rank: u32) -> Vec<String> {
    if rank >= schedule.ranks {
        return Vec::new();
    }
    let word = |item: &qeffect_core::action::Item| match item.kind {
        Kind::OverlapBegin => "overlap{".to_owned(),
        Kind::OverlapBranch => "|".to_owned(),
        Kind::OverlapEnd => "}".to_owned(),
        Kind::WeightGradJoin => format!("+{}W{}", item.stage, item.microbatch),
        kind => format!("{}{}{}", item.stage, kind.letter().unwrap_or('?'), item.microbatch),
    };
    let bookkeeping = |kind: Kind| matches!(kind, Kind::Refresh | Kind::Reduce | Kind::Commit);
    schedule.rank(Rank(rank)).iter().filter(|item| !bookkeeping(item.kind)).map(word).collect()
}

/// Largest table of the exact comparison; beyond it, everything between the common ends differs.
const LARGEST: usize = 1 << 26;

/// The differences of two programs: longest common subsequence.
fn compare(a: &[String], b: &[String]) -> Vec<Hunk> {
    let head = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let tail = a[head..].iter().rev().zip(b[head..].iter().rev()).take_while(|(x, y)| x == y).count();
    let (x, y) = (&a[head..a.len() - tail], &b[head..b.len() - tail]);
    let mut keep = vec![vec![0u32; y.len() + 1]; if x.len() * y.len() <= LARGEST { x.len() + 1 } else { 0 }];
    if !keep.is_empty() {
        for i in (0..x.len()).rev() {
            for j in (0..y.len()).rev() {
                keep[i][j] = if x[i] == y[j] { keep[i + 1][j + 1] + 1 } else { keep[i + 1][j].max(keep[i][j + 1]) };
            }
        }
    }
    let mut hunks: Vec<Hunk> = Vec::new();
    let (mut i, mut j, mut open) = (0, 0, false);
    while i < x.len() || j < y.len() {
        if i < x.len() && j < y.len() && !keep.is_empty() && x[i] == y[j] {
            (i, j, open) = (i + 1, j + 1, false);
            continue;
        }
        if !open {
            hunks.push(Hunk { step: head + i, removed: Vec::new(), added: Vec::new() });
            open = true;
        }
        let hunk = hunks.last_mut().expect("one is open");
        let remove = i < x.len() && (j == y.len() || keep.is_empty() || keep[i + 1][j] >= keep[i][j + 1]);
        if remove {
            hunk.removed.push(x[i].clone());
            i += 1;
        } else {
            hunk.added.push(y[j].clone());
            j += 1;
        }
    }
    hunks
}

#[cfg(test)]
mod tests {
    use super::compare;

    fn hunks(a: &str, b: &str) -> Vec<(usize, String, String)> {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        compare(&words(a), &words(b)).into_iter().map(|h| (h.step, h.removed.join(" "), h.added.join(" "))).collect()
    }

    #[test]
    fn differences_are_the_shortest() {
        assert!(hunks("F0 F1 B0 B1", "F0 F1 B0 B1").is_empty());
        assert_eq!(
            hunks("F0 F1 B0 B1", "F0 B0 F1 B1"),
            [(1, "F1".into(), String::new()), (3, String::new(), "F1".into())]
        );
        assert_eq!(hunks("F0 B0", "F0 I0 W0"), [(1, "B0".into(), "I0 W0".into())]);
        assert_eq!(hunks("", "F0"), [(0, String::new(), "F0".into())]);
        assert_eq!(hunks("F0", ""), [(0, "F0".into(), String::new())]);
    }
}
