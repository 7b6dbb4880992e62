//! What a profiler hears of a run.

use std::collections::BTreeMap;
use std::process::Command;

use crate::command::{Folder, command};

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
#[test]
fn a_profiler_hears_actions_and_steps_by_name() {
    let folder = Folder::new("nvtx");
    let library = folder.path("libsink.so");
    let sink = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nvtx/sink.rs");
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let built = Command::new(rustc).args(["--edition=2024", "--crate-type=cdylib", "-o", &library, sink]).output();
    let built = built.expect("the compiler that built this test");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let data = folder.play();
    let ranges = folder.path("ranges");
    let run = |capture: &str, library: &str| {
        let mut train = command(&["train", "--schedule", "zb_v", "--set", "run.device=cpu"]);
        for (key, value) in [
            ("data.path", data.clone()),
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
