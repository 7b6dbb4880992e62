//! What the compiler says about broken schedules and drivers, and what it must accept.
//!
//! The texts under `tests/ui` are part of the product: after a change, write them anew with
//! `BLESS=1 cargo test --test ui` and read the difference.
#![allow(missing_docs)]

mod compiler;

use std::path::PathBuf;

use compiler::Expect::{Accepted, Refused};

#[test]
fn ui() {
    compiler::run(&[("schedule", Refused), ("driver", Refused), ("stage", Refused), ("pass", Accepted)]);
}

fn texts(folder: &str) -> Vec<(PathBuf, String)> {
    let files = compiler::files(folder, "stderr");
    files.into_iter().map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect()
}

/// Messages speak of schedules, not of the types that implement them.
#[test]
fn no_internal_type_name_in_any_message() {
    const INTERNAL: &[&str] = &[
        "Diagnostic",
        "Origin",
        "Item",
        "Node",
        "Program",
        "Draft",
        "Parsed",
        "ExprKind",
        "StmtKind",
        "TokenKind",
        "Lambda",
        "Binding",
        "Place",
        "Label",
        "Family",
        "InputGrad",
        "WeightGrad",
        "FullBackward",
        "__schedule",
        "__private",
        "Checked",
        "Report",
        "Plan",
        "Proved",
        "qeffect_core",
        "panicked",
        "unwrap",
    ];
    for (path, text) in texts("schedule") {
        for name in INTERNAL {
            let leaks = text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == *name);
            assert!(!leaks, "{} names `{name}`", path.display());
        }
    }
}

/// Each code that a file is named for is in its text, and every error of ours has a code.
#[test]
fn every_case_shows_its_code() {
    for (path, text) in texts("schedule") {
        let name = path.file_name().unwrap().to_string_lossy().to_uppercase();
        if name.starts_with("QE") {
            let code = &name[..6];
            assert!(text.contains(&format!("[{code}]")), "{} does not show {code}", path.display());
            for headline in text.lines().filter(|line| line.starts_with("error")) {
                assert!(headline.contains("[QE"), "{}: {headline}", path.display());
            }
        }
    }
}

/// Every code that `schedule!` can report has a case.
#[test]
fn every_code_has_a_case() {
    use qeffect::core::code::{Code, Family};
    // Found by the ledger, in written communication, or by nothing yet.
    const ELSEWHERE: &[Code] = &[
        Code::StaleReference,
        Code::KeyMismatch,
        Code::TokenOutOfOrder,
        Code::NotQuiescent,
        Code::MessageMissing,
        Code::MessageDoubled,
        Code::MessageEarly,
        Code::MessageUnknown,
        Code::ShardMisplaced,
        Code::SlotsExhausted,
    ];
    let cases: Vec<String> = texts("schedule").into_iter().map(|(_, text)| text).collect();
    for code in Code::ALL.iter().filter(|code| !matches!(code.family(), Family::Arena | Family::Bind)) {
        let shown = cases.iter().any(|text| text.contains(&format!("[{code}]")));
        assert_eq!(shown, !ELSEWHERE.contains(code), "{code}");
    }
}

/// One compilation shows every independent fault, and nothing follows from the missing schedule.
#[test]
fn three_faults_are_shown_at_once() {
    let (_, text) = texts("schedule").into_iter().find(|(path, _)| path.ends_with("three_faults.stderr")).unwrap();
    let headlines: Vec<&str> = text.lines().filter(|line| line.starts_with("error")).collect();
    assert_eq!(headlines.len(), 3, "{headlines:#?}");
    for code in ["QE0101", "QE0104", "QE0106"] {
        assert_eq!(headlines.iter().filter(|line| line.contains(code)).count(), 1, "{code}");
    }
}

/// The README quotes the compiler.
#[test]
fn the_readme_shows_what_the_compiler_says() {
    let (_, text) = texts("schedule").into_iter().find(|(path, _)| path.ends_with("readme.stderr")).unwrap();
    let text = text.replace("tests/ui/schedule/readme.rs", "src/main.rs");
    let readme = include_str!("../../README.md");
    assert!(readme.contains(text.trim_end()), "{text}");
}
