//! A layer that not every microbatch uses, and a rank of two stages: state moves for those that it concerns.

use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::{Caps, Device};

use crate::common::line;

fn on_each(case: fn(&dyn Fn() -> Box<dyn Device>)) {
    for fp8_needs_transposes in [false, true] {
        let caps = Caps { fp8_needs_transposes, ..Caps::default() };
        case(&|| Box::new(CpuDevice::with_caps(caps)));
    }
}

// case B05: what I of a microbatch did not cast stays unmoved, whatever else it rolls.
#[test]
fn a_layer_that_a_microbatch_does_not_use_is_not_rolled_for_it() {
    on_each(|device| line::a_layer_that_a_microbatch_does_not_use_is_not_rolled_for_it(device));
}

// case B10: the first F of the step after the commit may be another stage's.
#[test]
fn transposed_weights_follow_the_optimizer_whichever_stage_begins() {
    on_each(|device| line::transposed_weights_follow_the_optimizer_whichever_stage_begins(device));
}
