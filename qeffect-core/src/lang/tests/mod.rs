//! Tests of the language as its users meet it: text in, schedules or messages out.

mod codes;
mod embedding;
mod meaning;
mod random;

use crate::action::Item;
use crate::code::Code;
use crate::ids::Rank;
use crate::lang::{interpret, read};
use crate::schedule::Schedule;

/// A schedule whose rank body is `body`, for parameters `P` and `M`.
fn with_body(body: &str) -> String {
    format!("t<P, M>;\nranks: P;\nmicrobatches: M;\nstages: P;\nplace: |s| s;\nrank |r| {{\n{body}\n}}\n")
}

/// Unrolls a text, or draws what is wrong.
fn run(text: &str, params: &[i64]) -> Result<Schedule, String> {
    let (program, map) = read("test.sched", text);
    program.and_then(|p| interpret(&p, params)).map_err(|report| map.locate(report).to_string())
}

/// Why a schedule is not accepted.
struct Refused {
    codes: Vec<Code>,
    /// The report, with places.
    text: String,
    /// What the first fault is about, as it was written.
    at: String,
}

fn refused(text: &str, params: &[i64]) -> Refused {
    let (program, map) = read("test.sched", text);
    let Err(report) = program.and_then(|p| interpret(&p, params)) else { panic!("accepted:\n{text}") };
    let at = map.range(report.diagnostics[0].primary.origin).map_or("", |range| &map.text()[range]).to_owned();
    Refused { codes: report.codes(), text: map.locate(report).to_string(), at }
}

/// `0F0,0F1`: the items of a rank in PyTorch's notation.
fn line(schedule: &Schedule, rank: u32) -> String {
    let cell = |item: &Item| match item.kind.letter() {
        Some(letter) => format!("{}{letter}{}", item.stage, item.microbatch),
        None => item.to_string(),
    };
    schedule.rank(Rank(rank)).iter().map(cell).collect::<Vec<_>>().join(",")
}
