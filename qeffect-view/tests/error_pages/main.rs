//! The pages under `docs/errors`: every code has one, and what they show is what is said.
//!
//! A block ```` ```schedule fails=QE0101 P=2 M=4 ```` is refused with that code and no other, and the
//! ```` ```text ```` block below it is the rendered message; a block ```` ```schedule ok P=2 M=4 ```` is
//! accepted. Blocks in ```` ```comms ```` are programs with written communication, a row per rank. A
//! ```` ```text run ```` block is what the ledger or `bind` says of the fault that `run_time.rs` makes.
//! `BLESS=1 cargo test -p qeffect-core --test error_pages` writes all messages anew.
#![allow(missing_docs)]

mod judge;
mod page;
mod run_time;

use std::collections::BTreeSet;
use std::fs;

use judge::verdict;
use page::{bless, blocks, directory, pages, rewrite};
use qeffect_core::code::Code;

#[test]
fn every_code_has_a_page_and_every_page_a_code() {
    let written: BTreeSet<String> = pages().into_iter().map(|(name, ..)| name).collect();
    let codes: BTreeSet<String> = Code::ALL.iter().map(Code::to_string).collect();
    assert_eq!(written, codes);
    for (name, _, text) in pages() {
        let code = Code::parse(&name).expect("a code");
        assert_eq!(text.lines().next(), Some(format!("# {code}: {}", code.title()).as_str()));
        assert!(text.contains("\nFound by "), "{name} says where it is found");
    }
}

#[test]
fn every_example_gets_the_verdict_of_its_page() {
    let mut wrong = Vec::new();
    let (mut refused, mut accepted) = (0, 0);
    for (name, path, mut text) in pages() {
        let before = text.clone();
        let blocks = blocks(&text);
        // Backwards, so that ranges in front stay true while messages are replaced.
        for (n, block) in blocks.iter().enumerate().rev().filter(|(_, block)| block.language() != "text") {
            match (block.expectation(), verdict(block)) {
                (Some(code), Some((codes, drawn))) => {
                    refused += 1;
                    if codes != BTreeSet::from([code]) || code.to_string() != name {
                        wrong.push(format!("{name}: refused with {codes:?}:\n{drawn}"));
                        continue;
                    }
                    let message = blocks.get(n + 1).filter(|next| next.info == "text").expect("a message below");
                    if bless() {
                        text.replace_range(message.range.clone(), &drawn);
                    } else if message.body != drawn {
                        wrong.push(format!("{name}: the page shows\n{}\nbut the message is\n{drawn}", message.body));
                    }
                }
                (None, None) => accepted += 1,
                (Some(code), None) => wrong.push(format!("{name}: {code} is accepted:\n{}", block.body)),
                (None, Some((_, drawn))) => wrong.push(format!("{name}: refused:\n{drawn}")),
            }
        }
        if text != before {
            rewrite(&path, &text);
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(refused > 30 && accepted > 30, "{refused} refused, {accepted} accepted");
}

/// Every code has an example, but for those that nothing reports yet and those of other crates.
#[test]
fn every_code_has_an_example() {
    for (name, _, text) in pages() {
        let shown = blocks(&text).iter().any(|block| block.info.contains("fails=") || block.info == "text run");
        let elsewhere = text.contains("\nFound by nothing yet") || text.contains("\nFound by the runtime");
        assert_ne!(shown, elsewhere, "{name}");
    }
}

#[test]
fn run_time_messages_are_those_of_the_pages() {
    let pages = pages();
    let mut wrong = Vec::new();
    for (code, said) in run_time::messages() {
        assert!(said.contains(&format!("[{code}]")), "{code}: {said}");
        let (_, path, text) = pages.iter().find(|(name, ..)| *name == code.to_string()).expect("a page");
        let blocks = blocks(text);
        let block = blocks.iter().find(|block| block.info == "text run").unwrap_or_else(|| panic!("{code}: no block"));
        if bless() {
            let mut text = text.clone();
            text.replace_range(block.range.clone(), &said);
            rewrite(path, &text);
        } else if block.body != said {
            wrong.push(format!("{code}: the page shows\n{}\nbut the message is\n{said}", block.body));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Schedules that other pages show are accepted.
#[test]
fn examples_of_other_pages_are_accepted() {
    let mut shown = 0;
    for entry in fs::read_dir(directory().join("..")).expect("docs is there") {
        let path = entry.expect("readable").path();
        let Ok(text) = fs::read_to_string(&path) else { continue };
        for block in blocks(&text).iter().filter(|block| block.language() == "schedule") {
            assert_eq!(block.expectation(), None);
            if let Some((_, drawn)) = verdict(block) {
                panic!("{}: refused:\n{drawn}", path.display());
            }
            shown += 1;
        }
    }
    assert!(shown > 0);
}
