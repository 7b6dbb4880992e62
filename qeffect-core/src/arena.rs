//! Where gradients go: stable destinations, and each contribution once.
//!
//! A parameter has one place for the sum over a step, or one per microbatch, and each place one destination that is bound
//! when the run starts and never moves:
//!
//! ```text
//! unbound ──bind──► bound ──begin, finish──► written(k of M) ──complete──► final
//!                     ▲                                                      │
//!                     └────────────────────── reset ─────────────────────────┘
//! ```
//!
//! A replayed step goes from bound to final at once ([`GradArena::replay`]): its rehearsal went the long way.
//!
//! The first *executed* write of a place initialises it, whichever microbatch it is for; later ones add. An aborted write
//! leaves a sum that nobody can trust, so it poisons the arena until the step is begun again. Every operation is checked
//! first and changes nothing if it is refused.
//!
//! The arena knows destinations as numbers and touches no memory.

use core::fmt;
use core::ops::Range;

use crate::code::Code;
use crate::dtype::Dtype;

/// Where a gradient lies, as the device sees it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Destination {
    /// Which device.
    pub device: u32,
    /// Which of its allocations.
    pub buffer: u64,
    /// First byte within the allocation.
    pub offset: u64,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
}

impl Destination {
    fn bytes(&self) -> Range<u64> {
        let len = self.rows.saturating_mul(self.cols).saturating_mul(self.dtype.size() as u64);
        self.offset..self.offset.saturating_add(len)
    }

    fn overlaps(&self, other: &Destination) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        (self.device, self.buffer) == (other.device, other.buffer) && a.start < b.end && b.start < a.end
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Destination { device, buffer, offset, dtype, rows, cols } = self;
        write!(f, "{dtype}[{rows}, {cols}] at byte {offset} of buffer {buffer} on device {device}")
    }
}

/// How many destinations a parameter has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Places {
    /// One per microbatch; they are added in microbatch order at the end.
    PerMicrobatch,
    /// One: every write after the first adds.
    One,
}

/// A parameter, as an arena is told of it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Declared {
    /// Its name, for messages.
    pub name: String,
    /// Type of gradients.
    pub dtype: Dtype,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub cols: u64,
    /// Its places.
    pub places: Places,
}

/// How far a parameter's gradient is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// A place has no destination.
    Unbound,
    /// Every place has one; nothing is written.
    Bound,
    /// So many microbatches have contributed.
    Written(u32),
    /// Complete: it is read from now on.
    Final,
}

/// A write that was allowed and has not been executed. Consumed once, by [`GradArena::finish`] or [`GradArena::abort`].
#[must_use = "a write is finished or aborted"]
#[derive(PartialEq, Eq, Debug)]
pub struct Write {
    param: usize,
    microbatch: u32,
    epoch: u64,
}

impl Write {
    /// Of which parameter.
    pub const fn param(&self) -> usize {
        self.param
    }

    /// For which microbatch.
    pub const fn microbatch(&self) -> u32 {
        self.microbatch
    }
}

/// A refusal. The arena is as it was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArenaError {
    /// The violated rule.
    pub code: Code,
    /// What happened.
    pub message: String,
}

impl fmt::Display for ArenaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}]", self.message, self.code)
    }
}

impl core::error::Error for ArenaError {}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Progress {
    Missing,
    Open,
    Done,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Entry {
    declared: Declared,
    /// One per place.
    bound: Vec<Option<Destination>>,
    /// One per microbatch.
    progress: Vec<Progress>,
    complete: bool,
}

impl Entry {
    fn place(&self, microbatch: u32) -> usize {
        match self.declared.places {
            Places::PerMicrobatch => microbatch as usize,
            Places::One => 0,
        }
    }

    fn done(&self) -> u32 {
        self.progress.iter().filter(|progress| **progress == Progress::Done).count() as u32
    }
}

/// The gradients of one step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GradArena {
    device: u32,
    entries: Vec<Entry>,
    /// Counts resets: a write that was allowed before one is worth nothing after it.
    epoch: u64,
    poisoned: bool,
}

impl GradArena {
    /// For steps of `microbatches` on `device`. Parameters are numbered as they are given.
    pub fn new(device: u32, microbatches: u32, params: impl IntoIterator<Item = Declared>) -> GradArena {
        let entry = |declared: Declared| {
            let places = if declared.places == Places::One { 1 } else { microbatches as usize };
            let progress = vec![Progress::Missing; microbatches as usize];
            Entry { bound: vec![None; places], progress, complete: false, declared }
        };
        GradArena { device, entries: params.into_iter().map(entry).collect(), epoch: 0, poisoned: false }
    }

