//! Devices: who owns buffers and carries out commands.
//!
//! A device knows nothing of ops, stages or schedules. It makes typed buffers, which keep their address for its whole
//! life, and carries out [`Cmd`]s over them. Commands hold no host data that changes from step to step, so a recorded
//! list of them can be replayed: that is what capture is.

mod hand_on;
mod shared;

pub use shared::{SharedDevice, Turn};

use core::fmt;
use std::time::Instant;

use qeffect_core::dtype::Dtype;

use crate::cmd::Cmd;

/// A buffer of one device. It stays valid, at one address, as long as the device lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Buf(pub(crate) u32);

impl Buf {
    /// The position in the device's table.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// What a buffer holds.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct BufSpec {
    /// For messages.
    pub name: String,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Number of rows.
    pub rows: usize,
    /// Elements per row.
    pub cols: usize,
}

impl BufSpec {
    /// A matrix.
    pub fn new(name: impl Into<String>, dtype: Dtype, rows: usize, cols: usize) -> BufSpec {
        BufSpec { name: name.into(), dtype, rows, cols }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.rows * self.cols
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

/// What a device asks of those who plan buffers for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Caps {
    /// Matrix products in FP8 take their first operand as stored and their second one transposed, and nothing else: a
    /// tensor that is needed the other way is kept as a transposed copy, made by the cast.
    pub fp8_needs_transposes: bool,
    /// Dimensions of FP8 products are multiples of this; 0 and 1: any will do.
    pub fp8_multiple: usize,
    /// Activations are bf16, with masters in f32, and nothing else.
    pub bf16_only: bool,
    /// Fused commands cost less than their parts.
    pub fuses: bool,
    /// Commands of a list run in parallel as far as their effects allow: buffers are reused late, and what one command does
    /// to independent cells is split.
    pub parallel: bool,
    /// Products in FP8 take one factor for a whole operand: microbatches of a group whose factors differ cannot be one
    /// product.
    pub one_factor: bool,
}

/// A list of commands that a device has made ready, to be launched as one. It belongs to the device that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct GraphId(pub(crate) u32);

impl GraphId {
    /// The position in the device's table.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A point in what a device was given to do. It belongs to the device that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Mark(pub(crate) u32);

/// What there is of a device's memory, for a session to be held against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// Bytes that nobody has taken.
    pub free: usize,
    /// Bytes that the device has taken already for what its lanes work in: they are part of what a session takes.
    pub workspaces: usize,
    /// Lanes, each with a workspace.
    pub lanes: usize,
}

/// Owner of buffers, executor of commands.
pub trait Device: Send {
    /// Its name, for messages and tables. Devices of one name share one memory.
    fn name(&self) -> &str;

    /// What it asks of buffers.
    fn caps(&self) -> Caps;

    /// Its memory, if that has an end which it knows: a session that does not fit is then refused before it takes any.
    fn memory(&self) -> Result<Option<Memory>, DeviceError> {
        Ok(None)
    }

    /// Makes a poisoned buffer: floats are NaN, other types have all bits but the first set. Never called in a replay.
    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError>;

    /// What a buffer holds.
    fn spec(&self, buf: Buf) -> Result<&BufSpec, DeviceError>;

    /// Carries out a command, or queues it behind those issued before. If the command is refused, nothing is written.
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError>;

    /// Fills a buffer from host memory. `bytes` has exactly its size.
    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Waits for all commands, then copies a buffer to host memory. `bytes` has exactly its size.
    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Makes a buffer's content as that of a new one, so that a read of what was not written shows.
    fn poison(&mut self, buf: Buf) -> Result<(), DeviceError>;

    /// Makes a list of commands ready to be launched as one. Nothing is carried out. The commands may be reordered
    /// where their effects allow it: a launch leaves every buffer as issuing them one by one would.
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError>;

    /// Carries out such a list, or queues it behind everything issued before.
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError>;

    /// Forgets such a list. Its number is not given out again.
    fn drop_graph(&mut self, graph: GraphId) -> Result<(), DeviceError>;

    /// Keeps others who share the device from giving it anything to do, until the turn is over: they wait. Who holds it waits
    /// for none of them. `None`: there are no others.
    fn hold(&mut self) -> Option<Turn> {
        None
    }

    /// Marks the point behind all that was issued and launched so far, to be timed. Where other marks are waiting to be read
    /// nothing is waited for. `None`: the device keeps no time, and who wants to know waits for it.
    fn mark(&mut self) -> Result<Option<Mark>, DeviceError> {
        Ok(None)
    }

    /// When the device came to each of these marks. Waits until it has, and forgets them. Marks of one device are on one clock,
    /// as long as there is one to be read; that of the host is kept to within the time of a launch.
    fn times(&mut self, marks: &[Mark]) -> Result<Vec<Instant>, DeviceError> {
        let reason = format!("{} marks of another device", marks.len());
        if marks.is_empty() { Ok(Vec::new()) } else { Err(DeviceError::Failed { cmd: "times", reason }) }
    }
}

/// What a device refuses. Nothing has been written then.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A buffer of another device, or of none.
    #[error("buffer {0} does not belong to this device")]
    UnknownBuffer(Buf),
    /// A list of commands of another device, or one that was dropped.
    #[error("command list {} does not belong to this device", .0.index())]
    UnknownGraph(GraphId),
    /// A command would write what it reads.
    #[error("{cmd}: `{buffer}` is written and used a second time")]
    Aliased {
        /// The command.
        cmd: &'static str,
        /// Name of the buffer.
        buffer: String,
    },
    /// A buffer has a type that the command does not take there.
    #[error("{cmd}: `{buffer}` holds {found}, not {expected}")]
    Dtype {
        /// The command.
        cmd: &'static str,
        /// Name of the buffer.
        buffer: String,
        /// Its type.
        found: Dtype,
        /// What is taken.
        expected: &'static str,
    },
    /// A buffer has another size.
    #[error("{cmd}: `{buffer}` has {found} elements, not {expected}")]
    Elements {
        /// The command.
        cmd: &'static str,
        /// Name of the buffer.
        buffer: String,
        /// Its elements.
        found: usize,
        /// What is needed.
        expected: usize,
    },
    /// The command itself failed.
    #[error("{cmd}: {reason}")]
    Failed {
        /// The command.
        cmd: &'static str,
        /// Why.
        reason: String,
    },
}
