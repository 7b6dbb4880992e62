//! The pool by example; as a state machine in `machine`.

mod machine;

use super::*;
use crate::cpu::CpuDevice;

fn layout(acts: &[Act]) -> Layout {
    let mut layout = Layout::default();
    layout.entries = acts.iter().map(|act| ("x".into(), *act)).collect();
    layout
}

#[test]
fn a_tensor_that_is_retained_twice_is_stored_once() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true, Reuse::Lowest));
    let act = pool.lease(&mut device, Dtype::F32, 2, 3).unwrap();
    let kept = [pool.keep(act).unwrap(), pool.keep(act).unwrap()];
    pool.free(&mut device, act).unwrap();
    assert_eq!((pool.bytes(), pool.peak()), (24, 24));
    let [first, second] = kept;
    pool.release(&mut device, first).unwrap();
    assert!(matches!(pool.quiescent(), Err(Error::StillLeased { count: 1 })));
    pool.release(&mut device, second).unwrap();
    pool.quiescent().unwrap();
    assert!(matches!(pool.free(&mut device, act), Err(Error::NotLeased(_))));
    assert!(matches!(pool.keep(act), Err(Error::NotLeased(_))));
}

#[test]
fn kept_bytes_are_counted_by_stage_and_by_life() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true, Reuse::Lowest));
    let stage = Stage(3);
    let acts = [1, 2, 4].map(|rows| pool.lease(&mut device, Dtype::F32, rows, 4).unwrap());
    pool.mark(&layout(&acts[..2]), stage, Class::Tape); // 16 + 32 bytes
    pool.mark(&layout(&acts[..2]), Stage(4), Class::Tape);
    let none = KeptBytes::default();
    assert_eq!((pool.kept(stage), pool.kept(Stage(4))), (KeptBytes { tape: 48, ..none }, none));
    pool.mark(&layout(&acts[1..]), stage, Class::Work); // 32 + 64 bytes, of which 32 were a tape
    pool.mark(&layout(&acts[1..]), stage, Class::Tape); // work does not become a tape again
    pool.free(&mut device, acts[2]).unwrap();
    let again = pool.lease(&mut device, Dtype::F32, 2, 4).unwrap();
    pool.mark(&layout(&[again]), stage, Class::Tape); // 16 + 32 now
    assert_eq!(pool.kept(stage), KeptBytes { tape: 48, work: 96, ..none });
    pool.reset(&mut device).unwrap();
    let one = pool.lease(&mut device, Dtype::F32, 1, 4).unwrap();
    pool.mark(&layout(&[one]), stage, Class::Work);
    assert_eq!(pool.kept(stage), KeptBytes { tape: 48, work: 96, ..none }, "the most since start");
}

#[test]
fn buffers_come_back_poisoned_and_in_the_same_order() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true, Reuse::Lowest));
    let mut round = |pool: &mut Pool| {
        let a = pool.lease(&mut device, Dtype::F32, 1, 4).unwrap();
        let b = pool.lease(&mut device, Dtype::F32, 2, 2).unwrap();
        let mut bytes = [0; 16];
        device.read(a.buf, &mut bytes).unwrap();
        assert!(bytemuck::cast_slice::<u8, f32>(&bytes).iter().all(|x| x.is_nan()));
        device.write(a.buf, &[0; 16]).unwrap();
        pool.free(&mut device, b).unwrap();
        pool.free(&mut device, a).unwrap();
        [a.buf, b.buf]
    };
    let first = round(&mut pool);
    assert_eq!(round(&mut pool), first);
}

#[test]
fn where_lanes_run_in_parallel_a_buffer_rests_before_it_is_used_again() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(false, Reuse::Oldest { spare: 3 * 16 }));
    let mut next = || {
        let act = pool.lease(&mut device, Dtype::F32, 1, 4).unwrap();
        pool.free(&mut device, act).unwrap();
        act.buf
    };
    let first: Vec<Buf> = (0..4).map(|_| next()).collect();
    let distinct: std::collections::BTreeSet<Buf> = first.iter().copied().collect();
    assert_eq!(distinct.len(), 4);
    assert_eq!((0..4).map(|_| next()).collect::<Vec<_>>(), first, "the oldest first, and no new ones");
}

#[test]
fn a_reset_takes_everything_back() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(false, Reuse::Lowest));
    let acts = [1, 2, 3].map(|rows| pool.lease(&mut device, Dtype::E4M3, rows, 16).unwrap());
    drop(pool.keep(acts[0]).unwrap());
    pool.reset(&mut device).unwrap();
    pool.quiescent().unwrap();
    assert_eq!((pool.bytes(), pool.peak()), (0, 96));
    assert_eq!(pool.lease(&mut device, Dtype::E4M3, 1, 16).unwrap().buf, acts[0].buf);
}

