//! Every single drop, duplicate and swap in the schedules of the library: the verdict is that of an oracle
//! which shares no code with the checker, the code is the one that the kind of fault has, and all front
//! ends agree: a program in text, `schedule!` itself, PyTorch's CSV, and a ledger that is driven through
//! the broken order.
#![allow(missing_docs)]

extern crate proc_macro;

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

use qeffect_core::check::{Options, check};
use qeffect_core::code::{Code, Family};
use qeffect_core::ids::Rank;
use qeffect_core::schedule::{Schedule, Transport};
use qeffect_schedules::{Entry, further, library};
use truth::Truth;

/// The schedules for training, unrolled for some sizes, without bounds and contracts: what a mutant
/// exceeds is not the question here.
fn bases() -> Vec<Schedule> {
    let sizes = [(1, 2), (2, 2), (2, 3), (3, 4), (4, 8)];
    let training = library().iter().chain(further()).filter(|entry| !entry.eval);
    let build = |entry: &Entry, (p, m): (i64, i64)| (entry.build)(p, m).ok().map(|checked| checked.schedule);
    let mut bases = Vec::new();
    for entry in training {
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

fn codes(schedule: &Schedule) -> BTreeSet<Code> {
    match check(schedule.clone(), &Options::AT_START) {
        Ok(_) => BTreeSet::new(),
        Err(report) => report.codes().into_iter().collect(),
    }
}

/// The family and codes of a schedule are those of the oracle.
fn agrees(what: &str, schedule: &Schedule, found: &BTreeSet<Code>, truth: &Truth) {
    let described = || format!("{what}: {found:?}, but {truth:?}\n{}", front_ends::printed(schedule));
    match truth {
        Truth::Fine => assert!(found.is_empty(), "{}", described()),
        Truth::Exactly(codes) => assert_eq!(found, codes, "{}", described()),
        Truth::OneOf(codes) => {
            assert!(!found.is_empty() && found.is_subset(codes), "{}", described());
        }
    }
}

#[test]
fn every_single_change_gets_the_verdict_and_the_code_of_the_oracle() {
    let mut counts: BTreeMap<Option<Family>, usize> = BTreeMap::new();
    let mut total = 0;
    for base in bases() {
        assert_eq!(truth::of(&base), Truth::Fine, "{}", base.name);
        for (what, mutant) in mutants::of(&base) {
            let what = format!("{} {:?}, {what}", base.name, base.params);
            let truth = truth::of(&mutant);
            let found = codes(&mutant);
            agrees(&what, &mutant, &found, &truth);
            *counts.entry(found.first().map(|code| code.family())).or_default() += 1;
            total += 1;
        }
    }
    assert!(total > 12_000, "{total}");
    let families = [Family::Placement, Family::Ownership, Family::Order, Family::Communication];
    for family in families.map(Some).into_iter().chain([None]) {
        assert!(counts.get(&family).is_some_and(|n| *n > 10), "{family:?}: {counts:?}");
    }
}

/// On one channel per pair of ranks a mutant is accepted only if every interleaving takes every message as
/// the one that it is.
#[test]
fn the_same_on_a_shared_channel() {
    let (mut refused, mut accepted) = (0, 0);
    for base in bases() {
        for (what, mut mutant) in std::iter::once(("as it is".to_owned(), base.clone())).chain(mutants::of(&base)) {
            mutant.transport = Transport::RankEdge;
            let truth = truth::of(&mutant);
            let found = codes(&mutant);
            agrees(&format!("{} {:?}, {what}", base.name, base.params), &mutant, &found, &truth);
            refused += usize::from(found.contains(&Code::FifoOrder));
            accepted += usize::from(found.is_empty());
        }
    }
    assert!(refused > 200 && accepted > 200, "{refused} mistaken, {accepted} accepted");
}

#[test]
fn text_says_the_same_as_the_checker() {
    let mut read = 0;
    for base in bases() {
        for (what, mutant) in mutants::of(&base) {
            let text = front_ends::printed(&mutant);
            assert_eq!(front_ends::program(&text), codes(&mutant), "{} {:?}, {what}\n{text}", base.name, base.params);
            read += 1;
        }
    }
    assert!(read > 12_000, "{read}");
}

/// Drawing errors takes its time: every mutant of the small schedules, some of the others.
#[test]
fn the_macro_says_the_same_as_the_checker() {
    let (mut small, mut others) = (0, 0);
    for base in bases() {
        let is_small = mutants::is_small(&base);
        let each = if is_small { 1 } else { 4 * base.items.len().div_ceil(24) };
        let mutants = mutants::of(&base);
        *(if is_small { &mut small } else { &mut others }) += mutants.len().div_ceil(each);
        for (what, mutant) in mutants.into_iter().step_by(each) {
            let text = front_ends::printed(&mutant);
            assert_eq!(front_ends::expanded(&text), codes(&mutant), "{} {:?}, {what}\n{text}", base.name, base.params);
        }
    }
    assert!(small > 9000 && others > 300, "{small} of small schedules, {others} of others");
}

/// A CSV has no header: stages, microbatches and placement are what its cells say. Where they still say
/// what the schedule says, so does the verdict.
#[test]
fn a_csv_gets_the_same_verdict() {
    let mut compared = 0;
    for base in bases() {
        for (what, mutant) in mutants::of(&base) {
            let Some(read) = front_ends::csv(&mutant) else { continue };
            assert_eq!(read, codes(&mutant), "{} {:?}, {what}", base.name, base.params);
            compared += 1;
        }
    }
    assert!(compared > 2000, "{compared}");
}

/// The ledger refuses a broken order at the action that breaks it, with a code that the checker gives too;
/// what is never consumed shows at the end of the step.
#[test]
fn a_ledger_refuses_what_the_checker_refuses() {
    let mut counts: BTreeMap<Option<Code>, usize> = BTreeMap::new();
    for base in bases() {
        for (what, mutant) in mutants::of(&base) {
            let found = codes(&mutant);
            let expected: BTreeSet<Code> = found.iter().flat_map(|code| front_ends::at_run_time(*code)).collect();
            let local = |code: &Code| !matches!(code.family(), Family::Communication | Family::Order);
            let what = format!("{} {:?}, {what}", base.name, base.params);
            match front_ends::ledger(&mutant) {
                Some(code) => assert!(expected.contains(&code), "{what}: {code} at run time, {found:?} by the checker"),
                // Waits for other ranks are none of the ledger's; it is driven rank by rank here.
                None => assert!(!found.iter().any(local), "{what}: {found:?} only by the checker"),
            }
            *counts.entry(front_ends::ledger(&mutant)).or_default() += 1;
        }
    }
    assert!(counts.len() >= 8 && counts.values().all(|n| *n > 10), "{counts:?}");
}

/// Written refresh, reduce and commit: every single change of a program that has them, by the checker through all
/// front ends, and by the ledger with the code of the action that it refuses.
#[test]
fn versions_are_judged_alike_by_checker_and_ledger() {
    let mut counts: BTreeMap<(Code, Code), usize> = BTreeMap::new();
    for base in mutants::with_versions() {
        assert_eq!(codes(&base), BTreeSet::new(), "{}", front_ends::printed(&base));
        assert_eq!(front_ends::ledger(&base), None);
        for (what, mutant) in mutants::everything(&base) {
            let found = codes(&mutant);
            let text = front_ends::printed(&mutant);
            agrees(&what, &mutant, &found, &truth::of(&mutant));
            assert_eq!(front_ends::program(&text), found, "{what}\n{text}");
            assert_eq!(front_ends::expanded(&text), found, "{what}\n{text}");
            if !found.iter().all(|code| code.family() == Family::Version) {
                continue;
            }
            let ledger = front_ends::ledger(&mutant);
            let expected = versions::first_refusal(mutant.rank(Rank(0)), mutant.microbatches);
            assert_eq!(ledger, expected, "{what}: {found:?} by the checker\n{text}");
            assert_eq!(ledger.is_some(), !found.is_empty(), "{what}: {found:?} by the checker\n{text}");
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
