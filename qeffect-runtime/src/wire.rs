//! Messages of a rank's pass: tensors of a device to and from the local transport.

use std::time::{Duration, Instant};

use qeffect_core::dtype::Dtype;
use qeffect_core::execute::Port;
use qeffect_core::plan::{Direction, Plan};

use crate::act::Act;
use crate::device::Device;
use crate::error::Result;
use crate::optim::Measured;
use crate::stage::Stage;
use crate::transport::local::Link;
use crate::transport::{Tag, TransportError};

/// One rank's end of all edges, for one pass.
pub(crate) struct Wire<'a> {
    link: &'a Link<'a, Measured>,
    plan: &'a Plan,
    /// Per edge, receive buffers whose messages are in use.
    used: Vec<Vec<Vec<u8>>>,
    /// Time spent waiting for others.
    pub waited: Duration,
}

impl<'a> Wire<'a> {
    pub fn new(link: &'a Link<'a, Measured>, plan: &'a Plan) -> Wire<'a> {
        Wire { link, plan, used: plan.edges.iter().map(|_| Vec::new()).collect(), waited: Duration::ZERO }
    }

    /// Sends what a buffer holds; the buffer is free when this returns.
    pub fn send(&mut self, device: &mut dyn Device, port: Port, act: Act) -> Result<()> {
        let tag = self.tag(port)?;
        let mut bytes = self.link.source(port.edge)?;
        if bytes.len() != act.bytes() {
            return Err(TransportError::Size { tag, expected: bytes.len(), found: act.bytes() }.into());
        }
        device.read(act.buf, &mut bytes)?;
        Ok(self.link.send(port.edge, tag, bytes)?)
    }

    /// Says that the next free receive buffer takes this message.
    pub fn post(&mut self, port: Port) -> Result<()> {
        Ok(self.link.post(port.edge, self.tag(port)?)?)
    }

    /// Waits for a message. Its receive buffer is used until [`release`](Wire::release).
    pub fn wait(&mut self, device: &mut dyn Device, port: Port, act: Act) -> Result<()> {
        let tag = self.tag(port)?;
        let bytes = self.waiting(|link| link.wait(port.edge, tag))?;
        device.write(act.buf, &bytes)?;
        self.used[port.edge as usize].push(bytes);
        Ok(())
    }

    /// A message of this edge is used.
    pub fn release(&mut self, edge: u32) -> Result<()> {
        match self.used.get_mut(edge as usize).and_then(Vec::pop) {
            Some(buffer) => Ok(self.link.release(edge, buffer)?),
            None => Err(TransportError::NoEdge { edge }.into()),
        }
    }

    /// Gives and takes what all ranks decide from.
    pub fn gather(&mut self, measured: Measured) -> Result<Vec<Measured>> {
        self.waiting(|link| link.gather(measured))
    }

    fn tag(&self, port: Port) -> Result<Tag> {
        let edge = self.plan.edges.get(port.edge as usize).ok_or(TransportError::NoEdge { edge: port.edge })?;
        Ok(Tag { step: port.step, direction: port.direction, from: edge.from, microbatch: port.microbatch })
    }

    fn waiting<T>(&mut self, wait: impl FnOnce(&Link<'_, Measured>) -> Result<T, TransportError>) -> Result<T> {
        let start = Instant::now();
        let result = wait(self.link);
        self.waited += start.elapsed();
        Ok(result?)
    }
}

/// What a port of a stage takes in: an input by a forward edge, the gradient of an output by a backward one.
pub(crate) fn message_shape(stage: &impl Stage, direction: Direction) -> Option<(Dtype, [usize; 2])> {
    let spec = stage.spec();
    let shape = match direction {
        Direction::Forward => spec.input,
        Direction::Backward => spec.output,
    };
    Some((spec.recipe.activation(), shape?))
}
