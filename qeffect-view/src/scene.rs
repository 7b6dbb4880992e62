//! What every view draws: one bar per action with its times, slot, dependencies and what is live.
//!
//! A scene is computed once from a checked schedule and costs; the views only decide how it looks.

use std::borrow::Cow;

use qeffect_core::action::{Item, Kind};
use qeffect_core::diag::printable;
use qeffect_core::ids::Rank;
use qeffect_core::index::{self, ABSENT, Index};
use qeffect_core::plan::{Checked, Op, Peaks};
use qeffect_core::schedule::Schedule;
use qeffect_core::sim::{self, CostModel, Timeline};

/// Where a bar stands in an overlap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Branch {
    /// Number of the branch.
    pub number: u32,
    /// How many branches there are.
    pub of: u32,
    /// Start of the whole overlap.
    pub start: i64,
    /// End of the whole overlap.
    pub end: i64,
}

/// One action in time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bar {
    /// What runs.
    pub item: Item,
    /// Its rank.
    pub rank: Rank,
    /// Its place in the rank's program.
    pub step: u32,
    /// Number of its stage among the stages of its rank, from 0.
    pub virtual_stage: u32,
    /// Start.
    pub start: i64,
    /// End. Members of an overlap share its span; see [`Bar::overlap`].
    pub end: i64,
    /// When its result starts on the wire to another rank.
    pub sent: i64,
    /// When its result is there, if the consumer is on another rank.
    pub arrives: i64,
    /// Inside an overlap: where.
    pub overlap: Option<Branch>,
    /// The slot that holds its microbatch.
    pub slot: Option<u32>,
    /// Bars whose results it takes, as indices into [`Scene::bars`].
    pub needs: Vec<u32>,
    /// What is live on the rank while it runs.
    pub live: Peaks,
}

impl Bar {
    /// Its text form, as in PyTorch: `2F7`.
    pub fn key(&self) -> String {
        format!("{}{}{}", self.item.stage, self.letter(), self.item.microbatch)
    }

    /// F, I, W, B or R.
    pub fn letter(&self) -> char {
        self.item.kind.letter().unwrap_or('?')
    }
}

/// A schedule laid out in time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scene {
    /// The schedule's name.
    pub name: Cow<'static, str>,
    /// Parameter names and values.
    pub params: Vec<(Cow<'static, str>, i64)>,
    /// Number of ranks.
    pub ranks: u32,
    /// Number of stages.
    pub stages: u32,
    /// Number of microbatches.
    pub microbatches: u32,
    /// Most stages of one rank.
    pub virtual_stages: u32,
    /// All bars, rank after rank, in program order.
    pub bars: Vec<Bar>,
    /// Start of each rank's bars, and their total.
    pub starts: Vec<u32>,
    /// Global end.
    pub makespan: i64,
    /// Busy time of each rank.
    pub busy: Vec<i64>,
    /// Bubble in the makespan sense: the largest idle time of a rank up to the global end.
    pub bubble: i64,
    /// Bubble in the idle sense: the largest idle time of a rank between its first start and last end.
    pub idle: i64,
    /// Peaks per rank.
    pub peaks: Vec<Peaks>,
    /// Time that a message takes.
    pub latency: i64,
}

impl Scene {
    /// Runs a checked schedule at the given costs and lays it out.
    pub fn new(checked: &Checked, costs: &CostModel) -> Scene {
        let index = Index::new(&checked.schedule);
        let timeline = sim::run(&checked.schedule, &index, costs)
            .unwrap_or_else(|_| unreachable!("a checked schedule has no cycle of waits, whatever the costs"));
        Scene::from_timeline(checked, costs, &timeline)
    }

