//! The list scheduler: all ranks in time, one setting of preferences.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::{Request, item};
use crate::action::{Item, Kind};
use crate::ids::Rank;

/// What runs if both an F and an I are ready.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Prefer {
    InputGrad,
    Forward,
    /// Whichever did not run last.
    Turn,
}

/// How many works a rank lets lie before a W takes precedence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lag {
    /// W only fills idle time, or makes room.
    Unlimited,
    /// None: W follows its I.
    None,
    /// As many as the rank's number, per virtual stage: what a bubble at the end can hold.
    Rank,
    /// Twice as many.
    TwiceRank,
}

/// Most microbatches in flight on a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Depth {
    /// What the memory limit allows.
    Memory,
    /// As in 1F1B, for V stages.
    Single,
    /// As in ZB-H2 and interleaved 1F1B.
    Double,
}

/// Preferences of one run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Setting {
    prefer: Prefer,
    lag: Lag,
    depth: Depth,
    /// How much of a W may hold up an action that is known to become ready, in quarters.
    tolerance: i64,
    /// Of several F's (I's) that are ready, the one of the later stage.
    late_forward: bool,
    late_backward: bool,
}

impl Setting {
    /// The settings tried for a request, best guesses first.
    pub(super) fn all(request: &Request) -> Vec<Setting> {
        let flags: &[(bool, bool)] = match request.stages / request.ranks {
            1 => &[(true, true)],
            _ => &[(true, true), (false, false), (true, false), (false, true)],
        };
        let mut all = Vec::new();
        for depth in [Depth::Memory, Depth::Double, Depth::Single] {
            for lag in [Lag::Unlimited, Lag::Rank, Lag::TwiceRank, Lag::None] {
                for prefer in [Prefer::InputGrad, Prefer::Turn, Prefer::Forward] {
                    for tolerance in [0, 2, 4] {
                        for (late_forward, late_backward) in flags.iter().copied() {
                            all.push(Setting { prefer, lag, depth, tolerance, late_forward, late_backward });
                        }
                    }
                }
            }
        }
        all
    }

    fn depth(&self, request: &Request, rank: u32) -> i64 {
        let (ranks, v) = (i64::from(request.ranks), i64::from(request.stages / request.ranks));
        let below = ranks - 1 - i64::from(rank);
        let depth = match self.depth {
            Depth::Memory => i64::MAX / 4,
            Depth::Single => below + (v - 1) * ranks + 1,
            Depth::Double => 2 * below + (v - 1) * ranks + 1,
        };
        depth.max(v)
    }

    fn lag(&self, request: &Request, rank: u32) -> usize {
        let v = (request.stages / request.ranks) as usize;
        match self.lag {
            Lag::Unlimited => usize::MAX,
            Lag::None => 0,
            Lag::Rank => rank as usize * v,
            Lag::TwiceRank => 2 * rank as usize * v,
        }
    }
}

/// Not known yet.
const UNKNOWN: i64 = i64::MAX;

struct RankState {
    /// Stages of the rank, ascending.
    stages: Vec<u32>,
    free_at: i64,
    memory: i64,
    /// Microbatches with a tape.
    tapes: i64,
    /// Stage and microbatch of each pending work, oldest first.
    works: VecDeque<(u32, u32)>,
    last: Kind,
    depth: i64,
    lag: usize,
    program: Vec<Item>,
}

/// One run of the list scheduler.
pub(super) struct Order<'a> {
    request: &'a Request,
    placement: &'a [Rank],
    setting: Setting,
    ranks: Vec<RankState>,
    /// Per stage and microbatch: when the input of F, and of I, is there.
    forward_in: Vec<i64>,
    backward_in: Vec<i64>,
    /// Per stage: the next F and the next I.
    next_forward: Vec<u32>,
    next_backward: Vec<u32>,
    /// Until when the wire into each stage is taken, for activations and for gradients.
    wires: Vec<[i64; 2]>,
    wakes: BinaryHeap<Reverse<(i64, u32)>>,
}

