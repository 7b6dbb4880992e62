//! The `qeffect` command as people and programs meet it: output, exit codes, files.
#![cfg(feature = "cli")]
#![allow(missing_docs)]

mod check;
mod command;
mod convert;
mod doctor;
#[cfg(target_os = "linux")]
mod profiler;
mod show;
mod simulate;
mod train;
mod usage;
