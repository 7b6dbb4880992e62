//! A device that shows every command, one by one, to whoever wants to see it, and then carries it out.

use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::device::{Device, DeviceError};

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
    qeffect_runtime::hand_on!(device: name caps alloc spec write read poison instantiate launch drop_graph);

    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        (self.see)(cmd, self.device.as_mut());
        self.device.issue(cmd)
    }
}
