//! Readers of files meet anything: they never panic, and what they refuse has a place in the file.

mod common;

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use common::{LOOPED, OVERLAPPED, ZB_H1, checked};
use proptest::prelude::*;
use qeffect_core::check::{Options, check, messages};
use qeffect_core::diag::Report;
use qeffect_core::lang;
use qeffect_core::plan::Checked;
use qeffect_core::sim::CostModel;
use qeffect_core::source::SourceMap;
use qeffect_core::text::{read_csv, read_plan, write_csv, write_plan};
use qeffect_view::json::{read_schedule, write_schedule};
use qeffect_view::report::plain;
use qeffect_view::{Scene, html, svg, terminal, trace};

/// What files of these formats are made of, so that random edits often make sense.
const WORDS: &[&str] = &[
    "0F0",
    "1B0",
    "0I1",
    "1W1",
    "3F2",
    "0SEND_F0",
    "1RECV_F0",
    "0RECV_B1",
    "0REDUCE_GRAD",
    "(0F1;1B0)OVERLAP_F_B",
    "F",
    "B",
    ",",
    ",,",
    ";",
    "(",
    ")",
    "\n",
    "\r\n",
    " ",
    "0",
    "7",
    "99999999999",
    "-1",
    "\"",
    "{",
    "}",
    "[",
    "]",
    ":",
    "null",
    "é",
    "\u{0}",
    "\"overlap\"",
    "\"coalesced\"",
    "\"placement\"",
    "\"0F0\"",
    "{\"overlap\": [[\"0F0\"], [\"0B0\"]]}",
];

/// Cuts, copies and insertions at random places.
fn edited(text: &str, edits: &[(usize, usize, usize)]) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    for (kind, at, word) in edits {
        let at = at % (chars.len() + 1);
        match kind % 4 {
            0 => chars.truncate(chars.len().saturating_sub(word % 9)),
            1 => drop(chars.drain(at..(at + 1 + word % 5).min(chars.len()))),
            2 => drop(chars.splice(at..at, WORDS[word % WORDS.len()].chars())),
            _ => {
                let copy: Vec<char> = chars[at..(at + word % 12).min(chars.len())].to_vec();
                let to = (at * 7 + word) % (chars.len() + 1);
                drop(chars.splice(to..to, copy));
            }
        }
    }
    chars.into_iter().collect()
}

/// Whatever comes out is drawn: a report with its places, or a schedule in every view.
fn digest(result: Result<Checked, Report>, map: &SourceMap) {
    match result {
        Err(report) => {
            assert!(!report.diagnostics.is_empty(), "a refusal says why");
            let text = plain(&report, map);
            assert!(text.starts_with("error[QE"), "{text}");
        }
        Ok(checked) => {
            let scene = Scene::new(&checked, &CostModel::unit());
            terminal::render(&scene, &terminal::Options::default());
            terminal::steps(&scene);
            svg::render(&scene, &svg::Options { titles: true, ..svg::Options::default() });
            html::render(&[&scene, &scene]);
            trace::render(&[&scene]);
        }
    }
}

fn judge_csv(text: &str) {
    let (schedule, map) = read_csv("t", "t.csv", text);
    digest(schedule.and_then(|schedule| check(schedule, &Options::AT_START)), &map);
}

fn judge_plan(text: &str) {
    let (raw, map) = read_plan("t", "t.csv", text);
    let judged = raw.and_then(|raw| {
        let placement = raw.schedule.placement.clone();
        let checked = check(raw.schedule, &Options::AT_START)?;
        let faults = messages::check(&raw.nodes, &placement);
        if faults.is_empty() { Ok(checked) } else { Err(Report::from_faults(faults)) }
    });
    digest(judged, &map);
}

fn judge_json(text: &str) {
    let (schedule, map) = read_schedule("t.json", text);
    digest(schedule.and_then(|schedule| check(schedule, &Options::AT_START)), &map);
}

