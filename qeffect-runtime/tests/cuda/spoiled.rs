//! A NaN that a command leaves behind, in every kind of action, mode and placement, its commands fused or not, under `skip` and
//! under `stop`: a bad step changes nothing.

use qeffect_core::bind::Gradients;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::Device;

use crate::common::spoilt::{Actions, Run};
use crate::rig::beside_others;
use crate::training::{OPTIM, RECIPES, model};

/// Every mode as lists are where a test looks at them, and as they are else: a whole step is fused.
const WAYS: [(CaptureMode, bool); 4] =
    [(CaptureMode::Eager, false), (CaptureMode::Action, false), (CaptureMode::Step, false), (CaptureMode::Step, true)];

fn gpu() -> Box<dyn Device> {
    Box::new(CudaDevice::new(0).unwrap())
}

macro_rules! a_nan_anywhere_changes_nothing {
    ($($name:ident: $actions:ident, $gradients:ident;)*) => {
        /// Of a GPT.
        mod a_nan_anywhere_changes_nothing {
            use super::*;
            $(mod $name {
                use super::*;

                fn run(way: usize) {
                    let Some(_turn) = beside_others() else { return };
                    let (capture, fused) = WAYS[way];
                    let run = Run { actions: Actions::$actions, gradients: Gradients::$gradients, capture, fused };
                    run.of_gpt(model(RECIPES[0]), OPTIM, gpu);
                }

                #[test]
                fn eager() {
                    run(0);
                }

                #[test]
                fn action() {
                    run(1);
                }

                #[test]
                fn step() {
                    run(2);
                }

                #[test]
                fn step_fused() {
                    run(3);
                }
            })*
        }
    };
}

a_nan_anywhere_changes_nothing! {
    split_copied: Split, Copied;
    split_direct: Split, Direct;
    split_coalesced: Split, Coalesced;
    whole_copied: Whole, Copied;
    whole_direct: Whole, Direct;
    whole_coalesced: Whole, Coalesced;
    again_copied: Again, Copied;
    again_direct: Again, Direct;
    again_coalesced: Again, Coalesced;
}

fn of_llama(actions: Actions, gradients: Gradients) {
    let Some(_turn) = beside_others() else { return };
    for (capture, fused) in WAYS {
        Run { actions, gradients, capture, fused }.of_llama(model(RECIPES[0]), OPTIM, gpu);
    }
}

#[test]
fn a_nan_in_a_llama_changes_nothing() {
    of_llama(Actions::Split, Gradients::Copied);
}

#[test]
fn a_nan_in_a_llama_with_b_changes_nothing() {
    of_llama(Actions::Whole, Gradients::Direct);
}

#[test]
fn a_nan_in_a_llama_with_r_changes_nothing() {
    of_llama(Actions::Again, Gradients::Coalesced);
}
