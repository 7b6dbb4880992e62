//! The simulator: when each action runs, given costs.
//!
//! Ranks run their items in order, one at a time; an action starts when its rank is free and the
//! message that it needs has arrived. Communication never holds up the sender (transport `edge`;
//! [`crate::lower`] says why bounded receive buffers change nothing). The same run at unit costs is
//! the deadlock test and sizes the receive buffers.

use std::collections::{BTreeMap, HashSet};

use crate::action::{Item, Kind};
use crate::ids::{Microbatch, Rank, Stage};
use crate::index::{self, ABSENT, Index};
use crate::plan::Peaks;
use crate::schedule::{Costs, Schedule};

/// What actions and messages cost, in one unit of time of the caller's choice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CostModel {
    /// Costs per stage; a single entry holds for all stages.
    pub stages: Vec<Costs>,
    /// Time from the last byte of a message to the earliest start of its consumer on another rank.
    pub latency: i64,
    /// Time that a message between the stages s and s + 1 is on the wire: its bytes over the
    /// bandwidth. A single entry holds for all boundaries, none means no time. Messages of one logical
    /// edge (boundary and direction) follow each other; those of different edges do not disturb.
    pub transfer: Vec<i64>,
    /// Cost of a whole `overlap`; `None`: the sum of its branches.
    pub overlap: Option<i64>,
    /// Costs of overlaps by the stages of their forward and of their backward, before `overlap`.
    pub pairs: BTreeMap<(Stage, Stage), i64>,
}

impl CostModel {
    /// Every action costs 1, messages nothing.
    pub fn unit() -> CostModel {
        CostModel::uniform(Costs { f: 1, i: 1, w: 1 })
    }

    /// The same costs on every stage, messages cost nothing.
    pub fn uniform(costs: Costs) -> CostModel {
        CostModel { stages: vec![costs], latency: 0, transfer: Vec::new(), overlap: None, pairs: BTreeMap::new() }
    }

    /// Time on the wire of the message that an item sends, if it sends one to the next stage.
    fn wire(&self, item: &Item) -> i64 {
        let boundary = if item.kind == Kind::Forward { item.stage.index() } else { item.stage.index().wrapping_sub(1) };
        self.transfer.get(boundary).or(self.transfer.first()).copied().unwrap_or(0)
    }

    /// From the start of a message on the wire to its arrival, for the item that sends it.
    pub fn flight(&self, item: &Item) -> i64 {
        self.wire(item) + self.latency
    }

    /// The cost of a whole overlap: of its pair of stages, of overlaps, or the sum of its members.
    pub fn whole(&self, block: &[Item]) -> i64 {
        let stage_of = |backward: bool| {
            let is = |item: &&Item| match item.kind {
                Kind::Forward => !backward,
                Kind::InputGrad | Kind::FullBackward => backward,
                _ => false,
            };
            block.iter().find(is).map(|item| item.stage)
        };
        let pair = match self.pairs.is_empty() {
            true => None,
            false => stage_of(false).zip(stage_of(true)).and_then(|pair| self.pairs.get(&pair).copied()),
        };
        pair.or(self.overlap).unwrap_or_else(|| block.iter().map(|item| self.cost(item)).sum())
    }

    /// The cost of one item: B costs i + w, R costs f, each member of a coalesced W costs w.
    pub fn cost(&self, item: &Item) -> i64 {
        let costs = self.stages.get(item.stage.index()).unwrap_or(&self.stages[0]);
        match item.kind {
            Kind::Forward | Kind::Recompute => costs.f,
            Kind::InputGrad => costs.i,
            Kind::WeightGrad | Kind::WeightGradJoin => costs.w,
            Kind::FullBackward => costs.i + costs.w,
            _ => 0,
        }
    }
}

/// Start and end of every item, in the order of [`Schedule::items`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Timeline {
    /// End of each item.
    pub end: Vec<i64>,
    /// When the message of each item starts on the wire; empty if messages take no time there: at its end.
    pub sent: Vec<i64>,
    /// Global end.
    pub makespan: i64,
    /// Sum of costs per rank.
    pub busy: Vec<i64>,
    /// First start per rank (0 for a rank without items).
    pub first: Vec<i64>,
    /// Last end per rank.
    pub last: Vec<i64>,
}

impl Timeline {
    /// Bubble in the makespan sense, of the rank that idles most: makespan minus its busy time.
    pub fn bubble(&self) -> i64 {
        self.busy.iter().map(|busy| self.makespan - busy).max().unwrap_or(0)
    }

