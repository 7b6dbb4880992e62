//! What is to be said of a schedule, from its programs alone.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use qeffect_core::action::{Item, Kind};
use qeffect_core::code::Code;
use qeffect_core::ids::Rank;
use qeffect_core::schedule::{Schedule, Transport};

use crate::versions;

/// The verdict.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Truth {
    /// Legal.
    Fine,
    /// Refused with these codes.
    Exactly(BTreeSet<Code>),
    /// Refused, with some of these.
    OneOf(BTreeSet<Code>),
}

pub fn of(schedule: &Schedule) -> Truth {
    let programs: Vec<&[Item]> = (0..schedule.ranks).map(|rank| schedule.rank(Rank(rank))).collect();
    let phases: [&dyn Fn() -> BTreeSet<Code>; 3] =
        [&|| misplaced(schedule, &programs), &|| coverage(schedule, &programs), &|| ownership(schedule, &programs)];
    for phase in phases {
        let codes = phase();
        if !codes.is_empty() {
            return Truth::Exactly(codes);
        }
    }
    let codes = overlaps(&programs);
    if !codes.is_empty() {
        return Truth::OneOf(codes);
    }
    let codes: BTreeSet<Code> = programs.iter().flat_map(|program| versions::codes(program)).collect();
    if !codes.is_empty() {
        return Truth::Exactly(codes);
    }
    let has_overlaps = programs.iter().any(|program| program.iter().any(|item| item.kind == Kind::OverlapBegin));
    let units: Vec<Vec<Vec<Item>>> = programs.iter().map(|program| units(program)).collect();
    match ends(schedule, &units) {
        End::All => Truth::Fine,
        End::Mistaken => {
            // What stops on channels of its own stops on a shared one, and either may be said of it.
            let alone = Schedule { transport: Transport::Edge, ..schedule.clone() };
            let stops = has_overlaps && matches!(ends(&alone, &units), End::Stops);
            let dependent = stops.then_some(Code::OverlapDependent);
            Truth::OneOf([Code::FifoOrder, Code::Deadlock].into_iter().chain(dependent).collect())
        }
        // An overlap that waits for itself through other ranks is named as such.
        End::Stops if has_overlaps => Truth::OneOf([Code::Deadlock, Code::OverlapDependent].into()),
        End::Stops => Truth::Exactly([Code::Deadlock].into()),
    }
}

fn misplaced(schedule: &Schedule, programs: &[&[Item]]) -> BTreeSet<Code> {
    let home = |item: &Item| schedule.placement[item.stage.index()].index();
    let wrong =
        |(rank, program): (usize, &&[Item])| program.iter().any(|item| item.kind.is_compute() && home(item) != rank);
    programs.iter().enumerate().any(wrong).then_some(Code::WrongRank).into_iter().collect()
}

fn coverage(schedule: &Schedule, programs: &[&[Item]]) -> BTreeSet<Code> {
    let mut codes = BTreeSet::new();
    for stage in 0..schedule.stages {
        for microbatch in 0..schedule.microbatches {
            let is = |item: &&Item| (item.kind, item.stage.0, item.microbatch.0) == (Kind::Forward, stage, microbatch);
            match programs.iter().flat_map(|program| program.iter()).filter(is).count() {
                0 => codes.insert(Code::ForwardMissing),
                1 => false,
                _ => codes.insert(Code::ForwardRepeated),
            };
        }
    }
    codes
}

/// What a stage does with one microbatch, in order and without R, and what that is called. A single change of
/// `FIW` or `FB` that keeps one F gives no other word.
fn word(letters: &str) -> &'static [Code] {
    use Code::{
        TapeBeforeForward, TapeConsumedTwice, TapeNeverConsumed, WorkBeforeInputGrad, WorkConsumedTwice,
        WorkNeverConsumed,
    };
    match letters {
        "FIW" | "FB" => &[],
        // One is dropped.
        "F" => &[TapeNeverConsumed],
        "FI" => &[WorkNeverConsumed],
        "FW" => &[TapeNeverConsumed, WorkBeforeInputGrad],
        // One runs twice.
        "FIIW" | "FIWI" | "FBB" => &[TapeConsumedTwice],
        "IFIW" | "BFB" => &[TapeBeforeForward, TapeConsumedTwice],
        "FIWW" => &[WorkConsumedTwice],
        "WFIW" | "FWIW" => &[WorkBeforeInputGrad, WorkConsumedTwice],
        // One or two stand elsewhere.
        "IFW" | "IWF" | "BF" => &[TapeBeforeForward],
        "FWI" | "WFI" => &[WorkBeforeInputGrad],
        "WIF" => &[TapeBeforeForward, WorkBeforeInputGrad],
        other => panic!("no single change makes {other}"),
    }
}

