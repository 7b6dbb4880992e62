//! Every single drop, duplicate and swap in the schedules of the library: the verdict is that of an oracle
//! which shares no code with the checker, the code is the one that the kind of fault has, and all front
//! ends agree: a program in text, `schedule!` itself, PyTorch's CSV, and a ledger that is driven through
//! the broken order.
#![allow(missing_docs)]

extern crate proc_macro;

mod every;
mod front_ends;
mod mutants;
mod truth;
mod versions;

// The expander of `schedule!`, as the compiler runs it: a proc-macro crate cannot be called, its files can.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../qeffect-macros/src/emit.rs"]
mod emit;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../qeffect-macros/src/expand.rs"]
mod expand;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../qeffect-macros/src/names.rs"]
mod names;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../qeffect-macros/src/report.rs"]
mod report;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../qeffect-macros/src/shadow.rs"]
mod shadow;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../qeffect-macros/src/tokens.rs"]
mod tokens;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use qeffect_core::check::{Options, check};
use qeffect_core::code::{Code, Family};
use qeffect_core::ids::Rank;
use qeffect_core::schedule::{Schedule, Transport};
use qeffect_schedules::{Entry, further, library};
use truth::Truth;

/// All schedules of the library, unrolled for some sizes, without bounds and contracts: what a mutant
/// exceeds is not the question here.
fn bases() -> Vec<Schedule> {
    let sizes = [(1, 2), (2, 2), (2, 3), (3, 4), (4, 8)];
    let build = |entry: &Entry, (p, m): (i64, i64)| (entry.build)(p, m).ok().map(|checked| checked.schedule);
    let mut bases = Vec::new();
    for entry in library().iter().chain(further()) {
        let before = bases.len();
        for size in sizes.into_iter().chain([(2, 4)]) {
            let Some(mut schedule) = build(entry, size) else { continue };
            schedule.bounds = Cow::Borrowed(&[]);
            schedule.expects = Cow::Borrowed(&[]);
            bases.push(schedule);
        }
        assert!(bases.len() > before + 1, "{} has two sizes or more", entry.name);
    }
    bases.extend(mutants::with_recomputation());
    bases
}

/// The codes that the checker finds.
fn codes(schedule: &Schedule) -> BTreeSet<Code> {
    front_ends::codes(check(schedule.clone(), &Options::AT_START))
}

/// The codes that the checker finds, if they are those of the oracle and, where `programs` are to be read too, those of
/// the program in text and of the macro.
fn judged(schedule: &Schedule, programs: bool) -> Result<BTreeSet<Code>, String> {
    let found = codes(schedule);
    let truth = truth::of(schedule);
    let agrees = match &truth {
        Truth::Fine => found.is_empty(),
        Truth::Exactly(codes) => found == *codes,
        Truth::OneOf(codes) => !found.is_empty() && found.is_subset(codes),
    };
    same(agrees, &found, "the oracle", &truth)?;
    if programs {
        let text = front_ends::printed(schedule);
        let program = front_ends::program(&text);
        same(program == found, &found, "text", &program)?;
        let expanded = front_ends::expanded(&text);
        same(expanded == found, &found, "the macro", &expanded)?;
    }
    Ok(found)
}

fn same(is: bool, found: &BTreeSet<Code>, other: &str, says: &dyn Debug) -> Result<(), String> {
    if is { Ok(()) } else { Err(format!("{found:?} by the checker, but {other}: {says:?}")) }
}

/// What was said of a mutant.
#[derive(PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Answer {
    family: Option<Family>,
    /// Whether text and the macro were asked too.
    programs: bool,
    /// Whether a CSV can say it.
    csv: bool,
    ledger: Option<Code>,
}

