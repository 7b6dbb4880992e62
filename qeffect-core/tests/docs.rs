//! The pages under `docs` speak of files and tests that exist.
#![allow(missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every page: its path and text.
fn pages() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for directory in ["", "docs", "docs/errors"] {
        for entry in fs::read_dir(root().join(directory)).expect("readable") {
            let path = entry.expect("readable").path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = fs::read_to_string(&path).expect("readable");
                found.push((path, text));
            }
        }
    }
    assert!(found.len() > 50, "{}", found.len());
    found
}

/// The anchor of a heading, as code hosts make it.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

fn has_anchor(page: &Path, wanted: &str) -> bool {
    let text = fs::read_to_string(page).expect("readable");
    text.lines().any(|line| line.starts_with('#') && anchor(line.trim_start_matches('#')) == wanted)
}

#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    for (page, text) in pages() {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.starts_with("http") || link.contains(char::is_whitespace) {
                continue;
            }
            let (file, wanted) = link.split_once('#').map_or((link, None), |(file, anchor)| (file, Some(anchor)));
            let target = if file.is_empty() { page.clone() } else { page.parent().expect("a folder").join(file) };
            let leads = target.exists() && wanted.is_none_or(|wanted| has_anchor(&target, wanted));
            if !leads {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

/// `docs/cases.md` names tests as `file: test`; each is there, marked as a test and with the id.
#[test]
fn cases_are_shown_by_tests_that_exist() {
    let text = fs::read_to_string(root().join("docs/cases.md")).expect("readable");
    let mut shown = 0;
    for line in text.lines().filter(|line| line.starts_with("| B")) {
        let id = line.split(' ').nth(1).expect("an id");
        for name in line.split('`').skip(1).step_by(2).filter(|name| name.contains(".rs: ")) {
            let (file, test) = name.split_once(": ").expect("file and test");
            let source = fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{id}: {file}: {e}"));
            let at = source.find(&format!("fn {test}()")).unwrap_or_else(|| panic!("{id}: no {test} in {file}"));
            assert!(source[..at].trim_end().ends_with("#[test]"), "{id}: {test} is no test");
            assert!(source.contains(id), "{id} is not named in {file}");
            shown += 1;
        }
    }
    assert!(shown > 10, "{shown}");
}
