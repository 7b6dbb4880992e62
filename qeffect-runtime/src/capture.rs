//! Capture: a step is written down once and replayed ever after.
//!
//! At start the ordinary driver runs one step over a `record::Recorder`, which writes down every command and carries
//! out none, and over a rehearsal of the ledger; so capture leaves no trace. What it wrote down, a trace, is cut at its
//! messages into lists of commands that the device launches as one (`program`), or, where all ranks share one device,
//! merged into a single list (`joint`). A replayed step leases no buffer and asks the host nothing until its verdict.

pub(crate) mod joint;
pub(crate) mod program;
pub(crate) mod record;
pub(crate) mod replay;
pub(crate) mod split;

use core::fmt;
use core::str::FromStr;

/// How the actions of a training step reach the device. The numbers are the same, bit for bit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum CaptureMode {
    /// Command by command, as the stages' code issues them.
    Eager,
    /// One list per action of the plan. The ledger checks action by action.
    Action,
    /// One program per rank and step, or one list for all ranks where they share a device. The ledger checks once per
    /// step, before the launch.
    #[default]
    Step,
}

impl CaptureMode {
    /// All of them.
    pub const ALL: [CaptureMode; 3] = [CaptureMode::Eager, CaptureMode::Action, CaptureMode::Step];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            CaptureMode::Eager => "eager",
            CaptureMode::Action => "action",
            CaptureMode::Step => "step",
        }
    }
}

impl fmt::Display for CaptureMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CaptureMode {
    type Err = String;

    fn from_str(text: &str) -> Result<CaptureMode, String> {
        let unknown = || format!("there is no capture mode `{text}`; one of: eager, action, step");
        CaptureMode::ALL.into_iter().find(|mode| mode.name() == text).ok_or_else(unknown)
    }
}
