//! Scales, histories, weight caches and gradients of one linear layer, number by number, as the cpu device has them.

use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::Device;

use crate::common::{line, state_cases};
use crate::rig::beside_others;

fn gpu() -> Box<dyn Device> {
    Box::new(CudaDevice::new(0).unwrap())
}

// Case B04. The sums are exact; factors are multiplied in an order of the library's, which is a few roundings.
#[test]
fn a_retained_tensor_carries_its_own_factor() {
    let Some(_turn) = beside_others() else { return };
    state_cases::a_retained_tensor_carries_its_own_factor(&gpu, 4.0 * f32::EPSILON);
}

// Case B05.
#[test]
fn only_an_input_gradient_moves_the_backward_state() {
    let Some(_turn) = beside_others() else { return };
    state_cases::only_an_input_gradient_moves_the_backward_state(&gpu);
}

// Case B05.
#[test]
fn a_layer_that_a_microbatch_does_not_use_is_not_rolled_for_it() {
    let Some(_turn) = beside_others() else { return };
    line::a_layer_that_a_microbatch_does_not_use_is_not_rolled_for_it(&gpu);
}

// Case B10.
#[test]
fn transposed_weights_follow_the_optimizer_whichever_stage_begins() {
    let Some(_turn) = beside_others() else { return };
    line::transposed_weights_follow_the_optimizer_whichever_stage_begins(&gpu);
}

// Case B44.
#[test]
fn a_tiny_input_gives_finite_numbers() {
    let Some(_turn) = beside_others() else { return };
    state_cases::a_tiny_input_gives_finite_numbers(&gpu);
}

// Case B07.
#[test]
fn a_moving_weight_scale_does_not_change_what_the_cache_means() {
    let Some(_turn) = beside_others() else { return };
    state_cases::a_moving_weight_scale_does_not_change_what_the_cache_means(&gpu);
}

// Case B02.
#[test]
fn a_weight_history_rolls_once_per_step() {
    let Some(_turn) = beside_others() else { return };
    state_cases::a_weight_history_rolls_once_per_step(&gpu);
}

// Case B10.
#[test]
fn the_transposed_weight_follows_the_optimizer() {
    let Some(_turn) = beside_others() else { return };
    state_cases::the_transposed_weight_follows_the_optimizer(&gpu);
}

// Cases B13 and B55.
#[test]
fn every_microbatch_is_added_once_in_any_order() {
    let Some(_turn) = beside_others() else { return };
    state_cases::every_microbatch_is_added_once_in_any_order(&gpu, &["bf16"]);
}

// Case B34.
#[test]
fn gradients_are_scaled_once() {
    let Some(_turn) = beside_others() else { return };
    state_cases::gradients_are_scaled_once(&gpu, &["bf16"]);
}
