//! The slot pool: bounded physical slots that hold what F and I retained.
//!
//! A slot is leased to F and released when I and W have both consumed it. Leasing bumps the slot's
//! generation, which never goes back, so a reference from an earlier lease is refused and the
//! record that lives there now stays as it was. Live keys and live slots are one to one; an occupied
//! slot is never given away.

use core::fmt;

use crate::code::Code;
use crate::tape::{TapeKey, TapeRef, WorkRef};

/// Which consumers are done with a slot.
const TAPE_CONSUMED: u8 = 1;
const WORK_CONSUMED: u8 = 2;

/// Slots of one rank.
#[derive(Debug)]
pub struct SlotPool {
    slots: Vec<Slot>,
    live: u32,
    tapes: u32,
}

#[derive(Debug)]
struct Slot {
    generation: u64,
    record: Option<Record>,
}

/// What lives in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Record {
    key: TapeKey,
    consumed: u8,
}

/// Why the pool refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotError {
    /// The plan names a slot that the pool does not have.
    Absent {
        /// The slot.
        slot: u32,
        /// How many there are.
        slots: u32,
    },
    /// The slot holds live work.
    Occupied {
        /// The slot.
        slot: u32,
        /// What lives there.
        holder: TapeKey,
    },
    /// The key is live already.
    Live {
        /// The key.
        key: TapeKey,
        /// Its slot.
        slot: u32,
    },
    /// The slot was leased anew, or purged, since the reference was made.
    Stale {
        /// The slot.
        slot: u32,
        /// The reference's generation.
        reference: u64,
        /// The slot's generation.
        current: u64,
    },
    /// The reference belongs to another microbatch or stage.
    Foreign {
        /// What the slot holds.
        holder: TapeKey,
    },
    /// I has consumed this tape.
    TapeConsumed,
    /// W has consumed this work.
    WorkConsumed,
    /// I has not ended, so there is no work.
    WorkUnwritten,
}

impl SlotError {
    /// The code under which it is reported.
    pub const fn code(&self) -> Code {
        match self {
            SlotError::Absent { .. } | SlotError::Occupied { .. } => Code::SlotsExhausted,
            SlotError::Live { .. } => Code::ForwardRepeated,
            SlotError::Stale { .. } => Code::StaleReference,
            SlotError::Foreign { .. } => Code::KeyMismatch,
            SlotError::TapeConsumed => Code::TapeConsumedTwice,
            SlotError::WorkConsumed => Code::WorkConsumedTwice,
            SlotError::WorkUnwritten => Code::WorkBeforeInputGrad,
        }
    }
}

impl fmt::Display for SlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SlotError::Absent { slot, slots } => write!(f, "leases slot {slot}, and the rank has {slots}"),
            SlotError::Occupied { slot, holder } => write!(f, "leases slot {slot}, which holds {holder}"),
            SlotError::Live { key, slot } => write!(f, "leases a second slot for {key}, which lives in slot {slot}"),
            SlotError::Stale { slot, reference, current } => {
                write!(f, "uses generation {reference} of slot {slot}, which is at generation {current}")
            }
            SlotError::Foreign { holder } => write!(f, "is given what belongs to {holder}"),
            SlotError::TapeConsumed => f.write_str("consumes a tape that is already consumed"),
            SlotError::WorkConsumed => f.write_str("consumes work that is already consumed"),
            SlotError::WorkUnwritten => f.write_str("consumes work before its input gradient has ended"),
        }
    }
}

impl std::error::Error for SlotError {}

impl SlotPool {
    /// A pool of `slots` free slots.
    pub fn new(slots: u32) -> SlotPool {
        SlotPool { slots: (0..slots).map(|_| Slot { generation: 0, record: None }).collect(), live: 0, tapes: 0 }
    }

    /// Number of slots.
    pub fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Whether the pool has no slots at all.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Live records: between F and the end of W.
    pub const fn live(&self) -> u32 {
        self.live
    }

    /// Live tapes: between F and the end of I.
    pub const fn tapes(&self) -> u32 {
        self.tapes
    }

    /// Live works: between I and the end of W.
    pub const fn works(&self) -> u32 {
        self.live - self.tapes
    }

