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

    /// Sends what buffers hold, one behind the other; they are free when this returns.
    pub fn send(&mut self, device: &mut dyn Device, port: Port, acts: &[Act]) -> Result<()> {
        let tag = self.tag(port)?;
        let mut bytes = self.link.source(port.edge)?;
        let found = acts.iter().map(Act::bytes).sum();
        if bytes.len() != found {
            return Err(TransportError::Size { tag, expected: bytes.len(), found }.into());
        }
        let mut rest = &mut bytes[..];
        for act in acts {
            let (part, after) = rest.split_at_mut(act.bytes());
            device.read(act.buf, part)?;
            rest = after;
        }
        Ok(self.link.send(port.edge, tag, bytes)?)
    }

    /// Says that the next free receive buffer takes this message.
    pub fn post(&mut self, port: Port) -> Result<()> {
        Ok(self.link.post(port.edge, self.tag(port)?)?)
    }

    /// Waits for a message. Its receive buffer is used until [`release`](Wire::release).
    pub fn wait(&mut self, device: &mut dyn Device, port: Port, acts: &[Act]) -> Result<()> {
        let tag = self.tag(port)?;
        let bytes = self.waiting(|link| link.wait(port.edge, tag))?;
        let expected = acts.iter().map(Act::bytes).sum();
        if bytes.len() != expected {
            return Err(TransportError::Size { tag, expected, found: bytes.len() }.into());
        }
        let mut rest = &bytes[..];
        for act in acts {
            let (part, after) = rest.split_at(act.bytes());
            device.write(act.buf, part)?;
            rest = after;
        }
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

/// The tensors that a port of a stage takes in: an input by a forward edge, the gradient of an output by a backward one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MessageShape {
    pub dtype: Dtype,
    /// Rows and columns of each tensor; there is at least one.
    pub tensors: Vec<[usize; 2]>,
}

impl MessageShape {
    /// `None` where no message comes in: at the ends of the pipeline.
    pub fn of(stage: &impl Stage, direction: Direction) -> Option<MessageShape> {
        let spec = stage.spec();
        let tensors = match direction {
            Direction::Forward => spec.input.clone(),
            Direction::Backward => spec.output.clone(),
        };
        (!tensors.is_empty()).then(|| MessageShape { dtype: spec.recipe.activation(), tensors })
    }

    /// Bytes of all its tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|[rows, cols]| rows * cols * self.dtype.size()).sum()
    }
}
