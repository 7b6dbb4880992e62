//! V-Min: a V with a third of ZB-V's memory.
//!
//! Qi et al., *Pipeline Parallelism with Controllable Memory*, 2024. Rank r holds stages r and
//! 2P - 1 - r. Each rank repeats a building block of six unit slots in which every action follows what
//! it needs at once, so that a microbatch stays as short as it can; both ends are tightened under the
//! same peak ([`qeffect_core::synth::pattern`] says how).
//!
//! | | costs of one of the 2P stages |
//! |---|---|
//! | bubble, and idle time inside a rank | 4P - 7 if 3 divides P, else 4P - 5, if f = i = w = 1, M >= 2P, P >= 2 |
//! | other costs | the bubble grows with M as soon as costs differ |
//! | live (stage, microbatch) pairs on a rank | at most 2 floor((P + 4)/3), ZB-V: 2P |

use qeffect_core::diag::Report;
use qeffect_core::plan::Checked;
use qeffect_core::synth::pattern::Block;

/// Makes and checks it.
///
/// # Errors
///
/// If there is no such size: at least one rank and microbatch, at most 2^20 actions.
pub fn build(ranks: i64, microbatches: i64) -> Result<Checked, Report> {
    super::v_block::build("v_min", block, |p| 2 * ((p + 4) / 3), ranks, microbatches)
}

fn block(p: u32, r: u32) -> Block {
    // Two slots more where three divides the ranks, else two actions would meet in one slot.
    let gap = if p.is_multiple_of(3) { 2 } else { 0 };
    [r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p + gap - 1 - r]
}
