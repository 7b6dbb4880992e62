//! Verdicts about the examples of a page.

use std::collections::BTreeSet;

use qeffect_core::check::{self, Options, messages};
use qeffect_core::code::Code;
use qeffect_core::diag::Report;
use qeffect_core::lang;
use qeffect_core::schedule::Transport;
use qeffect_core::source::SourceMap;
use qeffect_core::text::read_plan;

use crate::page::Block;
use qeffect_view::report::plain;

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

/// Reads a lowered program and judges its messages.
fn judge_messages(block: &Block) -> (Result<(), Report>, SourceMap) {
    let (plan, map) = read_plan("example", "example.csv", &block.body);
    let verdict = plan.and_then(|plan| {
        let rendezvous = block.words().any(|word| word == "rendezvous");
        let transport = if rendezvous { Transport::Rendezvous } else { Transport::Edge };
        let faults = messages::check_on(&plan.nodes, &plan.schedule.placement, transport);
        if faults.is_empty() { Ok(()) } else { Err(Report::from_faults(faults)) }
    });
    (verdict, map)
}

/// The report of a block, drawn; `None` if it is accepted.
pub fn verdict(block: &Block) -> Option<(BTreeSet<Code>, String)> {
    let (verdict, map) = match block.language() {
        "schedule" => judge_schedule(block),
        "comms" => judge_messages(block),
        other => panic!("a block in {other}"),
    };
    verdict.err().map(|report| (report.codes().into_iter().collect(), plain(&report, &map)))
}