/// Nothing is retained in an evaluation.
fn ownership(schedule: &Schedule, programs: &[&[Item]]) -> BTreeSet<Code> {
    if schedule.eval {
        return BTreeSet::new();
    }
    let mut words: BTreeMap<(u32, u32), String> = BTreeMap::new();
    for item in programs.iter().flat_map(|program| program.iter()) {
        if let Some(letter) = item.kind.letter() {
            words.entry((item.stage.0, item.microbatch.0)).or_default().push(letter);
        }
    }
    let mut codes = BTreeSet::new();
    for letters in words.values() {
        // R stands once, between F and what takes the tape.
        let taken = letters.find(['I', 'B']).unwrap_or(letters.len());
        let fits = |at: usize| letters[..at].contains('F') && at < taken;
        let recomputed: Vec<usize> = letters.match_indices('R').map(|(at, _)| at).collect();
        if recomputed.len() > 1 || !recomputed.iter().all(|at| fits(*at)) {
            codes.insert(Code::RecomputeMisplaced);
        }
        codes.extend(word(&letters.replace('R', "")));
    }
    codes
}

/// Stretches of a program that go as one: overlaps, else single actions.
fn units(program: &[Item]) -> Vec<Vec<Item>> {
    let mut units = Vec::new();
    let mut block: Option<Vec<Item>> = None;
    for item in program {
        match (item.kind, &mut block) {
            (Kind::OverlapBegin, _) => block = Some(Vec::new()),
            (Kind::OverlapEnd, _) => units.extend(block.take()),
            (Kind::OverlapBranch, _) => {}
            (kind, Some(members)) if kind.is_compute() => members.push(*item),
            (kind, None) if kind.is_compute() => units.push(vec![*item]),
            _ => {}
        }
    }
    units
}

/// Branches that move one cell, or of which one needs the other.
fn overlaps(programs: &[&[Item]]) -> BTreeSet<Code> {
    let mut codes = BTreeSet::new();
    for program in programs {
        let mut branches: Vec<Vec<Item>> = Vec::new();
        for item in *program {
            match item.kind {
                Kind::OverlapBegin => branches.clear(),
                Kind::OverlapBranch => branches.push(Vec::new()),
                Kind::OverlapEnd => {
                    for (n, one) in branches.iter().enumerate() {
                        for (a, b) in one.iter().flat_map(|a| branches[..n].iter().flatten().map(move |b| (a, b))) {
                            codes.extend(at_once(a, b).or(at_once(b, a)));
                        }
                    }
                    branches.clear();
                }
                _ => {
                    if let Some(branch) = branches.last_mut() {
                        branch.push(*item);
                    }
                }
            }
        }
    }
    codes
}

fn at_once(a: &Item, b: &Item) -> Option<Code> {
    let backward = |item: &Item| matches!(item.kind, Kind::InputGrad | Kind::FullBackward);
    let both = |is: &dyn Fn(&Item) -> bool| is(a) && is(b);
    if a.stage == b.stage && (both(&backward) || both(&|item| item.kind == Kind::Forward)) {
        return Some(Code::OverlapConflict);
    }
    if a.microbatch != b.microbatch {
        return None;
    }
    let letters = (a.kind.letter()?, b.kind.letter()?);
    let steps = i64::from(a.stage.0) - i64::from(b.stage.0);
    let needs = match letters {
        ('F', 'F') => steps == 1,
        ('I' | 'B', 'I' | 'B') => steps == -1,
        ('I' | 'B', 'F') | ('W', 'I') => steps == 0,
        _ => false,
    };
    needs.then_some(Code::OverlapDependent)
}

