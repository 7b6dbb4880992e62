//! The free buffers of a rank, in two regions: which one a tensor gets, and what passes between the regions.
//!
//! | when | what happens |
//! |---|---|
//! | a tensor is leased | it gets a free buffer of its kind: of the tape region while that has more than are spared ([`Reuse`]), else the first of both regions if they have more together, which a work region thus lends; else memory is asked of the device, for the tape region |
//! | it becomes work | its buffer passes to the work region, and a free one of that region and kind passes back, if there is any |
//! | it is given back | its buffer is free in the region where it lies |
//!
//! A kind is a type and a number of elements. Of each kind the work region so owns no more buffers than works have needed at
//! once; the tape region no more than everything else has, and the spared ones; both together no more than one pool would. A
//! buffer that is lent, or passes back, is the other region's for good: nothing is owed.

use std::collections::{BTreeMap, BTreeSet};

use qeffect_core::dtype::Dtype;

use crate::device::Buf;

/// Type and number of elements: buffers of one kind can stand for each other.
pub(super) type Kind = (Dtype, usize);

pub(super) const fn bytes(kind: Kind) -> usize {
    kind.1 * kind.0.size()
}

/// Where a buffer belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Region {
    /// What F and I lease: tensors on their way, inputs and tapes.
    Tape,
    /// What waits for W.
    Work,
}

/// Bytes of one region of a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Extent {
    /// Of the buffers that it owns now, leased or free.
    pub owned: usize,
    /// The most that were leased at once since start.
    pub most: usize,
}

/// Bytes of both regions of a rank: together the memory that its pool has taken of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RegionBytes {
    /// Of the tape region.
    pub tape: Extent,
    /// Of the work region.
    pub work: Extent,
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

    /// How many free buffers of a kind are left alone.
    pub(super) fn spare(self, kind: Kind) -> usize {
        match self {
            Reuse::Lowest => 0,
            Reuse::Oldest { spare } => (spare / bytes(kind).max(1)).clamp(Reuse::FEWEST, Reuse::MOST),
        }
    }
}

/// Free buffers of one region and kind, by when they came back if that matters, else by number: the first is leased first.
type Queue = BTreeSet<(u64, Buf)>;

/// One region.
#[derive(Debug, Default)]
struct Part {
    free: BTreeMap<Kind, Queue>,
    extent: Extent,
    leased: usize,
}

impl Part {
    fn idle(&self, kind: Kind) -> usize {
        self.free.get(&kind).map_or(0, Queue::len)
    }

    fn first(&self, kind: Kind) -> Option<(u64, Buf)> {
        self.free.get(&kind)?.first().copied()
    }

    fn take(&mut self, kind: Kind) -> Option<(u64, Buf)> {
        self.free.get_mut(&kind)?.pop_first()
    }

    fn give(&mut self, kind: Kind, free: (u64, Buf)) {
        self.free.entry(kind).or_default().insert(free);
    }

    fn lease(&mut self, bytes: usize) {
        self.leased += bytes;
        self.extent.most = self.extent.most.max(self.leased);
    }
}

/// Moves ownership of so many bytes.
const fn pass(bytes: usize, from: &mut Part, to: &mut Part) {
    from.extent.owned -= bytes;
    to.extent.owned += bytes;
}

/// Both regions.
#[derive(Debug, Default)]
pub(super) struct Regions {
    reuse: Reuse,
    tape: Part,
    work: Part,
    /// How many buffers came back.
    returns: u64,
}

impl Regions {
    pub fn new(reuse: Reuse) -> Regions {
        Regions { reuse, ..Regions::default() }
    }

    pub fn reuse(&mut self, reuse: Reuse) {
        self.reuse = reuse;
    }

    pub fn free(&self) -> impl Iterator<Item = Buf> {
        [&self.tape, &self.work].into_iter().flat_map(|part| part.free.values().flatten()).map(|(_, buf)| *buf)
    }

    pub const fn bytes(&self) -> RegionBytes {
        RegionBytes { tape: self.tape.extent, work: self.work.extent }
    }

    /// A free buffer for a lease of the tape region. `None`: new memory is wanted, to be told to [`Regions::made`].
    pub fn take(&mut self, kind: Kind) -> Option<Buf> {
        let (spare, own, other) = (self.reuse.spare(kind), self.tape.idle(kind), self.work.idle(kind));
        if own + other <= spare {
            return None;
        }
        let older = |other| self.tape.first(kind).is_some_and(|own| own < other);
        let (_, buf) = if own > spare || self.work.first(kind).is_none_or(older) {
            self.tape.take(kind)
        } else {
            pass(bytes(kind), &mut self.work, &mut self.tape);
            self.work.take(kind)
        }?;
        self.tape.lease(bytes(kind));
        Some(buf)
    }

    /// A buffer was made and is leased.
    pub fn made(&mut self, kind: Kind) {
        self.tape.extent.owned += bytes(kind);
        self.tape.lease(bytes(kind));
    }

    /// A leased buffer of the tape region becomes one of the work region, for a free one of that.
    pub fn becomes_work(&mut self, kind: Kind) {
        self.tape.leased -= bytes(kind);
        self.work.lease(bytes(kind));
        match self.work.take(kind) {
            Some(back) => self.tape.give(kind, back),
            None => pass(bytes(kind), &mut self.tape, &mut self.work),
        }
    }

    /// A buffer is given back.
    pub fn give(&mut self, kind: Kind, region: Region, buf: Buf) {
        let turn = match self.reuse {
            Reuse::Lowest => 0,
            Reuse::Oldest { .. } => self.returns,
        };
        self.returns += 1;
        let part = match region {
            Region::Tape => &mut self.tape,
            Region::Work => &mut self.work,
        };
        part.leased -= bytes(kind);
        part.give(kind, (turn, buf));
    }
}