    /// Number of parameters.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of all destinations.
    pub fn bytes(&self) -> u64 {
        let destinations = self.entries.iter().flat_map(|entry| entry.bound.iter().flatten());
        destinations.map(|destination| destination.bytes()).map(|bytes| bytes.end - bytes.start).sum()
    }

    /// How far a parameter is; `None` if it does not exist.
    pub fn state(&self, param: usize) -> Option<State> {
        let entry = self.entries.get(param)?;
        Some(match entry.done() {
            _ if entry.complete => State::Final,
            _ if entry.bound.contains(&None) => State::Unbound,
            0 => State::Bound,
            count => State::Written(count),
        })
    }

    /// Whether an aborted write is in it.
    pub const fn is_poisoned(&self) -> bool {
        self.poisoned
    }

    /// The destination of a microbatch's contribution.
    pub fn destination(&self, param: usize, microbatch: u32) -> Option<&Destination> {
        let entry = self.entries.get(param)?;
        entry.bound.get(entry.place(microbatch))?.as_ref()
    }

    /// Gives a place of a parameter its destination, for the whole run. Place m is that of microbatch m, or 0 is the only
    /// one.
    ///
    /// # Errors
    ///
    /// QE0804: another shape, type or device than the parameter's; no such place; a place that has a destination.
    /// QE0803: the destination overlaps another one.
    pub fn bind(&mut self, param: usize, place: u32, destination: Destination) -> Result<(), ArenaError> {
        let entry = self.entry(param)?;
        let Declared { name, dtype, rows, cols, .. } = &entry.declared;
        let mismatch = |message: String| refuse(Code::ArenaMismatch, message);
        match entry.bound.get(place as usize) {
            None => return mismatch(format!("the gradient of `{name}` has no place {place}")),
            Some(Some(bound)) => {
                return mismatch(format!("the gradient of `{name}` lies at {bound}, and is given {destination}"));
            }
            Some(None) => {}
        }
        let Destination { device, dtype: found, rows: down, cols: across, .. } = destination;
        if (found, down, across) != (*dtype, *rows, *cols) || device != self.device {
            let device = self.device;
            return mismatch(format!(
                "the gradient of `{name}` is {dtype}[{rows}, {cols}] on device {device}, and is given {destination}"
            ));
        }
        let shared = self.entries.iter().find(|other| other.bound.iter().flatten().any(|d| d.overlaps(&destination)));
        if let Some(other) = shared {
            let other = &other.declared.name;
            return refuse(
                Code::ArenaAliased,
                format!("the gradients of `{other}` and `{name}` would share {destination}"),
            );
        }
        self.entries[param].bound[place as usize] = Some(destination);
        Ok(())
    }

    /// A step begins: nothing is written, and nothing is poisoned any more. Destinations stay.
    pub fn reset(&mut self) {
        for entry in &mut self.entries {
            entry.progress.fill(Progress::Missing);
            entry.complete = false;
        }
        self.epoch += 1;
        self.poisoned = false;
    }

    /// Allows the contribution of a microbatch. Whether it initialises its place is known when it is executed:
    /// [`GradArena::initialises`].
    ///
    /// # Errors
    ///
    /// QE0801: it was allowed or written before, or the gradient is complete. QE0804: there is no such parameter,
    /// microbatch or destination. QE0805: the arena is poisoned.
    pub fn begin(&mut self, param: usize, microbatch: u32) -> Result<Write, ArenaError> {
        self.sound()?;
        let epoch = self.epoch;
        let entry = self.entry(param)?;
        let name = &entry.declared.name;
        let Some(progress) = entry.progress.get(microbatch as usize) else {
            return refuse(Code::ArenaMismatch, format!("the gradient of `{name}` has no microbatch {microbatch}"));
        };
        if entry.bound.get(entry.place(microbatch)).is_none_or(Option::is_none) {
            return refuse(Code::ArenaMismatch, format!("the gradient of `{name}` has no destination"));
        }
        if entry.complete {
            return refuse(
                Code::ArenaDuplicate,
                format!("the gradient of `{name}` is complete, and microbatch {microbatch} adds to it"),
            );
        }
        if *progress != Progress::Missing {
            return refuse(
                Code::ArenaDuplicate,
                format!("the gradient of `{name}` is written twice for microbatch {microbatch}"),
            );
        }
        self.entries[param].progress[microbatch as usize] = Progress::Open;
        Ok(Write { param, microbatch, epoch })
    }

    /// Whether a write that is executed now is the first of its place, which overwrites; any other one adds.
    pub fn initialises(&self, write: &Write) -> bool {
        self.entries.get(write.param).is_some_and(|entry| match entry.declared.places {
            Places::PerMicrobatch => true,
            Places::One => entry.done() == 0,
        })
    }

