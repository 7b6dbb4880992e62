//! The `qeffect` command as people and programs meet it: output, exit codes, files.
#![cfg(feature = "cli")]
#![allow(missing_docs)]

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qeffect"));
    command.args(args).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("NO_COLOR").env("COLUMNS", "100");
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().expect("the command starts")
}

/// Standard output and exit code.
fn out(args: &[&str]) -> (String, i32) {
    let output = run(args);
    (String::from_utf8(output.stdout).expect("UTF-8"), output.status.code().expect("an exit code"))
}

/// Standard error of a command that fails with that code.
fn fails(args: &[&str], code: i32) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).expect("UTF-8")
}

fn json(args: &[&str]) -> (Value, i32) {
    let (text, code) = out(args);
    (serde_json::from_str(&text).unwrap_or_else(|e| panic!("{args:?}: {e}\n{text}")), code)
}

fn with_input(args: &[&str], input: &str) -> (String, i32) {
    let mut child = command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the command starts");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("written");
    let output = child.wait_with_output().expect("it ends");
    (String::from_utf8(output.stdout).expect("UTF-8"), output.status.code().expect("an exit code"))
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("qeffect-cli-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

#[test]
fn list_compares_the_library() {
    let (text, code) = out(&["schedule", "list"]);
    assert_eq!(code, 0);
    for entry in qeffect::schedules::library().iter().chain(qeffect::schedules::further()) {
        assert!(text.lines().any(|line| line.starts_with(entry.name)), "{text}");
    }
    let (all, _) = json(&["--json", "schedule", "list", "-p", "4", "-m", "8", "--costs", "4,5,3"]);
    let of = |name: &str| all.as_array().unwrap().iter().find(|e| e["name"] == name).unwrap()["at"].clone();
    assert_eq!((&of("one_f_one_b")["makespan"], &of("one_f_one_b")["bubble"]), (&132.into(), &36.into()));
    assert_eq!(of("zb_h1")["peak_slots"], 4);
}

#[test]
fn simulate_gives_known_numbers() {
    let (value, code) = json(&["--json", "schedule", "simulate", "zb_h1", "-p", "4", "-m", "8", "--costs", "10,12,7"]);
    assert_eq!(code, 0);
    assert_eq!((&value["makespan"], &value["bubble"], &value["idle"]), (&277.into(), &45.into(), &45.into()));
    assert_eq!(value["ranks"].as_array().unwrap().len(), 4);
    // A microbatch keeps 100 from F to I and 40 of them to W: rank r has P - r tapes and r works.
    let args =
        ["schedule", "simulate", "zb_h1", "-p", "4", "-m", "8", "--tape-bytes", "100", "--work-bytes", "40", "--json"];
    let bytes: Vec<i64> =
        json(&args).0["ranks"].as_array().unwrap().iter().map(|r| r["peak_bytes"].as_i64().unwrap()).collect();
    assert_eq!(bytes, [400, 340, 280, 220]);
    // Stages that differ: each rank has its own.
    let args = ["--tape-bytes", "100,10,1000,100", "--work-bytes", "40,10,0,40"];
    let args = [&["--json", "schedule", "simulate", "zb_h1", "-p", "4", "-m", "8"][..], &args].concat();
    let bytes: Vec<i64> =
        json(&args).0["ranks"].as_array().unwrap().iter().map(|r| r["peak_bytes"].as_i64().unwrap()).collect();
    assert_eq!(bytes, [400, 40, 2000, 220]);
    assert!(
        fails(&["schedule", "simulate", "zb_h1", "--tape-bytes", "1,2", "--work-bytes", "1"], 2).contains("4 stages")
    );
    let (text, _) = out(&["schedule", "simulate", "zb_h1", "--costs", "10,12,7"]);
    assert!(text.contains("makespan       277\n"), "{text}");
}

#[test]
fn costs_come_from_a_file_per_stage() {
    let folder = Folder::new("costs");
    let file = folder.file("costs.json", "{\"stages\": [[1, 1, 1], [3, 3, 3]], \"latency\": 2}");
    // Stage 1 is the bottleneck: F0 ends at 1, arrives at 3, then 2 microbatches of 9; dX arrives 2 later.
    let (value, _) = json(&["--json", "schedule", "simulate", "gpipe", "-p", "2", "-m", "2", "--costs", &file]);
    assert_eq!(value["makespan"], 3 + 2 * 3 + 2 * 6 + 2 + 2);
    assert!(
        fails(&["schedule", "simulate", "gpipe", "-p", "3", "-m", "2", "--costs", &file], 2)
            .contains("costs of 2 stages")
    );
    assert!(fails(&["schedule", "simulate", "gpipe", "--costs", "1,2"], 2).contains("has 2 numbers"));
    assert!(fails(&["schedule", "simulate", "gpipe", "--costs", "1,-2,3"], 2).contains("a cost is -2"));
    assert!(fails(&["schedule", "simulate", "gpipe", "--costs", "none.json"], 3).contains("none.json"));
}

#[test]
fn check_draws_faults_with_their_places() {
    let export = "tests/golden/pytorch/1f1b_P2_M4.csv";
    let (text, code) = out(&["schedule", "check", "tests/golden/pytorch/gpipe_P2_M4.csv", export]);
    assert_eq!(code, 1);
    assert!(
        text.contains("gpipe_P2_M4.csv: accepted (compute-only CSV: 2 ranks, 2 stages, 4 microbatches, 16 actions)")
    );
    assert!(text.contains("[QE0602]") && text.contains(&format!("--> {export}:2:25")), "{text}");
    assert!(text.contains("`qeffect explain QE0602` tells more"));
    let (value, code) = json(&["--json", "schedule", "check", export]);
    assert_eq!(code, 1);
    let fault = &value[0]["diagnostics"][1];
    assert_eq!(
        (&fault["code"], &fault["place"]["line"], &fault["place"]["column"]),
        (&"QE0602".into(), &2.into(), &25.into())
    );
    let (_, code) = out(&["schedule", "check", "tests/golden/pytorch/zb_v_P4_M8_V2.comms.csv"]);
    assert_eq!(code, 0);
}

#[test]
fn programs_are_read_with_their_parameters() {
    let folder = Folder::new("programs");
    let text = "pub mine<P, M, X> for (2, 4, 1);\nranks: P; microbatches: M; stages: P; place: |s| s;\nrank |r| {\n    for m in 0..M { F(r, m); }\n    for m in 0..X * M { B(r, m); }\n}\n";
    let file = folder.file("mine.sched", text);
    let (text, code) = out(&["schedule", "check", &file]);
    assert_eq!((code, text.contains("2 ranks, 2 stages, 4 microbatches")), (0, true), "{text}");
    let (text, code) = out(&["schedule", "check", &file, "-p", "3", "-m", "2", "--set", "X=1"]);
    assert_eq!((code, text.contains("3 ranks, 3 stages, 2 microbatches")), (0, true), "{text}");
    let (text, code) = out(&["schedule", "check", &file, "--set", "X=0"]);
    assert_eq!((code, text.contains("[QE0103]")), (1, true), "{text}");
    assert!(text.contains("mine.sched:4:"), "{text}");
    assert!(fails(&["schedule", "check", &file, "--set", "Y=0"], 2).contains("no parameter `Y`"));
    let undeclared = folder.file(
        "bare.sched",
        "bare<P>; ranks: P; microbatches: 1; stages: P; place: |s| s; rank |r| { F(r, 0); B(r, 0); }",
    );
    assert!(fails(&["schedule", "show", &undeclared], 2).contains("give -p N"));
}

#[test]
fn conversions_go_round() {
    let folder = Folder::new("conversions");
    let (csv, lowered, json_file) = (folder.path("a.csv"), folder.path("b.csv"), folder.path("c.json"));
    assert_eq!(out(&["schedule", "convert", "zb_h1", "-p", "4", "-m", "8", "-o", &csv]).1, 0);
    assert_eq!(out(&["schedule", "convert", &csv, "--to", "lowered", "-o", &lowered]).1, 0);
    assert_eq!(out(&["schedule", "convert", &lowered, "-o", &json_file]).1, 0);
    for file in [&csv, &lowered, &json_file] {
        let (text, code) = out(&["schedule", "diff", "zb_h1", file]);
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("every rank runs the same actions in the same order"));
    }
    let text = std::fs::read_to_string(&csv).expect("written");
    assert_eq!(
        text.lines().next(),
        Some("0F0,0F1,0F2,0F3,0I0,0W0,0F4,0I1,0W1,0F5,0I2,0W2,0F6,0I3,0W3,0F7,0I4,0W4,0I5,0W5,0I6,0W6,0I7,0W7")
    );
    let (accepted, code) = with_input(&["schedule", "check", "-"], &text);
    assert_eq!((code, accepted.contains("-: accepted (compute-only CSV")), (0, true), "{accepted}");
    let asked = fails(&["schedule", "convert", &csv], 2);
    assert!(asked.contains("--to pytorch, pytorch-comms, lowered or json"), "{asked}");
    // `csv` is another word for `pytorch`.
    assert_eq!(out(&["schedule", "convert", "zb_h1", "-p", "4", "-m", "8", "--to", "csv"]), (text, 0));
}

#[test]
fn faults_of_a_file_are_told_in_its_words() {
    let folder = Folder::new("words");
    let early = "0F0,0F1,0B0,0REDUCE_GRAD,0B1\n";
    for text in [early.to_owned(), early.replace("0F0,", "0UNSHARD,0F0,")] {
        let (refused, code) = out(&["schedule", "check", &folder.file("early.csv", &text)]);
        assert_eq!(code, 1, "{refused}");
        assert!(refused.contains("0REDUCE_GRAD runs before 0B1, which still adds to the gradient"), "{refused}");
        assert!(refused.contains("move `0REDUCE_GRAD` below the last `I` and `W` of stage 0"), "{refused}");
    }
}

#[test]
fn names_from_files_do_not_steer_the_terminal() {
    let folder = Folder::new("names");
    let text = r#"{"format": "qeffect-schedule", "version": 1, "name": "a\u001b[31mRED", "microbatches": 1,
        "placement": [0], "programs": [["0F0", "0B0"]]}"#;
    let file = folder.file("red.json", text);
    for arguments in
        [vec!["check"], vec!["show"], vec!["show", "--format", "steps"], vec!["simulate"], vec!["diff", "gpipe"]]
    {
        let output = run(&[&["schedule"], &arguments[..], &[&file]].concat());
        let shown = [output.stdout, output.stderr].concat();
        assert!(!shown.is_empty() && !shown.contains(&0x1b), "{arguments:?}: {}", String::from_utf8_lossy(&shown));
    }
    assert!(out(&["schedule", "show", &file]).0.contains(r"a\u{1b}[31mRED"));
}

