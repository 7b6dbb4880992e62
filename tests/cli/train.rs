//! Whole runs, and what they leave behind.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::command::{Folder, fails, json, out};

/// The losses of a run's folder, as text: equal text is equal bits.
fn losses(folder: &std::path::Path) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines.filter(|line| line["kind"] == "step").map(|line| line["loss"].to_string()).collect()
}

#[test]
fn a_run_from_a_file_takes_a_schedule_from_a_file_and_gives_the_same_numbers() {
    let folder = Folder::new("train");
    let config = folder.file(
        "run.toml",
        &format!(
            "[pipeline]\nschedule = \"one_f_one_b\"\nmicrobatches = 4\n[optimizer]\nsteps = 2\n[data]\npath = {:?}\n\
             [run]\nout = {:?}\nevaluations = 1\nsample = 2\n",
            folder.play(),
            folder.path("runs")
        ),
    );
    let (csv, code) = out(&["schedule", "convert", "zb_v", "-p", "2", "-m", "4", "--to", "csv"]);
    assert_eq!(code, 0);
    let csv = folder.file("mine.csv", &csv);
    let (said, code) = out(&["train", "--config", &config]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("held-out loss") && said.contains("proved by the compiler"), "{said}");
    assert!(said.lines().any(|line| line == "device   cpu"), "{said}");
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

/// The flags are the keys, and win over them.
#[test]
fn device_and_verify_are_flags() {
    let folder = Folder::new("flags");
    let config = |text: &str, args: &[&str]| {
        let file = folder.file("run.toml", text);
        let (text, code) = out(&[&["train", "--print-config", "--config", &file], args].concat());
        assert_eq!(code, 0);
        let config: toml::Table = text.parse().expect("TOML");
        (config["run"]["device"].as_str().expect("text").to_owned(), config["run"]["verify"].as_bool().expect("a flag"))
    };
    assert_eq!(config("", &[]), ("cpu".into(), false));
    assert_eq!(config("", &["--device", "auto", "--verify"]), ("auto".into(), true));
    let file = "[run]\ndevice = \"cuda:1\"\nverify = true\n";
    assert_eq!(config(file, &[]), ("cuda:1".into(), true));
    assert_eq!(config(file, &["--device", "cpu"]), ("cpu".into(), true));
    assert_eq!(config("", &["--set", "run.device=auto", "--device", "cuda:3"]), ("cuda:3".into(), false));

    let said = fails(&["train", "--device", "foo"], 2);
    assert!(
        said.contains("--device <DEVICE>") && said.contains("no device `foo`; one of: auto, cpu, cuda:N"),
        "{said}"
    );
    // Whether there are GPUs or no driver: the tenth is missing, and what to do is said.
    let said = fails(&["train", "--device", "cuda:9"], 4);
    assert!(said.contains("CUDA driver: ") && said.contains("help: "), "{said}");
    let (help, code) = out(&["train", "--help"]);
    assert_eq!(code, 0);
    assert!(
        help.contains("--device <DEVICE>") && help.contains("--verify") && help.contains("--device cuda:0"),
        "{help}"
    );

    let (data, runs) = (folder.play(), folder.path("runs"));
    let mut args = vec!["train".to_owned()];
    for set in ["optimizer.steps=1", "run.evaluations=1", "run.sample=1", "pipeline.microbatches=2"] {
        args.extend(["--set".to_owned(), set.to_owned()]);
    }
    args.extend(["--set".to_owned(), format!("data.path={data}"), "--set".to_owned(), format!("run.out={runs}")]);
    let run = |more: &[&str]| {
        let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let (said, code) = out(&args);
        assert_eq!(code, 0, "{said}");
        assert!(said.lines().any(|line| line == "device   cpu"), "{said}");
    };
    run(&["--set", "run.device=cuda:9", "--device", "cpu"]);
    run(&["--device", "cpu", "--verify"]);
    let [plain, verified] =
        ["", "-2"].map(|n| losses(&folder.0.join("runs").join(format!("zb_v-fp8-delayed-seed1{n}"))));
    assert_eq!(verified, plain, "tags change no bit");
}

#[test]
fn a_trace_that_cannot_be_written_is_told_before_the_run() {
    let said = fails(&["train", "--trace", "no/such/folder/trace.json"], 3);
    assert!(said.contains("no/such/folder/trace.json"), "{said}");
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
    let (data, runs) = (folder.play(), folder.path("runs"));
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
