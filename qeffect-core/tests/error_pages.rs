//! The pages under `docs/errors`: every code has one, and what they show is what the checker says.
//!
//! A block ```` ```schedule fails=QE0101 P=2 M=4 ```` is refused with that code and no other, and the
//! ```` ```text ```` block below it is the rendered message; a block ```` ```schedule ok P=2 M=4 ```` is
//! accepted. Blocks in ```` ```comms ```` are programs with written communication, a row per rank.
//! `BLESS=1 cargo test -p qeffect-core --test error_pages` writes the messages anew.
#![allow(missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use qeffect_core::check::{self, Options, messages};
use qeffect_core::code::Code;
use qeffect_core::diag::Report;
use qeffect_core::ids::Rank;
use qeffect_core::lang;
use qeffect_core::plan::{NONE, Node, Op};
use qeffect_core::render::{SourceMap, render};

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/errors")
}

/// The pages: what the name of the file says, and the text.
fn pages() -> Vec<(String, PathBuf, String)> {
    let mut pages: Vec<_> = fs::read_dir(directory())
        .expect("docs/errors is there")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .map(|path| {
            let name = path.file_stem().expect("a file").to_string_lossy().into_owned();
            let text = fs::read_to_string(&path).expect("readable");
            (name, path, text)
        })
        .collect();
    pages.sort();
    assert!(pages.len() > 40, "{} pages in {}", pages.len(), directory().display());
    pages
}

/// A fenced block of a page.
#[derive(Debug)]
struct Block {
    /// What stands behind the fence.
    info: String,
    body: String,
    /// Bytes of the body in the page.
    range: std::ops::Range<usize>,
}

impl Block {
    fn words(&self) -> impl Iterator<Item = &str> {
        self.info.split(' ')
    }

    fn language(&self) -> &str {
        self.words().next().unwrap_or_default()
    }

    /// The code that this block is refused with; `None`: it is accepted.
    fn expectation(&self) -> Option<Code> {
        let verdict = self.words().nth(1).unwrap_or_default();
        match verdict.strip_prefix("fails=") {
            Some(code) => Some(Code::parse(code).unwrap_or_else(|| panic!("no code {code}"))),
            None => {
                assert_eq!(verdict, "ok", "{}", self.info);
                None
            }
        }
    }
}

fn blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, usize)> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let fence = line.trim_end().strip_prefix("```");
        match (&mut open, fence) {
            (None, Some(info)) => open = Some((info.to_owned(), at + line.len())),
            (Some((info, start)), Some("")) => {
                let range = *start..at;
                blocks.push(Block { info: std::mem::take(info), body: text[range.clone()].to_owned(), range });
                open = None;
            }
            (Some(_), Some(info)) => panic!("a fence inside a fence: {info}"),
            _ => {}
        }
        at += line.len();
    }
    assert!(open.is_none(), "an open fence");
    blocks
}

/// Reads, interprets and checks a schedule for the values behind its fence.
fn judge_schedule(block: &Block) -> (Result<(), Report>, SourceMap) {
    let (program, map) = lang::read("example.sched", &block.body);
    let verdict = program.and_then(|program| {
        let values: Vec<i64> = (program.params.iter())
            .map(|param| {
                let name = program.text(param.name);
                let word = block.words().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
                word.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{}: no {name}", block.info))
            })
            .collect();
        let schedule = lang::interpret(&program, &values)?;
        check::check(schedule, &Options::COMPILE_TIME).map(drop).map_err(|mut report| {
            lang::annotate(&mut report, &program, &values);
            report
        })
    });
    (verdict, map)
}

/// Reads `0F0,0SEND_F0` rows, places stages where they compute, and judges the messages.
fn judge_messages(block: &Block) -> (Result<(), Report>, SourceMap) {
    let mut map = SourceMap::new("example.csv", &block.body);
    let mut placement = Vec::new();
    let mut programs = Vec::new();
    let mut at = 0;
    for (rank, line) in block.body.split_inclusive('\n').enumerate() {
        let mut nodes = Vec::new();
        for cell in line.trim_end().split(',') {
            let origin = map.push(at..at + cell.len());
            at += cell.len() + 1;
            let digit = |c: char| c.is_ascii_digit();
            let letters = cell.trim_matches(digit);
            let stage: u32 = cell[..cell.find(letters).unwrap()].parse().expect("a stage");
            let microbatch: u32 = cell[cell.rfind(letters).unwrap() + letters.len()..].parse().expect("a microbatch");
            let op = match letters {
                "F" => Op::Forward,
                "I" => Op::InputGrad,
                "W" => Op::WeightGrad,
                "B" => Op::FullBackward,
                "SEND_F" => Op::SendForward,
                "RECV_F" => Op::PostForward,
                "SEND_B" => Op::SendBackward,
                "RECV_B" => Op::PostBackward,
                _ => panic!("{cell}"),
            };
            if op == Op::Forward {
                placement.resize(placement.len().max(stage as usize + 1), Rank(0));
                placement[stage as usize] = Rank(rank as u32);
            }
            nodes.push(Node::new(op, stage, microbatch, NONE, origin.0));
        }
        programs.push(nodes);
    }
    let faults = messages::check(&programs, &placement);
    (if faults.is_empty() { Ok(()) } else { Err(Report::from_faults(faults)) }, map)
}

/// The report of a block, drawn; `None` if it is accepted.
fn verdict(block: &Block) -> Option<(BTreeSet<Code>, String)> {
    let (verdict, map) = match block.language() {
        "schedule" => judge_schedule(block),
        "comms" => judge_messages(block),
        other => panic!("a block in {other}"),
    };
    verdict.err().map(|report| (report.codes().into_iter().collect(), render(&report, &map)))
}

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
    let bless = std::env::var_os("BLESS").is_some();
    let mut wrong = Vec::new();
    let (mut refused, mut accepted) = (0, 0);
    for (name, path, mut text) in pages() {
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
                    if bless {
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
        if bless {
            // In one go, for the tests that read at the same time.
            let fresh = path.with_extension("tmp");
            fs::write(&fresh, text).and_then(|()| fs::rename(fresh, path)).expect("writable");
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(refused > 30 && accepted > 30, "{refused} refused, {accepted} accepted");
}

/// Codes that a schedule or a written program can be refused with have an example.
#[test]
fn every_static_code_has_an_example() {
    const AT_RUN_TIME: [u16; 17] =
        [108, 109, 203, 306, 505, 506, 801, 802, 803, 804, 805, 901, 902, 903, 904, 905, 906];
    for (name, _, text) in pages() {
        let has_example = blocks(&text).iter().any(|block| block.info.contains("fails="));
        let code = Code::parse(&name).expect("a code");
        assert_eq!(has_example, !AT_RUN_TIME.contains(&(code as u16)), "{name}");
    }
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
