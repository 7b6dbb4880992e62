//! What a GPT block retains, computed from its shapes and counted by the pool while a step runs.
//!
//! PyTorch's split backward of the same block in bf16 keeps 32 bytes per token and element of the hidden size from F to I,
//! and 54 from I to W (`scripts/kept_bytes.py`).

use qeffect_core::action::Kind;
use qeffect_core::ids::Rank;
use qeffect_core::plan::Checked;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Caps, Device};
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::pool::KeptBytes;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::{gpipe, zb_h1, zb_v};

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

/// Tapes and works share buffers. Of a GPT block in bf16 a tape takes 32 bytes per token and element of the hidden size and
/// a work 32, of which 14 lie in the tape already; what only a tape has is given up when its I ends. Pools of their own
/// would each be as large as their peak.
#[test]
fn one_pool_is_smaller_than_one_for_tapes_and_one_for_works() {
    const TAPE: usize = 32;
    const WORK: usize = 32;
    const BOTH: usize = 14;
    let ranks = |checked: &Checked| {
        let of = |rank: u32| {
            let (mut tapes, mut works) = (0, 0);
            let (mut together, mut most_tapes, mut most_works) = (0, 0, 0);
            for item in checked.schedule.rank(Rank(rank)) {
                match item.kind {
                    Kind::Forward => tapes += 1,
                    Kind::InputGrad => (tapes, works) = (tapes - 1, works + 1),
                    Kind::WeightGrad => works -= 1,
                    kind => panic!("{kind:?}"),
                }
                // While I runs its tape is still there.
                let ending = usize::from(item.kind == Kind::InputGrad);
                let now = (tapes + ending) * TAPE + works * WORK - ending * BOTH;
                together = together.max(now);
                (most_tapes, most_works) = (most_tapes.max(tapes + ending), most_works.max(works));
            }
            (together, most_tapes * TAPE + most_works * WORK)
        };
        [0, 1, 2, 3].map(of)
    };
    assert_eq!(ranks(zb_h1::<4, 8>()), [(146, 160); 4]);
    assert_eq!(ranks(zb_v::<4, 8>()), [(274, 288), (274, 352), (274, 416), (274, 480)]);
}
