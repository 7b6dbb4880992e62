//! What can go wrong at run time, as values that say where and what was expected.

use qeffect_core::code::Code;

use crate::act::Act;
use crate::device::{Buf, DeviceError};

/// An error of the runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device refused a command, or failed in it.
    #[error(transparent)]
    Device(#[from] DeviceError),
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
    /// A configuration that cannot run.
    #[error("{0}")]
    Config(String),
    /// Text that cannot be trained on.
    #[error(transparent)]
    Data(#[from] crate::data::DataError),
}

/// Result of the runtime.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    pub(crate) fn shape(consumer: &str, expected: &str, found: Option<Act>) -> Error {
        Error::Shape {
            consumer: consumer.into(),
            expected: expected.into(),
            found: found.map_or_else(|| "nothing".into(), |act| act.to_string()),
        }
    }
}
