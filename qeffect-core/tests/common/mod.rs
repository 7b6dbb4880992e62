//! Random small schedules, and a brute-force judge of them that shares no code with the checker.
#![allow(dead_code, missing_docs)]

pub mod interleavings;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use qeffect_core::action::{Item, Kind};
use qeffect_core::ids::Rank;
use qeffect_core::schedule::{HeaderOrigins, Schedule, Transport, Update};

/// A small deterministic generator (splitmix64): tests need no more.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

pub fn schedule(programs: Vec<Vec<Item>>, placement: Vec<u32>, microbatches: u32) -> Schedule {
    let mut starts = vec![0];
    let mut items = Vec::new();
    for program in &programs {
        items.extend_from_slice(program);
        starts.push(items.len() as u32);
    }
    Schedule {
        name: Cow::Borrowed("random"),
        params: Cow::Borrowed(&[]),
        ranks: programs.len() as u32,
        stages: placement.len() as u32,
        microbatches,
        placement: placement.into_iter().map(Rank).collect(),
        items: Cow::Owned(items),
        starts: Cow::Owned(starts),
        bounds: Cow::Borrowed(&[]),
        expects: Cow::Borrowed(&[]),
        transport: Transport::Edge,
        update: Update::Microbatch,
        eval: false,
        coalesce: 1,
        bytes: None,
        origins: HeaderOrigins::NONE,
    }
}

pub fn programs(schedule: &Schedule) -> Vec<Vec<Item>> {
    (0..schedule.ranks).map(|r| schedule.rank(Rank(r)).to_vec()).collect()
}

/// A legal schedule: ranks take turns at random, each doing a random enabled action.
pub fn legal(rng: &mut Rng, ranks: usize, virtual_stages: usize, microbatches: usize) -> Schedule {
    let stages = ranks * virtual_stages;
    let mut placement: Vec<u32> = (0..stages).map(|s| (s % ranks) as u32).collect();
    // Shuffled: neither looped nor V, but every rank keeps its number of stages.
    for at in (1..stages).rev() {
        placement.swap(at, rng.below(at + 1));
    }
    let mut done: HashSet<(Kind, usize, usize)> = HashSet::new();
    let mut programs: Vec<Vec<Item>> = vec![Vec::new(); ranks];
    let full: Vec<bool> = (0..stages * microbatches).map(|_| rng.below(3) == 0).collect();
    loop {
        let mut enabled = Vec::new();
        for s in 0..stages {
            for m in 0..microbatches {
                let has = |k, s, m| done.contains(&(k, s, m));
                if !has(Kind::Forward, s, m) && (s == 0 || has(Kind::Forward, s - 1, m)) {
                    enabled.push((Kind::Forward, s, m));
                }
                let upstream = s + 1 == stages || has(Kind::InputGrad, s + 1, m);
                if has(Kind::Forward, s, m) && !has(Kind::InputGrad, s, m) && upstream {
                    enabled.push((if full[s * microbatches + m] { Kind::FullBackward } else { Kind::InputGrad }, s, m));
                }
                if has(Kind::InputGrad, s, m) && !has(Kind::WeightGrad, s, m) {
                    enabled.push((Kind::WeightGrad, s, m));
                }
            }
        }
        if enabled.is_empty() {
            break;
        }
        let (kind, s, m) = enabled[rng.below(enabled.len())];
        let program = &mut programs[placement[s] as usize];
        program.push(Item::new(kind, s as u32, m as u32, program.len() as u32));
        match kind {
            Kind::FullBackward => {
                done.insert((Kind::InputGrad, s, m));
                done.insert((Kind::WeightGrad, s, m));
            }
            kind => {
                done.insert((kind, s, m));
            }
        }
    }
    schedule(programs, placement, microbatches as u32)
}

/// Puts neighbours of every rank's program into overlaps, one action per branch, where chance has it and their
/// microbatches differ. Not all are legal.
pub fn overlapping(rng: &mut Rng, base: &Schedule) -> Schedule {
    let mark = |kind| Item::new(kind, 0, 0, 0);
    let overlapped = |program: Vec<Item>| {
        let mut out = Vec::new();
        let mut rest = &program[..];
        while !rest.is_empty() {
            let length = if rng.below(3) == 0 { 2 + rng.below(2) } else { 1 };
            let (block, after) = rest.split_at(rest.len().min(length));
            let distinct: HashSet<_> = block.iter().map(|item| item.microbatch).collect();
            if distinct.len() < length || length == 1 {
                out.push(rest[0]);
                rest = &rest[1..];
                continue;
            }
            rest = after;
            out.push(mark(Kind::OverlapBegin));
            out.extend(block.iter().flat_map(|item| [mark(Kind::OverlapBranch), *item]));
            out.push(mark(Kind::OverlapEnd));
        }
        out
    };
    let programs = programs(base).into_iter().map(overlapped).collect();
    let placement = base.placement.iter().map(|rank| rank.0).collect();
    Schedule { update: Update::Step, ..schedule(programs, placement, base.microbatches) }
}

