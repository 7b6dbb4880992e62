//! The slot pool: which key lives in which slot, at which generation, and what of it is consumed.

use std::collections::BTreeSet;

use proptest::prelude::*;
use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Stage};
use qeffect_core::slots::SlotPool;
use qeffect_core::tape::TapeKey;

use crate::{choose, forged_tape, forged_work};

/// What lives in a slot: its key, and whether I has taken the tape.
pub type Record = (TapeKey, bool);

#[derive(Clone, Debug)]
pub struct Slots {
    pub records: Vec<Option<Record>>,
    pub generations: Vec<u64>,
}

impl Slots {
    pub fn new(count: u32) -> Slots {
        Slots { records: vec![None; count as usize], generations: vec![0; count as usize] }
    }

    pub fn tapes(&self) -> u32 {
        self.records.iter().flatten().filter(|(_, taken)| !taken).count() as u32
    }

    pub fn live(&self) -> u32 {
        self.records.iter().flatten().count() as u32
    }

    pub fn lease_breaks(&self, key: TapeKey, slot: u32) -> BTreeSet<Code> {
        let mut broken = BTreeSet::new();
        if self.records.get(slot as usize).is_none_or(Option::is_some) {
            broken.insert(Code::SlotsExhausted);
        }
        if self.records.iter().flatten().any(|(live, _)| *live == key) {
            broken.insert(Code::ForwardRepeated);
        }
        broken
    }

    pub fn reference_breaks(&self, key: TapeKey, slot: u32, generation: u64, work: bool) -> BTreeSet<Code> {
        let Some(current) = self.generations.get(slot as usize) else { return [Code::SlotsExhausted].into() };
        let consumed = if work { Code::WorkConsumedTwice } else { Code::TapeConsumedTwice };
        if generation != *current {
            return [Code::StaleReference].into();
        }
        let Some((holder, taken)) = self.records[slot as usize] else { return [consumed].into() };
        let mut broken = BTreeSet::new();
        if holder != key {
            broken.insert(Code::KeyMismatch);
        }
        match (work, taken) {
            (false, true) => broken.insert(consumed),
            (true, false) => broken.insert(Code::WorkBeforeInputGrad),
            _ => false,
        };
        broken
    }

    pub fn lease(&mut self, key: TapeKey, slot: u32) {
        self.generations[slot as usize] += 1;
        self.records[slot as usize] = Some((key, false));
    }

    pub fn purge(&mut self, step: u64) -> u32 {
        let mut purged = 0;
        for (record, generation) in self.records.iter_mut().zip(&mut self.generations) {
            if record.is_some_and(|(key, _)| key.step == step) {
                *record = None;
                *generation += 1;
                purged += 1;
            }
        }
        purged
    }
}

#[derive(Clone, Copy, Debug)]
enum PoolCall {
    Lease(TapeKey, u32),
    ConsumeTape(TapeKey, u32, u64),
    ConsumeWork(TapeKey, u32, u64),
    Purge(u64),
}

pub const SLOTS: u32 = 3;

impl PoolCall {
    fn breaks(&self, slots: &Slots) -> BTreeSet<Code> {
        match *self {
            PoolCall::Lease(key, slot) => slots.lease_breaks(key, slot),
            PoolCall::ConsumeTape(key, slot, generation) => slots.reference_breaks(key, slot, generation, false),
            PoolCall::ConsumeWork(key, slot, generation) => slots.reference_breaks(key, slot, generation, true),
            PoolCall::Purge(_) => BTreeSet::new(),
        }
    }

    /// Every call on a small pool: all keys, slots (one too many), and generations around the current one.
    fn all(slots: &Slots) -> Vec<PoolCall> {
        let mut calls = Vec::new();
        for key in (0..2).flat_map(|step| (0..4).map(move |m| TapeKey::stage(step, Stage(0), Microbatch(m)))) {
            for slot in 0..=SLOTS {
                calls.push(PoolCall::Lease(key, slot));
                let current = slots.generations.get(slot as usize).copied().unwrap_or(1);
                for generation in current.saturating_sub(1).max(1)..=current + 1 {
                    calls.push(PoolCall::ConsumeTape(key, slot, generation));
                    calls.push(PoolCall::ConsumeWork(key, slot, generation));
                }
            }
        }
        calls.extend([PoolCall::Purge(0), PoolCall::Purge(1)]);
        calls
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn the_slot_pool_is_its_model(choices in prop::collection::vec(any::<(u8, u16)>(), 0..60)) {
        let (mut pool, mut model) = (SlotPool::new(SLOTS), Slots::new(SLOTS));
        for choice in choices {
            let call = choose(choice, &PoolCall::all(&model), |call| call.breaks(&model), |_| true);
            let broken = call.breaks(&model);
            let before = format!("{pool:?}");
            let refused = match call {
                PoolCall::Lease(key, slot) => pool.lease(key, slot).map(|tape| {
                    assert_eq!((tape.slot(), tape.generation()), (slot, model.generations[slot as usize] + 1));
                }),
                PoolCall::ConsumeTape(key, slot, generation) => {
                    pool.consume_tape(forged_tape(slot, generation), &key).map(|work| {
                        assert_eq!((work.slot(), work.generation()), (slot, generation));
                    })
                }
                PoolCall::ConsumeWork(key, slot, generation) => pool.consume_work(forged_work(slot, generation), &key),
                PoolCall::Purge(step) => {
                    let purged = model.clone().purge(step);
                    assert_eq!(pool.purge(step), purged);
                    Ok(())
                }
            }
            .err();
            match refused {
                Some(error) => {
                    prop_assert!(broken.contains(&error.code()), "{call:?}: {error}, breaks {broken:?}");
                    prop_assert_eq!(format!("{pool:?}"), before, "a refused call changed the pool");
                }
                None => {
                    prop_assert!(broken.is_empty(), "{call:?} breaks {broken:?} and succeeds");
                    match call {
                        PoolCall::Lease(key, slot) => model.lease(key, slot),
                        PoolCall::ConsumeTape(key, slot, _) => model.records[slot as usize] = Some((key, true)),
                        PoolCall::ConsumeWork(_, slot, _) => model.records[slot as usize] = None,
                        PoolCall::Purge(step) => {
                            model.purge(step);
                        }
                    }
                }
            }
            prop_assert_eq!((pool.live(), pool.tapes()), (model.live(), model.tapes()));
            prop_assert_eq!(pool.works(), model.live() - model.tapes());
            for slot in 0..SLOTS {
                prop_assert_eq!(pool.generation(slot), Some(model.generations[slot as usize]));
            }
            let keys: Vec<(u32, TapeKey)> = pool.keys().collect();
            let records = model.records.iter().enumerate();
            let expected: Vec<_> = records.filter_map(|(slot, r)| Some((slot as u32, r.as_ref()?.0))).collect();
            prop_assert_eq!(keys, expected);
        }
    }
}
