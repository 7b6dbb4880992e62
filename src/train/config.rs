//! What a run is: model, pipeline, optimizer, data, and what it leaves behind.

use std::num::NonZeroU64;
use std::path::PathBuf;

use qeffect_core::bind::GradientChoice;
use qeffect_core::recipe::Recipe;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::place::Place;
use qeffect_runtime::session::{FastAccumulation, GradDtype, OnNonFinite};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A run, as a TOML file says it. Every key may be left out; keys that do not exist are refused.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The model.
    pub model: Model,
    /// How it is cut and in which order its parts run.
    pub pipeline: Pipeline,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// What it is trained on.
    pub data: Data,
    /// What else the run does.
    pub run: Run,
}

/// `[model]`: a GPT of bytes.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Model {
    /// Transformer blocks; at least one per stage.
    pub layers: usize,
    /// Elements per token.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Elements per token inside the MLP.
    pub ffn: usize,
    /// Tokens per sequence.
    pub sequence: usize,
    /// Sequences per microbatch.
    pub sequences: usize,
    /// How numbers are stored and scaled: `fp8-delayed`, also with settings as in `fp8-delayed:history=4,update=step`,
    /// `bf16`, `f32` or `f64`.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub recipe: Recipe,
}

/// `[pipeline]`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Pipeline {
    /// A schedule of the library, or a file.
    pub schedule: String,
    /// Ranks of a schedule that has them as a parameter.
    #[serde(deserialize_with = "at_least_one")]
    pub ranks: u32,
    /// Microbatches per step of a schedule that has them as a parameter.
    #[serde(deserialize_with = "at_least_one")]
    pub microbatches: u32,
    /// How weight gradients reach the optimizer: `copied`, `direct`, `coalesced`, or `coalesced:4` for groups of four.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub gradients: GradientChoice,
    /// What coalesced gradients of matrices are stored in: `master` or `bf16`.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub grad_dtype: GradDtype,
    /// Which FP8 products may be summed in fewer bits on a GPU: those of F (`forward`), `none`, or `all`.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub fast_accumulation: FastAccumulation,
}

/// `[optimizer]`: AdamW with linear warm-up and half a cosine.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Optimizer {
    /// Training steps.
    pub steps: u64,
    /// Steps of warm-up; a tenth of all if left out.
    pub warmup: Option<u64>,
    /// Learning rate after warm-up.
    pub lr: f64,
    /// Learning rate at the end; a tenth of `lr` if left out.
    pub floor: Option<f64>,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Decoupled decay of matrices.
    pub weight_decay: f64,
    /// Largest gradient norm.
    pub clip: f32,
}

/// `[data]`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Data {
    /// A text; its last tenth is held out.
    pub path: PathBuf,
}

/// `[run]`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Run {
    /// Seed of initialisation, batches and the sample.
    pub seed: u64,
    /// Folder for metrics and plots.
    pub out: PathBuf,
    /// Where it computes: `cpu`, `cuda:0` and so on for a GPU that all ranks share, or `auto`.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub device: Place,
    /// Evaluations over the run; the last one is on all held-out windows that fill whole passes, the others on the first
    /// 64 KiB.
    pub evaluations: u64,
    /// Bytes of text to generate at the end.
    pub sample: usize,
    /// What the sample continues.
    pub prompt: String,
    /// Take a schedule whose order of microbatches gives other numbers than the ascending one.
    pub allow_order_dependent: bool,
    /// How actions reach the device: `eager`, `action` or `step`. The numbers are the same.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub capture: CaptureMode,
    /// What follows a step that met a value that is not finite, which has changed nothing: `stop` or `skip`.
    #[serde(serialize_with = "as_text", deserialize_with = "from_text")]
    pub on_nonfinite: OnNonFinite,
    /// Tag what F keeps and have I and W compare the tags on the device: a mismatch makes the step bad and is named.
    pub verify: bool,
    /// Every so many steps, count what casts to FP8 lose and tell how the state cells fare: the worst in a table, all of them
    /// in the metrics. Such a step runs command by command, with the same bits as ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<NonZeroU64>,
    /// A file for the trace of the run's last step: what each rank did and when. That step runs action by action, with
    /// the same bits as ever. Chrome and Perfetto open it, and `--costs` of `qeffect schedule` takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace: Option<PathBuf>,
}

