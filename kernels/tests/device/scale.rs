//! Scale rolls against the core's, bit for bit, and the choice of state after a bad step.

use qeffect_core::fp8::Fp8;
use qeffect_core::recipe::AmaxAlgo;
use qeffect_core::scaling::ScaleRule;

use crate::rig::{bits, numbers, rig};

// cases B01, B02, B44: windows, cells that did not run, infinities, NaN and tiny values over many rolls.
#[test]
fn rolls_equal_those_of_the_core() {
    let Some(rig) = rig() else { return };
    for (cells, length) in [(1, 1), (1, 4), (3, 4), (7, 16), (5, 33), (2, 300), (3, 1024)] {
        for algo in [AmaxAlgo::Max, AmaxAlgo::MostRecent] {
            for (format, margin) in [(Fp8::E4M3, 0), (Fp8::E5M2, 2), (Fp8::E4M3, -3)] {
                let rule = ScaleRule::new(format, margin, algo);
                let (mut scale, mut history) = (vec![1.0f32; cells], vec![0.0f32; cells * length]);
                let device_scale = rig.upload(&scale);
                let mut device_history = rig.upload(&history);
                for roll in 0..12u64 {
                    let staged = numbers(roll * 31 + cells as u64, cells);
                    for (cell, value) in staged.into_iter().enumerate() {
                        history[cell] = match (roll + cell as u64) % 9 {
                            3 => 0.0,
                            5 => f32::INFINITY,
                            6 => f32::NAN,
                            7 => 1e-38,
                            8 => f32::from_bits(1), // the smallest number, 1.4e-45
                            _ => value.abs() * 10.0,
                        };
                    }
                    device_history.write(&history).unwrap();
                    rule.roll(&mut scale, &mut history, None).unwrap();
                    rig.kernels
                        .roll_scales(
                            &rig.stream,
                            &rule,
                            0..device_scale.span().len(),
                            device_scale.span(),
                            device_history.span(),
                            None,
                            None,
                        )
                        .unwrap();
                    assert_eq!(bits(&device_scale.read().unwrap()), bits(&scale), "{cells} × {length}, roll {roll}");
                    assert_eq!(bits(&device_history.read().unwrap()), bits(&history), "{cells} × {length}");
                }
            }
        }
    }
}

// Case B44: a maximum too small for a scale gives the largest one, a maximum of zero none.
#[test]
fn a_tiny_amax_makes_a_finite_scale() {
    let Some(rig) = rig() else { return };
    let rule = ScaleRule::new(Fp8::E4M3, 0, AmaxAlgo::Max);
    let (scale, history) = (rig.upload(&[1.0f32; 3]), rig.upload(&[1e-37, f32::from_bits(1), 0.0]));
    rig.kernels.roll_scales(&rig.stream, &rule, 0..3, scale.span(), history.span(), None, None).unwrap();
    assert_eq!(bits(&scale.read().unwrap()), [0x7F7F_FFFF, 0x7F7F_FFFF, 1.0f32.to_bits()]);
}

// Case B43, as far as there is no data parallelism: two stages of two replicas, whose maxima are 1 and 4, and 16 in both of the
// other stage. Given the maximum over the replicas of their own stage, both have one scale, and that of their stage.
#[test]
fn replicas_roll_alike_from_the_maximum_of_their_stage() {
    let Some(rig) = rig() else { return };
    let rule = ScaleRule::new(Fp8::E4M3, 0, AmaxAlgo::Max);
    for (staged, group, want) in [([1.0f32, 4.0], 4.0f32, 112.0f32), ([16.0, 16.0], 16.0, 28.0)] {
        for own in staged {
            let (scale, history) = (rig.upload(&[1.0f32]), rig.upload(&[own, 0.0]));
            let reduced = rig.upload(&[group]);
            let (cell, amax) = (history.span(), Some(reduced.span()));
            rig.kernels.roll_scales(&rig.stream, &rule, 0..1, scale.span(), cell, amax, None).unwrap();
            assert_eq!((scale.read().unwrap(), history.read().unwrap()), (vec![want], vec![0.0, group]));
        }
    }
}

// Case B43.
#[test]
fn a_reduced_amax_replaces_the_staged_one() {
    let Some(rig) = rig() else { return };
    let rule = ScaleRule::new(Fp8::E4M3, 0, AmaxAlgo::Max);
    let (scale, history) = (rig.upload(&[1.0f32, 1.0]), rig.upload(&[2.0f32, 4.0, 0.0, 0.0]));
    let reduced = rig.upload(&[7.0f32, 0.0]);
    rig.kernels
        .roll_scales(
            &rig.stream,
            &rule,
            0..scale.span().len(),
            scale.span(),
            history.span(),
            Some(reduced.span()),
            None,
        )
        .unwrap();
    assert_eq!((scale.read().unwrap(), history.read().unwrap()), (vec![64.0, 112.0], vec![0.0, 0.0, 7.0, 4.0]));
}

#[test]
fn a_bad_step_rolls_nothing_and_gets_its_state_back() {
    let Some(rig) = rig() else { return };
    let rule = ScaleRule::new(Fp8::E4M3, 0, AmaxAlgo::Max);
    let start = [2.0f32, 4.0, 0.0, 0.0];
    for raised in [0u32, 1, 2] {
        let (scale, history) = (rig.upload(&[1.0f32, 1.0]), rig.upload(&start));
        let flag = rig.upload(&[raised]);
        rig.kernels
            .roll_scales(
                &rig.stream,
                &rule,
                0..scale.span().len(),
                scale.span(),
                history.span(),
                None,
                Some(flag.span()),
            )
            .unwrap();
        assert_eq!(scale.read().unwrap() == [1.0, 1.0], raised != 0);
        assert_eq!(history.read().unwrap() == start, raised != 0);

        let (live, saved) = (rig.upload(&[5u32; 1000]), rig.upload(&[9u32; 1000]));
        rig.kernels.copy_if(&rig.stream, flag.span(), saved.span(), live.span()).unwrap();
        assert_eq!(live.read().unwrap(), [if raised == 0 { 5 } else { 9 }; 1000]);
    }
}
