//! What can go wrong at run time, as values that say where and what was expected.

use qeffect_core::code::Code;
use qeffect_core::diag::Report;
use qeffect_core::ids::Rank;
use qeffect_core::ledger::{Action, LedgerError};

use crate::act::Act;
use crate::device::{Buf, DeviceError};
use crate::transport::TransportError;

/// An error of the runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device refused a command, or failed in it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A GPU, or a library for it, cannot be used.
    #[error(transparent)]
    Cuda(#[from] qeffect_kernels::Error),
    /// A tensor does not have the shape or type that its consumer takes.
    #[error("{consumer} takes {expected}, found {found}")]
    Shape {
        /// Who takes it.
        consumer: String,
        /// What it takes.
        expected: String,
        /// What it was given.
        found: String,
    },
    /// A buffer is used or given back by someone who does not hold it.
    #[error("buffer {0} is not leased: it was given back already, or never taken")]
    NotLeased(Buf),
    /// Buffers are still held where nothing may be in flight.
    #[error("{count} buffers are still held where nothing may be in flight")]
    StillLeased {
        /// How many.
        count: usize,
    },
    /// A rule of the contract is violated.
    #[error("{message} [{code}]")]
    Contract {
        /// Which rule.
        code: Code,
        /// What happened.
        message: String,
    },
    /// The ledger refused an action.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// A message did not come, or came otherwise than planned.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A schedule does not fit the model, recipe or run.
    #[error(transparent)]
    Schedule(#[from] Report),
    /// An action of the plan failed.
    #[error("{action}: {source}")]
    Action {
        /// Which.
        action: Action,
        /// Why.
        source: Box<Error>,
    },
    /// A rank failed.
    #[error("rank {rank}: {source}")]
    Rank {
        /// Which.
        rank: Rank,
        /// Why.
        source: Box<Error>,
    },
    /// A step met a value that is not finite. Nothing has changed but the step counter.
    #[error("step {step}: {what}; nothing has changed [{}]", Code::NonFinite)]
    NotFinite {
        /// Attempt number of the step.
        step: u64,
        /// What was not finite, as far as it is known.
        what: String,
    },
    /// A rank panicked: a fault of this crate or of an op.
    #[error("a panic: {0}")]
    Panic(String),
    /// A session whose ranks no longer agree, after an error that came too late to put everything back.
    #[error("the session is not usable any more: {0}")]
    Broken(String),
    /// A configuration that cannot run.
    #[error("{0}")]
    Config(String),
    /// Text that cannot be trained on.
    #[error(transparent)]
    Data(#[from] crate::data::DataError),
}

/// Result of the runtime.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<qeffect_core::arena::ArenaError> for Error {
    fn from(error: qeffect_core::arena::ArenaError) -> Error {
        Error::Contract { code: error.code, message: error.message }
    }
}

impl Error {
    /// The code of the violated rule, if one is.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Contract { code, .. } => Some(*code),
            Error::Ledger(error) => Some(error.code),
            Error::Transport(error) => error.code(),
            Error::Schedule(report) => report.diagnostics.first().map(|fault| fault.code),
            Error::Action { source, .. } | Error::Rank { source, .. } => source.code(),
            Error::NotFinite { .. } => Some(Code::NonFinite),
            _ => None,
        }
    }

    /// Whether this only says that another rank failed.
    pub fn is_echo(&self) -> bool {
        match self {
            Error::Transport(error) => error.is_echo(),
            Error::Action { source, .. } | Error::Rank { source, .. } => source.is_echo(),
            _ => false,
        }
    }

    /// A branch that was taken by F is not taken by I or W.
    #[doc(hidden)]
    pub fn branch() -> Error {
        Error::Config("the configuration of a stage has changed between two actions of a step".into())
    }

    /// A tensor of another shape than `consumer` takes.
    pub fn shapes(consumer: &str, expected: &str, found: &[Act]) -> Error {
        let found: Vec<String> = found.iter().map(Act::to_string).collect();
        let found = if found.is_empty() { "nothing".into() } else { found.join(", ") };
        Error::Shape { consumer: consumer.into(), expected: expected.into(), found }
    }

    /// The same, of at most one tensor.
    pub fn shape(consumer: &str, expected: &str, found: Option<Act>) -> Error {
        Error::Shape {
            consumer: consumer.into(),
            expected: expected.into(),
            found: found.map_or_else(|| "nothing".into(), |act| act.to_string()),
        }
    }
}