    /// A write was executed, at `destination`.
    ///
    /// # Errors
    ///
    /// QE0804: it went elsewhere. QE0805: the arena is poisoned, or was reset since the write was allowed. The write stays
    /// open then, so the gradient cannot become complete.
    pub fn finish(&mut self, write: Write, destination: &Destination) -> Result<(), ArenaError> {
        self.current(&write)?;
        let entry = self.entry(write.param)?;
        match entry.bound.get(entry.place(write.microbatch)) {
            Some(Some(bound)) if bound == destination => {}
            bound => {
                let name = &entry.declared.name;
                let bound = bound.copied().flatten().map_or_else(|| "nowhere".into(), |bound| bound.to_string());
                let message = format!("the gradient of `{name}` lies at {bound}, and was written at {destination}");
                return refuse(Code::ArenaMismatch, message);
            }
        }
        self.entries[write.param].progress[write.microbatch as usize] = Progress::Done;
        Ok(())
    }

    /// A write was begun and not executed to its end: nothing more is allowed until the next [`GradArena::reset`].
    pub fn abort(&mut self, write: Write) {
        self.poisoned |= write.epoch == self.epoch;
    }

    /// The action that writes failed, and what it has written is not known: as [`GradArena::abort`].
    pub fn poison(&mut self) {
        self.poisoned = true;
    }

    /// The last contribution was written: the gradient is read from now on.
    ///
    /// # Errors
    ///
    /// QE0802: a microbatch is missing, or its write is not finished. QE0801: it was complete before. QE0805: the arena is
    /// poisoned.
    pub fn complete(&mut self, param: usize) -> Result<(), ArenaError> {
        self.sound()?;
        let entry = self.entry(param)?;
        let name = &entry.declared.name;
        if entry.complete {
            return refuse(Code::ArenaDuplicate, format!("the gradient of `{name}` is completed twice"));
        }
        if let Some(microbatch) = entry.progress.iter().position(|progress| *progress != Progress::Done) {
            return refuse(Code::ArenaMissing, format!("the gradient of `{name}` lacks microbatch {microbatch}"));
        }
        self.entries[param].complete = true;
        Ok(())
    }

    /// A replayed step: everything that its rehearsal wrote and completed, as one transition from bound to final.
    ///
    /// # Errors
    ///
    /// QE0804: a place has no destination. QE0801: something is written already. QE0805: the arena is poisoned.
    pub fn replay(&mut self) -> Result<(), ArenaError> {
        self.sound()?;
        for Entry { declared: Declared { name, .. }, bound, progress, complete } in &self.entries {
            if bound.contains(&None) {
                return refuse(Code::ArenaMismatch, format!("the gradient of `{name}` has no destination"));
            }
            if *complete || progress.iter().any(|progress| *progress != Progress::Missing) {
                let message = format!("the gradient of `{name}` is written, and a replay would write it again");
                return refuse(Code::ArenaDuplicate, message);
            }
        }
        for entry in &mut self.entries {
            entry.progress.fill(Progress::Done);
            entry.complete = true;
        }
        Ok(())
    }

    /// Refuses unless a gradient is complete: what a reader asks.
    ///
    /// # Errors
    ///
    /// QE0802: it is not. QE0804: there is no such parameter. QE0805: the arena is poisoned.
    pub fn require_final(&self, param: usize) -> Result<(), ArenaError> {
        self.sound()?;
        let Entry { declared, complete, .. } = self.entry(param)?;
        if !complete {
            return refuse(Code::ArenaMissing, format!("the gradient of `{}` is not complete", declared.name));
        }
        Ok(())
    }

    /// Refuses unless every gradient is complete: what a commit asks.
    ///
    /// # Errors
    ///
    /// As [`GradArena::require_final`].
    pub fn all_final(&self) -> Result<(), ArenaError> {
        self.sound()?;
        (0..self.len()).try_for_each(|param| self.require_final(param))
    }

    fn sound(&self) -> Result<(), ArenaError> {
        if self.poisoned {
            return refuse(Code::ArenaPoisoned, "a write to a gradient of this step was aborted".into());
        }
        Ok(())
    }

    fn current(&self, write: &Write) -> Result<(), ArenaError> {
        self.sound()?;
        if write.epoch != self.epoch {
            let message = format!("a write for microbatch {} belongs to an earlier step", write.microbatch);
            return refuse(Code::ArenaPoisoned, message);
        }
        Ok(())
    }

    fn entry(&self, param: usize) -> Result<&Entry, ArenaError> {
        match self.entries.get(param) {
            Some(entry) => Ok(entry),
            None => refuse(Code::ArenaMismatch, format!("there is no parameter {param}")),
        }
    }
}

fn refuse<T>(code: Code, message: String) -> Result<T, ArenaError> {
    Err(ArenaError { code, message })
}

#[cfg(test)]
mod tests;
