//! A device that shows every command, one by one, to whoever wants to see it, and then carries it out.

use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId};

pub struct Tap<F> {
    device: Box<dyn Device>,
    see: F,
}

impl<F: FnMut(&Cmd, &mut dyn Device) + Send + 'static> Tap<F> {
    /// `see` is shown commands that are issued; those of lists are not.
    pub fn boxed(device: Box<dyn Device>, see: F) -> Box<dyn Device> {
        Box::new(Tap { device, see })
    }
}

impl<F: FnMut(&Cmd, &mut dyn Device) + Send> Device for Tap<F> {
    fn name(&self) -> &str {
        self.device.name()
    }
    fn caps(&self) -> Caps {
        self.device.caps()
    }
    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        self.device.alloc(spec)
    }
    fn spec(&self, buf: Buf) -> Result<&BufSpec, DeviceError> {
        self.device.spec(buf)
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        (self.see)(cmd, self.device.as_mut());
        self.device.issue(cmd)
    }
    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        self.device.write(buf, bytes)
    }
    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.device.read(buf, bytes)
    }
    fn poison(&mut self, buf: Buf) -> Result<(), DeviceError> {
        self.device.poison(buf)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        self.device.instantiate(cmds)
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.device.launch(graph)
    }
    fn drop_graph(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.device.drop_graph(graph)
    }
}
