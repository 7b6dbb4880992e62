//! Scales, histories, weight caches and gradient slots of one linear layer, number by number.

use crate::common::one_layer::{Bench, STAGE, constant, pattern};
use crate::common::state_cases::{self, first_row, train_one_step};
use qeffect_core::code::Code;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::{Caps, Device};
use qeffect_runtime::error::Error;
use qeffect_runtime::shard::Named;

/// Where products in FP8 take any operand as it is stored, and where they want transposed copies.
fn devices() -> [Box<dyn Fn() -> Box<dyn Device>>; 2] {
    [false, true].map(|fp8_needs_transposes| {
        let caps = Caps { fp8_needs_transposes, ..Caps::default() };
        Box::new(move || Box::new(CpuDevice::with_caps(caps)) as Box<dyn Device>) as Box<_>
    })
}

// case B04: retained bytes are read with the factor they were made with, whatever the scale is by now.
#[test]
fn a_retained_tensor_carries_its_own_factor() {
    devices().iter().for_each(|device| state_cases::a_retained_tensor_carries_its_own_factor(device, 0.0));
}

// case B05: the backward state moves once per I, at its end; F, W, reduce and commit leave it alone.
#[test]
fn only_an_input_gradient_moves_the_backward_state() {
    devices().iter().for_each(|device| state_cases::only_an_input_gradient_moves_the_backward_state(device));
}

// case B44: an input so small that its scale would be infinite, and a zero that is cast with that scale.
#[test]
fn a_tiny_input_gives_finite_numbers() {
    devices().iter().for_each(|device| state_cases::a_tiny_input_gives_finite_numbers(device));
}

// case B07: the weight's scale moves while its cached bytes stay; their factor stays with them.
#[test]
fn a_moving_weight_scale_does_not_change_what_the_cache_means() {
    devices().iter().for_each(|device| state_cases::a_moving_weight_scale_does_not_change_what_the_cache_means(device));
}

// case B02: a weight rolls once per step, however many microbatches there are.
#[test]
fn a_weight_history_rolls_once_per_step() {
    devices().iter().for_each(|device| state_cases::a_weight_history_rolls_once_per_step(device));
}

// case B10: a commit renews the transposed copy too.
#[test]
fn the_transposed_weight_follows_the_optimizer() {
    devices().iter().for_each(|device| state_cases::the_transposed_weight_follows_the_optimizer(device));
}

// case B55, case B13: every microbatch is added once, whichever weight gradient runs first or last.
#[test]
fn every_microbatch_is_added_once_in_any_order() {
    let recipes = &["f32", "bf16"];
    devices().iter().for_each(|device| state_cases::every_microbatch_is_added_once_in_any_order(device, recipes));
}

// case B34: the division by the number of microbatches happens once; so does that by the loss scale.
#[test]
fn gradients_are_scaled_once() {
    devices().iter().for_each(|device| state_cases::gradients_are_scaled_once(device, &["f32", "bf16"]));
}

// case B13: a second write of one microbatch's gradient is refused; it neither replaces the first nor is lost.
#[test]
fn a_gradient_that_is_written_twice_is_refused() {
    let mut bench = Bench::with("f32", 1, Caps::default(), true);
    bench.begin();
    let (_, tape) = bench.forward(0, &constant(1.0));
    let (_, work) = bench.input_grad(0, &first_row(0.6), tape);
    match bench.weight_grad(0, work) {
        Err(Error::Contract { code: Code::ArenaDuplicate, message }) => assert!(message.contains("layer.weight")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_gradient_is_refused() {
    let mut bench = Bench::new("f32", 2);
    bench.begin();
    let (_, tape) = bench.forward(0, &constant(1.0));
    let (_, work) = bench.input_grad(0, &first_row(1.0), tape);
    bench.weight_grad(0, work).unwrap();
    match bench.shard.reduce(STAGE) {
        Err(Error::Contract { code: Code::ArenaMissing, message }) => {
            assert!(message.contains("layer.weight") && message.contains("microbatch 1"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

/// Everything that a step may change only if it is good.
fn lasting(bench: &mut Bench) -> Vec<(String, Named)> {
    bench.shard.export().unwrap().into_iter().filter(|(name, _)| !name.ends_with("/gradient")).collect()
}

#[test]
fn a_value_that_is_not_finite_leaves_no_trace() {
    for recipe in ["fp8-delayed:history=4", "fp8-delayed:history=4,update=step", "bf16", "f32"] {
        for hidden in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            for backward in [false, true] {
                let mut bench = Bench::new(recipe, 2);
                train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
                bench.shard.commit().unwrap();
                let before = lasting(&mut bench);
                bench.begin();
                for m in 0..2 {
                    let (mut x, mut dy) = (constant(1.0), constant(1.0));
                    if m == 0 {
                        if backward { dy[7] = hidden } else { x[7] = hidden }
                    }
                    let (_, tape) = bench.forward(m, &x);
                    let (_, work) = bench.input_grad(m, &dy, tape);
                    bench.weight_grad(m, work).unwrap();
                }
                let verdict = bench.settle();
                assert!(!verdict.commit, "{recipe}: {hidden} is noticed");
                bench.shard.commit().unwrap();
                assert!(lasting(&mut bench) == before, "{recipe}: {hidden} leaves a trace");
                // The next step is none the worse for it.
                train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
                bench.shard.commit().unwrap();
                assert_eq!(bench.shard.commits().unwrap(), 2);
            }
        }
    }
}

#[test]
fn an_aborted_step_leaves_no_trace() {
    let mut bench = Bench::new("fp8-delayed:history=4", 2);
    train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
    bench.shard.commit().unwrap();
    let before = lasting(&mut bench);
    bench.begin();
    let (_, tape) = bench.forward(0, &pattern(64.0));
    drop(bench.input_grad(0, &pattern(32.0), tape));
    assert!(bench.shard.pool().quiescent().is_err());
    bench.shard.abort().unwrap();
    bench.shard.pool().quiescent().unwrap();
    assert!(lasting(&mut bench) == before);
}

#[test]
fn with_one_update_per_step_the_largest_amax_of_the_step_counts() {
    let mut bench = Bench::new("fp8-delayed:history=4,update=step", 3);
    bench.begin();
    for (m, amax) in [2.0, 8.0, 1.0].into_iter().enumerate() {
        let (_, tape) = bench.forward(m as u32, &pattern(amax));
        assert_eq!(bench.scale("input"), 1.0, "scales stand still within a step");
        let (_, work) = bench.input_grad(m as u32, &pattern(4.0 * amax), tape);
        bench.weight_grad(m as u32, work).unwrap();
    }
    assert!(bench.settle().commit);
    bench.shard.commit().unwrap();
    assert_eq!((bench.scale("input"), bench.scale("grad_output")), (56.0, 57344.0 / 32.0));
    assert_eq!(bench.floats("layer.input/history"), [0.0, 0.0, 0.0, 8.0]);
}