impl Default for Model {
    fn default() -> Self {
        let recipe = Recipe::Fp8Delayed(Default::default());
        Model { layers: 4, hidden: 128, heads: 4, ffn: 512, sequence: 64, sequences: 2, recipe }
    }
}

impl Default for Pipeline {
    fn default() -> Self {
        Pipeline {
            schedule: "zb_v".into(),
            ranks: 2,
            microbatches: 8,
            gradients: GradientChoice::default(),
            grad_dtype: GradDtype::default(),
            fast_accumulation: FastAccumulation::default(),
        }
    }
}

impl Default for Optimizer {
    fn default() -> Self {
        let OptimConfig { beta1, beta2, weight_decay, clip, .. } = OptimConfig::default();
        Optimizer { steps: 500, warmup: None, lr: 4.5e-3, floor: None, beta1, beta2, weight_decay, clip }
    }
}

impl Default for Data {
    fn default() -> Self {
        Data { path: concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/shakespeare.txt").into() }
    }
}

impl Default for Run {
    fn default() -> Self {
        Run {
            seed: 1,
            out: "runs".into(),
            device: Place::default(),
            evaluations: 5,
            sample: 400,
            prompt: "\n\nHAMLET.\n".into(),
            allow_order_dependent: false,
            capture: CaptureMode::default(),
            on_nonfinite: OnNonFinite::default(),
            verify: false,
            health: None,
            trace: None,
        }
    }
}

impl Model {
    /// As the runtime takes it.
    pub fn gpt(&self) -> GptConfig {
        GptConfig {
            vocab: 256,
            hidden: self.hidden,
            heads: self.heads,
            ffn: self.ffn,
            layers: self.layers,
            seq: self.sequence,
            sequences: self.sequences,
            recipe: self.recipe,
        }
    }
}

impl Optimizer {
    /// As the runtime takes it.
    pub fn adamw(&self) -> OptimConfig {
        OptimConfig {
            steps: self.steps,
            warmup: self.warmup.unwrap_or(self.steps / 10),
            peak: self.lr,
            floor: self.floor.unwrap_or(self.lr / 10.0),
            beta1: self.beta1,
            beta2: self.beta2,
            weight_decay: self.weight_decay,
            clip: self.clip,
            ..OptimConfig::default()
        }
    }
}

fn as_text<S: Serializer>(value: &impl ToString, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&value.to_string())
}

fn at_least_one<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let found = u32::deserialize(deserializer)?;
    if found == 0 { Err(serde::de::Error::custom("it is 0, and must be at least 1")) } else { Ok(found) }
}

fn from_text<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
    D: Deserializer<'de>,
{
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_what_differs_from_the_defaults() {
        assert_eq!(toml::from_str::<Config>("").unwrap(), Config::default());
        let text = "[model]\nlayers = 8\nrecipe = \"fp8-delayed:history=4\"\n[optimizer]\nwarmup = 0\n";
        let config: Config = toml::from_str(text).unwrap();
        assert_eq!((config.model.layers, config.model.recipe.to_string().as_str()), (8, "fp8-delayed:history=4"));
        assert_eq!((config.optimizer.adamw().warmup, config.optimizer.steps), (0, 500));
        assert_eq!(toml::from_str::<Config>(&toml::to_string(&config).unwrap()).unwrap(), config);
    }

    #[test]
    fn what_does_not_exist_is_refused() {
        let wrong = |text: &str| toml::from_str::<Config>(text).unwrap_err().to_string();
        assert!(wrong("[model]\nlayer = 8\n").contains("unknown field `layer`"));
        assert!(wrong("[models]\n").contains("unknown field `models`"));
        assert!(wrong("[model]\nrecipe = \"fp9\"\n").contains("one of: "));
    }
}
