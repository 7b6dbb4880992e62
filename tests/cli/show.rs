//! Pictures, and what reaches a terminal.

use crate::command::{Folder, fails, out, run};

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