#[test]
fn programs_for_pytorch_read_back() {
    let folder = Folder::new("pytorch");
    let file = folder.path("dual.csv");
    let size = ["-p", "2", "-m", "4"];
    let convert = ["schedule", "convert", "dualpipe_v", "--to", "pytorch-comms", "-o", &file];
    assert_eq!(out(&[&convert[..], &size].concat()).1, 0);
    let text = std::fs::read_to_string(&file).expect("written");
    assert!(text.starts_with("0UNSHARD,") && text.contains("OVERLAP_F_B") && !text.contains("REFRESH"), "{text}");
    let (text, code) = out(&[&["schedule", "diff", "dualpipe_v", &file][..], &size].concat());
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("every rank runs the same actions in the same order"), "{text}");
    for transport in ["edge", "rendezvous"] {
        assert_eq!(out(&["schedule", "check", &file, "--transport", transport]).1, 0, "{transport}");
    }
    let refused = fails(&["schedule", "convert", "eval", "--to", "pytorch-comms"], 1);
    assert!(refused.contains("QE0701") && refused.contains("without backward"), "{refused}");
}

#[test]
fn a_lowered_program_of_one_rank_is_known_as_one() {
    let folder = Folder::new("one_rank");
    let mut seen = 0;
    for entry in qeffect_schedules::library().iter().chain(qeffect_schedules::further()).filter(|entry| !entry.eval) {
        // Some need a rank for each arm of their shape, or more microbatches.
        if entry.checked(1, 4).is_err() {
            continue;
        }
        let (lowered, back) = (folder.path(&format!("{}.csv", entry.name)), folder.path("back.json"));
        let size = ["-p", "1", "-m", "4"];
        let to_lowered = ["schedule", "convert", entry.name, "--to", "lowered", "-o", &lowered];
        assert_eq!(out(&[&to_lowered[..], &size].concat()).1, 0, "{}", entry.name);
        let (accepted, code) = out(&["schedule", "check", &lowered]);
        assert_eq!((code, accepted.contains("accepted (lowered program")), (0, true), "{}: {accepted}", entry.name);
        assert_eq!(out(&["schedule", "convert", &lowered, "-o", &back]).1, 0, "{}", entry.name);
        let (text, code) = out(&[&["schedule", "diff", entry.name, &back][..], &size].concat());
        assert_eq!(code, 0, "{text}");
        seen += 1;
    }
    assert!(seen >= 10, "{seen}");
    let sharded = folder.file("sharded.csv", "0UNSHARD,0F0,0B0,0RESHARD\n");
    assert_eq!(out(&["schedule", "check", &sharded]).1, 0);
}

