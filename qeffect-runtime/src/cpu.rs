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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::{Operand, Scalar};
    use qeffect_core::dtype::Dtype;
    use qeffect_core::fp8::Fp8 as Format;

    fn alloc(device: &mut CpuDevice, name: &str, dtype: Dtype, elements: usize) -> Buf {
        device.alloc(BufSpec::new(name, dtype, 1, elements)).unwrap()
    }

    fn bytes(device: &mut CpuDevice, buf: Buf) -> Vec<u8> {
        let mut bytes = vec![0; device.spec(buf).unwrap().bytes()];
        device.read(buf, &mut bytes).unwrap();
        bytes
    }

    fn floats(device: &mut CpuDevice, buf: Buf) -> Vec<f32> {
        bytes(device, buf).chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
    }

    #[test]
    fn new_buffers_are_poisoned() {
        let mut device = CpuDevice::new();
        for dtype in [Dtype::F64, Dtype::F32, Dtype::Bf16] {
            let buf = alloc(&mut device, "x", dtype, 3);
            // NaN in each: all exponent bits are set.
            let bytes = bytes(&mut device, buf);
            assert!(bytes.chunks(dtype.size()).all(|x| x[dtype.size() - 1] & 0x7F == 0x7F));
        }
        for dtype in [Dtype::E4M3, Dtype::E5M2] {
            let buf = alloc(&mut device, "x", dtype, 3);
            assert_eq!(bytes(&mut device, buf), [0x7F; 3]);
        }
    }

    #[test]
    fn refusals_name_command_and_buffer_and_write_nothing() {
        let mut device = CpuDevice::new();
        let [a, b] = ["a", "b"].map(|name| alloc(&mut device, name, Dtype::F32, 4));
        let (short, ids) = (alloc(&mut device, "short", Dtype::F32, 3), alloc(&mut device, "ids", Dtype::U32, 4));
        for buf in [a, b, short] {
            device.issue(&Cmd::Fill { dst: buf, value: 1.5 }).unwrap();
        }
        let operand = |buf| Operand { buf, scale_inv: None, transposed: false };
        let gemm = |x, out| Cmd::Gemm { m: 2, n: 2, k: 2, a: operand(x), b: operand(b), bias: None, out };
        for (cmd, message) in [
            (Cmd::Add { a, b, out: a }, "add: `a` is written and used a second time"),
            (gemm(a, b), "gemm: `b` is written and used a second time"),
            (Cmd::Copy { src: a, dst: a }, "copy: `a` is written and used a second time"),
            (Cmd::Add { a, b: ids, out: b }, "add: `ids` holds u32, not f32"),
            (Cmd::Copy { src: a, dst: short }, "copy: `short` has 3 elements, not 4"),
            (Cmd::Copy { src: a, dst: ids }, "copy: `ids` holds u32, not f32"),
            (Cmd::Gelu { x: ids, y: a }, "gelu: `ids` holds u32, not an activation type"),
            (Cmd::Advance { counter: a, unless: ids }, "advance: `a` holds f32, not u64"),
            (Cmd::Fill { dst: Buf(99), value: 0.0 }, "buffer #99 does not belong to this device"),
        ] {
            if let Cmd::Advance { unless, .. } = cmd {
                device.issue(&Cmd::Fill { dst: unless, value: 0.0 }).unwrap();
            }
            assert_eq!(device.issue(&cmd).unwrap_err().to_string(), message);
        }
        assert!(device.issue(&gemm(short, a)).unwrap_err().to_string().contains("gemm"));
        for buf in [a, b, short] {
            assert!(floats(&mut device, buf).iter().all(|x| *x == 1.5));
        }
        assert_eq!(device.write(a, &[0; 3]).unwrap_err().to_string(), "write: `a` has 16 bytes, 3 were given");
    }

    #[test]
    fn a_cast_writes_codes_factor_amax_and_flag() {
        let mut device = CpuDevice::new();
        let src = alloc(&mut device, "src", Dtype::F32, 6);
        let [scale, history] = ["scale", "history"].map(|name| alloc(&mut device, name, Dtype::F32, 2));
        let [codes, transposed] = ["codes", "transposed"].map(|name| alloc(&mut device, name, Dtype::E4M3, 6));
        let (scale_inv, flag) =
            (alloc(&mut device, "factor", Dtype::F32, 1), alloc(&mut device, "flag", Dtype::U32, 1));
        for (dst, value) in [(scale, 2.0), (history, 3.0), (flag, 0.0)] {
            device.issue(&Cmd::Fill { dst, value }).unwrap();
        }
        let cmd = Cmd::Quantise {
            src,
            rows: 2,
            cols: 3,
            format: Format::E4M3,
            scale: Scalar { buf: scale, index: 1 },
            codes,
            transposed: Some(transposed),
            scale_inv,
            amax: Some(Scalar { buf: history, index: 1 }),
            flag: Some(flag),
        };
        let mut x = [1.0f32, -2.0, 0.5, 4.0, 0.0, -8.0];
        device.write(src, bytemuck::cast_slice(&x)).unwrap();
        device.issue(&cmd).unwrap();
        let want: Vec<u8> = x.iter().map(|x| Format::E4M3.encode(x * 2.0)).collect();
        assert_eq!(bytes(&mut device, codes), want);
        assert_eq!(bytes(&mut device, transposed), [want[0], want[3], want[1], want[4], want[2], want[5]]);
        assert_eq!(floats(&mut device, scale_inv), [0.5]);
        assert_eq!(floats(&mut device, history), [3.0, 8.0]);
        assert_eq!(bytes(&mut device, flag), [0; 4]);

        x[2] = f32::NAN;
        device.write(src, bytemuck::cast_slice(&x)).unwrap();
        device.issue(&cmd).unwrap();
        x[2] = 0.0;
        device.write(src, bytemuck::cast_slice(&x)).unwrap();
        device.issue(&cmd).unwrap();
        assert_eq!(bytes(&mut device, flag), 1u32.to_le_bytes(), "a flag stays set");
        assert_eq!(floats(&mut device, history), [3.0, 8.0]);
    }
}
