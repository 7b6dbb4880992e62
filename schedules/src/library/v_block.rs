//! What V-Half and V-Min share: a building block, repeated and tightened.

use qeffect_core::check::{Options, check};
use qeffect_core::code::Code;
use qeffect_core::diag::{Diagnostic, Report};
use qeffect_core::origin::Origin;
use qeffect_core::plan::Checked;
use qeffect_core::schedule::Bounds;
use qeffect_core::synth::pattern::{Block, repeat};

/// Repeats `block(ranks, rank)` and checks the result, `peak(ranks)` live pairs at most included.
pub(super) fn build(
    name: &'static str,
    block: fn(u32, u32) -> Block,
    peak: fn(u32) -> u32,
    ranks: i64,
    microbatches: i64,
) -> Result<Checked, Report> {
    // The same limit as the language's on ranks; the product is judged where the block is repeated.
    let size = |value: i64| u32::try_from(value).ok().filter(|value| *value <= 1 << 16);
    let made = size(ranks).zip(size(microbatches)).and_then(|(ranks, microbatches)| {
        let blocks: Vec<Block> = (0..ranks).map(|rank| block(ranks, rank)).collect();
        Some((ranks, repeat(name, &blocks, microbatches).ok()?))
    });
    let Some((ranks, mut schedule)) = made else {
        let message = format!("`{name}` has no instance of {ranks} ranks and {microbatches} microbatches");
        let fault = Diagnostic::new(Code::Header, Origin::NONE, message)
            .help("give at least one of each, and at most 2^20 actions in all");
        return Err(Report::from_faults(vec![fault]));
    };
    let slots = Some(peak(ranks));
    schedule.bounds = vec![Bounds { slots, ..Bounds::default() }; ranks as usize].into();
    check(schedule, &Options::AT_START)
}
