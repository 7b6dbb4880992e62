//! Schedules and plans as the text that PyTorch's pipelining writes and reads.
//!
//! | format | one line per rank | here |
//! |---|---|---|
//! | compute-only CSV | `0F0,0F1,0I0,0W0` | [`read_csv`], [`write_csv`]: a [`Schedule`](crate::schedule::Schedule) |
//! | lowered, with communication | `0F0,0SEND_F0,0RECV_B0,0I0` | [`read_plan`]: the nodes of a [`Plan`](crate::plan::Plan); [`write_comms`] writes what PyTorch loads, [`write_plan`] all that a plan says |
//!
//! Reading is strict: a cell must match as a whole, and every fault has line and column. A file says
//! which rank runs a stage only by its rows, so the placement is taken from there.

mod cell;
mod csv;
mod plan;
mod pytorch;
mod shards;
mod words;

pub use csv::{read_csv, write_csv};
pub use plan::{RawPlan, is_lowered, read_plan, write_plan};
pub use pytorch::write_comms;
pub use words::spelt;

#[cfg(test)]
mod tests;