/// What a rank does next.
enum Decision {
    Run(Kind, u32, u32),
    /// Nothing before something arrives.
    Sleep,
}

impl<'a> Order<'a> {
    pub(super) fn new(request: &'a Request, placement: &'a [Rank], setting: &Setting) -> Order<'a> {
        let cells = request.stages as usize * request.microbatches as usize;
        let mut forward_in = vec![UNKNOWN; cells];
        forward_in[..request.microbatches as usize].fill(0);
        let rank = |rank: u32| RankState {
            stages: (0..request.stages).filter(|s| placement[*s as usize] == Rank(rank)).collect(),
            free_at: 0,
            memory: 0,
            tapes: 0,
            works: VecDeque::new(),
            last: Kind::InputGrad,
            depth: setting.depth(request, rank),
            lag: setting.lag(request, rank),
            program: Vec::new(),
        };
        Order {
            request,
            placement,
            setting: *setting,
            ranks: (0..request.ranks).map(rank).collect(),
            forward_in,
            backward_in: vec![UNKNOWN; cells],
            next_forward: vec![0; request.stages as usize],
            next_backward: vec![0; request.stages as usize],
            wires: vec![[i64::MIN; 2]; request.stages as usize],
            wakes: (0..request.ranks).map(|rank| Reverse((0, rank))).collect(),
        }
    }

    /// The program of each rank; `None` if the run does not reach the end.
    pub(super) fn run(mut self) -> Option<Vec<Vec<Item>>> {
        while let Some(Reverse((now, rank))) = self.wakes.pop() {
            if now < self.ranks[rank as usize].free_at {
                continue;
            }
            if let Decision::Run(kind, stage, microbatch) = self.decide(rank as usize, now) {
                self.start(rank as usize, now, kind, stage, microbatch);
            }
        }
        let actions = self.request.stages as usize * self.request.microbatches as usize * 3;
        let done: usize = self.ranks.iter().map(|rank| rank.program.len()).sum();
        (done == actions).then(|| self.ranks.into_iter().map(|rank| rank.program).collect())
    }

    fn cell(&self, stage: u32, microbatch: u32) -> usize {
        stage as usize * self.request.microbatches as usize + microbatch as usize
    }

    /// The F of a stage that comes next, and when its input is there.
    fn forward(&self, stage: u32) -> Option<(u32, i64)> {
        let microbatch = self.next_forward[stage as usize];
        (microbatch < self.request.microbatches).then(|| (microbatch, self.forward_in[self.cell(stage, microbatch)]))
    }

    /// The I of a stage that comes next, if its F has run.
    fn backward(&self, stage: u32) -> Option<(u32, i64)> {
        let microbatch = self.next_backward[stage as usize];
        (microbatch < self.next_forward[stage as usize])
            .then(|| (microbatch, self.backward_in[self.cell(stage, microbatch)]))
    }

    /// Whether an F of the stage may start: room for it, and for every later stage without a tape.
    fn room(&self, rank: usize, stage: u32) -> bool {
        let state = &self.ranks[rank];
        let later = state.stages.iter().filter(|s| **s > stage);
        let empty =
            later.filter(|s| self.next_forward[**s as usize] == self.next_backward[**s as usize]).count() as i64;
        state.memory + (1 + empty) * self.request.tape <= self.request.limit && state.tapes + 1 + empty <= state.depth
    }

    fn decide(&self, rank: usize, now: i64) -> Decision {
        let state = &self.ranks[rank];
        let ready = |next: Option<(u32, i64)>| next.filter(|(_, at)| *at <= now).map(|(microbatch, _)| microbatch);
        let forward = self.pick(&state.stages, self.setting.late_forward, |stage| {
            ready(self.forward(stage)).filter(|_| self.room(rank, stage))
        });
        let backward = self.pick(&state.stages, self.setting.late_backward, |stage| ready(self.backward(stage)));
        let work = state.works.front().copied();
        if let Some((stage, microbatch)) = work
            && state.works.len() > state.lag
        {
            return Decision::Run(Kind::WeightGrad, stage, microbatch);
        }
        let forward_first = match self.setting.prefer {
            Prefer::InputGrad => false,
            Prefer::Forward => true,
            Prefer::Turn => state.last == Kind::InputGrad,
        };
        match (forward, backward) {
            (Some((stage, microbatch)), None) => return Decision::Run(Kind::Forward, stage, microbatch),
            (Some((stage, microbatch)), Some(_)) if forward_first => {
                return Decision::Run(Kind::Forward, stage, microbatch);
            }
            (_, Some((stage, microbatch))) => return Decision::Run(Kind::InputGrad, stage, microbatch),
            (None, None) => {}
        }
        let Some((stage, microbatch)) = work else { return Decision::Sleep };
        // Nothing else is ready: W fills the time, unless it would hold up what is known to come.
        let cost = self.request.costs.cost(&item(Kind::WeightGrad, stage, microbatch));
        let coming = |next: Option<(u32, i64)>| next.map(|(_, at)| at).filter(|at| *at > now && *at != UNKNOWN);
        let soonest = state.stages.iter().filter_map(|stage| {
            let forward = coming(self.forward(*stage)).filter(|_| self.room(rank, *stage));
            [forward, coming(self.backward(*stage))].into_iter().flatten().min()
        });
        match soonest.min() {
            Some(at) if (now + cost - at) * 4 > cost * self.setting.tolerance => Decision::Sleep,
            _ => Decision::Run(Kind::WeightGrad, stage, microbatch),
        }
    }

    fn pick(&self, stages: &[u32], late: bool, ready: impl Fn(u32) -> Option<u32>) -> Option<(u32, u32)> {
        let found = |stage: &u32| ready(*stage).map(|microbatch| (*stage, microbatch));
        if late { stages.iter().rev().find_map(found) } else { stages.iter().find_map(found) }
    }

    fn start(&mut self, rank: usize, now: i64, kind: Kind, stage: u32, microbatch: u32) {
        let end = now + self.request.costs.cost(&item(kind, stage, microbatch));
        let (tape, work) = (self.request.tape, self.request.work);
        let cell = self.cell(stage, microbatch);
        let state = &mut self.ranks[rank];
        state.program.push(item(kind, stage, microbatch));
        state.free_at = end;
        match kind {
            Kind::Forward => {
                state.memory += tape;
                state.tapes += 1;
                state.last = kind;
                self.next_forward[stage as usize] += 1;
                if stage + 1 < self.request.stages {
                    self.deliver(rank, &item(kind, stage, microbatch), end, cell + self.request.microbatches as usize);
                } else {
                    self.backward_in[cell] = end;
                }
            }
            Kind::InputGrad => {
                state.memory -= tape - work;
                state.tapes -= 1;
                state.last = kind;
                state.works.push_back((stage, microbatch));
                self.next_backward[stage as usize] += 1;
                if stage > 0 {
                    self.deliver(rank, &item(kind, stage, microbatch), end, cell - self.request.microbatches as usize);
                }
            }
            _ => {
                state.memory -= work;
                state.works.pop_front();
            }
        }
        self.wakes.push(Reverse((end, rank as u32)));
    }

    /// The result of an item reaches the next stage, after what its wire carries already.
    fn deliver(&mut self, from: usize, sender: &Item, end: i64, cell: usize) {
        let forward = sender.kind == Kind::Forward;
        let stage = if forward { sender.stage.0 + 1 } else { sender.stage.0 - 1 };
        let to = self.placement[stage as usize];
        let mut at = end;
        if to.index() != from {
            let costs = &self.request.costs;
            let wire = &mut self.wires[stage as usize][usize::from(forward)];
            let sent = end.max(*wire);
            at = sent + costs.flight(sender);
            *wire = at - costs.latency;
        }
        let table = if forward { &mut self.forward_in } else { &mut self.backward_in };
        table[cell] = at;
        self.wakes.push(Reverse((at, to.0)));
    }
}