/// As the fuzz target `program` does it: few rounds only, the interpreter's own limits are tested elsewhere.
fn judge_program(text: &str) {
    if text.len() > 4096 || text.split(|c: char| !c.is_ascii_digit()).any(|number| number.len() > 2) {
        return;
    }
    let (program, map) = lang::read("t.sched", text);
    let judged = program.and_then(|program| {
        let printed = lang::print(&program);
        assert_eq!(lang::print(&lang::read("t", &printed).0.expect("what is printed reads")), printed);
        let values: Vec<i64> = (2..).take(program.params.len()).collect();
        let judged = lang::interpret(&program, &values).and_then(|schedule| check(schedule, &Options::AT_START));
        judged.map_err(|mut report| {
            lang::annotate(&mut report, &program, &values);
            report
        })
    });
    digest(judged, &map);
}

/// What a fuzz target does with a text: it must not panic.
type Judge = fn(&str);

/// Folder of the fuzz corpus, and what its target does.
const TARGETS: &[(&str, Judge)] =
    &[("csv", judge_csv), ("lowered", judge_plan), ("json", judge_json), ("program", judge_program)];

/// The seeds that fuzzers start from, in the order of their names.
fn seeds(target: &str) -> Vec<String> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut paths: Vec<PathBuf> =
        fs::read_dir(folder).expect("a folder per target").map(|entry| entry.expect("readable").path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read_to_string(path).expect("text")).collect()
}

static SEEDS: LazyLock<Vec<Vec<String>>> = LazyLock::new(|| TARGETS.iter().map(|(target, _)| seeds(target)).collect());

#[test]
fn every_seed_of_the_fuzzers_is_judged() {
    for ((target, judge), seeds) in TARGETS.iter().zip(SEEDS.iter()) {
        assert!(seeds.len() >= 3, "{target}");
        seeds.iter().for_each(|seed| judge(seed));
    }
}

fn sample(n: usize) -> Checked {
    checked([ZB_H1, LOOPED, OVERLAPPED][n % 3], &[1 + (n as i64 / 3) % 3, 1 + (n as i64 / 9) % 4])
}

fn edits() -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    prop::collection::vec((any::<usize>(), any::<usize>(), 0usize..1000), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn spoilt_csv(n in 0usize..36, edits in edits()) {
        if let Ok(text) = write_csv(&sample(n).schedule) {
            judge_csv(&edited(&text, &edits));
        }
    }

    #[test]
    fn spoilt_plans(n in 0usize..36, edits in edits()) {
        judge_plan(&edited(&write_plan(&sample(n).plan), &edits));
    }

    #[test]
    fn spoilt_json(n in 0usize..36, edits in edits()) {
        judge_json(&edited(&write_schedule(&sample(n).schedule), &edits));
    }

    #[test]
    fn spoilt_seeds(target in 0..TARGETS.len(), n: prop::sample::Index, edits in edits()) {
        TARGETS[target].1(&edited(n.get::<String>(&SEEDS[target]), &edits));
    }

    #[test]
    fn words_in_any_order(words in prop::collection::vec(0..WORDS.len(), 0..40)) {
        let text: String = words.iter().map(|n| WORDS[*n]).collect();
        judge_csv(&text);
        judge_plan(&text);
        judge_json(&text);
    }

    /// JSON keeps the actions of any CSV that reads, and CSV those of any JSON that it can say.
    #[test]
    fn formats_agree(n in 0usize..36, edits in edits()) {
        let Ok(text) = write_csv(&sample(n).schedule) else { return Ok(()) };
        if let (Ok(schedule), _) = read_csv("t", "t.csv", &edited(&text, &edits)) {
            let (back, map) = read_schedule("t.json", &write_schedule(&schedule));
            let back = back.unwrap_or_else(|report| panic!("{}", plain(&report, &map)));
            let what = |s: &qeffect_core::schedule::Schedule| s.items.iter().map(|i| (i.kind, i.stage, i.microbatch)).collect::<Vec<_>>();
            prop_assert_eq!(what(&back), what(&schedule));
            prop_assert_eq!(write_csv(&back).ok(), write_csv(&schedule).ok());
        }
    }
}
