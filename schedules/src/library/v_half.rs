//! V-Half: a V with half of ZB-V's memory.
//!
//! Qi et al., *Pipeline Parallelism with Controllable Memory*, 2024. Rank r holds stages r and
//! 2P - 1 - r. Each rank repeats a building block of six unit slots whose F's go down the V at half
//! speed, so that a microbatch stays half as long on the first rank; both ends are tightened under
//! the same peak ([`qeffect_core::synth::pattern`] says how, and why it is no program of the schedule
//! language: what moves where depends on all ranks at once).
//!
//! | | costs of one of the 2P stages |
//! |---|---|
//! | bubble, and idle time inside a rank | 6 ceil(P/2) - 7 if f = i = w = 1, M >= 2P and P >= 3; 1 for P = 2 |
//! | other costs | the bubble does not grow with M if w + 2i >= 2f and w + 2f >= 2i |
//! | live (stage, microbatch) pairs on a rank | 2 floor((P + 2)/2), ZB-V: 2P |

use qeffect_core::diag::Report;
use qeffect_core::plan::Checked;
use qeffect_core::synth::pattern::Block;

/// Makes and checks it.
///
/// # Errors
///
/// If there is no such size: at least one rank and microbatch, at most 2^20 actions.
pub fn build(ranks: i64, microbatches: i64) -> Result<Checked, Report> {
    super::v_block::build("v_half", block, |p| 2 * ((p + 2) / 2), ranks, microbatches)
}

fn block(p: u32, r: u32) -> Block {
    // An even number of ranks needs three slots more, else two actions would meet in one slot.
    let gap = if p.is_multiple_of(2) { 3 } else { 0 };
    [2 * r, 3 * p - 2 - r, 3 * p + gap - 1 + 2 * r, 6 * p + gap - 2 - r]
}
