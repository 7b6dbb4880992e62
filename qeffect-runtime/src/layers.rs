//! What models of equal blocks share: how they are cut into stages, and the sizes that FP8 asks for.

use std::ops::Range;

use qeffect_core::recipe::{Head as HeadFormat, Recipe};

use crate::error::{Error, Result};

/// Every size of a matrix product in FP8 is a multiple of this, tokens too: they are the inner size of a weight gradient.
pub const FP8_ALIGNMENT: usize = 16;

/// Standard deviation of first weights at [`DEVIATION_HIDDEN`]; it goes with 1/√hidden.
const DEVIATION: f64 = 0.02;

/// The hidden size of the smallest GPT-2, for which 0.02 was chosen. A narrow model that starts from 0.02 learns little in
/// its first hundreds of thousands of tokens.
const DEVIATION_HIDDEN: f64 = 768.0;

/// Standard deviation of first weights of a model with this hidden size.
pub(crate) fn deviation(hidden: usize) -> f64 {
    DEVIATION * (DEVIATION_HIDDEN / hidden as f64).sqrt()
}

/// The same for matrices that add to the residual stream: smaller, for there are 2·layers of them.
pub(crate) fn residual_deviation(hidden: usize, layers: usize) -> f64 {
    deviation(hidden) / (2.0 * layers as f64).sqrt()
}

/// Refuses a size of zero.
pub(crate) fn positive(sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => Err(Error::Config(format!("model: `{name}` must not be zero"))),
        None => Ok(()),
    }
}

/// Refuses sizes of products that FP8 cannot have: `sizes` always, `vocab` if the head runs in FP8.
pub(crate) fn aligned(recipe: &Recipe, sizes: &[(&str, usize)], vocab: usize) -> Result<()> {
    let Some(delayed) = recipe.delayed() else { return Ok(()) };
    let head = (delayed.head == HeadFormat::Fp8).then_some(("vocab", vocab));
    match sizes.iter().copied().chain(head).find(|(_, size)| !size.is_multiple_of(FP8_ALIGNMENT)) {
        Some((name, size)) => Err(Error::Config(format!(
            "model: products in FP8 need `{name}` to be a multiple of {FP8_ALIGNMENT}, found {size}"
        ))),
        None => Ok(()),
    }
}

/// Whether the head runs in FP8.
pub(crate) fn fp8_head(recipe: &Recipe) -> bool {
    recipe.delayed().is_some_and(|delayed| delayed.head == HeadFormat::Fp8)
}

/// Blocks per stage, as even as possible; the first stages take what is left over.
pub(crate) fn split(layers: usize, stages: usize) -> Result<Vec<usize>> {
    if stages == 0 || stages > layers {
        return Err(Error::Config(format!("{layers} blocks cannot be cut into {stages} stages")));
    }
    let (each, more) = (layers / stages, layers % stages);
    Ok((0..stages).map(|stage| each + usize::from(stage < more)).collect())
}

/// The stages, given the number of blocks of each; `stage` is told its blocks, and whether it is the first and the last.
/// These two may have no block, as one has the embedding and one the head.
pub(crate) fn cut<S>(
    layers: usize,
    blocks: &[usize],
    mut stage: impl FnMut(Range<usize>, bool, bool) -> Result<S>,
) -> Result<Vec<S>> {
    let total: usize = blocks.iter().sum();
    if blocks.is_empty() || total != layers {
        return Err(Error::Config(format!("the stages hold {total} blocks, the model has {layers}")));
    }
    if let Some(empty) = (1..blocks.len().saturating_sub(1)).find(|stage| blocks[*stage] == 0) {
        return Err(Error::Config(format!("stage {empty} holds nothing")));
    }
    let (mut done, last) = (0, blocks.len() - 1);
    let stages = blocks.iter().enumerate().map(|(at, count)| {
        done += count;
        stage(done - count..done, at == 0, at == last)
    });
    stages.collect()
}
