//! Times and memory: of one schedule, of the library, of what is searched for.

use serde_json::Value;

use crate::command::{Folder, fails, json, out};

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