#[test]
fn diff_tells_what_changes() {
    let (text, code) = out(&["schedule", "diff", "one_f_one_b", "zb_h1", "-p", "4", "-m", "8"]);
    assert_eq!(code, 1);
    assert!(text.contains("makespan                     33     27      -6"), "{text}");
    let folder = Folder::new("diff");
    let page = folder.path("page.html");
    let (value, _) = json(&["--json", "schedule", "diff", "gpipe", "one_f_one_b", "-o", &page]);
    assert_eq!((&value["same"], &value["metrics"]["peak_slots"]["before"]), (&false.into(), &8.into()));
    assert!(std::fs::read_to_string(&page).expect("written").contains("one_f_one_b(P = 4, M = 8)"));
    // Rank 3 of GPipe runs F1 to F7 before B0, of 1F1B after.
    assert_eq!(value["ranks"][3][0]["removed"][0], "3F1");
    let (text, _) = out(&["schedule", "diff", "gpipe", "zb_v"]);
    assert!(text.contains("stage 4: no rank to rank 3"), "{text}");
}

#[test]
fn pictures_go_where_they_are_asked() {
    let folder = Folder::new("pictures");
    for (name, sign) in [("a.svg", "<svg"), ("a.html", "<!doctype html>"), ("a.json", "\"traceEvents\"")] {
        let file = folder.path(name);
        assert_eq!(out(&["schedule", "show", "zb_v", "-o", &file]), (String::new(), 0));
        assert!(std::fs::read_to_string(&file).expect("written").contains(sign));
    }
    let (text, _) = out(&["schedule", "show", "zb_h1", "--ascii", "--width", "60"]);
    assert!(text.is_ascii() && text.lines().all(|line| line.len() <= 80), "{text}");
    assert!(out(&["schedule", "show", "zb_h1", "--format", "steps"]).0.contains("step 0   0F0"));
    assert!(fails(&["schedule", "show", "zb_h1", "-o", "/no/such/folder/a.svg"], 3).contains("/no/such/folder/a.svg"));
}

