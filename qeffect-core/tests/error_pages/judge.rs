//! Verdicts about the examples of a page.

use std::collections::BTreeSet;

use qeffect_core::check::{self, Options, messages};
use qeffect_core::code::Code;
use qeffect_core::diag::Report;
use qeffect_core::ids::Rank;
use qeffect_core::lang;
use qeffect_core::plan::{NONE, Node, Op};
use qeffect_core::render::{SourceMap, render};

use crate::page::Block;

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
pub fn verdict(block: &Block) -> Option<(BTreeSet<Code>, String)> {
    let (verdict, map) = match block.language() {
        "schedule" => judge_schedule(block),
        "comms" => judge_messages(block),
        other => panic!("a block in {other}"),
    };
    verdict.err().map(|report| (report.codes().into_iter().collect(), render(&report, &map)))
}
