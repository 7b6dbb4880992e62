//! The cpu device: commands on the kernels of this crate, in the calling thread.
//!
//! It is the reference that other devices are compared with: FP8 is emulated bit for bit, sums have a fixed order, and
//! nothing is left to the machine it runs on.

mod exec;
mod table;

use crate::cmd::Cmd;
use crate::device::{Buf, BufSpec, Caps, Device, DeviceError};
use crate::kernels::Scratch;
use crate::kernels::embedding::TokenPositions;

use table::Table;

/// Memory that kernels reuse from command to command.
#[derive(Debug, Default)]
struct Workspace {
    f32: Scratch<f32>,
    f64: Scratch<f64>,
    bias32: Vec<f32>,
    bias64: Vec<f64>,
    rows32: Vec<f32>,
    rows64: Vec<f64>,
    positions: TokenPositions,
}

/// The embedded device. One rank owns one.
#[derive(Debug, Default)]
pub struct CpuDevice {
    table: Table,
    workspace: Workspace,
    caps: Caps,
    issued: u64,
}

impl CpuDevice {
    /// A device without buffers.
    pub fn new() -> CpuDevice {
        CpuDevice::default()
    }

    /// A device that asks for what another one asks for: with it, code for GPUs is tested without one. Numbers are the
    /// same bits.
    pub fn with_caps(caps: Caps) -> CpuDevice {
        CpuDevice { caps, ..CpuDevice::default() }
    }

    /// Commands carried out so far.
    pub fn issued(&self) -> u64 {
        self.issued
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &str {
        "cpu"
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        Ok(self.table.alloc(spec))
    }

    fn spec(&self, buf: Buf) -> Result<&BufSpec, DeviceError> {
        self.table.spec(buf)
    }

    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        self.issued += 1;
        exec::run(&mut self.table, &mut self.workspace, cmd)
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        let found = self.table.data(buf)?.bytes().len();
        if found != bytes.len() {
            return Err(self.size("write", buf, found, bytes.len()));
        }
        self.table.data_mut(buf)?.bytes_mut().copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let data = self.table.data(buf)?.bytes();
        if data.len() != bytes.len() {
            return Err(self.size("read", buf, data.len(), bytes.len()));
        }
        bytes.copy_from_slice(data);
        Ok(())
    }

    fn poison(&mut self, buf: Buf) -> Result<(), DeviceError> {
        self.table.poison(buf)
    }
}

impl CpuDevice {
    fn size(&self, cmd: &'static str, buf: Buf, found: usize, given: usize) -> DeviceError {
        let name = self.table.spec(buf).map_or_else(|_| buf.to_string(), |spec| spec.name.clone());
        DeviceError::Failed { cmd, reason: format!("`{name}` has {found} bytes, {given} were given") }
    }
}