    /// Bubble in the idle sense: largest idle time of a rank between its own first start and last
    /// end (ranks may start and end as a parallelogram).
    pub fn idle(&self) -> i64 {
        (0..self.busy.len()).map(|r| self.last[r] - self.first[r] - self.busy[r]).max().unwrap_or(0)
    }

    /// When the message of an item starts on the wire.
    pub fn sent(&self, at: usize) -> i64 {
        self.sent.get(at).copied().unwrap_or(self.end[at])
    }

    /// Bubble as a share of the makespan, 0 to 1.
    pub fn bubble_rate(&self) -> f64 {
        if self.makespan == 0 { 0.0 } else { self.bubble() as f64 / self.makespan as f64 }
    }
}

/// Where a rank stopped: its item waits for another one that never ran.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Blocked {
    /// The rank.
    pub rank: Rank,
    /// The item that cannot start, index into [`Schedule::items`].
    pub item: u32,
    /// The item that it waits for.
    pub needs: u32,
}

/// Runs a schedule that passed placement and ownership checks.
///
/// An `overlap` is one block: it starts when everything that its members need from outside is
/// there, and its results are usable when it ends.
///
/// # Errors
///
/// Every rank that never ends, with what it waits for.
pub fn run(schedule: &Schedule, index: &Index, costs: &CostModel) -> Result<Timeline, Vec<Blocked>> {
    let ranks = schedule.ranks as usize;
    let mut run = Run {
        schedule,
        index,
        costs,
        end: vec![PENDING; schedule.items.len()],
        sent: if costs.transfer.iter().any(|time| *time > 0) { vec![0; schedule.items.len()] } else { Vec::new() },
        wires: vec![i64::MIN; 2 * schedule.stages as usize],
        next: schedule.starts[..ranks].to_vec(),
        clock: vec![0; ranks],
        busy: vec![0; ranks],
        first: vec![PENDING; ranks],
        waits: vec![None; ranks],
        ready: (0..ranks).rev().collect(),
    };
    while let Some(rank) = run.ready.pop() {
        run.waits[rank] = None;
        while run.next[rank] < schedule.starts[rank + 1] {
            if let Err(wait) = run.step(rank) {
                run.waits[rank] = Some(wait);
                break;
            }
        }
    }
    let blocked: Vec<Blocked> = run.waits.iter().flatten().copied().collect();
    if !blocked.is_empty() {
        return Err(blocked);
    }
    let makespan = run.clock.iter().copied().max().unwrap_or(0);
    let first = run.first.iter().map(|start| (*start).max(0)).collect();
    Ok(Timeline { end: run.end, sent: run.sent, makespan, busy: run.busy, first, last: run.clock })
}

const PENDING: i64 = i64::MIN;

struct Run<'a> {
    schedule: &'a Schedule,
    index: &'a Index,
    costs: &'a CostModel,
    end: Vec<i64>,
    sent: Vec<i64>,
    /// Until when the wire of each boundary and direction is taken.
    wires: Vec<i64>,
    next: Vec<u32>,
    clock: Vec<i64>,
    busy: Vec<i64>,
    first: Vec<i64>,
    waits: Vec<Option<Blocked>>,
    ready: Vec<usize>,
}

