//! What a device cannot compute is refused when a rank is made, by name, before anything runs.

use qeffect_core::dtype::Dtype;
use qeffect_core::recipe::Recipe;
use qeffect_core::schedule::Update;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::stage::{StageSpec, Working};

/// Whether a device can run stages of a recipe on microbatches of `tokens`, `members` of which have the weight gradients of
/// one product: 1 where gradients are not coalesced.
///
/// # Errors
///
/// [`Error::Config`] that names the type, or the parameter, its dimension and the multiple that is needed, or the group.
pub fn admit<'a>(
    device: &dyn Device,
    recipe: &Recipe,
    specs: impl IntoIterator<Item = &'a StageSpec>,
    tokens: usize,
    members: u32,
) -> Result<()> {
    let (name, caps) = (device.name(), device.caps());
    if caps.bf16_only && (recipe.activation(), recipe.master()) != (Dtype::Bf16, Dtype::F32) {
        let found = recipe.name();
        return Err(Error::Config(format!(
            "recipe {found} does not run on {name}, which computes in bf16 and FP8: take bf16 or fp8-delayed, or the cpu"
        )));
    }
    let multiple = caps.fp8_multiple.max(1);
    for param in specs.into_iter().flat_map(|spec| &spec.params) {
        if !matches!(param.working, Working::Fp8(_)) {
            continue;
        }
        if caps.one_factor && members > 1 && recipe.update() == Update::Microbatch {
            return Err(Error::Config(format!(
                "the gradients of `{}` cannot be coalesced on {name}: with `update=microbatch` each of the {members} microbatches \
                 of a group has a scale of its own, which FP8 products carry as block scales on Hopper GPUs alone; take \
                 gradients `direct` or `copied`, `update=step` in the recipe, or recipe bf16",
                param.path
            )));
        }
        // The terms of a sum are inputs in F, outputs in dI, and tokens in dW.
        let (inputs, outputs) = (param.cols, param.rows);
        for (what, size) in [("inputs", inputs), ("outputs", outputs), ("tokens per microbatch", tokens)] {
            if !size.is_multiple_of(multiple) {
                return Err(Error::Config(format!(
                    "`{}` has {size} {what}: FP8 products on {name} need a multiple of {multiple}",
                    param.path
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuDevice;
    use crate::device::Caps;
    use crate::gpt::GptConfig;
    use crate::stage::Stage;

    fn verdict(caps: Caps, recipe: &str, change: impl Fn(&mut GptConfig)) -> Result<()> {
        let recipe: Recipe = recipe.parse().unwrap();
        let mut config =
            GptConfig { vocab: 32, hidden: 32, heads: 2, ffn: 64, layers: 1, seq: 16, sequences: 2, recipe };
        change(&mut config);
        let stages = config.stages(&[1]).unwrap();
        admit(&CpuDevice::with_caps(caps), &recipe, stages.iter().map(Stage::spec), config.tokens(), 1)
    }

    #[test]
    fn what_does_not_fit_is_named() {
        // Shapes of the GPT are multiples of 16 in FP8 already, so this device asks for more.
        let gpu = Caps {
            fp8_needs_transposes: true,
            fp8_multiple: 48,
            bf16_only: true,
            fuses: true,
            parallel: true,
            one_factor: false,
        };
        let refused = |recipe, change: fn(&mut GptConfig)| verdict(gpu, recipe, change).unwrap_err().to_string();
        let fitting = |c: &mut GptConfig| {
            (c.vocab, c.hidden, c.ffn, c.seq, c.sequences) = (96, 48, 144, 48, 1);
        };
        assert!(verdict(gpu, "fp8-delayed", fitting).is_ok());
        assert_eq!(
            refused("fp8-delayed", |c| (c.vocab, c.hidden, c.ffn) = (96, 48, 144)),
            "`blocks.0.qkv.weight` has 32 tokens per microbatch: FP8 products on cpu need a multiple of 48"
        );
        assert!(refused("fp8-delayed", |c| c.seq = 24).contains("`blocks.0.qkv.weight` has 32 inputs"));
        let found = refused("fp8-delayed", |c| (c.vocab, c.hidden, c.seq, c.sequences) = (96, 48, 48, 1));
        assert!(found.contains("`blocks.0.fc1.weight` has 64 outputs"), "{found}");
        assert!(refused("f32", |_| {}).starts_with("recipe f32 does not run on cpu, which computes in bf16"));
        assert!(refused("f64", |_| {}).contains("recipe f64"));
        // Only FP8 asks for multiples, and only on a device that does.
        assert!(verdict(gpu, "bf16", |_| {}).is_ok());
        assert!(verdict(Caps::default(), "fp8-delayed", |_| {}).is_ok());
        assert!(verdict(Caps::default(), "f64", |_| {}).is_ok());
    }
}
