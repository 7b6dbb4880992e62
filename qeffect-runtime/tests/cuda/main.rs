//! The cuda device against the cpu device, and its graphs against its own eager run. Without a GPU every test says that
//! it was skipped.

#[path = "../common/mod.rs"]
mod common;

mod alone;
mod cases;
mod commands;
mod ends;
mod graphs;
mod llama;
mod observed;
mod products;
mod rig;
mod sessions;
mod spoiled;
mod state;
mod training;
