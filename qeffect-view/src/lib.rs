//! Pictures and exchange formats of schedules.
//!
//! Everything here is a pure function from values of `qeffect_core` to text:
//!
//! | module | gives |
//! |---|---|
//! | [`terminal`] | ranks against time, in characters, with or without colour |
//! | [`svg`] | one lane per rank, for papers and pages |
//! | [`html`] | one self-contained page with zoom and details; two schedules side by side |
//! | [`trace`] | Chrome and Perfetto trace events |
//! | [`report`] | why a schedule is refused, drawn in its text |
//! | [`json`] | schedules as JSON, in and out (PyTorch's CSV is `qeffect_core::text`) |
//!
//! All pictures are drawn from one [`Scene`], so they cannot disagree.
#![forbid(unsafe_code)]

pub mod color;
pub mod html;
pub mod json;
pub mod report;
pub mod scene;
pub mod svg;
pub mod terminal;
pub mod trace;

pub use scene::{Bar, Scene};