/// By the oracle, CSV and the ledger: every change. As text and by the macro: every change of two ranks with two or three
/// microbatches; of the larger schedules, the changes that [move nothing far](mutants::Change::is_near).
///
/// A CSV has no header: stages, microbatches and placement are what its cells say, and where they still say what the
/// schedule says, so does the verdict. The ledger refuses a broken order at the action that breaks it, with a code that
/// the checker gives too, and what is never consumed at the end of the step.
#[test]
fn every_single_change_gets_the_verdict_and_the_code_of_the_oracle() {
    let bases = bases();
    for base in &bases {
        assert_eq!(judged(base, true), Ok(BTreeSet::new()), "{} {:?}", base.name, base.params);
        assert_eq!(front_ends::ledger(base), None, "{} {:?}", base.name, base.params);
    }
    let counts = every::mutant(&bases, |mutant, near| {
        let found = judged(mutant, near)?;
        let csv = front_ends::csv(mutant);
        same(csv.iter().all(|csv| *csv == found), &found, "csv", &csv)?;
        let ledger = front_ends::ledger(mutant);
        // Waits for other ranks are none of the ledger's; it is driven rank by rank here.
        let local = |code: &Code| !matches!(code.family(), Family::Communication | Family::Order);
        let expected = match ledger {
            Some(refusal) => found.iter().any(|code| front_ends::at_run_time(*code, mutant.eval).contains(&refusal)),
            None => !found.iter().any(local),
        };
        same(expected, &found, "the ledger", &ledger)?;
        Ok(Answer { family: found.first().map(|code| code.family()), programs: near, csv: csv.is_some(), ledger })
    });
    let count = |is: &dyn Fn(&Answer) -> bool| -> usize {
        counts.iter().filter(|(answer, _)| is(answer)).map(|(_, n)| n).sum()
    };
    assert!(count(&|_| true) > 160_000, "{counts:?}");
    assert!(count(&|answer| answer.programs) > 26_000, "{counts:?}");
    assert!(count(&|answer| answer.csv) > 2000, "{counts:?}");
    let families = [Family::Placement, Family::Ownership, Family::Order, Family::Communication];
    for family in families.map(Some).into_iter().chain([None]) {
        assert!(count(&|answer| answer.family == family) > 10, "{family:?}: {counts:?}");
    }
    let refusals: BTreeSet<Option<Code>> = counts.keys().map(|answer| answer.ledger).collect();
    assert!(refusals.len() >= 8, "{refusals:?}");
    for refusal in refusals {
        assert!(count(&|answer| answer.ledger == refusal) > 10, "{refusal:?}: {counts:?}");
    }
}

/// On one channel per pair of ranks a mutant is accepted only if every interleaving takes every message as
/// the one that it is: every change by the oracle, and those above as text and by the macro.
#[test]
fn the_same_on_a_shared_channel() {
    let bases: Vec<Schedule> =
        bases().into_iter().map(|base| Schedule { transport: Transport::RankEdge, ..base }).collect();
    // As they are, some of them are refused here too.
    for base in &bases {
        if let Err(fault) = judged(base, true) {
            panic!("{} {:?}: {fault}", base.name, base.params);
        }
    }
    let counts = every::mutant(&bases, |mutant, near| judged(mutant, near).map(|found| found.first().copied()));
    for verdict in [Some(Code::FifoOrder), None] {
        assert!(counts.get(&verdict).is_some_and(|n| *n > 200), "{verdict:?}: {counts:?}");
    }
}

/// Written refresh, reduce and commit: every single change of a program that has them, by the checker through all
/// front ends, and by the ledger with the code of the action that it refuses.
#[test]
fn versions_are_judged_alike_by_checker_and_ledger() {
    let mut counts: BTreeMap<(Code, Code), usize> = BTreeMap::new();
    for base in mutants::with_versions() {
        assert_eq!(codes(&base), BTreeSet::new(), "{}", front_ends::printed(&base));
        assert_eq!(front_ends::ledger(&base), None);
        for change in mutants::of(&base) {
            let mutant = change.of(&base);
            let found = judged(&mutant, true).unwrap_or_else(|fault| panic!("{}: {fault}", change.describe(&base)));
            if !found.iter().all(|code| code.family() == Family::Version) {
                continue;
            }
            let ledger = front_ends::ledger(&mutant);
            let expected = versions::first_refusal(mutant.rank(Rank(0)), mutant.microbatches);
            assert_eq!(ledger, expected, "{}: {found:?} by the checker", change.describe(&base));
            assert_eq!(ledger.is_some(), !found.is_empty(), "{}: {found:?} by the checker", change.describe(&base));
            for code in found {
                *counts.entry((code, ledger.unwrap_or(code))).or_default() += 1;
            }
        }
    }
    // Each code at the action that has it, and where another one meets it first.
    for pair in [
        (Code::StaleCache, Code::StaleCache),
        (Code::StaleCache, Code::CommitWithWork),
        (Code::CommitWithWork, Code::CommitWithWork),
        (Code::RefreshMisplaced, Code::RefreshMisplaced),
        (Code::RefreshMisplaced, Code::StaleCache),
        (Code::RefreshMisplaced, Code::NotQuiescent),
        (Code::ReduceMisplaced, Code::ReduceMisplaced),
        (Code::ReduceMisplaced, Code::CommitWithWork),
        (Code::ReduceMisplaced, Code::NotQuiescent),
        (Code::CommitMissing, Code::NotQuiescent),
    ] {
        assert!(counts.contains_key(&pair), "no mutant gets {pair:?}: {counts:?}");
    }
}
