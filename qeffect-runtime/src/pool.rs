//! Buffers that are leased and given back: activations, tapes and works.
//!
//! A lease is shared by count: the action that made a tensor holds one share, everything that retains it another one, so
//! a tensor that two ops retain is stored once. Buffers are made when they are first needed and reused ever after; which
//! free one is taken follows from their numbers and order alone, so the same order of actions always gets the same buffers.
//!
//! Tapes and works are counted apart and share free buffers of one type and size; what W reads of a tape stays where F has
//! left it. So in FP8 recipes, where both have types of their own, the two are apart, and elsewhere they need less than two
//! pools would (`docs/design.md` has numbers).

use std::collections::{BTreeMap, VecDeque};

use qeffect_core::dtype::Dtype;
use qeffect_core::ids::Stage;

use crate::act::{Act, Fp8, Kept};
use crate::device::{Buf, BufSpec, Device};
use crate::error::{Error, Result};
use crate::retained::Layout;

#[derive(Debug)]
struct Lease {
    shares: u32,
    key: (Dtype, usize),
    kept: Option<(Stage, Class)>,
}

impl Lease {
    const fn bytes(&self) -> usize {
        self.key.1 * self.key.0.size()
    }
}

/// How long a retained tensor is kept. One region of a group is a tape until the group's first I, then work.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Class {
    /// From F to R, where F is run again.
    Input,
    /// From F, or R, to I.
    Tape,
    /// From I to W.
    Work,
}

/// Bytes that a stage retains: the most at once since start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KeptBytes {
    /// From F to R, where F is run again.
    pub input: usize,
    /// From F, or R, to I.
    pub tape: usize,
    /// From I to W; all regions of groups whose first I has run are in it.
    pub work: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    now: usize,
    most: usize,
}

/// Which of several free buffers is leased.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Reuse {
    /// The one with the lowest number: few buffers, which stay in the caches.
    #[default]
    Lowest,
    /// The one that has been free for longest, and only while so many bytes of its kind are free: what is computed in
    /// parallel lanes then seldom waits for a buffer.
    Oldest {
        /// Free bytes that are left alone, per type and size of tensor.
        spare: usize,
    },
}

impl Reuse {
    /// At least this many buffers are spare where any are: tensors of logits would have none otherwise.
    const FEWEST: usize = 2;
    /// Small tensors need no more.
    const MOST: usize = 32;

    fn take(self, free: &mut VecDeque<Buf>, bytes: usize) -> Option<Buf> {
        match self {
            Reuse::Lowest => {
                let (at, _) = free.iter().enumerate().min_by_key(|(_, buf)| **buf)?;
                free.remove(at)
            }
            Reuse::Oldest { spare } => {
                let spare = (spare / bytes.max(1)).clamp(Reuse::FEWEST, Reuse::MOST);
                if free.len() > spare { free.pop_front() } else { None }
            }
        }
    }
}

/// The pool of one rank.
#[derive(Debug, Default)]
pub struct Pool {
    /// In the order in which they came back.
    free: BTreeMap<(Dtype, usize), VecDeque<Buf>>,
    reuse: Reuse,
    leases: BTreeMap<Buf, Lease>,
    /// Whether buffers that come back are poisoned, so that a late read shows.
    poison: bool,
    bytes: usize,
    peak: usize,
    kept: BTreeMap<(Stage, Class), Count>,
}

impl Pool {
    /// An empty pool.
    pub fn new(poison: bool, reuse: Reuse) -> Pool {
        Pool { poison, reuse, ..Pool::default() }
    }

    /// Every buffer that was ever leased: none of them means anything between steps.
    pub fn buffers(&self) -> impl Iterator<Item = Buf> {
        self.free.values().flatten().chain(self.leases.keys()).copied()
    }

    /// Takes a buffer; its content is undefined.
    pub fn lease(&mut self, device: &mut dyn Device, dtype: Dtype, rows: usize, cols: usize) -> Result<Act> {
        let key = (dtype, rows * cols);
        let reuse = self.reuse;
        let buf = match self.free.get_mut(&key).and_then(|free| reuse.take(free, key.1 * dtype.size())) {
            Some(buf) => buf,
            None => device.alloc(BufSpec::new(format!("{dtype}[{rows}, {cols}]"), dtype, rows, cols))?,
        };
        self.leases.insert(buf, Lease { shares: 1, key, kept: None });
        let act = Act { buf, dtype, rows, cols };
        self.bytes += act.bytes();
        self.peak = self.peak.max(self.bytes);
        Ok(act)
    }

