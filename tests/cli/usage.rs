//! Wrong command lines, and help.

use crate::command::{fails, json, out};

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
        vec!["train"],
        vec!["doctor"],
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
