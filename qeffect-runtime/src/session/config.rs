//! What a session is told.

use core::fmt;
use core::str::FromStr;

use qeffect_core::bind::Gradients;

use crate::capture::CaptureMode;
use crate::fast::FastAccumulation;
use crate::gradients::GradDtype;
use crate::optim::OptimConfig;

/// What a session fixes beside schedule and model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SessionConfig {
    /// The optimizer.
    pub optim: OptimConfig,
    /// Tokens of a microbatch.
    pub tokens: usize,
    /// How weight gradients reach the optimizer.
    pub gradients: Gradients,
    /// What they are stored in on that way.
    pub grad_dtype: GradDtype,
    /// Which products in FP8 may be summed in fewer bits, on a device that can. It decides the bits of a run there.
    pub fast_accumulation: FastAccumulation,
    /// Names the first weights.
    pub seed: u64,
    /// Accept a schedule whose order of microbatches gives other numbers than the ascending one.
    pub allow_order_dependent: bool,
    /// How the actions of a training step reach the device.
    pub capture: CaptureMode,
    /// What follows a step that met a value that is not finite.
    pub on_nonfinite: OnNonFinite,
    /// Tag the slots of tapes, and have the device compare the tags: what differs makes a step bad. Off, it costs nothing.
    pub verify: bool,
}

/// What follows a step that met a value that is not finite. In either case it has changed nothing but the step counter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OnNonFinite {
    /// An error, which says where.
    Stop,
    /// The next step; the report says that this one was skipped.
    #[default]
    Skip,
}

impl OnNonFinite {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            OnNonFinite::Stop => "stop",
            OnNonFinite::Skip => "skip",
        }
    }
}

impl fmt::Display for OnNonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for OnNonFinite {
    type Err = String;

    fn from_str(text: &str) -> Result<OnNonFinite, String> {
        let found = [OnNonFinite::Stop, OnNonFinite::Skip].into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| format!("there is no policy `{text}`; one of: stop, skip"))
    }
}

impl SessionConfig {
    /// Gradients copied, seed 1, whole steps captured, and nothing out of the ordinary.
    pub const fn new(optim: OptimConfig, tokens: usize) -> SessionConfig {
        SessionConfig {
            optim,
            tokens,
            gradients: Gradients::Copied,
            grad_dtype: GradDtype::Master,
            fast_accumulation: FastAccumulation::Forward,
            seed: 1,
            allow_order_dependent: false,
            capture: CaptureMode::Step,
            on_nonfinite: OnNonFinite::Skip,
            verify: false,
        }
    }
}
