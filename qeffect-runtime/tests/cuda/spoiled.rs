//! A NaN that a command leaves behind, in every mode and placement, its commands fused or not: a bad step changes nothing.

use qeffect_core::bind::Gradients;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::gpt::GptConfig;
use qeffect_schedules::zb_h1;

use crate::common::sites::Spoilt;
use crate::common::spoil::{FUSED, KINDS};
use crate::rig::beside_others;
use crate::sessions::in_groups;
use crate::training::{OPTIM, RECIPES, model};

/// The kinds that a NaN came from are all that are wanted.
fn spoilt(gradients: Gradients, capture: CaptureMode, fused: bool, wanted: &[&str]) {
    let config = GptConfig { layers: 2, ..model(RECIPES[0]) };
    let checked = &in_groups(zb_h1::<2, 4>().clone(), gradients);
    let spoilt = Spoilt { config, checked, optim: OPTIM, gradients, capture, fused };
    let kinds = spoilt.a_nan_anywhere_changes_nothing(|| Box::new(CudaDevice::new(0).unwrap()));
    println!("{capture}, {gradients:?}: {} kinds", kinds.len());
    for kind in wanted {
        assert!(kinds.iter().any(|(name, _)| name == kind), "{capture}, {gradients:?}: no {kind} in {kinds:?}");
    }
}

#[test]
fn a_nan_anywhere_changes_nothing_where_gradients_are_copied() {
    let Some(_turn) = beside_others() else { return };
    CaptureMode::ALL.iter().for_each(|capture| spoilt(Gradients::Copied, *capture, false, KINDS));
}

#[test]
fn a_nan_anywhere_changes_nothing_where_gradients_are_added_in_place() {
    let Some(_turn) = beside_others() else { return };
    CaptureMode::ALL.iter().for_each(|capture| spoilt(Gradients::Direct, *capture, false, KINDS));
}

#[test]
fn a_nan_anywhere_changes_nothing_where_gradients_are_coalesced() {
    let Some(_turn) = beside_others() else { return };
    let kinds = [KINDS, &["group_gemm"]].concat();
    CaptureMode::ALL.iter().for_each(|capture| spoilt(Gradients::Coalesced, *capture, false, &kinds));
}

/// As lists are without a test that looks at them.
#[test]
fn a_nan_in_fused_commands_changes_nothing() {
    let Some(_turn) = beside_others() else { return };
    for gradients in [Gradients::Copied, Gradients::Coalesced] {
        spoilt(gradients, CaptureMode::Step, true, FUSED);
    }
}
