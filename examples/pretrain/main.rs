//! Pretrains a byte-level GPT through a pipeline schedule that the Rust compiler has proved.
//!
//! `cargo run --release --example pretrain -- --help` lists what can be changed; what a run does is in `qeffect::train`.

mod args;

use std::process::ExitCode;

use anyhow::{Context, Result};
use args::Args;
use clap::Parser;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let (ranks, microbatches) = (i64::from(args.ranks), i64::from(args.microbatches));
    let checked = args.schedule.checked(ranks, microbatches).context("the schedule is refused")?;
    qeffect::train::run(&args.config(), checked.into_owned())?;
    Ok(())
}
