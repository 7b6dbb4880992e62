//! One device for several ranks: handles that all allocate from it, so a buffer means the same to each of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Buf, BufSpec, Caps, Device, DeviceError, GraphId};
use crate::cmd::Cmd;

/// A handle to a device. Clones lead to the same one; each knows the buffers that it has made itself.
#[derive(Clone)]
pub struct SharedDevice {
    device: Arc<Mutex<Box<dyn Device>>>,
    name: Arc<str>,
    caps: Caps,
    specs: BTreeMap<Buf, BufSpec>,
}

impl SharedDevice {
    /// The first handle.
    pub fn new(device: Box<dyn Device>) -> SharedDevice {
        let (name, caps) = (device.name().into(), device.caps());
        SharedDevice { device: Arc::new(Mutex::new(device)), name, caps, specs: BTreeMap::new() }
    }

    /// What a buffer holds, whoever has made it.
    pub fn find(&self, buf: Buf) -> Option<BufSpec> {
        self.with(|device| device.spec(buf).ok().cloned())
    }

    fn with<R>(&self, run: impl FnOnce(&mut dyn Device) -> R) -> R {
        // A device keeps its buffers consistent between commands; whoever panicked is reported by other means.
        run(self.device.lock().unwrap_or_else(PoisonError::into_inner).as_mut())
    }
}

impl Device for SharedDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let buf = self.with(|device| device.alloc(spec.clone()))?;
        self.specs.insert(buf, spec);
        Ok(buf)
    }

    fn spec(&self, buf: Buf) -> Result<&BufSpec, DeviceError> {
        self.specs.get(&buf).ok_or(DeviceError::UnknownBuffer(buf))
    }

    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        self.with(|device| device.issue(cmd))
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        self.with(|device| device.write(buf, bytes))
    }

    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.with(|device| device.read(buf, bytes))
    }

    fn poison(&mut self, buf: Buf) -> Result<(), DeviceError> {
        self.with(|device| device.poison(buf))
    }

    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        self.with(|device| device.instantiate(cmds))
    }

    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.with(|device| device.launch(graph))
    }

    fn drop_graph(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.with(|device| device.drop_graph(graph))
    }
}
