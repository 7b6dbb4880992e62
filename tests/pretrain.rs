//! The main command, as a user runs it: what it leaves behind, and what it says when it cannot run.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The example that `cargo test` has built beside this test (`cargo test --test pretrain` alone does not).
fn pretrain(args: &[&str]) -> Output {
    let mut program = std::env::current_exe().unwrap();
    program.pop();
    program.set_file_name("examples");
    program.push(format!("pretrain{}", std::env::consts::EXE_SUFFIX));
    Command::new(&program).args(args).output().unwrap_or_else(|error| panic!("{}: {error}", program.display()))
}

fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    path
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_short_run_leaves_metrics_a_plot_and_a_table() {
    let out = folder("pretrain");
    let data = Path::new(env!("CARGO_TARGET_TMPDIR")).join("play.txt");
    let text = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/shakespeare.txt")).unwrap();
    std::fs::write(&data, &text[..60_000]).unwrap();
    let short = |out: &Path| {
        let (data, out) = (data.to_str().unwrap(), out.to_str().unwrap());
        pretrain(&["--data", data, "--out", out, "--steps", "2", "--evaluations", "1", "--sample", "3"])
    };
    let output = short(&out);
    assert!(output.status.success(), "{}", stderr(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("proved by the compiler"), "{text}");
    for row in ["held-out loss", "tokens per second", "bubble measured", "bubble simulated", "peak tapes", "peak works"]
    {
        cell(&text, row);
    }
    // A rank is a thread with a list of its own for each stretch between messages, all launched once per step: fewer than there
    // are F, I and W, of which each has a list under `--capture action`.
    let [lists, launches] = two(&cell(&text, "captured lists of commands, launches per step"));
    let run = out.join("zb_v-fp8-delayed-seed1");
    let metrics = lines(&run);
    let number = |name: &str| metrics[0][name].as_u64().unwrap() as usize;
    let actions = 3 * number("stages") * number("microbatches");
    assert!(lists == launches && (2..actions).contains(&lists), "{actions} actions:\n{text}");
    let mib = |row: &str| cell(&text, row).split(' ').map(|mib| mib.parse().unwrap()).collect::<Vec<f64>>();
    for row in ["tapes, MiB", "works, MiB", "destinations of gradients"] {
        assert!(mib(row).iter().all(|mib| *mib > 0.0), "{text}");
    }
    let [all, tape, work] = ["activations, tapes and works", "tape region", "work region"].map(mib);
    for ((all, tape), work) in all.into_iter().zip(tape).zip(work) {
        assert!(all > 0.0 && tape > 0.0 && work > 0.0 && tape + work > all - 0.1, "{text}");
    }
    assert_eq!(metrics[0]["identity"], *cell(&text, "identity of the numbers"));
    let kinds: Vec<&str> = metrics.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["run", "step", "step", "eval"]);
    // An untrained model of bytes knows little: near ln 256.
    assert!((metrics[1]["loss"].as_f64().unwrap() - 256f64.ln()).abs() < 0.5, "{}", metrics[1]);
    assert!(std::fs::read_to_string(run.join("loss.svg")).unwrap().contains("nats per byte"));

    // The same again gives the same numbers, in a folder of its own.
    assert!(short(&out).status.success());
    let again = lines(&out.join("zb_v-fp8-delayed-seed1-2"));
    for (a, b) in metrics.iter().zip(&again) {
        assert_eq!((&a["loss"], &a["grad_norm"]), (&b["loss"], &b["grad_norm"]));
    }
}

/// What the table says in a row.
fn cell(text: &str, row: &str) -> String {
    let line = text.lines().find(|line| line.trim_start_matches(['│', ' ']).starts_with(row));
    let line = line.unwrap_or_else(|| panic!("{row} is missing:\n{text}"));
    line.trim_matches(['│', ' ']).rsplit("  ").next().unwrap().trim().to_owned()
}

/// `3, 4`.
fn two(text: &str) -> [usize; 2] {
    let (one, other) = text.split_once(", ").unwrap();
    [one, other].map(|number| number.parse().unwrap())
}

fn lines(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Every action a list of its own, gradients in groups. Groups of another size are other numbers.
#[test]
fn flags_choose_mode_placement_and_policy() {
    let out = folder("flags");
    let data = Path::new(env!("CARGO_TARGET_TMPDIR")).join("flags.txt");
    let text = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/shakespeare.txt")).unwrap();
    std::fs::write(&data, &text[..60_000]).unwrap();
    let run = |gradients: &str, name: &str| {
        let (data, out) = (data.to_str().unwrap(), out.to_str().unwrap());
        let sizes = ["--data", data, "--out", out, "--steps", "2", "--evaluations", "1", "--sample", "3"];
        let flags = ["--capture", "action", "--gradients", gradients, "--on-nonfinite", "stop"];
        let output = pretrain(&[&sizes[..], &flags].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        (String::from_utf8(output.stdout).unwrap(), lines(&Path::new(out).join(name)))
    };
    let (table, metrics) = run("coalesced", "zb_v-fp8-delayed-seed1");
    let [lists, launches] = two(&cell(&table, "captured lists of commands, launches per step"));
    let number = |name: &str| metrics[0][name].as_u64().unwrap() as usize;
    // F and I of every stage and microbatch, and a W per stage at least.
    let fewest = number("stages") * (2 * number("microbatches") + 1);
    assert!(lists == launches && lists >= fewest, "{lists} of at least {fewest}:\n{table}");
    assert_eq!(cell(&table, "steps skipped as not finite"), "0");
    let (_, others) = run("coalesced:2", "zb_v-fp8-delayed-seed1-2");
    let (_, again) = run("coalesced:2", "zb_v-fp8-delayed-seed1-3");
    assert_eq!(others[0]["identity"], again[0]["identity"]);
    assert_ne!(others[0]["identity"], metrics[0]["identity"], "the groups are others");
}

#[test]
fn a_wrong_value_is_answered_with_the_right_ones() {
    let said = |args: &[&str]| {
        let output = pretrain(args);
        assert!(!output.status.success());
        stderr(&output)
    };
    let text = said(&["--schedule", "gpipes"]);
    for name in ["gpipe", "one_f_one_b", "interleaved_1f1b", "zb_h1", "zb_v"] {
        assert!(text.contains(name), "{text}");
    }
    let text = said(&["--recipe", "fp9"]);
    for name in ["fp8-delayed", "bf16", "f32", "f64"] {
        assert!(text.contains(name), "{text}");
    }
    assert!(said(&["--ranks", "0"]).contains("1..=64"));
    assert!(said(&["--ranks", "4"]).contains("--layers 8"));
}

#[test]
fn data_that_cannot_be_trained_on_is_named() {
    let missing = pretrain(&["--data", "no/such/file.txt"]);
    assert!(!missing.status.success());
    assert!(stderr(&missing).contains("cannot read `no/such/file.txt`"), "{}", stderr(&missing));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("short.txt");
    std::fs::write(&path, "too short").unwrap();
    let short = pretrain(&["--data", path.to_str().unwrap()]);
    assert!(!short.status.success());
    assert!(stderr(&short).contains("has 9 bytes, at least 650 are needed"), "{}", stderr(&short));
    std::fs::write(&path, "just long enough for one window, but not for an evaluation ".repeat(40)).unwrap();
    let few = pretrain(&["--data", path.to_str().unwrap()]);
    assert!(stderr(&few).contains("an evaluation needs 16"), "{}", stderr(&few));
}
