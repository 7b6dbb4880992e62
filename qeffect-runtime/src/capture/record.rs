//! A device that can write down what it is asked to do instead of doing it.

use std::collections::BTreeMap;

use qeffect_core::execute::Port;
use qeffect_core::ledger::Action;

use crate::act::Act;
use crate::cmd::Cmd;
use crate::device::{Buf, Device, DeviceError};
use crate::shard::Exchange;

/// One thing that a captured step does.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Entry {
    /// A command.
    Cmd(Cmd),
    /// Sends tensors; their buffers may be used anew as soon as this is done. Steps of ports are those of the rehearsal.
    Send { port: Port, acts: Vec<Act> },
    /// Says that the next free receive buffer takes a message.
    Post { port: Port },
    /// Waits for a message and puts it where its consumer reads it.
    Wait { port: Port, acts: Vec<Act> },
    /// The consumer has run: a receive buffer of the edge is free.
    Release { edge: u32 },
    /// Gathers gradients of ties that span ranks.
    Tie(Vec<Far>),
    /// Gathers what all ranks decide from.
    Agree(Exchange),
}

/// An end of a tie whose other end is on another rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Far {
    /// Twice the number of the tie, and 1 more at the end that is tied to the other.
    pub slot: usize,
    /// Its gradient.
    pub grad: Buf,
    /// Where that of the other end goes.
    pub other: Buf,
}

impl Far {
    /// The slot of the other end.
    pub const fn partner(&self) -> usize {
        self.slot ^ 1
    }
}

/// What one call of the driver did.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Part {
    pub action: Action,
    pub entries: Vec<Entry>,
}

/// A step, written down.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Trace {
    pub parts: Vec<Part>,
}

/// Passes everything on, or writes commands down. Buffers are made in either case.
pub(crate) struct Recorder {
    device: Box<dyn Device>,
    trace: Option<Trace>,
    /// What casts lose is counted: where, by the history that they stage their amax in.
    counters: Option<BTreeMap<Buf, Buf>>,
}

impl Recorder {
    /// Passes everything on.
    pub fn new(device: Box<dyn Device>) -> Recorder {
        Recorder { device, trace: None, counters: None }
    }

    /// From now on, what is counted beside casts that stage an amax; none: nothing.
    pub fn count_casts(&mut self, counters: Option<BTreeMap<Buf, Buf>>) {
        self.counters = counters;
    }

    /// The count that belongs to a cast.
    fn health(&self, cmd: &Cmd) -> Option<Cmd> {
        let Cmd::Quantise { src, format, scale, amax: Some(amax), .. } = *cmd else { return None };
        let counts = *self.counters.as_ref()?.get(&amax.buf)?;
        Some(Cmd::Health { src, format, scale, counts, cell: amax.index })
    }

    /// From now on nothing is carried out.
    pub fn start(&mut self) {
        self.trace = Some(Trace::default());
    }

    /// What was written down. From now on everything is passed on.
    pub fn stop(&mut self) -> Trace {
        self.trace.take().unwrap_or_default()
    }

    /// The driver's next call begins.
    pub fn enter(&mut self, action: Action) {
        if let Some(trace) = &mut self.trace {
            trace.parts.push(Part { action, entries: Vec::new() });
        }
    }

    /// Writes down what is no command.
    pub fn log(&mut self, entry: Entry) {
        if let Some(part) = self.trace.as_mut().and_then(|trace| trace.parts.last_mut()) {
            part.entries.push(entry);
        }
    }

    /// Host access has no place in a captured step.
    fn open(&self, cmd: &'static str, buf: Buf) -> Result<(), DeviceError> {
        if self.trace.is_none() {
            return Ok(());
        }
        let name = self.device.spec(buf).map_or_else(|_| buf.to_string(), |spec| spec.name.clone());
        Err(DeviceError::Failed { cmd, reason: format!("`{name}` is touched by the host inside a captured step") })
    }
}

impl Device for Recorder {
    crate::hand_on!(device: name caps memory alloc spec instantiate launch drop_graph hold mark times);

    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        match &self.trace {
            None => {
                self.device.issue(cmd)?;
                self.health(cmd).map_or(Ok(()), |count| self.device.issue(&count))
            }
            Some(_) => {
                self.log(Entry::Cmd(cmd.clone()));
                Ok(())
            }
        }
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        self.open("write", buf)?;
        self.device.write(buf, bytes)
    }

    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.open("read", buf)?;
        self.device.read(buf, bytes)
    }

    fn poison(&mut self, buf: Buf) -> Result<(), DeviceError> {
        // Of no meaning to what is computed: not part of a program.
        if self.trace.is_some() { Ok(()) } else { self.device.poison(buf) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuDevice;
    use crate::device::BufSpec;
    use qeffect_core::dtype::Dtype;

    #[test]
    fn a_recorder_carries_nothing_out_and_keeps_the_host_away() {
        let mut recorder = Recorder::new(Box::new(CpuDevice::new()));
        let buf = recorder.alloc(BufSpec::new("x", Dtype::F32, 1, 1)).unwrap();
        recorder.issue(&Cmd::Fill { dst: buf, value: 1.0 }).unwrap();
        recorder.start();
        recorder.enter(Action::Step);
        recorder.issue(&Cmd::Fill { dst: buf, value: 2.0 }).unwrap();
        recorder.poison(buf).unwrap();
        let mut bytes = [0; 4];
        let error = recorder.read(buf, &mut bytes).unwrap_err();
        assert_eq!(error.to_string(), "read: `x` is touched by the host inside a captured step");
        assert!(recorder.write(buf, &[0; 4]).is_err());
        let trace = recorder.stop();
        let entries = vec![Entry::Cmd(Cmd::Fill { dst: buf, value: 2.0 })];
        assert_eq!(trace, Trace { parts: vec![Part { action: Action::Step, entries }] });
        recorder.read(buf, &mut bytes).unwrap();
        assert_eq!(f32::from_le_bytes(bytes), 1.0);
    }
}