    /// Lays out a run that is already there; `costs` must be those of the run.
    pub fn from_timeline(checked: &Checked, costs: &CostModel, timeline: &Timeline) -> Scene {
        let schedule = &checked.schedule;
        let index = Index::new(schedule);
        let virtual_of = virtual_stages(schedule);
        let mut bars = Vec::with_capacity(schedule.items.len());
        let mut bar_of = vec![ABSENT; schedule.items.len()];
        let mut starts = vec![0];
        for rank in (0..schedule.ranks).map(Rank) {
            let slots = slots(checked, rank);
            let live = live(schedule, rank);
            let first = schedule.starts[rank.index()] as usize;
            for (step, span) in spans(schedule, rank, costs, &timeline.end[first..]).into_iter().enumerate() {
                let Some(span) = span else { continue };
                bar_of[first + step] = bars.len() as u32;
                let item = schedule.items[first + step];
                bars.push(Bar {
                    item,
                    rank,
                    step: step as u32,
                    virtual_stage: virtual_of[item.stage.index()],
                    start: span.start,
                    end: span.end,
                    sent: timeline.sent(first + step),
                    arrives: timeline.sent(first + step) + costs.flight(&item),
                    overlap: span.overlap,
                    slot: slots[step],
                    needs: Vec::new(),
                    live: live[step],
                });
            }
            starts.push(bars.len() as u32);
        }
        for bar in &mut bars {
            bar.needs = needs(schedule, &index, &bar.item).map(|at| bar_of[at as usize]).collect();
        }
        Scene {
            name: schedule.name.clone(),
            params: schedule.params.to_vec(),
            ranks: schedule.ranks,
            stages: schedule.stages,
            microbatches: schedule.microbatches,
            virtual_stages: virtual_of.iter().max().map_or(1, |v| v + 1),
            bars,
            starts,
            makespan: timeline.makespan,
            busy: timeline.busy.clone(),
            bubble: timeline.bubble(),
            idle: timeline.idle(),
            peaks: checked.plan.peaks.to_vec(),
            latency: costs.latency,
        }
    }

    /// The bars of one rank.
    pub fn rank(&self, rank: u32) -> &[Bar] {
        &self.bars[self.starts[rank as usize] as usize..self.starts[rank as usize + 1] as usize]
    }

    /// A chain of bars without a gap from time 0 to the end: to end earlier, one
    /// of them must. Indices into [`Scene::bars`], first to last; where several chains exist, the one that
    /// stays longest on a rank.
    pub fn critical_path(&self) -> Vec<u32> {
        let mut path = Vec::new();
        let mut at = (0..self.bars.len()).rev().max_by_key(|at| self.bars[*at].end);
        while let Some(now) = at {
            path.push(now as u32);
            let (start, end) = self.extent(now);
            let own = self.starts[self.bars[now].rank.index()] as usize;
            let before = (own..now).rev().map(|n| (n, self.extent(n))).find(|(_, other)| *other != (start, end));
            let before = before.filter(|(_, other)| other.1 == start).map(|(n, _)| n);
            // Members of an overlap start together: what any of them waits for holds up all.
            let first = (own..=now).rev().take_while(|n| self.extent(*n) == (start, end)).last().unwrap_or(now);
            let last = now + self.bars[now..].iter().take_while(|b| extent(b) == (start, end)).count();
            let block = if self.bars[now].overlap.is_some() { first..last } else { now..now + 1 };
            let awaited = || {
                let needs = self.bars[block.clone()].iter().flat_map(|bar| &bar.needs);
                needs.map(|n| *n as usize).find(|n| {
                    let remote = self.bars[*n].rank != self.bars[now].rank;
                    !block.contains(n) && if remote { self.bars[*n].arrives } else { self.extent(*n).1 } == start
                })
            };
            let awaited = || awaited().map(|n| self.first_of_queue(n));
            at = before.or_else(awaited).filter(|n| *n != now);
        }
        path.reverse();
        path
    }

    /// Whose message a message waited for on its wire: the first of an unbroken row of them.
    fn first_of_queue(&self, mut at: usize) -> usize {
        let edge = |bar: &Bar| match bar.item.kind {
            Kind::Forward => Some((bar.item.stage, true)),
            Kind::InputGrad | Kind::FullBackward => Some((bar.item.stage, false)),
            _ => None,
        };
        while self.bars[at].sent > self.extent(at).1 {
            let own = self.starts[self.bars[at].rank.index()] as usize;
            let off_wire = |bar: &Bar| bar.arrives - self.latency;
            let before = |n: &usize| {
                let (bar, waits) = (&self.bars[*n], &self.bars[at]);
                edge(bar) == edge(waits) && off_wire(bar) == waits.sent && self.extent(*n).1 < self.extent(at).1
            };
            match (own..at).rev().find(before) {
                Some(earlier) => at = earlier,
                None => break,
            }
        }
        at
    }

