//! What changes no bit of a model that is not split: filling its caches again, evaluations, copies that are transposed,
//! and values that it had before.

use crate::common::settings::small;
use crate::common::{Solo, batch};
use qeffect_core::bind::Gradients;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::Caps;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::stage::Stage;

// case B35: the cache is derived from the masters with the scale in force, so deriving it again gives the same bits.
#[test]
fn filling_the_cache_again_changes_nothing() {
    for recipe in ["bf16", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step"] {
        let config = small(recipe);
        let optim = OptimConfig { steps: 6, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
        let (mut plain, mut again) = (Solo::new(&config, &[4], 2, optim), Solo::new(&config, &[4], 2, optim));
        for step in 0..6 {
            plain.step(&batch(&config, step, 2));
            again.step(&batch(&config, step, 2));
            again.shard.prologue().unwrap();
        }
        assert!(plain.shard.export().unwrap() == again.shard.export().unwrap(), "{recipe}");
    }
}

/// Values that are given replace those before, and what was learnt about them: larger ones leave no amax behind.
#[test]
fn values_that_are_given_decide_alone() {
    for recipe in ["bf16", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step"] {
        let config = small(recipe);
        let optim = OptimConfig { steps: 4, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
        let mut runs = [1.0, 1024.0].map(|factor| {
            let mut solo = Solo::new(&config, &[4], 2, optim);
            let paths: Vec<String> =
                config.stages(&[4]).unwrap()[0].spec().params.iter().map(|p| p.path.clone()).collect();
            let values: Vec<Vec<f64>> = paths.iter().map(|path| solo.shard.param(path).unwrap()).collect();
            for factor in [factor, 1.0] {
                for (path, values) in paths.iter().zip(&values) {
                    let values: Vec<f64> = values.iter().map(|x| x * factor).collect();
                    solo.shard.set_param(path, &values).unwrap();
                }
                solo.shard.prologue().unwrap();
            }
            for step in 0..4 {
                solo.step(&batch(&config, step, 2));
            }
            solo.shard.export().unwrap()
        });
        let (plain, replaced) = runs.split_at_mut(1);
        assert!(plain[0] == replaced[0], "{recipe}");
    }
}

#[test]
fn evaluation_leaves_no_trace() {
    for recipe in ["f32", "fp8-delayed:history=4", "fp8-delayed:history=4,update=step"] {
        let config = small(recipe);
        let optim = OptimConfig { steps: 4, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
        let mut runs = [false, true].map(|evaluates| {
            let mut solo = Solo::new(&config, &[2, 2], 2, optim);
            for step in 0..4 {
                if evaluates {
                    let before = solo.shard.export().unwrap();
                    assert!(solo.evaluate(&batch(&config, 100 + step, 2)).is_finite());
                    assert!(solo.shard.export().unwrap() == before);
                }
                solo.step(&batch(&config, step, 2));
            }
            solo.shard.export().unwrap()
        });
        let (plain, evaluated) = runs.split_at_mut(1);
        assert!(plain[0] == evaluated[0], "{recipe}");
    }
}

#[test]
fn transposed_copies_change_no_bit() {
    let config = small("fp8-delayed:history=4");
    let optim = OptimConfig { steps: 4, peak: 3e-3, floor: 3e-4, ..OptimConfig::default() };
    let [mut plain, mut both] = [Caps::default(), Caps { fp8_needs_transposes: true, ..Caps::default() }]
        .map(|caps| Solo::on(Box::new(CpuDevice::with_caps(caps)), &config, &[4], 2, optim, (Gradients::Copied, 1)));
    for step in 0..4 {
        let data = batch(&config, step, 2);
        assert_eq!(plain.step(&data), both.step(&data));
    }
    let both = both.shard.export().unwrap();
    for (name, value) in plain.shard.export().unwrap() {
        assert!(both[&name] == value, "`{name}` differs");
    }
}
