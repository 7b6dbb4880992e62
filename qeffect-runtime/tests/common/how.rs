//! Every way in which a session runs a step, every schedule of the library, and a model cut for each.

use qeffect_core::action::{Item, Kind};
use qeffect_core::check::{Options, check};
use qeffect_core::ids::Rank;
use qeffect_core::plan::{Checked, Op};
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::device::Device;
use qeffect_runtime::error::Result;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::stage::Stage;
use qeffect_schedules::{Entry, further, library};

/// Every mode with a device per rank, and whole steps on one device for all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    PerRank(CaptureMode),
    OneDevice,
}

pub const HOW: [How; 4] = [How::EAGER, How::PerRank(CaptureMode::Action), How::STEP, How::OneDevice];

impl How {
    pub const EAGER: How = How::PerRank(CaptureMode::Eager);
    pub const STEP: How = How::PerRank(CaptureMode::Step);

    pub const fn is_eager(self) -> bool {
        matches!(self, How::PerRank(CaptureMode::Eager))
    }

    pub fn session<S>(
        self,
        checked: Checked,
        stages: Vec<S>,
        config: SessionConfig,
        mut device: impl FnMut() -> Box<dyn Device>,
    ) -> Result<Session<S>>
    where
        S: Stage + Send + 'static,
        S::Tape: Send,
        S::Work: Send,
    {
        match self {
            How::PerRank(capture) => {
                Session::with_devices(checked, stages, SessionConfig { capture, ..config }, |_| Ok(device()))
            }
            How::OneDevice => Session::on_one_device(checked, stages, config, device()),
        }
    }
}

/// Blocks per stage, of a model of three or, where there are eight stages, of six. Uneven on purpose: a stage may hold one
/// block, two, or only the embedding or the head.
pub fn cut(stages: u32) -> &'static [usize] {
    match stages {
        1 => &[3],
        2 => &[1, 2],
        4 => &[0, 2, 1, 0],
        8 => &[0, 1, 1, 1, 1, 1, 1, 0],
        _ => panic!("no model is cut into {stages} stages"),
    }
}

/// A schedule to be run, and the one that evaluates a model placed by it.
#[derive(Clone)]
pub struct Case {
    pub schedule: &'static str,
    pub checked: Checked,
    pub evaluation: Checked,
    pub blocks: &'static [usize],
}

impl Case {
    /// Blocks of the whole model.
    pub fn layers(&self) -> usize {
        self.blocks.iter().sum()
    }

    pub fn ranks(&self) -> u32 {
        self.checked.schedule.ranks
    }

    pub fn microbatches(&self) -> u32 {
        self.checked.schedule.microbatches
    }
}

pub const RANKS: [u32; 3] = [1, 2, 4];

/// Every training schedule that is known by name.
pub fn training() -> impl Iterator<Item = &'static Entry> {
    library().iter().chain(further()).filter(|entry| !entry.eval)
}

/// Every training schedule on 1, 2 and 4 ranks, with that many microbatches or the fewest that it is for. None is left
/// out: what the checker refuses, or has stages that no model is cut into, panics.
pub fn cases(microbatches: u32) -> Vec<Case> {
    let case = |entry: &'static Entry, ranks: u32| {
        let ranks = i64::from(ranks);
        let microbatches = entry.least_microbatches(ranks).max(i64::from(microbatches));
        let checked = entry.checked(ranks, microbatches).unwrap().into_owned();
        let evaluation = entry.evaluation().checked(ranks, microbatches).unwrap().into_owned();
        Case { schedule: entry.name, blocks: cut(checked.schedule.stages), checked, evaluation }
    };
    training().flat_map(|entry| RANKS.map(|ranks| case(entry, ranks))).collect()
}

/// Whether every stage runs its weight gradients, or those of groups of `n`, in ascending order, as the plan says.
pub fn weight_gradients_ascend(checked: &Checked, n: u32) -> bool {
    let mut last = vec![None; checked.schedule.stages as usize];
    let nodes = checked.plan.nodes.iter();
    nodes.filter(|node| matches!(node.op, Op::WeightGrad | Op::FullBackward)).all(|node| {
        let group = node.microbatch.0 / n;
        last[node.stage.index()].replace(group).is_none_or(|last| last < group)
    })
}

/// The same schedule with R in front of the backwards of the chosen actions.
pub fn with_recomputation(checked: &Checked, chosen: impl Fn(Item) -> bool) -> Checked {
    let mut schedule = checked.schedule.clone();
    let (mut items, mut starts) = (Vec::new(), vec![0]);
    for rank in 0..schedule.ranks {
        for item in schedule.rank(Rank(rank)) {
            if matches!(item.kind, Kind::InputGrad | Kind::FullBackward) && chosen(*item) {
                items.push(Item { kind: Kind::Recompute, ..*item });
            }
            items.push(*item);
        }
        starts.push(items.len() as u32);
    }
    assert!(items.len() > schedule.items.len());
    (schedule.items, schedule.starts) = (items.into(), starts.into());
    schedule.expects = Vec::new().into(); // of costs without R
    check(schedule, &Options::AT_START).unwrap()
}