    fn extent(&self, at: usize) -> (i64, i64) {
        extent(&self.bars[at])
    }

    /// The kinds that occur, in the order F, B, I, W, R.
    pub fn kinds(&self) -> Vec<Kind> {
        let has = |kind: &Kind| self.bars.iter().any(|bar| family(bar.item.kind) == *kind);
        FAMILIES.iter().copied().filter(has).collect()
    }

    /// Bubble as a share of the makespan, in percent.
    pub fn bubble_percent(&self) -> f64 {
        if self.makespan == 0 { 0.0 } else { 100.0 * self.bubble as f64 / self.makespan as f64 }
    }

    /// `zb_h1(P = 4, M = 8)`, [`printable`].
    pub fn title(&self) -> String {
        let name = printable(&self.name);
        let params: Vec<String> =
            self.params.iter().map(|(name, value)| format!("{} = {value}", printable(name))).collect();
        if params.is_empty() { name.into_owned() } else { format!("{name}({})", params.join(", ")) }
    }

    /// `2F7` where a rank holds several stages, `F7` elsewhere.
    pub fn label(&self, bar: &Bar) -> String {
        if self.virtual_stages > 1 { bar.key() } else { format!("{}{}", bar.letter(), bar.item.microbatch) }
    }
}

/// Span of a bar, or of the overlap that it is part of.
fn extent(bar: &Bar) -> (i64, i64) {
    bar.overlap.map_or((bar.start, bar.end), |branch| (branch.start, branch.end))
}

/// The kinds that have a colour, in the order of legends.
pub const FAMILIES: [Kind; 5] = [Kind::Forward, Kind::FullBackward, Kind::InputGrad, Kind::WeightGrad, Kind::Recompute];

/// The kind whose colour an item has: members of a coalesced W look like W.
pub fn family(kind: Kind) -> Kind {
    if kind == Kind::WeightGradJoin { Kind::WeightGrad } else { kind }
}

/// What legends call a kind.
pub fn describe(kind: Kind) -> &'static str {
    match family(kind) {
        Kind::Forward => "F forward",
        Kind::FullBackward => "B full backward",
        Kind::InputGrad => "I input gradient",
        Kind::WeightGrad => "W weight gradient",
        Kind::Recompute => "R recomputed forward",
        _ => "other",
    }
}

/// Number of each stage among those of its rank.
fn virtual_stages(schedule: &Schedule) -> Vec<u32> {
    let mut held = vec![0; schedule.ranks as usize];
    let number = |rank: &Rank| {
        held[rank.index()] += 1;
        held[rank.index()] - 1
    };
    schedule.placement.iter().map(number).collect()
}

/// Slot of each item of a rank: the plan has one compute node per item, in the same order.
fn slots(checked: &Checked, rank: Rank) -> Vec<Option<u32>> {
    let is_item = |op: Op| {
        matches!(
            op,
            Op::Forward | Op::InputGrad | Op::WeightGrad | Op::WeightGradJoin | Op::FullBackward | Op::Recompute
        )
    };
    let mut compute = checked.plan.rank(rank).iter().filter(|node| is_item(node.op));
    let slot = |item: &Item| {
        let node = item.kind.is_compute().then(|| compute.next()).flatten()?;
        (node.slot != qeffect_core::plan::NONE).then_some(node.slot)
    };
    checked.schedule.rank(rank).iter().map(slot).collect()
}

struct Span {
    start: i64,
    end: i64,
    overlap: Option<Branch>,
}

