//! Every way in which a session runs a step, every schedule that keeps the order, and a model cut for each.

use qeffect_core::plan::{Checked, Op};
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::device::Device;
use qeffect_runtime::error::Result;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::stage::Stage;
use qeffect_schedules::{further, library};

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
pub fn cut(stages: u32) -> Option<&'static [usize]> {
    match stages {
        1 => Some(&[3]),
        2 => Some(&[1, 2]),
        4 => Some(&[0, 2, 1, 0]),
        8 => Some(&[0, 1, 1, 1, 1, 1, 1, 0]),
        _ => None,
    }
}

/// A schedule to be run, and the one that evaluates a model placed by it.
pub struct Case {
    pub name: String,
    pub checked: Checked,
    pub evaluation: Checked,
    pub blocks: &'static [usize],
}

impl Case {
    /// Blocks of the whole model.
    pub fn layers(&self) -> usize {
        self.blocks.iter().sum()
    }
}

/// Every training schedule on 1, 2 and 4 ranks that keeps F's and I's in order: all of the library, and of the further
/// ones those that take these numbers.
pub fn ascending(microbatches: u32) -> Vec<Case> {
    let mut cases = Vec::new();
    for entry in library().iter().chain(further()).filter(|entry| !entry.eval) {
        for ranks in [1, 2, 4] {
            let Ok(checked) = entry.checked(ranks, i64::from(microbatches)) else { continue };
            let Some(blocks) = cut(checked.schedule.stages) else { continue };
            if checked.order_dependent {
                continue;
            }
            cases.push(Case {
                name: format!("{} on {ranks} ranks", entry.name),
                checked: checked.into_owned(),
                evaluation: entry.evaluation().checked(ranks, i64::from(microbatches)).unwrap().into_owned(),
                blocks,
            });
        }
    }
    for entry in library().iter().filter(|entry| !entry.eval) {
        let found = cases.iter().filter(|case| case.name.starts_with(&format!("{} on", entry.name)));
        assert_eq!(found.count(), 3, "{}", entry.name);
    }
    cases
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
