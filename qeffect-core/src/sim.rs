//! The simulator: when each action runs, given costs.
//!
//! Ranks run their items in order, one at a time; an action starts when its rank is free and the
//! message that it needs has arrived. Communication never holds up the sender (transport `edge`;
//! [`crate::lower`] says why bounded receive buffers change nothing). The same run at unit costs is
//! the deadlock test and sizes the receive buffers.

use crate::action::{Item, Kind};
use crate::ids::{Rank, Stage};
use crate::index::{self, ABSENT, Index};
use crate::plan::Peaks;
use crate::schedule::{Costs, Schedule};

/// What actions and messages cost, in one unit of time of the caller's choice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CostModel {
    /// Costs per stage; a single entry holds for all stages.
    pub stages: Vec<Costs>,
    /// Time from the end of a producer to the earliest start of its consumer on another rank.
    pub latency: i64,
}

impl CostModel {
    /// Every action costs 1, messages nothing.
    pub fn unit() -> CostModel {
        CostModel::uniform(Costs { f: 1, i: 1, w: 1 })
    }

    /// The same costs on every stage, messages cost nothing.
    pub fn uniform(costs: Costs) -> CostModel {
        CostModel { stages: vec![costs], latency: 0 }
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
/// # Errors
///
/// Every rank that never ends, with what it waits for.
pub fn run(schedule: &Schedule, index: &Index, costs: &CostModel) -> Result<Timeline, Vec<Blocked>> {
    const PENDING: i64 = i64::MIN;
    let ranks = schedule.ranks as usize;
    let mut end = vec![PENDING; schedule.items.len()];
    let mut next: Vec<u32> = schedule.starts[..ranks].to_vec();
    let mut clock = vec![0i64; ranks];
    let mut busy = vec![0i64; ranks];
    let mut first = vec![PENDING; ranks];
    let mut waits_for = vec![ABSENT; ranks];
    let mut ready: Vec<usize> = (0..ranks).rev().collect();

    while let Some(rank) = ready.pop() {
        let stop = schedule.starts[rank + 1];
        waits_for[rank] = ABSENT;
        while next[rank] < stop {
            let at = next[rank] as usize;
            let item = &schedule.items[at];
            let mut start = clock[rank];
            if let Some(needs) = index::dependency(schedule, index, item) {
                let ready_at = if needs == ABSENT { PENDING } else { end[needs as usize] };
                if ready_at == PENDING {
                    waits_for[rank] = needs;
                    break;
                }
                let source = if item.kind == Kind::Forward { item.stage.0 - 1 } else { item.stage.0 + 1 };
                let local = schedule.placement[source as usize].index() == rank;
                start = start.max(ready_at + if local { 0 } else { costs.latency });
            }
            let cost = costs.cost(item);
            if item.kind.is_compute() && first[rank] == PENDING {
                first[rank] = start;
            }
            clock[rank] = start + cost;
            busy[rank] += cost;
            end[at] = clock[rank];
            next[rank] += 1;
            if let Some(stage) = index::dependent(schedule, item) {
                let other = schedule.placement[stage.index()].index();
                if other != rank && waits_for[other] == at as u32 {
                    waits_for[other] = ABSENT;
                    ready.push(other);
                }
            }
        }
    }

    let blocked: Vec<Blocked> = (0..ranks)
        .filter(|rank| next[*rank] < schedule.starts[*rank + 1])
        .map(|rank| Blocked { rank: Rank(rank as u32), item: next[rank], needs: waits_for[rank] })
        .collect();
    if !blocked.is_empty() {
        return Err(blocked);
    }
    let makespan = clock.iter().copied().max().unwrap_or(0);
    for start in &mut first {
        *start = (*start).max(0);
    }
    Ok(Timeline { end, makespan, busy, first, last: clock })
}

/// Peak numbers of live slots, tapes and works of one rank, and the slot of every F.
///
/// A slot lives from the start of F to the end of W, a tape from the start of F to the end of I, a
/// work from the start of I to the end of W. Inside an overlap nothing is freed before its end.
/// Freed slots are reused lowest number first, so the count of slots is the peak.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Live {
    /// Peaks of the rank.
    pub peaks: Peaks,
    /// Slot of each compute item of the rank, [`ABSENT`] for other items.
    pub slots: Vec<u32>,
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
                tapes += 1;
                if schedule.eval {
                    ended_slots.push(slot);
                    ended_tapes += 1;
                }
            }
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
/// which `work` lives on to the end of W.
pub fn peak_memory(schedule: &Schedule, rank: Rank, tape: i64, work: i64) -> i64 {
    let (mut now, mut peak, mut later, mut overlapped) = (0i64, 0i64, 0i64, false);
    for item in schedule.rank(rank) {
        let mut freed = 0;
        match item.kind {
            Kind::Forward => {
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
