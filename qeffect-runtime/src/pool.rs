//! Buffers that are leased and given back: activations, tapes and works.
//!
//! A lease is shared by count: the action that made a tensor holds one share, everything that retains it another one, so
//! a tensor that two ops retain is stored once. Buffers are made when they are first needed and reused ever after; which
//! free one is taken follows from what was leased and given back before alone: the same order of actions gets the same
//! buffers.
//!
//! Buffers belong to two regions of a rank, one for works and one for tapes and everything else, with free buffers, bytes
//! and peaks of their own (`region`). A buffer passes to the other region when its tensor becomes work; what W reads of a
//! tape stays where F has left it. A region that has none to give takes one of the other, so both together own what one
//! pool would.

mod region;
#[cfg(test)]
mod tests;

pub use region::{Extent, RegionBytes, Reuse};

use std::collections::BTreeMap;

use qeffect_core::dtype::Dtype;
use qeffect_core::ids::Stage;

use crate::act::{Act, Fp8, Kept};
use crate::device::{Buf, BufSpec, Device};
use crate::error::{Error, Result};
use crate::retained::Layout;
use region::{Kind, Region, Regions};

#[derive(Debug)]
struct Lease {
    shares: u32,
    kind: Kind,
    kept: Option<(Stage, Class)>,
}

impl Lease {
    const fn bytes(&self) -> usize {
        region::bytes(self.kind)
    }

    const fn region(&self) -> Region {
        match self.kept {
            Some((_, Class::Work)) => Region::Work,
            _ => Region::Tape,
        }
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

/// The pool of one rank.
#[derive(Debug, Default)]
pub struct Pool {
    regions: Regions,
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
        Pool { poison, regions: Regions::new(reuse), ..Pool::default() }
    }

    /// From now on buffers are reused so.
    pub fn reuse(&mut self, reuse: Reuse) {
        self.regions.reuse(reuse);
    }

    /// Every buffer that was ever leased: none of them means anything between steps.
    pub fn buffers(&self) -> impl Iterator<Item = Buf> {
        self.regions.free().chain(self.leases.keys().copied())
    }

    /// Takes a buffer; its content is undefined.
    pub fn lease(&mut self, device: &mut dyn Device, dtype: Dtype, rows: usize, cols: usize) -> Result<Act> {
        let kind = (dtype, rows * cols);
        let buf = match self.regions.take(kind) {
            Some(buf) => buf,
            None => {
                let buf = device.alloc(BufSpec::new(format!("{dtype}[{rows}, {cols}]"), dtype, rows, cols))?;
                self.regions.made(kind);
                buf
            }
        };
        self.leases.insert(buf, Lease { shares: 1, kind, kept: None });
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
            let (kind, region, bytes, kept) = (lease.kind, lease.region(), lease.bytes(), lease.kept);
            self.leases.remove(&act.buf);
            self.regions.give(kind, region, act.buf);
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

    /// A stage retains what this layout says; works lie in a region of their own from here on. A tensor that two stages
    /// retain counts for the first.
    pub fn mark(&mut self, layout: &Layout, stage: Stage, class: Class) {
        for (_, act) in &layout.entries {
            let Some(lease) = self.leases.get_mut(&act.buf) else { continue };
            let before = lease.kept;
            let moves = before.is_none_or(|(of, was)| of == stage && was < class);
            if !moves {
                continue;
            }
            lease.kept = Some((stage, class));
            let (kind, bytes) = (lease.kind, lease.bytes());
            if class == Class::Work {
                self.regions.becomes_work(kind);
            }
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

    /// Bytes of both regions.
    pub const fn regions(&self) -> RegionBytes {
        self.regions.bytes()
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
            self.regions.give(lease.kind, lease.region(), buf);
            if self.poison {
                device.poison(buf)?;
            }
        }
        self.bytes = 0;
        self.kept.values_mut().for_each(|count| count.now = 0);
        Ok(())
    }
}
