//! Random lists of commands give the same bits on cpu in every order that their effects allow, and other bits in others.

mod random;

use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_core::recipe::AmaxAlgo;
use qeffect_core::scaling::ScaleRule;

use super::*;
use crate::cmd::GroupOperand;
use crate::cpu::CpuDevice;
use crate::device::Device;
use random::{Bench, Dice};

fn run(seed: u64, list: &[Cmd], order: impl IntoIterator<Item = usize>) -> Vec<Vec<u8>> {
    let mut bench = Bench::new(seed);
    for index in order {
        bench.device.issue(&list[index]).unwrap();
    }
    bench.contents()
}

/// A random order in which every command follows those that it must follow.
fn shuffled(dice: &mut Dice, before: &[Vec<usize>]) -> Vec<usize> {
    let mut done = vec![false; before.len()];
    let mut order = Vec::new();
    while order.len() < before.len() {
        let ready: Vec<usize> =
            (0..before.len()).filter(|i| !done[*i] && before[*i].iter().all(|other| done[*other])).collect();
        let next = dice.pick(&ready);
        done[next] = true;
        order.push(next);
    }
    order
}

const LEN: usize = 48;

#[test]
fn every_order_that_effects_allow_gives_the_same_bits() {
    let mut moved = 0;
    for seed in 0..60 {
        let mut dice = Dice(seed, 0);
        let bench = Bench::new(seed);
        let list = bench.list(&mut dice, LEN);
        let before = order(&bench.effects(&list));
        let want = run(seed, &list, 0..LEN);
        for _ in 0..4 {
            let order = shuffled(&mut dice, &before);
            moved += order.iter().enumerate().filter(|(at, index)| at != *index).count();
            assert_eq!(run(seed, &list, order.iter().copied()), want, "seed {seed}, order {order:?}");
        }
    }
    assert!(moved > 60 * 4 * LEN / 2, "orders do differ: {moved}");
}

/// Witness that the comparison can fail, and that no edge is there for nothing: of two neighbours that are ordered,
/// most give other bits the other way round.
#[test]
fn orders_that_effects_forbid_give_other_bits() {
    let (mut pairs, mut differ) = (0, 0);
    for seed in 0..40 {
        let bench = Bench::new(seed);
        let list = bench.list(&mut Dice(seed, 0), LEN);
        let before = order(&bench.effects(&list));
        let want = run(seed, &list, 0..LEN);
        for second in (1..LEN).filter(|second| before[*second].contains(&(second - 1))) {
            let mut swapped: Vec<usize> = (0..LEN).collect();
            swapped.swap(second - 1, second);
            pairs += 1;
            differ += usize::from(run(seed, &list, swapped) != want);
        }
    }
    // Others are overwritten before anyone looks, or a flag keeps them from doing anything.
    assert!(pairs > 200 && differ * 3 > pairs, "{differ} of {pairs}");
}

#[test]
fn lists_hold_every_kind_of_command() {
    let bench = Bench::new(0);
    let mut dice = Dice(0, 0);
    let names: std::collections::BTreeSet<&str> = bench.list(&mut dice, 2000).iter().map(Cmd::name).collect();
    assert_eq!(names.len(), 34, "{names:?}");
}

#[test]
fn casts_that_stage_into_different_cells_are_free_and_a_roll_follows_all() {
    let mut device = CpuDevice::new();
    let mut make = |dtype, n| device.alloc(BufSpec::new("x", dtype, 1, n)).unwrap();
    let (src, scales, history, flag) =
        (make(Dtype::F32, 4), make(Dtype::F32, 2), make(Dtype::F32, 4), make(Dtype::U32, 1));
    let mut cast = |index| Cmd::Quantise {
        src,
        rows: 2,
        cols: 2,
        format: Format::E4M3,
        scale: Scalar { buf: scales, index },
        codes: make(Dtype::E4M3, 4),
        transposed: None,
        beside: None,
        scale_inv: make(Dtype::F32, 1),
        amax: Some(Scalar { buf: history, index }),
        flag: Some(flag),
    };
    let rule = ScaleRule::new(Format::E4M3, 0, AmaxAlgo::Max);
    let roll = Cmd::Roll { scales, history, cells: 0..usize::MAX, rule, unless: None };
    let list = [cast(0), cast(1), cast(1), roll.clone(), cast(0), roll];
    let effects: Vec<Vec<Access>> = list.iter().map(|cmd| cmd.effects(|_| None)).collect();
    assert_eq!(order(&effects), [vec![], vec![], vec![], vec![0, 1, 2], vec![3], vec![3, 4]]);
}