    /// Keys of everything live, by slot.
    pub fn keys(&self) -> impl Iterator<Item = (u32, TapeKey)> + '_ {
        self.slots.iter().enumerate().filter_map(|(slot, s)| s.record.as_ref().map(|r| (slot as u32, r.key)))
    }

    /// The generation of a slot.
    pub fn generation(&self, slot: u32) -> Option<u64> {
        self.slots.get(slot as usize).map(|s| s.generation)
    }

    /// A pool with the same generations and nothing live.
    pub(crate) fn at_rest(&self) -> SlotPool {
        let slots = self.slots.iter().map(|slot| Slot { generation: slot.generation, record: None }).collect();
        SlotPool { slots, live: 0, tapes: 0 }
    }

    /// Every slot was leased and released so often.
    pub(crate) fn advance(&mut self, leases: &[u64]) {
        self.slots.iter_mut().zip(leases).for_each(|(slot, leases)| slot.generation += leases);
    }

    /// Whether `key` could be leased `slot` now.
    pub fn check_lease(&self, key: &TapeKey, slot: u32) -> Result<(), SlotError> {
        let Some(place) = self.slots.get(slot as usize) else {
            return Err(SlotError::Absent { slot, slots: self.len() });
        };
        if let Some((slot, key)) = self.keys().find(|(_, live)| live == key) {
            return Err(SlotError::Live { key, slot });
        }
        match &place.record {
            Some(record) => Err(SlotError::Occupied { slot, holder: record.key }),
            None => Ok(()),
        }
    }

    /// Leases `slot` to `key`: a new generation. The ledger leases when F has succeeded, and holds the pool
    /// exclusively from its check before F until then.
    pub fn lease(&mut self, key: TapeKey, slot: u32) -> Result<TapeRef, SlotError> {
        self.check_lease(&key, slot)?;
        let place = &mut self.slots[slot as usize];
        place.generation += 1;
        place.record = Some(Record { key, consumed: 0 });
        self.live += 1;
        self.tapes += 1;
        Ok(TapeRef::new(slot, place.generation))
    }

    /// Whether `tape` is the unconsumed tape of `key`.
    pub fn check_tape(&self, tape: &TapeRef, key: &TapeKey) -> Result<(), SlotError> {
        let record = self.record(tape.slot(), tape.generation(), SlotError::TapeConsumed)?;
        if record.key != *key {
            Err(SlotError::Foreign { holder: record.key })
        } else if record.consumed & TAPE_CONSUMED != 0 {
            Err(SlotError::TapeConsumed)
        } else {
            Ok(())
        }
    }

    /// I has ended: the tape became work.
    pub fn consume_tape(&mut self, tape: TapeRef, key: &TapeKey) -> Result<WorkRef, SlotError> {
        self.check_tape(&tape, key)?;
        self.record_mut(tape.slot(), tape.generation())?.consumed |= TAPE_CONSUMED;
        self.tapes -= 1;
        Ok(WorkRef::new(tape.slot(), tape.generation()))
    }

    /// Whether `work` is the unconsumed work of `key`.
    pub fn check_work(&self, work: &WorkRef, key: &TapeKey) -> Result<(), SlotError> {
        let record = self.record(work.slot(), work.generation(), SlotError::WorkConsumed)?;
        if record.key != *key {
            Err(SlotError::Foreign { holder: record.key })
        } else if record.consumed & WORK_CONSUMED != 0 {
            Err(SlotError::WorkConsumed)
        } else if record.consumed & TAPE_CONSUMED == 0 {
            Err(SlotError::WorkUnwritten)
        } else {
            Ok(())
        }
    }

    /// W has ended: both consumers are done and the slot is free. Its generation stays.
    pub fn consume_work(&mut self, work: WorkRef, key: &TapeKey) -> Result<(), SlotError> {
        self.check_work(&work, key)?;
        let record = self.record_mut(work.slot(), work.generation())?;
        record.consumed |= WORK_CONSUMED;
        if record.consumed == TAPE_CONSUMED | WORK_CONSUMED {
            self.slots[work.slot() as usize].record = None;
            self.live -= 1;
        }
        Ok(())
    }

    /// Drops every record of a step and makes all references to them stale. Returns how many.
    pub fn purge(&mut self, step: u64) -> u32 {
        let mut purged = 0;
        for slot in &mut self.slots {
            let Some(record) = slot.record.filter(|record| record.key.step == step) else { continue };
            slot.record = None;
            slot.generation += 1;
            self.live -= 1;
            self.tapes -= u32::from(record.consumed & TAPE_CONSUMED == 0);
            purged += 1;
        }
        purged
    }

    /// `released` is the error for a reference whose lease ended in the regular way.
    fn record(&self, slot: u32, generation: u64, released: SlotError) -> Result<&Record, SlotError> {
        let Some(place) = self.slots.get(slot as usize) else {
            return Err(SlotError::Absent { slot, slots: self.len() });
        };
        if place.generation != generation {
            return Err(SlotError::Stale { slot, reference: generation, current: place.generation });
        }
        place.record.as_ref().ok_or(released)
    }

    fn record_mut(&mut self, slot: u32, generation: u64) -> Result<&mut Record, SlotError> {
        let slots = self.len();
        let Some(place) = self.slots.get_mut(slot as usize) else {
            return Err(SlotError::Absent { slot, slots });
        };
        let current = place.generation;
        let stale = SlotError::Stale { slot, reference: generation, current };
        place.record.as_mut().filter(|_| current == generation).ok_or(stale)
    }
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;
