//! Counters, and tags of slots.

use core::time::Duration;

use cudarc::driver::CudaStream;

use crate::error::Result;
use crate::memory::Span;
use crate::module::{Argument, Kernels, expect, expect_if, optional};

/// What a slot should hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    /// The action's key.
    pub key: u64,
    /// The slot's generation.
    pub generation: u64,
}

/// Words of a tag: step, key, generation.
pub const TAG_WORDS: usize = 3;
/// Words of a report: 1 if there is a difference, the tag expected, the tag found.
pub const REPORT_WORDS: usize = 1 + 2 * TAG_WORDS;

impl Kernels {
    /// Raises the flag if a value is infinite or NaN.
    pub fn check_finite(&self, stream: &CudaStream, values: Span<f32>, flag: Span<u32>) -> Result {
        expect("check_finite", "values", values, values.len())?;
        expect("check_finite", "flag", flag, 1)?;
        let count = values.len() as i64;
        self.launch(stream, "check_finite", [values.len().div_ceil(256), 1], 256, 0, &[&values, &flag, &count])
    }

    /// `counter += 1`, unless the flag is raised.
    pub fn advance(&self, stream: &CudaStream, counter: Span<u64>, unless: Option<Span<u32>>) -> Result {
        expect("advance", "counter", counter, 1)?;
        expect_if("advance", "unless", unless, 1)?;
        self.launch(stream, "advance", [1, 1], 32, 0, &[&counter, &optional(unless)])
    }

    /// Keeps the stream busy for that long, at most a second: a missing wait then shows.
    pub fn delay(&self, stream: &CudaStream, time: Duration) -> Result {
        let nanoseconds = time.min(Duration::from_secs(1)).as_nanos() as u64;
        self.launch(stream, "delay", [1, 1], 32, 0, &[&nanoseconds])
    }

    /// Marks a slot.
    pub fn write_tag(&self, stream: &CudaStream, slot: Span<u64>, step: Span<u64>, tag: Tag) -> Result {
        expect("write_tag", "slot", slot, TAG_WORDS)?;
        expect("write_tag", "step", step, 1)?;
        self.launch(stream, "write_tag", [1, 1], 32, 0, &[&slot, &step, &tag.key, &tag.generation])
    }

    /// Compares a slot's mark with what should be there. A difference raises the flag; the first one is kept in `report`.
    pub fn check_tag(
        &self,
        stream: &CudaStream,
        slot: Span<u64>,
        step: Span<u64>,
        tag: Tag,
        flag: Span<u32>,
        report: Span<u64>,
    ) -> Result {
        expect("check_tag", "slot", slot, TAG_WORDS)?;
        expect("check_tag", "step", step, 1)?;
        expect("check_tag", "flag", flag, 1)?;
        expect("check_tag", "report", report, REPORT_WORDS)?;
        let arguments: [&dyn Argument; 6] = [&slot, &step, &tag.key, &tag.generation, &flag, &report];
        self.launch(stream, "check_tag", [1, 1], 32, 0, &arguments)
    }
}
