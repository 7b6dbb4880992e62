//! Ops and models against numbers that something else made: PyTorch, formulas, finite differences, a tape.

#[path = "../common/mod.rs"]
mod common;
#[path = "../golden/mod.rs"]
mod golden;

mod gpt_model;
mod kept_bytes;
mod llama_model;
mod llama_ops;
mod ops;
mod stage_bodies;
