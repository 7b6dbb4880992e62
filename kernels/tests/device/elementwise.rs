//! Sums and conversions, bit for bit.

use half::bf16;

use crate::rig::{bf16_bits, bits, floats, numbers, rig, rounded, values};

const LENGTHS: [usize; 7] = [1, 3, 8, 17, 1000, 2048, 70_001];

#[test]
fn addition_rounds_once_in_place_or_not() {
    let Some(rig) = rig() else { return };
    for len in LENGTHS {
        let (a, b) = (values(1, len), values(2, len));
        let want: Vec<f32> = floats(&a).iter().zip(floats(&b)).map(|(a, b)| rounded(a + b)).collect();
        let (x, y, out) = (rig.upload(&a), rig.upload(&b), rig.poisoned::<bf16>(len));
        rig.kernels.add(&rig.stream, x.span(), y.span(), out.span()).unwrap();
        assert_eq!(bits(&floats(&out.read().unwrap())), bits(&want));
        rig.kernels.add(&rig.stream, x.span(), y.span(), y.span()).unwrap();
        assert_eq!(bits(&floats(&y.read().unwrap())), bits(&want));
    }
}

#[test]
fn conversion_is_to_the_nearest_even() {
    let Some(rig) = rig() else { return };
    let mut x: Vec<f32> = (0..=u32::MAX).step_by(65_521).map(f32::from_bits).filter(|x| !x.is_nan()).collect();
    x.extend([1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::MAX, f32::INFINITY, -0.0, f32::MIN_POSITIVE / 2.0]);
    let (from, to) = (rig.upload(&x), rig.poisoned::<bf16>(x.len()));
    rig.kernels.convert(&rig.stream, from.span(), to.span()).unwrap();
    let want: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    assert_eq!(bf16_bits(&to.read().unwrap()), bf16_bits(&want));
    rig.kernels.widen(&rig.stream, to.span(), from.span()).unwrap();
    assert_eq!(bits(&from.read().unwrap()), bits(&floats(&want)));
}

#[test]
fn slots_are_added_in_order_and_multiplied_once() {
    let Some(rig) = rig() else { return };
    for len in LENGTHS {
        for count in [1, 2, 8, 64, 65, 130] {
            let slots = numbers(3, len * count);
            let from: Vec<_> = slots.chunks(len).map(|slot| rig.upload(slot)).collect();
            let (spans, out) = (from.iter().map(|slot| slot.span()).collect::<Vec<_>>(), rig.poisoned::<f32>(len));
            rig.kernels.sum_slots(&rig.stream, &spans, 0.3, out.span()).unwrap();
            let sum = |i: usize| (1..count).fold(slots[i], |sum, slot| sum + slots[slot * len + i]);
            let want: Vec<f32> = (0..len).map(|i| sum(i) * 0.3).collect();
            assert_eq!(bits(&out.read().unwrap()), bits(&want));
        }
        let (a, b) = (numbers(4, len), numbers(5, len));
        let (x, out) = (rig.upload(&a), rig.upload(&b));
        rig.kernels.accumulate(&rig.stream, x.span(), out.span()).unwrap();
        let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| b + a).collect();
        assert_eq!(bits(&out.read().unwrap()), bits(&want));
    }
}