enum End {
    All,
    Stops,
    Mistaken,
}

/// A message: forward or not, from which stage, which microbatch.
type Message = (bool, u32, u32);

fn input(schedule: &Schedule, item: &Item) -> Option<Message> {
    match item.kind {
        Kind::Forward => item.stage.0.checked_sub(1).map(|from| (true, from, item.microbatch.0)),
        Kind::InputGrad | Kind::FullBackward => {
            (item.stage.0 + 1 < schedule.stages).then_some((false, item.stage.0 + 1, item.microbatch.0))
        }
        _ => None,
    }
}

fn output(item: &Item) -> Option<Message> {
    match item.kind {
        Kind::Forward => Some((true, item.stage.0, item.microbatch.0)),
        Kind::InputGrad | Kind::FullBackward => Some((false, item.stage.0, item.microbatch.0)),
        _ => None,
    }
}

/// How far each rank is, and what lies in the channels between ranks.
#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    at: Vec<usize>,
    made: Vec<Message>,
    channels: Vec<((usize, usize), VecDeque<Message>)>,
}

/// Runs all interleavings of small programs, and some of others (which of the enabled ranks goes first
/// takes nothing away from another).
fn ends(schedule: &Schedule, units: &[Vec<Vec<Item>>]) -> End {
    let states: f64 = units.iter().map(|units| units.len() as f64 + 1.0).product();
    let exhaustive = states < 700.0;
    let mut seen = HashSet::new();
    let start = State { at: vec![0; units.len()], made: Vec::new(), channels: Vec::new() };
    let mut stack = vec![start.clone(), start];
    let mut run = 0;
    while let Some(mut state) = stack.pop() {
        if exhaustive && !seen.insert(state.at.clone()) {
            continue;
        }
        run += 1;
        loop {
            let mut moved = false;
            // From the first rank on, or from the last.
            let order: Vec<usize> =
                if run % 2 == 0 { (0..units.len()).collect() } else { (0..units.len()).rev().collect() };
            for rank in order {
                match advance(schedule, units, &state, rank) {
                    Some(Ok(next)) => {
                        moved = true;
                        if exhaustive {
                            stack.push(next);
                        } else {
                            state = next;
                        }
                    }
                    Some(Err(())) => return End::Mistaken,
                    None => {}
                }
            }
            if !moved && state.at.iter().zip(units).any(|(at, units)| *at < units.len()) {
                return End::Stops;
            }
            if exhaustive || !moved {
                break;
            }
        }
    }
    End::All
}

/// The state after a rank's next unit; `None`: it must wait, or has ended; an error: it takes another
/// message than its own.
fn advance(schedule: &Schedule, units: &[Vec<Vec<Item>>], state: &State, rank: usize) -> Option<Result<State, ()>> {
    let unit = units[rank].get(state.at[rank])?;
    let home = |stage: u32| schedule.placement[stage as usize].index();
    let inside: Vec<Message> = unit.iter().filter_map(output).collect();
    let mut next = state.clone();
    for message in unit.iter().filter_map(|item| input(schedule, item)) {
        if !state.made.contains(&message) && !inside.contains(&message) {
            return None;
        }
        let from = home(message.1);
        if schedule.transport == Transport::RankEdge && from != rank {
            let channel = next.channels.iter_mut().find(|(ends, _)| *ends == (from, rank));
            if channel.and_then(|(_, queue)| queue.pop_front()) != Some(message) {
                return Some(Err(()));
            }
        }
    }
    for message in inside {
        next.made.push(message);
        let to = if message.0 { message.1 + 1 } else { message.1.wrapping_sub(1) };
        if schedule.transport != Transport::RankEdge || to >= schedule.stages || home(to) == rank {
            continue;
        }
        let ends = (rank, home(to));
        match next.channels.iter_mut().find(|(other, _)| *other == ends) {
            Some((_, queue)) => queue.push_back(message),
            None => next.channels.push((ends, VecDeque::from([message]))),
        }
    }
    next.at[rank] += 1;
    Some(Ok(next))
}
