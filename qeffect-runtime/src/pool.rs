//! Buffers that are leased and given back: activations, tapes and works.
//!
//! A lease is shared by count: the action that made a tensor holds one share, everything that retains it another one, so
//! a tensor that two ops retain is stored once. Buffers are made when they are first needed and reused ever after; the
//! free one with the lowest number is taken, so the same order of actions always gets the same buffers.

use std::collections::{BTreeMap, BTreeSet};

use qeffect_core::dtype::Dtype;

use crate::act::{Act, Fp8, Kept};
use crate::device::{Buf, BufSpec, Device};
use crate::error::{Error, Result};

#[derive(Debug)]
struct Lease {
    shares: u32,
    key: (Dtype, usize),
}

/// The pool of one rank.
#[derive(Debug, Default)]
pub struct Pool {
    free: BTreeMap<(Dtype, usize), BTreeSet<Buf>>,
    leases: BTreeMap<Buf, Lease>,
    /// Whether buffers that come back are poisoned, so that a late read shows.
    poison: bool,
    bytes: usize,
    peak: usize,
}

impl Pool {
    /// An empty pool.
    pub fn new(poison: bool) -> Pool {
        Pool { poison, ..Pool::default() }
    }

    /// Takes a buffer; its content is undefined.
    pub fn lease(&mut self, device: &mut dyn Device, dtype: Dtype, rows: usize, cols: usize) -> Result<Act> {
        let key = (dtype, rows * cols);
        let buf = match self.free.get_mut(&key).and_then(BTreeSet::pop_first) {
            Some(buf) => buf,
            None => device.alloc(BufSpec::new(format!("{dtype}[{rows}, {cols}]"), dtype, rows, cols))?,
        };
        self.leases.insert(buf, Lease { shares: 1, key });
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
            let key = lease.key;
            self.leases.remove(&act.buf);
            self.free.entry(key).or_default().insert(act.buf);
            self.bytes -= key.1 * key.0.size();
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
        for kept in [Some(fp8.codes), fp8.other, Some(fp8.scale_inv)].into_iter().flatten() {
            self.release(device, kept)?;
        }
        Ok(())
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
            self.free.entry(lease.key).or_default().insert(buf);
            if self.poison {
                device.poison(buf)?;
            }
        }
        self.bytes = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuDevice;

    #[test]
    fn a_tensor_that_is_retained_twice_is_stored_once() {
        let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true));
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
    fn buffers_come_back_poisoned_and_in_the_same_order() {
        let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true));
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
    fn a_reset_takes_everything_back() {
        let (mut device, mut pool) = (CpuDevice::new(), Pool::new(false));
        let acts = [1, 2, 3].map(|rows| pool.lease(&mut device, Dtype::E4M3, rows, 16).unwrap());
        drop(pool.keep(acts[0]).unwrap());
        pool.reset(&mut device).unwrap();
        pool.quiescent().unwrap();
        assert_eq!((pool.bytes(), pool.peak()), (0, 96));
        assert_eq!(pool.lease(&mut device, Dtype::E4M3, 1, 16).unwrap().buf, acts[0].buf);
    }
}