#[test]
fn colors_are_for_terminals() {
    let plain = out(&["schedule", "show", "zb_h1"]).0;
    assert!(!plain.contains('\x1b'), "a pipe is no terminal");
    assert!(out(&["schedule", "show", "zb_h1", "--color", "always"]).0.contains('\x1b'));
    let refused = |color: &str| out(&["schedule", "check", "tests/golden/pytorch/1f1b_P2_M4.csv", "--color", color]).0;
    assert!(refused("always").contains("\x1b[91merror[QE") && !refused("never").contains('\x1b'));
}

#[test]
fn wrong_command_lines_are_told_apart_from_wrong_files() {
    assert!(fails(&["schedule", "show", "zbh1"], 2).contains("did you mean `zb_h1`?"));
    assert!(fails(&["schedule", "show", "something_else"], 2).contains("`qeffect schedule list`"));
    assert!(fails(&["schedule", "show", "none.csv"], 3).contains("none.csv: No such file"));
    assert!(fails(&["schedule", "show", "zb_h1", "-v", "2"], 2).contains("no parameter `V`"));
    assert!(fails(&["schedule", "show", "zb_h1", "-p", "0"], 1).contains("[QE0607]"));
    assert!(fails(&["explain", "QE9999"], 2).contains("there is no code"));
    fails(&["schedule"], 2);
    assert!(fails(&["schedule", "simulate", "zb_v", "-p", "16", "--set", "P=3"], 2).contains("`P` is given twice"));
    assert!(fails(&["schedule", "show", "zb_v", "-o", "a.pdf"], 2).contains("`.pdf` names no picture"));
    assert!(fails(&["schedule", "list", "-p", "0"], 2).contains("each is at least 1"));
    assert!(fails(&["schedule", "list", "--set", "X=3"], 2).contains("no parameter `X`"));
    assert!(fails(&["schedule", "show", "dualpipe_v", "-p", "4", "-m", "4"], 1).contains("at least 7 microbatches"));
    let (value, code) = json(&["--json", "schedule", "show", "none.csv"]);
    assert_eq!((code, &value["error"]), (3, &"file".into()));
    for args in [&["--json", "schedule", "show"][..], &["schedule", "nosuch", "--json"]] {
        let (value, code) = json(args);
        assert_eq!((code, &value["error"], &value["ok"]), (2, &"usage".into(), &false.into()));
        assert!(
            value["message"].as_str().is_some_and(|message| message.contains("Usage: qeffect schedule")),
            "{value}"
        );
    }
}

