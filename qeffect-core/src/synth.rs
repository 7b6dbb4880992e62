//! The automatic scheduler: from costs and a memory limit to a schedule.
//!
//! A list scheduler simulates all ranks in time and gives each free rank the action that a setting
//! prefers; the best of a fixed set of settings, and of schedules that the caller brings along, is
//! returned. It is deterministic: ties are broken by setting, rank, stage and microbatch.
//!
//! F's and I's of a stage run in microbatch order, so every recipe takes the result. No rank ever
//! exceeds its limit, as [`peak_memory`] counts it.
//!
//! # Why it never deadlocks
//!
//! An F of a stage runs only if room for one microbatch is left for every later stage of the rank
//! that holds none. So the oldest microbatch in flight can always go on: where it goes next, either
//! that room is free, or works hold it, and a W needs nothing to run.

use std::borrow::Cow;
use std::fmt;

use crate::action::{Item, Kind};
use crate::check::{self, Options};
use crate::ids::Rank;
use crate::index::Index;
use crate::lang::MAX_ITEMS;
use crate::origin::Origin;
use crate::plan::Checked;
use crate::schedule::{HeaderOrigins, Schedule, Transport, Update};
use crate::sim::{self, CostModel, peak_memory};

mod list;
pub mod pattern;

use list::{Order, Setting};

/// What is asked of the scheduler.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of stages: a multiple of the ranks.
    pub stages: u32,
    /// Number of microbatches.
    pub microbatches: u32,
    /// Costs per stage (or one entry for all), and of messages.
    pub costs: CostModel,
    /// Memory of one microbatch on one stage from F to I, in any unit.
    pub tape: i64,
    /// The part of it that lives on to W.
    pub work: i64,
    /// Most memory of a rank, in the same unit.
    pub limit: i64,
    /// Stages per rank in a loop, in a V, or whichever is better.
    pub shape: Shape,
    /// What is made as small as possible.
    pub objective: Objective,
}

/// How stages are placed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Shape {
    /// Both are tried.
    #[default]
    Any,
    /// Stage s on rank s mod P.
    Loop,
    /// Down the ranks and back up again, and so on.
    V,
}

/// What a better schedule has less of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Objective {
    /// Time from the first start to the last end of all ranks.
    #[default]
    Makespan,
    /// Idle time of a rank between its own first start and last end.
    Idle,
}

/// Why there is no schedule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Infeasible {
    /// The limit holds less than one microbatch of each stage of a rank.
    Limit {
        /// The limit.
        limit: i64,
        /// The least that works.
        least: i64,
    },
    /// The request contradicts itself.
    Request(String),
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Infeasible::Limit { limit, least } => write!(
                f,
                "a memory limit of {limit} is too small: one microbatch of each stage of a rank takes {least}"
            ),
            Infeasible::Request(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Infeasible {}

/// A schedule that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The schedule, checked.
    pub checked: Checked,
    /// Makespan at the requested costs.
    pub makespan: i64,
    /// Bubble in the makespan sense.
    pub bubble: i64,
    /// Bubble in the idle sense.
    pub idle: i64,
    /// Largest memory of each rank.
    pub memory: Vec<i64>,
    /// Which of the caller's schedules it is, if it is one of them.
    pub given: Option<usize>,
}

/// Finds a schedule: at least as good as each of `given` that fits the request.
///
/// A given schedule fits if it has the requested ranks, stages and microbatches, trains, and keeps
/// the limit; others are passed over.
///
/// # Errors
///
/// If the limit is too small for any schedule, or the request contradicts itself.
pub fn synthesize(request: &Request, given: &[Checked]) -> Result<Found, Infeasible> {
    validate(request)?;
    let mut best: Option<(Key, Found)> = None;
    for (n, checked) in given.iter().enumerate().filter(|(_, checked)| fits(request, &checked.schedule)) {
        offer(&mut best, request, judge(request, checked.clone(), Some(n)));
    }
    let mut placements = shapes(request);
    placements.dedup();
    for placement in placements {
        let mut programs: Vec<Vec<Vec<Item>>> = Vec::new();
        for setting in Setting::all(request) {
            let Some(order) = Order::new(request, &placement, &setting).run() else { continue };
            if !programs.contains(&order) {
                programs.push(order);
            }
        }
        // The simulator is cheap next to the checker: only the best of them is checked.
        let mut scored: Vec<((i64, i64), Schedule)> =
            programs.into_iter().map(|p| schedule(request, &placement, p)).map(|s| (score(request, &s), s)).collect();
        scored.sort_by_key(|(score, _)| *score);
        if let Some((_, schedule)) = scored.into_iter().next()
            && let Ok(checked) = check::check(schedule, &Options::AT_START)
        {
            offer(&mut best, request, judge(request, checked, None));
        }
    }
    best.map(|(_, found)| found)
        .ok_or_else(|| Infeasible::Request("no setting of the scheduler leads to the end".to_owned()))
}

/// Smaller is better; at equal quality a given schedule wins, and the earlier one of those.
type Key = (i64, i64, i64);

fn offer(best: &mut Option<(Key, Found)>, request: &Request, found: Found) {
    let memory = found.memory.iter().copied().max().unwrap_or(0);
    let key = match request.objective {
        Objective::Makespan => (found.makespan, found.idle, memory),
        Objective::Idle => (found.idle, found.makespan, memory),
    };
    if best.as_ref().is_none_or(|(known, _)| key < *known) {
        *best = Some((key, found));
    }
}

