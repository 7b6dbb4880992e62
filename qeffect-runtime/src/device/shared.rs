//! One device for several ranks: handles that all allocate from it, so a buffer means the same to each of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Buf, BufSpec, Caps, Device, DeviceError, GraphId, Mark, Memory};
use crate::cmd::Cmd;

/// A handle to a device. Clones lead to the same one; each knows the buffers that it has made itself.
pub struct SharedDevice {
    shared: Arc<Shared>,
    /// Which of the handles.
    number: u64,
    name: Arc<str>,
    caps: Caps,
    specs: BTreeMap<Buf, BufSpec>,
}

struct Shared {
    device: Mutex<Held>,
    freed: Condvar,
    handles: AtomicU64,
}

struct Held {
    device: Box<dyn Device>,
    /// The handle that has the device to itself.
    holder: Option<u64>,
}

/// The time in which a handle has the device to itself. It ends when this is dropped.
#[must_use = "a turn that is dropped is over"]
pub struct Turn(Arc<Shared>);

impl Shared {
    /// Waits while another handle has the device to itself.
    fn lock(&self, number: u64) -> MutexGuard<'_, Held> {
        // A device keeps its buffers consistent between commands; whoever panicked is reported by other means.
        let held = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = |held: &mut Held| held.holder.is_some_and(|holder| holder != number);
        self.freed.wait_while(held, taken).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.device.lock().unwrap_or_else(PoisonError::into_inner).holder = None;
        self.0.freed.notify_all();
    }
}

impl Clone for SharedDevice {
    fn clone(&self) -> SharedDevice {
        let SharedDevice { shared, name, caps, specs, .. } = self;
        let number = shared.handles.fetch_add(1, Ordering::Relaxed);
        SharedDevice { shared: shared.clone(), number, name: name.clone(), caps: *caps, specs: specs.clone() }
    }
}

impl SharedDevice {
    /// The first handle.
    pub fn new(device: Box<dyn Device>) -> SharedDevice {
        let (name, caps) = (device.name().into(), device.caps());
        let device = Mutex::new(Held { device, holder: None });
        let shared = Shared { device, freed: Condvar::new(), handles: AtomicU64::new(1) };
        SharedDevice { shared: Arc::new(shared), number: 0, name, caps, specs: BTreeMap::new() }
    }

    /// What a buffer holds, whoever has made it.
    pub fn find(&self, buf: Buf) -> Option<BufSpec> {
        self.with(|device| device.spec(buf).ok().cloned())
    }

    fn with<R>(&self, run: impl FnOnce(&mut dyn Device) -> R) -> R {
        run(self.shared.lock(self.number).device.as_mut())
    }
}

impl Device for SharedDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn memory(&self) -> Result<Option<Memory>, DeviceError> {
        self.with(|device| device.memory())
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

    fn hold(&mut self) -> Option<Turn> {
        self.shared.lock(self.number).holder = Some(self.number);
        Some(Turn(self.shared.clone()))
    }

    fn mark(&mut self) -> Result<Option<Mark>, DeviceError> {
        self.with(|device| device.mark())
    }

    fn times(&mut self, marks: &[Mark]) -> Result<Vec<Instant>, DeviceError> {
        self.with(|device| device.times(marks))
    }
}
