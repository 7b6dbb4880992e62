//! The command line of `pretrain`.

use std::num::NonZeroU64;
use std::path::PathBuf;

use clap::Parser;
use qeffect::core::bind::GradientChoice;
use qeffect::core::recipe::Recipe;
use qeffect::runtime::capture::CaptureMode;
use qeffect::runtime::place::Place;
use qeffect::runtime::session::{FastAccumulation, GradDtype, OnNonFinite};
use qeffect::schedules::{Entry, library};
use qeffect::train::{Config, Data, Model, Optimizer, Pipeline, Run};

/// Trains a byte-level GPT through a pipeline schedule that the Rust compiler has proved.
///
/// Ranks are threads of this process; numbers are FP8 with delayed scaling unless another recipe
/// is asked for. Everything is deterministic: the same arguments give the same bits.
#[derive(Parser, Debug)]
#[command(
    name = "pretrain",
    version,
    after_help = "Examples:\n  \
        cargo run --release --example pretrain\n  \
        cargo run --release --example pretrain -- --schedule 1f1b --recipe bf16\n  \
        cargo run --release --example pretrain -- --ranks 4 --layers 8 --steps 100\n  \
        cargo run --release --example pretrain -- --data my.txt --seed 7\n  \
        cargo run --release --example pretrain -- --steps 20 --trace trace.json"
)]
pub struct Args {
    /// Pipeline schedule: gpipe, one_f_one_b, interleaved_1f1b, zb_h1 or zb_v
    #[arg(long, default_value = "zb_v", value_parser = schedule)]
    pub schedule: &'static Entry,

    /// How numbers are represented and scaled: fp8-delayed (also with settings, such as
    /// `fp8-delayed:history=4,update=step`), bf16, f32 or f64
    #[arg(long, default_value = "fp8-delayed", value_parser = |text: &str| text.parse::<Recipe>())]
    pub recipe: Recipe,

    /// Where to compute: auto, cpu, or cuda:N, a GPU that all ranks share
    #[arg(long, default_value_t, value_parser = |text: &str| text.parse::<Place>())]
    pub device: Place,

    /// Pipeline ranks (threads)
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub ranks: u32,

    /// Microbatches per step
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub microbatches: u32,

    /// How weight gradients reach the optimizer: copied, direct, coalesced, or coalesced:N for groups
    /// of N microbatches
    #[arg(long, default_value_t, value_parser = |text: &str| text.parse::<GradientChoice>())]
    pub gradients: GradientChoice,

    /// What coalesced gradients of matrices are stored in: master or bf16
    #[arg(long, default_value_t)]
    pub grad_dtype: GradDtype,

    /// Which FP8 products may be summed in fewer bits on a GPU: forward, none or all
    #[arg(long, default_value_t)]
    pub fast_accumulation: FastAccumulation,

    /// Training steps
    #[arg(long, default_value_t = DEFAULT_STEPS, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,

    /// Transformer blocks; at least one per stage
    #[arg(long, default_value_t = 4)]
    pub layers: usize,

    /// Peak learning rate
    #[arg(long, default_value_t = 4.5e-3)]
    pub lr: f64,

    /// Text to train on; the last tenth is held out
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/shakespeare.txt"), hide_default_value = true)]
    pub data: PathBuf,

    /// Evaluations over the run; the last one is on all held-out windows that fill whole passes, the
    /// others on the first 64 KiB
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    pub evaluations: u64,

    /// Seed of initialisation, batches and the sample
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// How actions reach the device: eager, action (a list of commands per action) or step (one program per rank and
    /// step); the numbers are the same
    #[arg(long, default_value_t)]
    pub capture: CaptureMode,

    /// What follows a step that met a value that is not finite, which has changed nothing: stop or skip
    #[arg(long, default_value_t)]
    pub on_nonfinite: OnNonFinite,

    /// Tag what F keeps and have I and W compare the tags on the device: a mismatch makes the step bad and is named
    #[arg(long)]
    pub verify: bool,

    /// Folder for metrics and plots
    #[arg(long, default_value = "runs")]
    pub out: PathBuf,

    /// Every N steps, tell what casts to FP8 lose and whether scales move; such a step runs command by command, with the
    /// same bits
    #[arg(long, value_name = "N")]
    pub health: Option<NonZeroU64>,

    /// Write a trace of the last step: what each rank did and when. It runs action by action then, with the same bits;
    /// `qeffect schedule simulate --costs FILE` takes it as measured costs
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Bytes of text to generate at the end
    #[arg(long, default_value_t = 400)]
    pub sample: usize,
}

impl Args {
    /// The run that was asked for.
    pub fn config(&self) -> Config {
        Config {
            model: Model { layers: self.layers, recipe: self.recipe, ..Model::default() },
            pipeline: Pipeline {
                schedule: self.schedule.name.into(),
                ranks: self.ranks,
                microbatches: self.microbatches,
                gradients: self.gradients,
                grad_dtype: self.grad_dtype,
                fast_accumulation: self.fast_accumulation,
            },
            optimizer: Optimizer { steps: self.steps, lr: self.lr, ..Optimizer::default() },
            data: Data { path: self.data.clone() },
            run: Run {
                seed: self.seed,
                out: self.out.clone(),
                device: self.device,
                evaluations: self.evaluations,
                sample: self.sample,
                capture: self.capture,
                on_nonfinite: self.on_nonfinite,
                verify: self.verify,
                health: self.health,
                trace: self.trace.clone(),
                ..Run::default()
            },
        }
    }
}

/// Steps of the default run: what reaches the documented loss.
pub const DEFAULT_STEPS: u64 = 500;

/// A training schedule of the library, by name; `zb-v` and `1f1b` are understood too.
fn schedule(text: &str) -> Result<&'static Entry, String> {
    let name = text.to_ascii_lowercase().replace('-', "_");
    let name = if name == "1f1b" { "one_f_one_b" } else { &name };
    library().iter().find(|entry| entry.name == name && !entry.eval).ok_or_else(|| {
        let names: Vec<&str> = library().iter().filter(|entry| !entry.eval).map(|entry| entry.name).collect();
        format!("there is no such schedule; one of: {}", names.join(", "))
    })
}
