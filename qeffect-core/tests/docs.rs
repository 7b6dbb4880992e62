//! The pages under `docs` speak of files and tests that exist.
#![allow(missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};

use qeffect_core::code::Code;

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

/// Sources that give codes, by the front end that shows them.
const FRONT_ENDS: [(&str, &[&str]); 5] = [
    ("programs", &["qeffect-core/src/lang", "qeffect-core/src/check", "qeffect-core/src/coalesce"]),
    (
        "files",
        &[
            "qeffect-core/src/text",
            "qeffect-core/src/check/messages.rs",
            "qeffect-core/src/check/progress.rs",
            "qeffect-view/src/json.rs",
        ],
    ),
    ("`bind`", &["qeffect-core/src/bind"]),
    // Longer prefixes win: the rest of core is what holds the contract.
    ("contract", &["qeffect-core/src"]),
    ("runtime", &["qeffect-runtime/src"]),
];

/// Sources of a folder or of the module of that name, without tests.
fn sources(directory: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(directory).expect("readable") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
            let text = fs::read_to_string(&path).expect("readable");
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
            let name = path.strip_prefix(root()).expect("inside").to_string_lossy().replace('\\', "/");
            found.push((name, code));
        }
    }
}

/// `docs/codes.md`: which front end gives which code, read from the sources. `BLESS=1 cargo test -p
/// qeffect-core --test docs` writes it.
#[test]
fn the_table_of_codes_is_that_of_the_sources() {
    let mut found = Vec::new();
    for folder in ["qeffect-core/src", "qeffect-view/src", "qeffect-runtime/src"] {
        sources(&root().join(folder), &mut found);
    }
    found.retain(|(name, _)| !name.contains("/tests/") && name != "qeffect-core/src/code.rs");
    let front_end = |name: &str| {
        let fits =
            |prefixes: &[&str]| prefixes.iter().filter(|prefix| name.starts_with(**prefix)).map(|p| p.len()).max();
        let best = FRONT_ENDS.iter().enumerate().filter_map(|(n, (_, prefixes))| Some((fits(prefixes)?, n))).max();
        best.map(|(_, n)| n)
    };
    let gives = |text: &str, code: Code| {
        let name = format!("Code::{code:?}");
        text.match_indices(&name).any(|(at, _)| !text[at + name.len()..].starts_with(char::is_alphanumeric))
    };
    let mut table =
        format!("| code | fault | {} |\n|---|---|{}\n", FRONT_ENDS.map(|(name, _)| name).join(" | "), "---|".repeat(5));
    let mut nowhere = Vec::new();
    for code in Code::ALL.iter().copied() {
        let mut given = [false; FRONT_ENDS.len()];
        for (name, text) in &found {
            if gives(text, code) {
                let at = front_end(name).unwrap_or_else(|| panic!("{name} gives {code}, and is no front end"));
                given[at] = true;
            }
        }
        if given == [false; FRONT_ENDS.len()] {
            nowhere.push(code);
        }
        let marks = given.map(|given| if given { "yes" } else { "" });
        table +=
            &format!("| [{code}](errors/{code}.md) | {} | {} |\n", code.title(), marks.join(" | ").replace("  ", " "));
    }
    assert!(nowhere.is_empty(), "codes that nothing gives: {nowhere:?}");

    let path = root().join("docs/codes.md");
    let page = fs::read_to_string(&path).expect("readable");
    let start = page.find("| code |").expect("a table");
    if std::env::var_os("BLESS").is_some() {
        fs::write(&path, format!("{}{table}", &page[..start])).expect("writable");
    } else {
        assert_eq!(page[start..], table, "run this test with BLESS=1 and read the difference");
    }
}
