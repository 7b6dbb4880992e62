//! A GPU that only counts: what a run would take of one, found on any machine.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qeffect_kernels::gemm::WORKSPACE;

use super::layout::Layout;
use super::scratch::Need;
use super::{CAPS, LANES};
use crate::cmd::Cmd;
use crate::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId};

/// A device that places buffers as a GPU does, and carries nothing out: reads give zeros. Clones count together.
#[derive(Clone, Debug)]
pub struct DryRun {
    lanes: usize,
    specs: Vec<BufSpec>,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    layout: Layout,
    need: Need,
    graphs: u32,
}

impl Default for DryRun {
    fn default() -> DryRun {
        DryRun::new()
    }
}

impl DryRun {
    /// Of a device with graphs of [`LANES`] lanes.
    pub fn new() -> DryRun {
        DryRun { lanes: LANES, specs: Vec::new(), counts: Arc::default() }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner) // numbers that are whole between calls
    }

    /// Bytes of all buffers.
    pub fn held(&self) -> usize {
        self.counts().layout.held()
    }

    /// Bytes that the device takes beyond its buffers: the rest of its allocations, and what each lane works in.
    pub fn beside(&self) -> usize {
        let counts = self.counts();
        counts.layout.allocated() - counts.layout.held() + self.lanes * (WORKSPACE + counts.need.bytes())
    }
}

impl Device for DryRun {
    fn name(&self) -> &str {
        "a GPU that only counts"
    }

    fn caps(&self) -> Caps {
        CAPS
    }

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let mut counts = self.counts();
        let slot = counts.layout.next(spec.bytes());
        counts.layout.take(slot, spec.bytes());
        drop(counts);
        self.specs.push(spec);
        Ok(Buf((self.specs.len() - 1) as u32))
    }

    fn spec(&self, buf: Buf) -> Result<&BufSpec, DeviceError> {
        self.specs.get(buf.index()).ok_or(DeviceError::UnknownBuffer(buf))
    }

    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        let need = Need::of(cmd, |buf| self.spec(buf))?;
        let mut counts = self.counts();
        counts.need = counts.need.max(need);
        Ok(())
    }

    fn write(&mut self, _: Buf, _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn read(&mut self, _: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bytes.fill(0);
        Ok(())
    }

    fn poison(&mut self, _: Buf) -> Result<(), DeviceError> {
        Ok(())
    }

    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        cmds.iter().try_for_each(|cmd| self.issue(cmd))?;
        let mut counts = self.counts();
        counts.graphs += 1;
        Ok(GraphId(counts.graphs - 1))
    }

    fn launch(&mut self, _: GraphId) -> Result<(), DeviceError> {
        Ok(())
    }

    fn drop_graph(&mut self, _: GraphId) -> Result<(), DeviceError> {
        Ok(())
    }
}
