//! Points in the stream of a device, timed by the GPU.
//!
//! The GPU tells how long it takes from one event to another. What ties these times to the clock of the host is an event
//! that was recorded when the stream was empty: anew for every set of marks, so that the two clocks cannot drift apart.

use std::sync::Arc;
use std::time::Instant;

use qeffect_kernels::{CudaContext, CudaEvent, CudaStream, DriverError, Error, event};

use super::failed;
use crate::device::{DeviceError, Mark};

/// Events: those in use, by their marks, and those that are free.
#[derive(Debug, Default)]
pub(super) struct Marks {
    events: Vec<CudaEvent>,
    free: Vec<Mark>,
    /// Where time begins, and when that was.
    origin: Option<(CudaEvent, Instant)>,
}

type Result<T, E = DeviceError> = std::result::Result<T, E>;

fn driver(call: &'static str) -> impl Fn(DriverError) -> DeviceError + Copy {
    move |source| failed("mark")(Error::Driver { call, source })
}

impl Marks {
    /// Marks where a stream is.
    pub(super) fn mark(&mut self, context: &Arc<CudaContext>, stream: &CudaStream) -> Result<Mark> {
        let new = || event::timed(context).map_err(failed("mark"));
        let recorded = driver("recording an event");
        if self.events.len() == self.free.len() {
            let origin = new()?;
            stream.synchronize().map_err(driver("waiting for a stream"))?;
            let now = Instant::now();
            origin.record(stream).map_err(recorded)?;
            self.origin = Some((origin, now));
        }
        let mark = match self.free.pop() {
            Some(mark) => mark,
            None => {
                self.events.push(new()?);
                Mark((self.events.len() - 1) as u32)
            }
        };
        self.get(mark)?.record(stream).map_err(recorded)?;
        Ok(mark)
    }

    /// When the GPU came to each. All are free again.
    pub(super) fn times(&mut self, marks: &[Mark]) -> Result<Vec<Instant>> {
        let time = |mark: &Mark| {
            let (origin, zero) = self.origin.as_ref().ok_or_else(unknown)?;
            Ok(*zero + event::between(origin, self.get(*mark)?).map_err(failed("times"))?)
        };
        let times = marks.iter().map(time).collect();
        self.free.extend_from_slice(marks);
        times
    }

    fn get(&self, mark: Mark) -> Result<&CudaEvent> {
        self.events.get(mark.0 as usize).ok_or_else(unknown)
    }
}

fn unknown() -> DeviceError {
    DeviceError::Failed { cmd: "times", reason: "a mark of another device".into() }
}
