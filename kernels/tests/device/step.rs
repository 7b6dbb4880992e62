//! Tags of slots.

use qeffect_kernels::launch::step::{REPORT_WORDS, TAG_WORDS, Tag};

use crate::rig::rig;

// a slot that holds another action's tape, an older generation, or another step's is found, and named.
#[test]
fn a_wrong_tag_raises_the_flag_and_the_first_is_reported() {
    let Some(rig) = rig() else { return };
    let right = Tag { key: 0x1_0002_0003, generation: 7 };
    let wrong = [Tag { key: 0x1_0002_0004, ..right }, Tag { generation: 6, ..right }];
    let (slot, mut step) = (rig.poisoned::<u64>(TAG_WORDS), rig.upload(&[41u64]));
    let (flag, report) = (rig.upload(&[0u32]), rig.upload(&[0u64; REPORT_WORDS]));
    let check = |tag| {
        rig.kernels.check_tag(&rig.stream, slot.span(), step.span(), tag, flag.span(), report.span()).unwrap();
        (flag.read().unwrap()[0], report.read().unwrap())
    };
    rig.kernels.write_tag(&rig.stream, slot.span(), step.span(), right).unwrap();
    assert_eq!(check(right), (0, vec![0; REPORT_WORDS]));
    let first = vec![1, 41, wrong[0].key, 7, 41, right.key, 7];
    assert_eq!(check(wrong[0]), (2, first.clone()));
    assert_eq!(check(wrong[1]), (2, first));

    step.write(&[42]).unwrap();
    let (flag, report) = (rig.upload(&[0u32]), rig.upload(&[0u64; REPORT_WORDS]));
    rig.kernels.check_tag(&rig.stream, slot.span(), step.span(), right, flag.span(), report.span()).unwrap();
    assert_eq!((flag.read().unwrap(), report.read().unwrap()), (vec![2], vec![1, 42, right.key, 7, 41, right.key, 7]));
}

#[test]
fn what_is_not_finite_raises_the_flag_for_good() {
    let Some(rig) = rig() else { return };
    let flag = rig.upload(&[0u32]);
    for (x, want) in [(f32::MAX, 0), (f32::MIN_POSITIVE / 2.0, 0), (f32::NAN, 1), (0.0, 1)] {
        let mut values = vec![1.0f32; 700];
        values[699] = x;
        let values = rig.upload(&values);
        rig.kernels.check_finite(&rig.stream, values.span(), flag.span()).unwrap();
        assert_eq!(flag.read().unwrap(), [want]);
    }
    flag_of_infinity(rig);
}

fn flag_of_infinity(rig: &crate::rig::Rig) {
    for x in [f32::INFINITY, f32::NEG_INFINITY] {
        let (values, flag) = (rig.upload(&[x]), rig.upload(&[0u32]));
        rig.kernels.check_finite(&rig.stream, values.span(), flag.span()).unwrap();
        assert_eq!(flag.read().unwrap(), [1]);
    }
}