/// Breaks (or keeps) a schedule: one random drop, duplicate, swap or move.
pub fn mutate(rng: &mut Rng, base: &Schedule) -> Schedule {
    let mut programs = programs(base);
    let filled: Vec<usize> = (0..programs.len()).filter(|r| !programs[*r].is_empty()).collect();
    if filled.is_empty() {
        return base.clone();
    }
    let rank = filled[rng.below(filled.len())];
    let len = programs[rank].len();
    let at = rng.below(len);
    match rng.below(6) {
        0 => {
            programs[rank].remove(at);
        }
        1 => {
            let item = programs[rank][at];
            let to = rng.below(len + 1);
            programs[rank].insert(to, item);
        }
        2 => {
            let other = rng.below(len);
            programs[rank].swap(at, other);
        }
        3 => {
            let item = programs[rank].remove(at);
            let to = rng.below(programs.len());
            let place = rng.below(programs[to].len() + 1);
            programs[to].insert(place, item);
        }
        4 => {
            let item = programs[rank].remove(at);
            let to = rng.below(len);
            programs[rank].insert(to, item);
        }
        _ => {
            let kinds = [Kind::Forward, Kind::InputGrad, Kind::WeightGrad, Kind::FullBackward];
            programs[rank][at].kind = kinds[rng.below(4)];
        }
    }
    schedule(programs, base.placement.iter().map(|r| r.0).collect(), base.microbatches)
}

/// The verdict by brute force: the first family that fails, `"ok"` otherwise.
pub fn oracle(schedule: &Schedule) -> &'static str {
    let programs = programs(schedule);
    let (stages, microbatches) = (schedule.stages, schedule.microbatches);
    // Placement and coverage, by counting.
    let mut forwards: BTreeMap<(u32, u32), usize> = BTreeMap::new();
    for (rank, program) in programs.iter().enumerate() {
        for item in program {
            if item.stage.0 >= stages || item.microbatch.0 >= microbatches {
                return "QE06";
            }
            if schedule.placement[item.stage.index()].index() != rank {
                return "QE06";
            }
            if item.kind == Kind::Forward {
                *forwards.entry((item.stage.0, item.microbatch.0)).or_default() += 1;
            }
        }
    }
    for s in 0..stages {
        for m in 0..microbatches {
            if forwards.get(&(s, m)) != Some(&1) {
                return "QE06";
            }
        }
    }
    // Ownership, by running each rank's program on sets of what is in hand.
    for program in &programs {
        let mut tapes: BTreeSet<(u32, u32)> = BTreeSet::new();
        let mut works: BTreeSet<(u32, u32)> = BTreeSet::new();
        for item in program {
            let key = (item.stage.0, item.microbatch.0);
            let legal = match item.kind {
                Kind::Forward => tapes.insert(key),
                Kind::InputGrad => tapes.remove(&key) && works.insert(key),
                Kind::WeightGrad => works.remove(&key),
                Kind::FullBackward => tapes.remove(&key),
                _ => true,
            };
            if !legal {
                return "QE01";
            }
        }
        if !tapes.is_empty() || !works.is_empty() {
            return "QE01";
        }
    }
    // Communication: every interleaving of the ranks, depth first over program counters.
    let mut seen: HashSet<Vec<usize>> = HashSet::new();
    let mut stack = vec![vec![0usize; programs.len()]];
    while let Some(at) = stack.pop() {
        if !seen.insert(at.clone()) {
            continue;
        }
        let ran = |kind: Kind, s: u32, m: u32| {
            programs.iter().zip(&at).any(|(program, pc)| {
                program[..*pc].iter().any(|i| {
                    let same = i.kind == kind || (kind == Kind::InputGrad && i.kind == Kind::FullBackward);
                    same && i.stage.0 == s && i.microbatch.0 == m
                })
            })
        };
        let mut moved = false;
        for (rank, program) in programs.iter().enumerate() {
            let Some(item) = program.get(at[rank]) else { continue };
            let (s, m) = (item.stage.0, item.microbatch.0);
            let enabled = match item.kind {
                Kind::Forward => s == 0 || ran(Kind::Forward, s - 1, m),
                Kind::InputGrad | Kind::FullBackward => s + 1 == stages || ran(Kind::InputGrad, s + 1, m),
                _ => true,
            };
            if enabled {
                moved = true;
                let mut next = at.clone();
                next[rank] += 1;
                stack.push(next);
            }
        }
        if !moved && programs.iter().zip(&at).any(|(program, pc)| *pc < program.len()) {
            return "QE04";
        }
    }
    "ok"
}