#[test]
fn the_list_goes_on_where_something_does_not_suit_a_schedule() {
    let folder = Folder::new("list");
    let costs = folder.file("costs.json", r#"{"stages": [[1, 1, 1], [2, 2, 2], [1, 1, 1], [1, 1, 1]]}"#);
    let (value, code) = json(&["--json", "schedule", "list", "--costs", &costs]);
    let row = |name: &str| value.as_array().unwrap().iter().find(|row| row["name"] == name).unwrap().clone();
    assert_eq!(code, 0);
    assert!(row("gpipe")["at"]["makespan"].as_i64() > Some(33));
    assert_eq!(row("zb_v")["unsuited"], "costs of 4 stages, but the schedule has 8");
    let (value, _) = json(&["--json", "schedule", "list", "-v", "3"]);
    let peak = |name: &str| {
        let rows = value.as_array().unwrap();
        rows.iter().find(|row| row["name"] == name).unwrap()["at"]["peak_slots"].as_i64().unwrap()
    };
    assert_eq!((peak("interleaved_1f1b"), peak("one_f_one_b")), (15, 4), "V is 3 where it is a parameter");
}

#[test]
fn help_explains_and_completions_complete() {
    for command in [
        vec![],
        vec!["schedule", "list"],
        vec!["schedule", "show"],
        vec!["schedule", "check"],
        vec!["schedule", "simulate"],
        vec!["schedule", "convert"],
        vec!["schedule", "diff"],
        vec!["schedule", "synthesize"],
        vec!["explain"],
    ] {
        let mut args = command.clone();
        args.push("--help");
        let (text, code) = out(&args);
        assert_eq!(code, 0);
        assert!(text.contains("Example"), "{command:?} shows no example");
    }
    assert!(out(&["--help"]).0.contains("Exit codes"));
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(out(&["completions", shell]).0.contains("schedule"));
    }
    let pages = out(&["man"]).0;
    for page in [".TH qeffect 1", ".TH qeffect-schedule-simulate 1", ".TH qeffect-train 1"] {
        assert!(pages.contains(page), "{page}");
    }
    let (text, code) = out(&["explain", "qe0401"]);
    assert_eq!((code, text.starts_with("QE0401: ranks wait for each other")), (0, true));
    let (all, _) = json(&["--json", "explain", "--list"]);
    assert_eq!(all.as_array().map(Vec::len), Some(qeffect::core::code::Code::ALL.len()));
}

#[test]
fn synthesize_finds_what_is_no_worse_than_the_library() {
    let folder = Folder::new("synthesize");
    let file = folder.path("best.json");
    let args = ["schedule", "synthesize", "-p", "4", "-m", "8", "--costs", "10,12,7", "--limit", "4", "-o", &file];
    let (text, code) = out(&args);
    assert_eq!(code, 0, "{text}");
    let (value, _) = json(&["--json", "schedule", "simulate", &file, "--costs", "10,12,7"]);
    assert!(value["makespan"].as_i64().unwrap() <= 277, "ZB-H1 takes 277 with the same memory: {value}");
    assert!(value["ranks"].as_array().unwrap().iter().all(|rank| rank["slots"].as_i64().unwrap() <= 4));
    // No schedule of the library is better under its own memory.
    let (library, _) = json(&["--json", "schedule", "list"]);
    let training = library.as_array().unwrap().iter().filter(|row| row["eval"] == false);
    for row in training {
        let number = |value: &Value| value.as_i64().unwrap().to_string();
        let (stages, limit) = (number(&row["virtual_stages"]), number(&row["at"]["peak_slots"]));
        let args = ["--json", "schedule", "synthesize", "-p", "4", "-m", "8", "-v", &stages, "--limit", &limit];
        let (value, code) = json(&args);
        assert_eq!(code, 0, "{}", row["name"]);
        assert!(value["makespan"].as_i64() <= row["at"]["makespan"].as_i64(), "{}: {value}", row["name"]);
    }
    // The V placement and its known schedule without idle time.
    let (value, _) = json(&[
        "--json",
        "schedule",
        "synthesize",
        "-p",
        "4",
        "-m",
        "8",
        "-v",
        "2",
        "--limit",
        "8",
        "--objective",
        "idle",
    ]);
    assert_eq!((&value["idle"], &value["ok"]), (&0.into(), &true.into()));
    assert!(
        fails(&["schedule", "synthesize", "-v", "2", "--limit", "1"], 1)
            .contains("one microbatch of each stage of a rank takes 2")
    );
    assert!(fails(&["schedule", "synthesize", "-m", "0"], 2).contains("0 microbatches"));
    assert!(fails(&["schedule", "synthesize", "-p", "100000", "-v", "100000"], 2).contains("more stages"));
}

/// The losses of a run's folder, as text: equal text is equal bits.
fn losses(folder: &std::path::Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines.filter(|line| line["kind"] == "step").map(|line| line["loss"].to_string()).collect()
}

#[test]
fn a_run_from_a_file_takes_a_schedule_from_a_file_and_gives_the_same_numbers() {
    let folder = Folder::new("train");
    let text = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/shakespeare.txt")).expect("the text");
    let data = folder.0.join("play.txt");
    std::fs::write(&data, &text[..60_000]).expect("written");
    let config = folder.file(
        "run.toml",
        &format!(
            "[pipeline]\nschedule = \"one_f_one_b\"\nmicrobatches = 4\n[optimizer]\nsteps = 2\n[data]\npath = {:?}\n\
             [run]\nout = {:?}\nevaluations = 1\nsample = 2\n",
            data.display().to_string(),
            folder.0.join("runs").display().to_string()
        ),
    );
    let (csv, code) = out(&["schedule", "convert", "zb_v", "-p", "2", "-m", "4", "--to", "csv"]);
    assert_eq!(code, 0);
    let csv = folder.file("mine.csv", &csv);
    let (said, code) = out(&["train", "--config", &config]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("held-out loss") && said.contains("proved by the compiler"), "{said}");
    let (said, code) = out(&["train", "--config", &config, "--schedule", &csv]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("4 stages") && said.contains("checked now, at start"), "{said}");
    let run = |name: &str| losses(&folder.0.join("runs").join(name));
    let first = run("one_f_one_b-fp8-delayed-seed1");
    assert_eq!(first.len(), 2);
    assert_eq!(run("mine-fp8-delayed-seed1"), first, "the schedule decides no bit");
}

