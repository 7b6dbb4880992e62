//! Points in the stream of a device, timed by the GPU.

use std::sync::Arc;
use std::time::Duration;

use qeffect_kernels::{CudaContext, CudaEvent, CudaStream, Error, event};

use super::failed;
use crate::device::{DeviceError, Mark};

/// Events: those in use, by their marks, and those that are free.
#[derive(Debug, Default)]
pub(super) struct Marks {
    events: Vec<CudaEvent>,
    free: Vec<Mark>,
}

type Result<T, E = DeviceError> = std::result::Result<T, E>;

impl Marks {
    /// Marks where a stream is.
    pub(super) fn mark(&mut self, context: &Arc<CudaContext>, stream: &CudaStream) -> Result<Mark> {
        const CALL: &str = "mark";
        let mark = match self.free.pop() {
            Some(mark) => mark,
            None => {
                self.events.push(event::timed(context).map_err(failed(CALL))?);
                Mark((self.events.len() - 1) as u32)
            }
        };
        let recorded = self.get(mark)?.record(stream);
        recorded.map_err(|source| failed(CALL)(Error::Driver { call: "recording an event", source }))?;
        Ok(mark)
    }

    /// Times from the first mark to each. All are free again.
    pub(super) fn times(&mut self, marks: &[Mark]) -> Result<Vec<Duration>> {
        let Some(first) = marks.first() else { return Ok(Vec::new()) };
        let since = |mark: &Mark| event::between(self.get(*first)?, self.get(*mark)?).map_err(failed("times"));
        let times = marks.iter().map(since).collect();
        self.free.extend_from_slice(marks);
        times
    }

    fn get(&self, mark: Mark) -> Result<&CudaEvent> {
        let unknown = || DeviceError::Failed { cmd: "times", reason: "a mark of another device".into() };
        self.events.get(mark.0 as usize).ok_or_else(unknown)
    }
}
