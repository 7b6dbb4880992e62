//! Training runs: a configuration, a checked schedule, and what a run prints and leaves behind.
//!
//! `qeffect train` and `examples/pretrain` are two ways to say what is run; everything else is here.

mod config;
mod health;
mod held_out;
mod report;
mod run;

use std::path::PathBuf;

pub use config::{Config, Data, Model, Optimizer, Pipeline, Run};
pub use run::{Outcome, run};

use qeffect_core::diag::Report;

/// Why a run did not start or did not end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// Sizes that do not go together.
    #[error("{0}")]
    Config(String),
    /// A schedule that the checker refuses.
    #[error("the schedule is refused:\n{0}")]
    Schedule(Report),
    /// Text that cannot be trained on.
    #[error(transparent)]
    Data(#[from] qeffect_runtime::data::DataError),
    /// The runtime.
    #[error(transparent)]
    Runtime(#[from] qeffect_runtime::error::Error),
    /// A file of the run's folder.
    #[error("cannot {action} `{}`: {reason}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
}

type Result<T, E = TrainError> = std::result::Result<T, E>;