#[test]
fn a_wrong_run_is_refused_where_it_is_wrong() {
    for (key, name) in [("pipeline.ranks=0", "ranks"), ("pipeline.microbatches=0", "microbatches")] {
        let error = fails(&["train", "--set", key], 2);
        assert!(error.contains(name) && error.contains("at least 1"), "{error}");
    }
    let folder = Folder::new("train-wrong");
    let config = folder.file("run.toml", "[model]\nlayer = 8\n");
    let said = fails(&["train", "--config", &config], 2);
    assert!(said.contains("run.toml") && said.contains("line 2") && said.contains("layer"), "{said}");
    assert!(fails(&["train", "--config", "no/such.toml"], 3).contains("no/such.toml"));
    assert!(fails(&["train", "--set", "optimizer.step=1"], 2).contains("unknown field `step`"));
    assert!(fails(&["train", "--schedule", "zb_w"], 2).contains("did you mean"));
    assert!(fails(&["train", "--set", "model.layers=1"], 2).contains("4 stages"));
    assert!(fails(&["train", "--set", "data.path='no/such.txt'"], 3).contains("no/such.txt"));
    assert!(fails(&["train", "--set", "data.path=no/such.txt"], 3).contains("no/such.txt"));
    assert!(fails(&["train", "--set", "model.layers=many"], 2).contains("string \"many\", expected"));
    assert!(fails(&["train", "--set", "model.layers"], 2).contains("--set model.layers: "));
    let bad = folder.file("bad.csv", "0F0,0F1,0B0\n");
    assert!(fails(&["train", "--schedule", &bad], 1).contains("QE0"));
    let (text, code) = out(&["train", "--print-config", "--set", "pipeline.ranks=4"]);
    assert_eq!(code, 0);
    assert!(text.contains("ranks = 4") && text.contains("recipe = \"fp8-delayed\""), "{text}");
    let again = folder.file("whole.toml", &text);
    assert_eq!(out(&["train", "--print-config", "--config", &again]).0, text);
}

#[test]
fn messages_take_time_by_their_bytes() {
    let gpipe = |more: &[&str]| {
        let mut args = vec!["--json", "schedule", "simulate", "gpipe", "-p", "2", "-m", "4", "--latency", "2"];
        args.extend_from_slice(more);
        json(&args).0["makespan"].as_i64().unwrap()
    };
    // 25 bytes at 10 in a unit of time take 3: see `messages_of_an_edge_follow_each_other`.
    assert_eq!(gpipe(&["--message-bytes", "25", "--bandwidth", "10"]), 34);
    assert_eq!(gpipe(&[]), 4 * 3 + 3 + 2 * 2);
    let bad = |args: &[&str], message: &str| {
        let all: Vec<&str> = ["schedule", "simulate", "gpipe"].iter().chain(args).copied().collect();
        assert!(fails(&all, 2).contains(message), "{args:?}");
    };
    bad(&["--bandwidth", "10"], "--message-bytes");
    bad(&["--message-bytes", "10"], "--bandwidth");
    bad(&["--message-bytes", "1,2", "--bandwidth", "10"], "bytes of 2 boundaries");
    bad(&["--message-bytes", "1", "--bandwidth", "0"], "carries nothing");
    bad(&["--pair", "0,9=4"], "a pair of the stages 0 and 9");
    bad(&["--pair", "0,9"], "S,T=TIME");
}

#[test]
fn a_trace_gives_costs() {
    let folder = Folder::new("trace");
    let trace = folder.path("trace.json");
    assert_eq!(out(&["schedule", "show", "zb_h1", "--costs", "10,12,7", "--format", "trace", "-o", &trace]).1, 0);
    let (value, _) = json(&["--json", "schedule", "simulate", "zb_h1", "--costs", &trace]);
    assert_eq!((&value["makespan"], &value["bubble"]), (&277_000.into(), &45_000.into()));
}