/// Bytes that the tape region and the work region own, of buffers of 16 bytes.
fn owned(pool: &Pool) -> [usize; 2] {
    let RegionBytes { tape, work } = pool.regions();
    [tape.owned / 16, work.owned / 16]
}

fn buffers(owned: usize, most: usize) -> Extent {
    Extent { owned: 16 * owned, most: 16 * most }
}

#[test]
fn a_buffer_passes_to_the_work_region_and_a_free_one_back() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true, Reuse::Lowest));
    let [first, second] = [0; 2].map(|_| pool.lease(&mut device, Dtype::F32, 1, 4).unwrap());
    let stage = Stage(0);
    pool.mark(&layout(&[first, second]), stage, Class::Tape);
    assert_eq!(owned(&pool), [2, 0]);
    pool.mark(&layout(&[first]), stage, Class::Work);
    pool.mark(&layout(&[first]), stage, Class::Work);
    assert_eq!(owned(&pool), [1, 1], "once");
    pool.free(&mut device, first).unwrap();
    assert_eq!(owned(&pool), [1, 1], "free, it is the work region's");
    pool.mark(&layout(&[second]), stage, Class::Work);
    assert_eq!(owned(&pool), [1, 1], "works need one buffer at a time, so the other one is for tapes");
    assert_eq!(pool.lease(&mut device, Dtype::F32, 1, 4).unwrap().buf, first.buf);
    assert_eq!(pool.regions(), RegionBytes { tape: buffers(1, 2), work: buffers(1, 1) });
}

#[test]
fn a_region_lends_before_memory_is_asked_for() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true, Reuse::Lowest));
    let acts = [0; 3].map(|_| pool.lease(&mut device, Dtype::F32, 1, 4).unwrap());
    pool.mark(&layout(&acts[..2]), Stage(0), Class::Work);
    acts.iter().for_each(|act| pool.free(&mut device, *act).unwrap());
    assert_eq!(owned(&pool), [1, 2]);
    let again = [0; 3].map(|_| pool.lease(&mut device, Dtype::F32, 1, 4).unwrap().buf);
    assert_eq!(again, [2, 0, 1].map(|at: usize| acts[at].buf), "its own first, then those of works, and no new one");
    assert_eq!(owned(&pool), [3, 0]);
    // A kind is a type and a size: what is free of one says nothing of another.
    pool.reset(&mut device).unwrap();
    let other = pool.lease(&mut device, Dtype::U32, 1, 4).unwrap();
    assert!(acts.iter().all(|act| act.buf != other.buf));
}

#[test]
fn where_lanes_run_in_parallel_tapes_take_the_buffers_of_works_that_rested_longest() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(false, Reuse::Oldest { spare: 2 * 16 }));
    let acts = [0; 5].map(|_| pool.lease(&mut device, Dtype::F32, 1, 4).unwrap());
    pool.mark(&layout(&acts[..2]), Stage(0), Class::Work);
    for at in [2, 0, 3, 1, 4] {
        pool.free(&mut device, acts[at]).unwrap();
    }
    let mut lease = || pool.lease(&mut device, Dtype::F32, 1, 4).unwrap();
    let taken = [lease(), lease(), lease()];
    // The tape region has 2, 3 and 4, one more than are spared; then it has 3 and 4, of which 3 is younger than 0 of the
    // works; then 3 is the oldest.
    assert_eq!(taken.map(|act| act.buf), [2, 0, 3].map(|at: usize| acts[at].buf));
    let fresh = lease();
    assert!(acts.iter().all(|act| act.buf != fresh.buf), "two are spared, of both regions together");
    assert_eq!(owned(&pool), [5, 1]);
    taken.into_iter().chain([fresh]).for_each(|act| pool.free(&mut device, act).unwrap());
}

#[test]
fn a_reset_leaves_buffers_in_their_regions() {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true, Reuse::Lowest));
    let acts = [0; 3].map(|_| pool.lease(&mut device, Dtype::F32, 1, 4).unwrap());
    pool.mark(&layout(&acts[..1]), Stage(0), Class::Work);
    pool.reset(&mut device).unwrap();
    assert_eq!(owned(&pool), [2, 1]);
    assert_eq!(pool.regions(), RegionBytes { tape: buffers(2, 3), work: buffers(1, 1) });
    // Nothing is work any more: what is leased again is a tape until it is marked.
    let again = [0; 3].map(|_| pool.lease(&mut device, Dtype::F32, 1, 4).unwrap());
    assert_eq!(again.map(|act| act.buf), [1, 2, 0].map(|at: usize| acts[at].buf));
    assert_eq!(owned(&pool), [3, 0]);
}