/// The members of a group lie beside each other in one region: their casts are free of each other, in whatever order they
/// come, and the product of the group follows all of them, as the zeros between members come before.
#[test]
fn members_of_a_group_are_free_of_each_other_and_its_product_follows_all() {
    const TOKENS: usize = 3;
    const STRIDE: usize = 4;
    const MEMBERS: usize = 3;
    let build = || {
        let mut device = CpuDevice::new();
        let mut make = |name: &str, dtype: Dtype, rows, cols| {
            let buf = device.alloc(BufSpec::new(name, dtype, rows, cols)).unwrap();
            let bytes: Vec<u8> = match dtype {
                Dtype::F32 => (0..rows * cols).flat_map(|i| (1.0 + (i % 7) as f32).to_le_bytes()).collect(),
                _ => vec![0; rows * cols * dtype.size()],
            };
            device.write(buf, &bytes).unwrap();
            buf
        };
        let (scales, line) = (make("scales", Dtype::F32, 1, 1), MEMBERS * STRIDE);
        let scale = Scalar { buf: scales, index: 0 };
        let mut list = Vec::new();
        let mut side = |name: &str, cols: usize| {
            let region = make(name, Dtype::E4M3, cols, line);
            list.push(Cmd::Fill { dst: region, value: 0.0 });
            let factors: Box<[Buf]> = (0..MEMBERS)
                .map(|member| {
                    let scale_inv = make("factor", Dtype::F32, 1, 1);
                    list.push(Cmd::Quantise {
                        src: make("x", Dtype::F32, TOKENS, cols),
                        rows: TOKENS,
                        cols,
                        format: Format::E4M3,
                        scale,
                        codes: make("codes", Dtype::E4M3, TOKENS, cols),
                        transposed: Some(region),
                        beside: Some(Beside { first: member * STRIDE, line }),
                        scale_inv,
                        amax: None,
                        flag: None,
                    });
                    scale_inv
                })
                .collect();
            (region, factors)
        };
        let ((a, of_a), (b, of_b)) = (side("dy", 5), side("x", 2));
        let out = make("out", Dtype::F32, 5, 2);
        list.push(Cmd::GroupGemm {
            m: 5,
            n: 2,
            k: TOKENS,
            stride: STRIDE,
            members: MEMBERS,
            a: GroupOperand { buf: a, scale_inv: of_a, transposed: false },
            b: GroupOperand { buf: b, scale_inv: of_b, transposed: true },
            out,
            accumulate: false,
        });
        (device, list, out)
    };
    let (_, list, _) = build();
    let effects: Vec<Vec<Access>> = list.iter().map(|cmd| cmd.effects(|_| None)).collect();
    let before = order(&effects);
    for cast in [1, 2, 3, 5, 6, 7] {
        assert_eq!(before[cast], [if cast < 4 { 0 } else { 4 }], "a member follows the zeros alone");
    }
    assert_eq!(before[8], (0..8).collect::<Vec<_>>());
    let run = |order: Vec<usize>| {
        let (mut device, list, out) = build();
        order.into_iter().for_each(|index| device.issue(&list[index]).unwrap());
        let mut bytes = vec![0; 5 * 2 * 4];
        device.read(out, &mut bytes).unwrap();
        bytes
    };
    let want = run((0..9).collect());
    // Members with the same factor: one of them says it, with the same bits, and the product still follows every cast.
    let with_one = |both: bool| {
        let (mut device, mut list, out) = build();
        let Some(Cmd::GroupGemm { a, b, .. }) = list.last_mut() else { panic!("the product is the last command") };
        a.scale_inv = Box::from([a.scale_inv[0]]);
        if both {
            b.scale_inv = Box::from([b.scale_inv[0]]);
        }
        let effects: Vec<Vec<Access>> = list.iter().map(|cmd| cmd.effects(|_| None)).collect();
        assert_eq!(order(&effects)[8], (0..8).collect::<Vec<_>>());
        list.iter().try_for_each(|cmd| device.issue(cmd))?;
        let mut bytes = vec![0; 5 * 2 * 4];
        device.read(out, &mut bytes).map(|()| bytes)
    };
    assert_eq!(with_one(true).unwrap(), want);
    let error = with_one(false).unwrap_err().to_string();
    assert!(error.contains("3 members have"), "{error}");
    for seed in 0..20 {
        assert_eq!(run(shuffled(&mut Dice(seed, 0), &before)), want, "seed {seed}");
    }
    assert_ne!(run(vec![0, 1, 2, 4, 5, 6, 7, 8, 3]), want, "the product reads every member");
}

#[test]
fn columns_meet_where_they_share_elements_and_cover_what_lies_in_them() {
    let buf = Buf(0);
    let columns = |line, columns: Range<usize>| Access {
        buf,
        range: columns.start..4 * line,
        columns: Some(Columns { line, columns }),
        mode: Mode::Write,
    };
    let range = |range| Access { buf, range, columns: None, mode: Mode::Write };
    for (a, b, meet) in [
        (columns(8, 0..4), columns(8, 4..8), false),
        (columns(8, 0..5), columns(8, 4..8), true),
        (columns(8, 0..4), columns(6, 4..6), true),
        (columns(8, 4..8), range(0..4), false),
        (columns(8, 4..8), range(0..40), true),
    ] {
        assert_eq!((a.conflicts(&b), b.conflicts(&a)), (meet, meet), "{a:?}, {b:?}");
    }
    assert!(columns(8, 2..6).covers(&columns(8, 3..6)) && !columns(8, 3..6).covers(&columns(8, 2..6)));
    assert!(range(0..40).covers(&columns(8, 2..6)) && !columns(8, 0..8).covers(&range(0..32)));
    assert!(range(0..32).is_whole(32) && !columns(8, 0..8).is_whole(32));
    // case: four lines of 8, of which columns 2..6 are touched.
    assert_eq!((columns(8, 2..6).count(32), range(3..usize::MAX).count(32)), (16, 29));
}
