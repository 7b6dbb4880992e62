//! Points in a stream whose times can be compared.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaEvent, sys};

use crate::error::{Error, Result};

/// An event that keeps the time at which its stream came to it.
///
/// # Errors
///
/// A driver that makes none.
pub fn timed(context: &Arc<CudaContext>) -> Result<CudaEvent> {
    let made = context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
    made.map_err(|source| Error::Driver { call: "making an event", source })
}

/// From one such event to another, which was recorded behind it. Waits for both. About half a microsecond is told apart.
///
/// # Errors
///
/// Events of different contexts, or that were not recorded.
pub fn between(start: &CudaEvent, end: &CudaEvent) -> Result<Duration> {
    let elapsed = start.elapsed_ms(end).map_err(|source| Error::Driver { call: "comparing events", source })?;
    Ok(Duration::from_secs_f64(f64::from(elapsed.max(0.0)) / 1e3))
}
