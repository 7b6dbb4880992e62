//! The contract of QEffect, and everything that judges a schedule against it.
//!
//! Data flows one way through this crate:
//!
//! ```text
//! text or Rust tokens ─ lang::parse ─► Program ─ lang::interpret ─► Schedule ─ lower ─► Plan ─ check ─► Checked
//! ```
//!
//! The macro `schedule!`, the command line, the runtime and the tests all walk this same path, so
//! there is one interpreter, one lowering and one checker. Nothing here knows of `syn` or CUDA.
#![forbid(unsafe_code)]

pub mod action;
pub mod arena;
pub mod bind;
pub mod check;
pub mod coalesce;
pub mod code;
pub mod diag;
pub mod dtype;
pub mod effects;
pub mod execute;
pub mod fp8;
pub mod ids;
pub mod index;
pub mod lang;
pub mod ledger;
pub mod lower;
pub mod measured;
pub mod origin;
pub mod packed;
pub mod plan;
pub mod recipe;
pub mod scaling;
pub mod schedule;
pub mod shadow;
pub mod sim;
pub mod slots;
pub mod source;
pub mod synth;
pub mod tape;
pub mod template;
pub mod text;
pub mod token;
pub mod version;
