//! Tags of slots: with `verify`, F marks the slot that its tape lies in with step, action and generation, and I and W
//! compare the mark with what they expect, on the device, where a captured step is checked by nobody else. A difference
//! makes the step bad.

use core::fmt;

use qeffect_core::dtype::Dtype;
use qeffect_core::ids::{Microbatch, Stage as StageId};

use super::Shard;
use crate::cmd::{Cmd, SlotTag};
use crate::device::{Buf, BufSpec, Device};
use crate::error::{Error, Result};
use crate::stage::Stage;

/// Words of a tag: step, key, generation.
pub const TAG_WORDS: usize = 3;
/// Words of a report: whether there is a difference, the tag expected, the tag found.
pub const REPORT_WORDS: usize = 1 + 2 * TAG_WORDS;

/// The tags of a rank's slots.
#[derive(Debug)]
pub(super) struct Tags {
    slots: Vec<Slot>,
    report: Buf,
}

#[derive(Debug)]
struct Slot {
    tag: Buf,
    /// What it should hold. Generations count the tapes of a step.
    expected: SlotTag,
}

/// What the tag of a slot should say, and what it says: step, stage, microbatch, generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mismatch {
    expected: [u64; TAG_WORDS],
    found: [u64; TAG_WORDS],
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |[step, key, generation]: [u64; TAG_WORDS]| {
            let (stage, microbatch) = (key >> 32, key & u64::from(u32::MAX));
            format!("stage {stage}, microbatch {microbatch} of step {step}, generation {generation}")
        };
        write!(f, "a slot holds {}, not {}", name(self.found), name(self.expected))
    }
}

const fn key(stage: StageId, microbatch: Microbatch) -> u64 {
    (stage.0 as u64) << 32 | microbatch.0 as u64
}

impl<S: Stage> Shard<S> {
    /// From now on tags are written and compared, in so many slots.
    pub(crate) fn tag_slots(&mut self, slots: u32) -> Result<()> {
        let expected = SlotTag { key: 0, generation: 0 };
        let mut make = |name: String, words| self.device.alloc(BufSpec::new(name, Dtype::U64, 1, words));
        let slots = (0..slots)
            .map(|slot| Ok(Slot { tag: make(format!("tag of slot {slot}"), TAG_WORDS)?, expected }))
            .collect::<Result<Vec<_>>>()?;
        let report = make("report of tags".into(), REPORT_WORDS)?;
        self.tags = Some(Tags { slots, report });
        Ok(())
    }

    /// Whether tags are written and compared.
    pub(crate) const fn is_tagged(&self) -> bool {
        self.tags.is_some()
    }

    /// A step begins.
    pub(super) fn clear_tags(&mut self) -> Result<()> {
        let Some(tags) = &mut self.tags else { return Ok(()) };
        tags.slots.iter_mut().for_each(|slot| slot.expected.generation = 0);
        Ok(self.device.issue(&Cmd::Fill { dst: tags.report, value: 0.0 })?)
    }

    /// F has left its tape in a slot.
    pub(crate) fn write_tag(&mut self, slot: u32, stage: StageId, microbatch: Microbatch) -> Result<()> {
        let Some(tags) = &mut self.tags else { return Ok(()) };
        let slot = tags.slots.get_mut(slot as usize).ok_or_else(|| no_slot(slot))?;
        slot.expected = SlotTag { key: key(stage, microbatch), generation: slot.expected.generation + 1 };
        Ok(self.device.issue(&Cmd::WriteTag { tag: slot.tag, step: self.run.step, value: slot.expected })?)
    }

    /// I or W is about to read what F left in a slot.
    pub(crate) fn check_tag(&mut self, slot: u32, stage: StageId, microbatch: Microbatch) -> Result<()> {
        let Some(tags) = &self.tags else { return Ok(()) };
        let Slot { tag, expected } = tags.slots.get(slot as usize).ok_or_else(|| no_slot(slot))?;
        let expected = SlotTag { key: key(stage, microbatch), ..*expected };
        let (step, flag, report) = (self.run.step, self.run.flag, tags.report);
        Ok(self.device.issue(&Cmd::CheckTag { tag: *tag, step, expected, flag, report })?)
    }

    /// The first difference of the step, if there was one.
    pub(crate) fn mismatch(&mut self) -> Result<Option<Mismatch>> {
        let Some(report) = self.tags.as_ref().map(|tags| tags.report) else { return Ok(None) };
        let words = self.read_pod::<u64>(report)?;
        let [1, expected_step, expected_key, expected_generation, step, key, generation] = words[..] else {
            return Ok(None);
        };
        let expected = [expected_step, expected_key, expected_generation];
        Ok(Some(Mismatch { expected, found: [step, key, generation] }))
    }
}

fn no_slot(slot: u32) -> Error {
    Error::Config(format!("slot {slot} has no tag"))
}