/// Most that a cost or an amount of memory may be, so that no sum overflows.
const MOST: i64 = 1 << 32;

fn validate(request: &Request) -> Result<(), Infeasible> {
    let Request { ranks, stages, microbatches, costs, tape, work, limit, .. } = request;
    let refuse = |what: String| Err(Infeasible::Request(what));
    if *ranks == 0 || *microbatches == 0 || *stages == 0 || !stages.is_multiple_of(*ranks) {
        return refuse(format!(
            "{stages} stages on {ranks} ranks with {microbatches} microbatches: each rank needs the same number of stages, \
             and none of them may be 0"
        ));
    }
    if *stages as usize * *microbatches as usize * 3 > MAX_ITEMS {
        return refuse(format!("{stages} stages and {microbatches} microbatches are more than {MAX_ITEMS} actions"));
    }
    if costs.stages.len() != 1 && costs.stages.len() != *stages as usize {
        return refuse(format!("costs of {} stages, but there are {stages}", costs.stages.len()));
    }
    let times = costs.stages.iter().flat_map(|c| [c.f, c.i, c.w]).chain(costs.transfer.iter().copied());
    let all = times.chain([costs.latency, *tape, *work]);
    if let Some(bad) = all.into_iter().find(|value| !(0..=MOST).contains(value)) {
        return refuse(format!("{bad} is no cost and no memory: they are from 0 to {MOST}"));
    }
    if work > tape {
        return refuse(format!("work {work} is a part of tape {tape}, and so no larger"));
    }
    let least = i64::from(stages / ranks) * tape;
    if *limit < least {
        return Err(Infeasible::Limit { limit: *limit, least });
    }
    Ok(())
}

fn shapes(request: &Request) -> Vec<Vec<Rank>> {
    let ranks = request.ranks;
    let loop_ = (0..request.stages).map(|s| Rank(s % ranks)).collect::<Vec<_>>();
    let v = (0..request.stages)
        .map(|s| if (s / ranks).is_multiple_of(2) { Rank(s % ranks) } else { Rank(ranks - 1 - s % ranks) });
    match request.shape {
        Shape::Loop => vec![loop_],
        Shape::V => vec![v.collect()],
        Shape::Any => vec![loop_, v.collect()],
    }
}

fn fits(request: &Request, schedule: &Schedule) -> bool {
    let sizes = (schedule.ranks, schedule.stages, schedule.microbatches);
    sizes == (request.ranks, request.stages, request.microbatches)
        && !schedule.eval
        && memory(request, schedule).into_iter().all(|peak| peak <= request.limit)
}

fn memory(request: &Request, schedule: &Schedule) -> Vec<i64> {
    (0..schedule.ranks).map(|rank| peak_memory(schedule, Rank(rank), request.tape, request.work)).collect()
}

fn score(request: &Request, schedule: &Schedule) -> (i64, i64) {
    let index = Index::new(schedule);
    match (sim::run(schedule, &index, &request.costs), request.objective) {
        (Ok(timeline), Objective::Makespan) => (timeline.makespan, timeline.idle()),
        (Ok(timeline), Objective::Idle) => (timeline.idle(), timeline.makespan),
        (Err(_), _) => (i64::MAX, i64::MAX),
    }
}

fn judge(request: &Request, checked: Checked, given: Option<usize>) -> Found {
    let index = Index::new(&checked.schedule);
    let timeline = sim::run(&checked.schedule, &index, &request.costs);
    let timeline = timeline.expect("a checked schedule has no cycle of waits, whatever the costs");
    let memory = memory(request, &checked.schedule);
    Found { makespan: timeline.makespan, bubble: timeline.bubble(), idle: timeline.idle(), memory, given, checked }
}

fn schedule(request: &Request, placement: &[Rank], programs: Vec<Vec<Item>>) -> Schedule {
    let name = |name: &'static str, value: u32| (Cow::Borrowed(name), i64::from(value));
    assemble(Parts {
        name: "synthesized",
        params: vec![
            name("P", request.ranks),
            name("M", request.microbatches),
            name("V", request.stages / request.ranks),
        ],
        ranks: request.ranks,
        microbatches: request.microbatches,
        placement,
        programs,
    })
}

/// What a made schedule consists of.
struct Parts<'a> {
    name: &'static str,
    params: Vec<(Cow<'static, str>, i64)>,
    ranks: u32,
    microbatches: u32,
    placement: &'a [Rank],
    programs: Vec<Vec<Item>>,
}

/// A schedule that nobody wrote: no bounds, no contracts, no places.
fn assemble(parts: Parts<'_>) -> Schedule {
    let mut starts = vec![0u32];
    let mut items = Vec::with_capacity(parts.programs.iter().map(Vec::len).sum());
    for program in parts.programs {
        items.extend(program);
        starts.push(items.len() as u32);
    }
    Schedule {
        name: Cow::Borrowed(parts.name),
        params: parts.params.into(),
        ranks: parts.ranks,
        stages: parts.placement.len() as u32,
        microbatches: parts.microbatches,
        placement: parts.placement.to_vec().into(),
        items: items.into(),
        starts: starts.into(),
        bounds: Cow::Borrowed(&[]),
        expects: Cow::Borrowed(&[]),
        transport: Transport::default(),
        update: Update::default(),
        eval: false,
        coalesce: 1,
        bytes: None,
        origins: HeaderOrigins::NONE,
    }
}

fn item(kind: Kind, stage: u32, microbatch: u32) -> Item {
    Item::new(kind, stage, microbatch, Origin::NONE.0)
}

#[cfg(test)]
mod tests;
