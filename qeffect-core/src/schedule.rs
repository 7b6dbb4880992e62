//! A schedule: per rank, the actions in program order, before communication is added.
//!
//! Every sequence is a `Cow<'static, [T]>`, so the same type is a `static` that the macro emitted
//! and a value that a reader built at run time.

use std::borrow::Cow;

use crate::action::{Item, Kind};
use crate::ids::{Rank, Stage};
use crate::origin::Origin;

/// When the scaling state of a stage moves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub enum Update {
    /// Nothing to move: stateless recipes only.
    None,
    /// amax is folded over the step, scales move at commit.
    Step,
    /// Each F and each I rolls the state of its stage (as in the paper). The strictest, the default.
    #[default]
    Microbatch,
}

/// How messages travel, and so what the checker judges.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Transport {
    /// One FIFO and stream per logical edge (boundary and direction).
    #[default]
    Edge,
    /// One FIFO per directed pair of ranks.
    RankEdge,
    /// One blocking stream per rank.
    Rendezvous,
}

/// Costs of F, I and W of one stage, in any unit of time.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Costs {
    /// Forward.
    pub f: i64,
    /// Input gradient.
    pub i: i64,
    /// Weight gradient.
    pub w: i64,
}

/// What an `expect` line measures.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Measure {
    /// Makespan minus the busy time of one rank: idle time up to the global end.
    Bubble(Costs),
    /// Largest idle time of a rank between its own first start and last end.
    Idle(Costs),
    /// Largest number of live microbatches (F start to W end) on a rank.
    Peak,
}

/// Comparison operators of `expect`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Compare {
    /// `<=`
    AtMost,
    /// `<`
    Below,
    /// `==`
    Equal,
    /// `>=`
    AtLeast,
    /// `>`
    Above,
}

/// A contract of the schedule about itself: `expect bubble(1, 1, 1) <= P - 1 if M >= P;`
///
/// Only those whose condition held for this instance are kept.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Expect {
    /// What is measured.
    pub measure: Measure,
    /// How it is compared.
    pub compare: Compare,
    /// With what.
    pub bound: i64,
    /// Where it was written.
    pub origin: Origin,
}

/// Declared upper bounds for one rank; `None`: no bound declared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Bounds {
    /// Live microbatches, from the start of F to the end of W.
    pub slots: Option<u32>,
    /// Live tapes, from F to I.
    pub tapes: Option<u32>,
    /// Live works, from I to W.
    pub works: Option<u32>,
}

/// `bytes(tape = |s| .., work = |s| .., budget = |r| ..)`: what stages retain per microbatch, and how much
/// of it a rank may hold. Tapes and works lie in regions of their own, per stage, each as large as its
/// peak: a rank holds the sum of its regions.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Bytes {
    /// Bytes from F to I, per stage (from R to I where F is recomputed).
    pub tape: Cow<'static, [u64]>,
    /// Bytes from I to W, per stage.
    pub work: Cow<'static, [u64]>,
    /// Bytes that F keeps until R, per stage; empty: as many as the tape.
    pub input: Cow<'static, [u64]>,
    /// Bytes that a rank may hold, per rank.
    pub budget: Cow<'static, [u64]>,
    /// Where it was written.
    pub origin: Origin,
}

/// Places of the header fields, for diagnostics about them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct HeaderOrigins {
    /// The schedule's name.
    pub name: Origin,
    /// `place:`.
    pub place: Origin,
    /// `microbatches:`.
    pub microbatches: Origin,
    /// `slots:`, `tapes:`, `works:`.
    pub bounds: [Origin; 3],
}

impl HeaderOrigins {
    /// For schedules without a written header.
    pub const NONE: HeaderOrigins = HeaderOrigins {
        name: Origin::NONE,
        place: Origin::NONE,
        microbatches: Origin::NONE,
        bounds: [Origin::NONE; 3],
    };
}

/// An unrolled schedule for given parameters.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schedule {
    /// Its name, for messages and tables.
    pub name: Cow<'static, str>,
    /// Parameter names and values of this instance, in declaration order.
    pub params: Cow<'static, [(Cow<'static, str>, i64)]>,
    /// Number of ranks (P).
    pub ranks: u32,
    /// Number of stages.
    pub stages: u32,
    /// Number of microbatches (M).
    pub microbatches: u32,
    /// Rank of each stage; `placement.len() == stages`.
    pub placement: Cow<'static, [Rank]>,
    /// All items, rank after rank.
    pub items: Cow<'static, [Item]>,
    /// Start of each rank's items, and their total: `ranks + 1` entries.
    pub starts: Cow<'static, [u32]>,
    /// Declared bounds per rank, or empty.
    pub bounds: Cow<'static, [Bounds]>,
    /// Contracts whose condition holds for this instance.
    pub expects: Cow<'static, [Expect]>,
    /// Declared transport.
    pub transport: Transport,
    /// Declared update mode.
    pub update: Update,
    /// Forward-only schedule.
    pub eval: bool,
    /// Microbatches per coalesced weight gradient; 1: none.
    pub coalesce: u32,
    /// Sizes of what is retained and budgets for it, if declared.
    pub bytes: Option<Bytes>,
    /// Places of the header fields.
    pub origins: HeaderOrigins,
}

impl Schedule {
    /// The items of one rank, in program order.
    pub fn rank(&self, rank: Rank) -> &[Item] {
        &self.items[self.starts[rank.index()] as usize..self.starts[rank.index() + 1] as usize]
    }

    /// The evaluation of a model that this schedule has placed: F of every microbatch, in the order of microbatches and
    /// stages. Each F stands behind those that it waits for, on any placement.
    pub fn forward_only(&self) -> Schedule {
        let mut items = Vec::new();
        let mut starts = vec![0];
        for rank in 0..self.ranks {
            let stages: Vec<Stage> = self.stages_of(Rank(rank)).collect();
            for microbatch in 0..self.microbatches {
                let forward = |stage: &Stage| Item::new(Kind::Forward, stage.0, microbatch, Origin::NONE.0);
                items.extend(stages.iter().map(forward));
            }
            starts.push(items.len() as u32);
        }
        Schedule {
            name: format!("{}, forward only", self.name).into(),
            params: self.params.clone(),
            placement: self.placement.clone(),
            items: items.into(),
            starts: starts.into(),
            bounds: Cow::Borrowed(&[]),
            expects: Cow::Borrowed(&[]),
            transport: self.transport,
            update: Update::None,
            eval: true,
            coalesce: 1,
            bytes: None,
            origins: HeaderOrigins::NONE,
            ..*self
        }
    }

    /// The stages of one rank, ascending.
    pub fn stages_of(&self, rank: Rank) -> impl Iterator<Item = Stage> + '_ {
        self.placement.iter().enumerate().filter(move |(_, r)| **r == rank).map(|(s, _)| Stage(s as u32))
    }
}