/// Whatever the machine has, the answer is complete and the exit code says whether something is missing.
#[test]
fn doctor_says_what_is_there() {
    let (value, code) = json(&["--json", "doctor"]);
    let ok = value["ok"].as_bool().unwrap();
    assert_eq!(code, if ok { 0 } else { 1 });
    assert_eq!(value["missing"].as_array().unwrap().is_empty(), ok);
    let libraries = value["libraries"].as_array().unwrap();
    assert_eq!(libraries.len(), 4);
    for library in libraries {
        let field = if library["found"].as_bool().unwrap() { "path" } else { "advice" };
        assert!(!library[field].as_str().unwrap().is_empty(), "{library}");
    }
    let (text, again) = out(&["doctor"]);
    assert_eq!(again, code);
    assert!(text.contains("cuBLASLt") && text.contains("train on GPUs"), "{text}");
}

/// Stage and letter of an action's name, `2F7`.
fn action(name: &str) -> Option<(usize, char)> {
    let at = name.find(|c: char| !c.is_ascii_digit())?;
    let stage = name[..at].parse().ok()?;
    let letter = name[at..].chars().next()?;
    "FIW".contains(letter).then_some((stage, letter))
}

/// What a step was measured to cost is what it is simulated at.
#[test]
fn a_measured_trace_feeds_the_simulator() {
    let folder = Folder::new("measured");
    let text = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/shakespeare.txt")).expect("the text");
    let data = folder.0.join("play.txt");
    std::fs::write(&data, &text[..60_000]).expect("written");
    let (data, runs) = (data.display().to_string(), folder.0.join("runs").display().to_string());
    let trace = folder.path("trace.json");
    let set = [
        format!("data.path={data:?}"),
        format!("run.out={runs:?}"),
        "optimizer.steps=2".into(),
        "run.evaluations=1".into(),
        "run.sample=2".into(),
        "pipeline.microbatches=4".into(),
    ];
    let run = |more: &[&str]| {
        let mut args = vec!["train"];
        set.iter().for_each(|set| args.extend(["--set", set]));
        args.extend(more);
        out(&args)
    };
    let (said, code) = run(&["--trace", &trace]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains(&trace), "{said}");
    assert_eq!(run(&[]).1, 0);
    let (told, code) = run(&["--health", "2"]);
    assert_eq!(code, 0, "{told}");
    assert!(told.contains("step     2  FP8 health, the worst 6 of") && !told.contains("step     1  FP8"), "{told}");
    let run = |name: &str| folder.0.join("runs").join(name);
    let [traced, plain, counted] = ["", "-2", "-3"].map(|n| run(&format!("zb_v-fp8-delayed-seed1{n}")));
    assert_eq!(losses(&traced), losses(&plain), "measuring changes no bit");
    assert_eq!(losses(&counted), losses(&plain), "counting changes no bit");
    let metrics = std::fs::read_to_string(counted.join("metrics.jsonl")).expect("metrics");
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let health: Vec<Value> = lines.filter(|line| line["kind"] == "health").collect();
    let cells: Vec<&Value> = health.iter().flat_map(|line| line["cells"].as_array().expect("cells")).collect();
    assert_eq!((health.len(), &health[0]["step"]), (1, &Value::from(1)));
    // 4 blocks of 4 products and the head, each with 3 cells.
    assert_eq!(cells.len(), 3 * (4 * 4 + 1));
    assert!(cells.iter().all(|cell| cell["elements"].as_u64() > Some(0) && cell["frozen"] == false), "{cells:?}");

    let value: Value = serde_json::from_str(&std::fs::read_to_string(&trace).expect("a trace")).expect("JSON");
    let mut times: BTreeMap<(usize, char), Vec<i64>> = Default::default();
    for event in value["traceEvents"].as_array().expect("events").iter().filter(|event| event["ph"] == "X") {
        if let Some(key) = action(event["name"].as_str().expect("a name")) {
            times.entry(key).or_default().push((event["dur"].as_f64().expect("a time") * 1e3).round() as i64);
        }
    }
    assert_eq!(times.len(), 4 * 3, "F, I and W of four stages");
    assert!(times.values().all(|times| times.len() == 4 && times.iter().all(|time| *time > 0)), "{times:?}");
    times.values_mut().for_each(|times| times.sort_unstable());
    let (value, code) = json(&["--json", "schedule", "simulate", "zb_v", "-p", "2", "-m", "4", "--costs", &trace]);
    assert_eq!(code, 0);
    // The lower one of two medians; a V has the first and the last stage on rank 0.
    let stage = |s: usize| "FIW".chars().map(|letter| times[&(s, letter)][1]).sum::<i64>();
    for (rank, stages) in [[0, 3], [1, 2]].into_iter().enumerate() {
        let busy: i64 = stages.into_iter().map(|s| 4 * stage(s)).sum();
        assert_eq!(value["ranks"][rank]["busy"], busy, "{value}");
    }
}