/// Start and end of each computing item of a rank. Branches of an overlap share its span; the
/// members of a branch divide it by their costs.
fn spans(schedule: &Schedule, rank: Rank, costs: &CostModel, ends: &[i64]) -> Vec<Option<Span>> {
    let items = schedule.rank(rank);
    let mut spans = Vec::with_capacity(items.len());
    let mut at = 0;
    while at < items.len() {
        if items[at].kind != Kind::OverlapBegin {
            let cost = costs.cost(&items[at]);
            let span = Span { start: ends[at] - cost, end: ends[at], overlap: None };
            spans.push(items[at].kind.is_compute().then_some(span));
            at += 1;
            continue;
        }
        let length = items[at..].iter().position(|i| i.kind == Kind::OverlapEnd).map_or(items.len() - at, |n| n + 1);
        overlap(&items[at..at + length], costs, ends[at], &mut spans);
        at += length;
    }
    spans
}

fn overlap(block: &[Item], costs: &CostModel, end: i64, spans: &mut Vec<Option<Span>>) {
    let length = costs.whole(block);
    let branches = block.iter().filter(|item| item.kind == Kind::OverlapBranch).count() as u32;
    let parts = block.split_inclusive(|item| matches!(item.kind, Kind::OverlapBranch | Kind::OverlapEnd));
    for (branch, part) in (0u32..).zip(parts) {
        let sum: i64 = part.iter().map(|item| costs.cost(item)).sum();
        let mut done = 0;
        let start_of = |done: i64| end - length + if sum == 0 { 0 } else { length * done / sum };
        for item in part {
            let start = start_of(done);
            done += costs.cost(item);
            let within = Branch { number: branch.saturating_sub(1), of: branches.max(1), start: end - length, end };
            let span = Span { start, end: start_of(done), overlap: Some(within) };
            spans.push(item.kind.is_compute().then_some(span));
        }
    }
}

/// What is live on a rank during each item: what was live before it, and what it adds.
///
/// As in [`sim::live`]: a tape lives from the start of F (or R) to the end of I, a work from the start of
/// I to the end of W, and inside an overlap or a group nothing is freed before its end.
fn live(schedule: &Schedule, rank: Rank) -> Vec<Peaks> {
    let items = schedule.rank(rank);
    let mut now = Peaks::default();
    let mut ended = Peaks::default();
    let mut overlapped = false;
    let mut out = Vec::with_capacity(items.len());
    let recomputed = sim::recomputed(items);
    for (at, item) in items.iter().enumerate() {
        match item.kind {
            Kind::Recompute => now.tapes += 1,
            Kind::Forward => {
                now.slots += 1;
                now.tapes += u32::from(!recomputed.contains(&(item.stage, item.microbatch)));
                ended.slots += u32::from(schedule.eval);
                ended.tapes += u32::from(schedule.eval);
            }
            Kind::InputGrad => {
                now.works += 1;
                ended.tapes += 1;
            }
            Kind::WeightGrad | Kind::WeightGradJoin => {
                ended.works += 1;
                ended.slots += 1;
            }
            Kind::FullBackward => {
                now.works += 1;
                ended.tapes += 1;
                ended.works += 1;
                ended.slots += 1;
            }
            Kind::OverlapBegin => overlapped = true,
            Kind::OverlapEnd => overlapped = false,
            _ => {}
        }
        out.push(now);
        let group_goes_on = items.get(at + 1).is_some_and(|next| next.kind == Kind::WeightGradJoin);
        if !overlapped && !group_goes_on {
            now.slots -= ended.slots;
            now.tapes -= ended.tapes;
            now.works -= ended.works;
            ended = Peaks::default();
        }
    }
    out
}

/// The items whose results an item takes: from another stage, and from its own F or I.
fn needs(schedule: &Schedule, index: &Index, item: &Item) -> impl Iterator<Item = u32> {
    let cell = index.cell(item.stage, item.microbatch);
    let own = match item.kind {
        Kind::InputGrad | Kind::FullBackward | Kind::Recompute => Some(index.forward[cell]),
        Kind::WeightGrad | Kind::WeightGradJoin => Some(index.input_grad[cell]),
        _ => None,
    };
    [index::dependency(schedule, index, item), own].into_iter().flatten().filter(|at| *at != ABSENT)
}
