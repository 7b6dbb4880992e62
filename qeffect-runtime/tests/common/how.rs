//! Every way in which a session runs a step, and a model cut for every number of stages.

use qeffect_core::plan::Checked;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::device::Device;
use qeffect_runtime::error::Result;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::stage::Stage;

/// Every mode with a device per rank, and whole steps on one device for all ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    PerRank(CaptureMode),
    OneDevice,
}

pub const HOW: [How; 4] = [
    How::PerRank(CaptureMode::Eager),
    How::PerRank(CaptureMode::Action),
    How::PerRank(CaptureMode::Step),
    How::OneDevice,
];

impl How {
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

/// Blocks per stage of a model of six. Uneven on purpose: a stage may hold one block, three, or only the embedding or
/// the head.
pub fn cut(stages: u32) -> Option<&'static [usize]> {
    match stages {
        1 => Some(&[6]),
        2 => Some(&[4, 2]),
        4 => Some(&[1, 3, 2, 0]),
        8 => Some(&[0, 1, 1, 1, 1, 1, 1, 0]),
        _ => None,
    }
}