/// Ranges as a profiler hears them, per thread: how often each name, once all ranges have ended.
fn heard(text: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let mut open: BTreeMap<&str, usize> = BTreeMap::new();
    for line in text.lines() {
        let (thread, name) = line.split_once('\t').expect("a thread and a name");
        let depth = open.entry(thread).or_default();
        match name {
            "-" => *depth = depth.checked_sub(1).expect("a range that has begun"),
            name => {
                *depth += 1;
                *counts.entry(name.to_owned()).or_default() += 1;
            }
        }
    }
    assert!(open.values().all(|depth| *depth == 0), "all ranges have ended: {open:?}");
    counts
}

/// A library in the place of a profiler's, in every mode of capture.
#[cfg(target_os = "linux")]
#[test]
fn a_profiler_hears_actions_and_steps_by_name() {
    let folder = Folder::new("nvtx");
    let library = folder.path("libsink.so");
    let sink = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nvtx/sink.rs");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let built = Command::new(rustc).args(["--edition=2024", "--crate-type=cdylib", "-o", &library, sink]).output();
    let built = built.expect("the compiler that built this test");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let text = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/shakespeare.txt")).expect("the text");
    std::fs::write(folder.0.join("play.txt"), &text[..60_000]).expect("written");
    let ranges = folder.path("ranges");
    let run = |capture: &str, library: &str| {
        let mut train = command(&["train", "--schedule", "zb_v", "--set", "run.device=cpu"]);
        for (key, value) in [
            ("data.path", folder.path("play.txt")),
            ("run.out", folder.path("runs")),
            ("run.capture", capture.into()),
            ("optimizer.steps", "2".into()),
            ("pipeline.microbatches", "4".into()),
            ("run.evaluations", "1".into()),
            ("run.sample", "1".into()),
        ] {
            train.args(["--set", &format!("{key}={value}")]);
        }
        let output = train.env("NVTX_INJECTION64_PATH", library).env("QEFFECT_TEST_RANGES", &ranges).output();
        let output = output.expect("the command starts");
        assert!(output.status.success(), "{capture}: {}", String::from_utf8_lossy(&output.stderr));
    };
    for capture in ["eager", "action", "step"] {
        run(capture, &library);
        let heard = heard(&std::fs::read_to_string(&ranges).expect("ranges"));
        let count = |name: &str| heard.get(name).copied().unwrap_or(0);
        for step in ["step 0", "step 1"] {
            assert_eq!(count(step), 2, "{capture}: once per rank: {heard:?}");
        }
        assert!(count("evaluation") > 0, "{capture}");
        let actions = if capture == "step" { 0 } else { 2 };
        for (stage, microbatch) in (0..4).flat_map(|stage| (0..4).map(move |microbatch| (stage, microbatch))) {
            for letter in ["I", "W"] {
                assert_eq!(count(&format!("{letter}({stage}, {microbatch})")), actions, "{capture}: {heard:?}");
            }
            // Evaluations run F too.
            assert!(count(&format!("F({stage}, {microbatch})")) > actions, "{capture}");
        }
        assert_eq!(count("commit"), 2 * actions, "{capture}: once per rank and step");
    }
    // A library that is none is no reason not to run.
    run("step", "/no/such/library.so");
    run("step", sink);
}

#[test]
fn a_trace_that_cannot_be_written_is_told_before_the_run() {
    let said = fails(&["train", "--trace", "no/such/folder/trace.json"], 3);
    assert!(said.contains("no/such/folder/trace.json"), "{said}");
}

#[test]
fn a_lowered_program_is_judged_on_the_transport_that_is_asked_for() {
    let folder = Folder::new("transport");
    // Both ranks send first: a circle only where a send waits for its receive.
    let crossed = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                   1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    let crossed = folder.file("crossed.csv", crossed);
    let on = |file: &str, transport: &str| out(&["schedule", "check", file, "--transport", transport]);
    for transport in ["edge", "rank_edge"] {
        assert_eq!(on(&crossed, transport).1, 0, "{transport}");
    }
    let (said, code) = on(&crossed, "rendezvous");
    assert_eq!(code, 1);
    assert!(said.contains("QE0401") && said.contains("ranks 0 and 1 wait for each other"), "{said}");
    for transport in ["edge", "rank_edge", "rendezvous"] {
        assert_eq!(on("one_f_one_b", transport).1, 0, "{transport}");
    }
    // In a V two boundaries join the same two ranks: one queue for both cannot serve either order.
    assert_eq!((on("zb_v", "edge").1, on("zb_v", "rendezvous").1), (0, 0));
    let (said, code) = on("zb_v", "rank_edge");
    assert!(code == 1 && said.contains("QE0402"), "{said}");
    let said = fails(&["schedule", "check", "zb_v", "--transport", "pigeon"], 2);
    assert!(said.contains("rank_edge") && said.contains("rendezvous"), "{said}");
}