impl Run<'_> {
    /// Runs the next item (or whole overlap) of a rank, or says what it waits for.
    fn step(&mut self, rank: usize) -> Result<(), Blocked> {
        let at = self.next[rank];
        let item = self.schedule.items[at as usize];
        if item.kind == Kind::OverlapBegin {
            return self.overlap(rank, at);
        }
        let start = self.arrival(rank, at, &item)?.max(self.clock[rank]);
        self.finish(rank, at..at + 1, start, self.costs.cost(&item));
        Ok(())
    }

    fn overlap(&mut self, rank: usize, begin: u32) -> Result<(), Blocked> {
        let rest = &self.schedule.items[begin as usize..self.schedule.starts[rank + 1] as usize];
        let length = rest.iter().position(|i| i.kind == Kind::OverlapEnd).map_or(rest.len(), |n| n + 1);
        let block = begin..begin + length as u32;
        let mut start = self.clock[rank];
        for at in block.clone() {
            let item = self.schedule.items[at as usize];
            let inside =
                index::dependency(self.schedule, self.index, &item).is_some_and(|needs| block.contains(&needs));
            if !inside {
                start = start.max(self.arrival(rank, at, &item)?);
            }
        }
        let cost = self.costs.whole(&self.schedule.items[block.start as usize..block.end as usize]);
        self.finish(rank, block, start, cost);
        Ok(())
    }

    /// When what an item needs from another stage is there.
    fn arrival(&self, rank: usize, at: u32, item: &Item) -> Result<i64, Blocked> {
        let Some(needs) = index::dependency(self.schedule, self.index, item) else { return Ok(PENDING) };
        if needs == ABSENT || self.end[needs as usize] == PENDING {
            return Err(Blocked { rank: Rank(rank as u32), item: at, needs });
        }
        let source = if item.kind == Kind::Forward { item.stage.0 - 1 } else { item.stage.0 + 1 };
        let local = self.schedule.placement[source as usize].index() == rank;
        if local {
            return Ok(self.end[needs as usize]);
        }
        match self.sent.get(needs as usize) {
            None => Ok(self.end[needs as usize] + self.costs.latency),
            Some(sent) => Ok(sent + self.costs.flight(&self.schedule.items[needs as usize])),
        }
    }

    /// Ends a block of items and wakes whoever waits for one of them.
    fn finish(&mut self, rank: usize, block: std::ops::Range<u32>, start: i64, cost: i64) {
        let compute = cost > 0 || self.schedule.items[block.start as usize].kind.is_compute();
        if compute && self.first[rank] == PENDING {
            self.first[rank] = start;
        }
        self.clock[rank] = start + cost;
        self.busy[rank] += cost;
        self.next[rank] = block.end;
        for at in block {
            self.end[at as usize] = self.clock[rank];
            self.send(at);
            if let Some(stage) = index::dependent(self.schedule, &self.schedule.items[at as usize]) {
                let other = self.schedule.placement[stage.index()].index();
                if other != rank && self.waits[other].is_some_and(|wait| wait.needs == at) {
                    self.ready.push(other);
                    self.waits[other] = None;
                }
            }
        }
    }
}

impl Run<'_> {
    /// Puts the message of an item on its wire, after the one before it.
    fn send(&mut self, at: u32) {
        let Some(sent) = self.sent.get_mut(at as usize) else { return };
        let item = &self.schedule.items[at as usize];
        *sent = self.end[at as usize];
        if let Some(to) = index::dependent(self.schedule, item)
            && self.schedule.placement[to.index()] != self.schedule.placement[item.stage.index()]
        {
            let wire = &mut self.wires[2 * item.stage.index() + usize::from(item.kind != Kind::Forward)];
            *sent = (*sent).max(*wire);
            *wire = *sent + self.costs.wire(item);
        }
    }
}

/// Peak numbers of live slots, tapes and works of one rank, and the slot of every F.
///
/// A slot lives from the start of F to the end of W, a tape from the start of F (of R, where F is
/// recomputed) to the end of I, a work from the start of I to the end of W. Inside an overlap nothing is freed before its end.
/// Freed slots are reused lowest number first, so the count of slots is the peak.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Live {
    /// Peaks of the rank.
    pub peaks: Peaks,
    /// Slot of each compute item of the rank, [`ABSENT`] for other items.
    pub slots: Vec<u32>,
}

/// What a rank recomputes: F keeps no tape for it.
pub fn recomputed(items: &[Item]) -> HashSet<(Stage, Microbatch)> {
    items.iter().filter(|item| item.kind == Kind::Recompute).map(|item| (item.stage, item.microbatch)).collect()
}