    /// Gives up one share.
    pub fn free(&mut self, device: &mut dyn Device, act: Act) -> Result<()> {
        let lease = self.leases.get_mut(&act.buf).ok_or(Error::NotLeased(act.buf))?;
        lease.shares -= 1;
        if lease.shares == 0 {
            let (key, bytes, kept) = (lease.key, lease.bytes(), lease.kept);
            self.leases.remove(&act.buf);
            self.free.entry(key).or_default().push_back(act.buf);
            self.bytes -= bytes;
            self.unmark(kept, bytes);
            if self.poison {
                device.poison(act.buf)?;
            }
        }
        Ok(())
    }

    /// Takes one more share of a leased tensor.
    pub fn keep(&mut self, act: Act) -> Result<Kept> {
        self.leases.get_mut(&act.buf).ok_or(Error::NotLeased(act.buf))?.shares += 1;
        Ok(Kept::new(act))
    }

    /// Gives up a retained share.
    pub fn release(&mut self, device: &mut dyn Device, kept: Kept) -> Result<()> {
        self.free(device, kept.act())
    }

    /// Gives up a retained quantised tensor.
    pub fn release_fp8(&mut self, device: &mut dyn Device, fp8: Fp8) -> Result<()> {
        let grouped = fp8.grouped.map(|grouped| [Some(grouped.region), grouped.scale_inv]);
        let own = [Some(fp8.codes), fp8.other, Some(fp8.scale_inv)];
        own.into_iter().chain(grouped.into_iter().flatten()).flatten().try_for_each(|kept| self.release(device, kept))
    }

    /// A stage retains what this layout says. A tensor that two stages retain counts for the first.
    pub fn mark(&mut self, layout: &Layout, stage: Stage, class: Class) {
        for (_, act) in &layout.entries {
            let Some(lease) = self.leases.get_mut(&act.buf) else { continue };
            let before = lease.kept;
            let moves = before.is_none_or(|(of, was)| of == stage && was < class);
            if !moves {
                continue;
            }
            lease.kept = Some((stage, class));
            let bytes = lease.bytes();
            self.unmark(before, bytes);
            let count = self.kept.entry((stage, class)).or_default();
            count.now += bytes;
            count.most = count.most.max(count.now);
        }
    }

    fn unmark(&mut self, kept: Option<(Stage, Class)>, bytes: usize) {
        if let Some(count) = kept.and_then(|kept| self.kept.get_mut(&kept)) {
            count.now -= bytes;
        }
    }

    /// The most bytes that a stage retained at once.
    pub fn kept(&self, stage: Stage) -> KeptBytes {
        let most = |class| self.kept.get(&(stage, class)).map_or(0, |count| count.most);
        KeptBytes { input: most(Class::Input), tape: most(Class::Tape), work: most(Class::Work) }
    }

    /// Bytes that are leased.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The most bytes that were leased at once.
    pub fn peak(&self) -> usize {
        self.peak
    }

    /// Fails if anything is leased: to be called where nothing may be in flight.
    pub fn quiescent(&self) -> Result<()> {
        match self.leases.len() {
            0 => Ok(()),
            count => Err(Error::StillLeased { count }),
        }
    }

    /// Takes everything back: an aborted step retains nothing.
    pub fn reset(&mut self, device: &mut dyn Device) -> Result<()> {
        for (buf, lease) in std::mem::take(&mut self.leases) {
            self.free.entry(lease.key).or_default().push_back(buf);
            if self.poison {
                device.poison(buf)?;
            }
        }
        self.bytes = 0;
        self.kept.values_mut().for_each(|count| count.now = 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuDevice;

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
        let layout = |acts: &[Act]| {
            let mut layout = Layout::default();
            layout.entries = acts.iter().map(|act| ("x".into(), *act)).collect();
            layout
        };
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
}
