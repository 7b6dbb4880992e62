//! What a GPT block retains, computed from its shapes and counted by the pool while a step runs.
//!
//! PyTorch's split backward of the same block in bf16 keeps 32 bytes per token and element of the hidden size from F to I,
//! and 54 from I to W (`scripts/kept_bytes.py`).

use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Caps, Device};
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::pool::KeptBytes;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::gpipe;

/// Of the stage in the middle, which is one block.
fn kept(recipe: &str, fp8_needs_transposes: bool) -> (GptConfig, KeptBytes) {
    let (hidden, recipe) = (64, recipe.parse().unwrap());
    let config = GptConfig { vocab: 32, hidden, heads: 4, ffn: 4 * hidden, layers: 3, seq: 16, sequences: 2, recipe };
    let caps = Caps { fp8_needs_transposes, ..Caps::default() };
    let device = |_| Ok(Box::new(CpuDevice::with_caps(caps)) as Box<dyn Device>);
    let optim = SessionConfig::new(OptimConfig::default(), config.tokens());
    let stages = config.stages(&[1, 1, 1]).unwrap();
    let mut session = Session::with_devices(gpipe::build(3, 1).unwrap(), stages, optim, device).unwrap();
    let tokens: Vec<u32> = (0..config.tokens() as u32).map(|t| t % 32).collect();
    let report = session.step(vec![Windows { targets: tokens.clone(), tokens }]).unwrap();
    (config, report.kept[1])
}

#[test]
fn kept_bytes_of_the_gpt_block() {
    for (recipe, activation, code, factors) in [("bf16", 2, 2, 0), ("fp8-delayed", 2, 1, 4)] {
        for fp8_needs_transposes in [false, true] {
            let (config, found) = kept(recipe, fp8_needs_transposes);
            let (tokens, unit) = (config.tokens(), config.tokens() * config.hidden);
            // Of each norm mean and 1/deviation of each row, of attention one number per row and head, all f32.
            let statistics = 4 * tokens * (2 * 2 + config.heads);
            // The inputs of both norms, q, k and v, the input of GELU; inputs of the four matrices, once each.
            let tape = unit * (activation * (2 + 3 + 4) + code * (1 + 1 + 1 + 4)) + statistics + 4 * factors;
            // Those four, and the gradients of their outputs.
            let work = unit * code * ((1 + 1 + 1 + 4) + (3 + 1 + 4 + 1)) + 4 * 2 * factors;
            assert_eq!(found, KeptBytes { input: 0, tape, work }, "{recipe}, transposes: {fp8_needs_transposes}");
        }
    }
}