/// Counts what is live on a rank over its program order (which is its time order).
pub fn live(schedule: &Schedule, index: &Index, rank: Rank, slot_of: &mut [u32]) -> Live {
    let items = schedule.rank(rank);
    let mut slots = vec![ABSENT; items.len()];
    let mut free = std::collections::BinaryHeap::new();
    let (mut fresh, mut held) = (0u32, 0u32);
    let (mut tapes, mut works) = (0u32, 0u32);
    let mut peaks = Peaks::default();
    let mut overlapped = false;
    let recomputed = recomputed(items);
    // What the items so far free once their action, group or overlap has ended.
    let (mut ended_tapes, mut ended_works, mut ended_slots) = (0u32, 0u32, Vec::new());
    for (at, item) in items.iter().enumerate() {
        match item.kind {
            Kind::Forward => {
                let slot = match free.pop() {
                    Some(std::cmp::Reverse(slot)) => slot,
                    None => {
                        fresh += 1;
                        fresh - 1
                    }
                };
                slot_of[index.cell(item.stage, item.microbatch)] = slot;
                held += 1;
                tapes += u32::from(!recomputed.contains(&(item.stage, item.microbatch)));
                if schedule.eval {
                    ended_slots.push(slot);
                    ended_tapes += 1;
                }
            }
            Kind::Recompute => tapes += 1,
            Kind::InputGrad => {
                works += 1;
                ended_tapes += 1;
            }
            Kind::WeightGrad | Kind::WeightGradJoin => {
                ended_works += 1;
                ended_slots.push(slot_of[index.cell(item.stage, item.microbatch)]);
            }
            Kind::FullBackward => {
                works += 1;
                ended_tapes += 1;
                ended_works += 1;
                ended_slots.push(slot_of[index.cell(item.stage, item.microbatch)]);
            }
            Kind::OverlapBegin => overlapped = true,
            Kind::OverlapEnd => overlapped = false,
            _ => {}
        }
        peaks.slots = peaks.slots.max(held);
        peaks.tapes = peaks.tapes.max(tapes);
        peaks.works = peaks.works.max(works);
        if item.kind.is_compute() {
            slots[at] = slot_of[index.cell(item.stage, item.microbatch)];
        }
        let group_goes_on = items.get(at + 1).is_some_and(|next| next.kind == Kind::WeightGradJoin);
        if !overlapped && !group_goes_on {
            tapes -= std::mem::take(&mut ended_tapes);
            works -= std::mem::take(&mut ended_works);
            held -= ended_slots.len() as u32;
            free.extend(ended_slots.drain(..).map(std::cmp::Reverse));
        }
    }
    debug_assert_eq!(fresh, peaks.slots, "interval colouring uses as many slots as the peak");
    Live { peaks, slots }
}

/// Largest memory of a rank, in the caller's units: `tape` from the start of F to the end of I, of
/// which `work` lives on to the end of W. What F keeps for a recomputation is not counted.
pub fn peak_memory(schedule: &Schedule, rank: Rank, tape: i64, work: i64) -> i64 {
    peak_memory_by(schedule, rank, |_| [tape, work])
}

/// As [`peak_memory`], of stages that differ: `sizes` gives tape and work of each.
pub fn peak_memory_by(schedule: &Schedule, rank: Rank, sizes: impl Fn(Stage) -> [i64; 2]) -> i64 {
    let (mut now, mut peak, mut later, mut overlapped) = (0i64, 0i64, 0i64, false);
    let recomputed = recomputed(schedule.rank(rank));
    for item in schedule.rank(rank) {
        let mut freed = 0;
        let [tape, work] = if item.kind.is_compute() { sizes(item.stage) } else { [0, 0] };
        match item.kind {
            Kind::Forward if recomputed.contains(&(item.stage, item.microbatch)) => {}
            Kind::Forward | Kind::Recompute => {
                now += tape;
                freed = if schedule.eval { tape } else { 0 };
            }
            Kind::InputGrad => freed = tape - work,
            Kind::WeightGrad | Kind::WeightGradJoin => freed = work,
            Kind::FullBackward => freed = tape,
            Kind::OverlapBegin => overlapped = true,
            Kind::OverlapEnd => {
                overlapped = false;
                freed = std::mem::take(&mut later);
            }
            _ => {}
        }
        peak = peak.max(now);
        if overlapped {
            later += freed;
        } else {
            now -= freed;
        }
    }
    peak
}

/// Peak number of messages of the edge into `to` that were produced and not yet consumed.
///
/// A message is held from the end of its producer to the end of its consumer; at one instant, ends
/// of consumers come before ends of producers.
pub(crate) fn unconsumed(
    schedule: &Schedule,
    timeline: &Timeline,
    table: &[u32],
    from: Stage,
    to: Stage,
    events: &mut Vec<(i64, i8)>,
) -> u32 {
    let m = schedule.microbatches as usize;
    events.clear();
    for microbatch in 0..m {
        let (sent, used) = (table[from.index() * m + microbatch], table[to.index() * m + microbatch]);
        if sent != ABSENT && used != ABSENT {
            events.push((timeline.end[sent as usize], 1));
            events.push((timeline.end[used as usize], -1));
        }
    }
    events.sort_unstable();
    let (mut now, mut peak) = (0i32, 0i32);
    for (_, step) in events.iter() {
        now += i32::from(*step);
        peak = peak.max(now);
    }
    peak as u32
}
