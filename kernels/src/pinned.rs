//! Host memory that the GPU reads and writes by itself, and copies through it in the order of a stream.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};

use crate::error::{Error, Result};
use crate::memory::Span;
use crate::quiet;

/// Bytes of a segment: the most that one copy moves.
const SEGMENT: usize = 2 << 20;
const SEGMENTS: usize = 4;
/// Where a copy begins within a segment.
const ALIGNMENT: usize = 64;

/// A ring of pinned memory, through which copies pass.
///
/// A copy to the device returns when its bytes lie in the ring: they arrive in the order of the stream. The host waits only
/// where the ring is full of copies that have not been made yet.
#[derive(Debug)]
pub struct Ring {
    memory: Pinned,
    /// Recorded behind the last copy of each segment.
    left: [CudaEvent; SEGMENTS],
    segment: usize,
    used: usize,
}

/// Page-locked memory of the host.
#[derive(Debug)]
struct Pinned {
    address: *mut u8,
    context: Arc<CudaContext>,
}

// SAFETY: the memory belongs to its one owner; it is tied to no thread.
unsafe impl Send for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _alone = quiet::alone();
        // Copies may still be in flight. An error has nowhere to go.
        if self.context.synchronize().is_ok() {
            // SAFETY: it was allocated once, is freed once, and nothing runs that could use it.
            let _ = unsafe { result::free_host(self.address.cast()) };
        }
    }
}

fn fault(call: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error {
    move |source| Error::Driver { call, source }
}

impl Ring {
    /// An empty ring.
    pub fn new(context: &Arc<CudaContext>) -> Result<Ring> {
        let fault = fault("allocation of pinned memory");
        let _alone = quiet::alone();
        context.bind_to_thread().map_err(&fault)?;
        // SAFETY: the context is current; the memory is freed once, when it is dropped.
        let address = unsafe { result::malloc_host(SEGMENT * SEGMENTS, 0) }.map_err(&fault)?.cast::<u8>();
        let memory = Pinned { address, context: context.clone() };
        let event = || context.new_event(None).map_err(&fault);
        Ok(Ring { memory, left: [event()?, event()?, event()?, event()?], segment: 0, used: 0 })
    }

    /// Room for some bytes, at most a segment; it has been left by all copies through it.
    fn room(&mut self, stream: &CudaStream, bytes: usize) -> Result<&mut [u8]> {
        let fault = fault("waiting for pinned memory");
        if self.used + bytes > SEGMENT {
            self.left[self.segment].record(stream).map_err(&fault)?;
            self.segment = (self.segment + 1) % SEGMENTS;
            self.left[self.segment].synchronize().map_err(&fault)?;
            self.used = 0;
        }
        let start = self.segment * SEGMENT + self.used;
        self.used = (self.used + bytes).next_multiple_of(ALIGNMENT);
        // SAFETY: the range lies within the memory, since `bytes` is at most a segment; no other reference to it exists, and
        // the device has left it.
        Ok(unsafe { core::slice::from_raw_parts_mut(self.memory.address.add(start), bytes) })
    }

    /// Copies bytes to the device, behind what the stream holds.
    pub fn write(&mut self, stream: &CudaStream, bytes: &[u8], to: Span<u8>) -> Result {
        if bytes.len() != to.len() {
            let (expected, found) = (to.len(), bytes.len());
            return Err(Error::Length { kernel: "copy to the device", operand: "bytes", expected, found });
        }
        let fault = fault("copy to the device");
        stream.context().bind_to_thread().map_err(&fault)?;
        for (index, part) in bytes.chunks(SEGMENT).enumerate() {
            let room = self.room(stream, part.len())?;
            room.copy_from_slice(part);
            // SAFETY: both ends have that many bytes; the room is not used again before the stream has passed this copy.
            unsafe { result::memcpy_htod_async(to.address() + (index * SEGMENT) as u64, room, stream.cu_stream()) }
                .map_err(&fault)?;
        }
        Ok(())
    }

    /// Waits for what the stream holds, and copies bytes from the device.
    pub fn read(&mut self, stream: &CudaStream, from: Span<u8>, bytes: &mut [u8]) -> Result {
        if bytes.len() != from.len() {
            let (expected, found) = (from.len(), bytes.len());
            return Err(Error::Length { kernel: "copy from the device", operand: "bytes", expected, found });
        }
        let fault = fault("copy from the device");
        stream.context().bind_to_thread().map_err(&fault)?;
        for (index, part) in bytes.chunks_mut(SEGMENT).enumerate() {
            let room = self.room(stream, part.len())?;
            // SAFETY: both ends have that many bytes; the room is read below, when the stream has passed this copy.
            unsafe { result::memcpy_dtoh_async(room, from.address() + (index * SEGMENT) as u64, stream.cu_stream()) }
                .map_err(&fault)?;
            stream.synchronize().map_err(&fault)?;
            part.copy_from_slice(room);
        }
        Ok(())
    }
}
