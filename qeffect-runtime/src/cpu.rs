//! The cpu device: commands on the kernels of this crate, in the calling thread.
//!
//! It is the reference that other devices are compared with: FP8 is emulated bit for bit, sums have a fixed order, and
//! nothing is left to the machine it runs on.

mod exec;
mod table;
mod trial;

use qeffect_core::dtype::Dtype;

use crate::cmd::Cmd;
use crate::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId};
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
    /// Of fused commands: type, rows and columns, and the buffer.
    values: Vec<((Dtype, usize, usize), Buf)>,
}

/// The embedded device. One rank owns one.
#[derive(Debug, Default)]
pub struct CpuDevice {
    table: Table,
    workspace: Workspace,
    caps: Caps,
    issued: u64,
    graphs: Vec<Option<Box<[Cmd]>>>,
}

impl CpuDevice {
    /// A device without buffers.
    pub fn new() -> CpuDevice {
        CpuDevice::default()
    }

    /// A device that asks for what another one asks for: with it, code for GPUs is tested without one. Values are the
    /// same; the terms of a product may be added in another order where an operand is stored the other way round.
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
        self.table.alloc(spec)
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

    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        trial::try_out(&mut self.table, &cmds)?;
        self.graphs.push(Some(cmds.into_boxed_slice()));
        Ok(GraphId((self.graphs.len() - 1) as u32))
    }

    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        let cmds = self.graphs.get(graph.index()).and_then(Option::as_ref).ok_or(DeviceError::UnknownGraph(graph))?;
        for cmd in cmds {
            self.issued += 1;
            exec::run(&mut self.table, &mut self.workspace, cmd)?;
        }
        Ok(())
    }

    fn drop_graph(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        let slot = self.graphs.get_mut(graph.index()).and_then(Option::take);
        slot.map(drop).ok_or(DeviceError::UnknownGraph(graph))
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
    use crate::cmd::{DropoutKey, DropoutRate, Operand, RotaryShape, Scalar};
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
    fn what_there_is_no_memory_for_is_an_error_that_names_it() {
        let mut device = CpuDevice::new();
        for (rows, cols) in [(1, usize::MAX / 2), (usize::MAX / 2, 3)] {
            let error = device.alloc(BufSpec::new("table", Dtype::F64, rows, cols)).unwrap_err();
            assert!(error.to_string().starts_with("alloc: no memory for `table`, f64["), "{error}");
        }
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
        let gemm = |x, out| Cmd::Gemm {
            m: 2,
            n: 2,
            k: 2,
            a: operand(x),
            b: operand(b),
            bias: None,
            out,
            accumulate: false,
            fast: false,
        };
        let key = DropoutKey { seed: 1, site: 2, microbatch: 3 };
        let turn = RotaryShape { length: 1, heads: 1, head_dim: 2, width: 4 };
        for (cmd, message) in [
            (Cmd::Add { a, b, out: a }, "add: `a` is written and used a second time"),
            (gemm(a, b), "gemm: `b` is written and used a second time"),
            (Cmd::Copy { src: a, dst: a }, "copy: `a` is written and used a second time"),
            (Cmd::Add { a, b: ids, out: b }, "add: `ids` holds u32, not f32"),
            (Cmd::Copy { src: a, dst: short }, "copy: `short` has 3 elements, not 4"),
            (Cmd::Copy { src: a, dst: ids }, "copy: `ids` holds u32, not f32"),
            (Cmd::Gelu { x: ids, y: a }, "gelu: `ids` holds u32, not an activation type"),
            (Cmd::Advance { counter: a, unless: ids }, "advance: `a` holds f32, not u64"),
            (
                Cmd::Dropout { x: a, y: b, step: short, key, rate: DropoutRate::new(0.5).unwrap() },
                "dropout: `short` holds f32, not u64",
            ),
            (
                Cmd::Rotary { x: a, table: short, out: b, shape: turn, inverse: false },
                "rotary: rotary: `table` has 3 elements, the shape needs 2",
            ),
            (Cmd::RmsNorm { x: a, gain: short, y: b, rstd: ids, cols: 3 }, "rms_norm: `ids` holds u32, not f32"),
            (Cmd::Swiglu { x: a, y: b, cols: 2 }, "swiglu: swiglu_forward: `x` has 4 elements, the shape needs 8"),
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
    fn a_range_is_copied_within_bounds_and_nothing_else() {
        let mut device = CpuDevice::new();
        let [src, dst] = ["src", "dst"].map(|name| alloc(&mut device, name, Dtype::F32, 6));
        let ids = alloc(&mut device, "ids", Dtype::U32, 6);
        device.write(src, bytemuck::cast_slice(&[0f32, 1.0, 2.0, 3.0, 4.0, 5.0])).unwrap();
        device.issue(&Cmd::Fill { dst, value: 9.0 }).unwrap();
        let range = |src, src_at, dst, dst_at, len| Cmd::CopyRange { src, src_at, dst, dst_at, len };
        device.issue(&range(src, 3, dst, 1, 2)).unwrap();
        assert_eq!(floats(&mut device, dst), [9.0, 3.0, 4.0, 9.0, 9.0, 9.0]);
        for (cmd, message) in [
            (range(src, 5, dst, 0, 2), "copy_range: `src` has 6 elements, not 7"),
            (range(src, 0, dst, 6, 1), "copy_range: `dst` has 6 elements, not 7"),
            (range(src, usize::MAX, dst, 0, 2), "copy_range: `src` has 6 elements, not 18446744073709551615"),
            (range(src, 0, ids, 0, 1), "copy_range: `ids` holds u32, not f32"),
            (range(src, 0, src, 2, 1), "copy_range: `src` is written and used a second time"),
        ] {
            assert_eq!(device.issue(&cmd).unwrap_err().to_string(), message);
        }
        assert_eq!(floats(&mut device, dst), [9.0, 3.0, 4.0, 9.0, 9.0, 9.0]);
    }

    #[test]
    fn a_value_that_is_not_finite_sets_the_flag_for_good() {
        let mut device = CpuDevice::new();
        let (src, flag) = (alloc(&mut device, "src", Dtype::F32, 3), alloc(&mut device, "flag", Dtype::U32, 1));
        device.issue(&Cmd::Fill { dst: flag, value: 0.0 }).unwrap();
        for (x, want) in [(f32::MAX, 0u32), (f32::NAN, 1), (0.0, 1)] {
            device.write(src, bytemuck::cast_slice(&[1.0, x, -1.0])).unwrap();
            device.issue(&Cmd::CheckFinite { src, flag }).unwrap();
            assert_eq!(bytes(&mut device, flag), want.to_le_bytes());
        }
    }

    #[test]
    fn a_list_of_commands_runs_when_it_is_launched() {
        let mut device = CpuDevice::new();
        let [a, b] = ["a", "b"].map(|name| alloc(&mut device, name, Dtype::F32, 2));
        device.issue(&Cmd::Fill { dst: a, value: 1.0 }).unwrap();
        device.issue(&Cmd::Fill { dst: b, value: 5.0 }).unwrap();
        let graph = device.instantiate(vec![Cmd::Copy { src: a, dst: b }, Cmd::Fill { dst: a, value: 2.0 }]).unwrap();
        assert_eq!(floats(&mut device, b), [5.0; 2], "nothing is carried out");
        for want in [1.0, 2.0] {
            device.launch(graph).unwrap();
            assert_eq!(floats(&mut device, b), [want; 2]);
        }
        device.drop_graph(graph).unwrap();
        for result in [device.launch(graph), device.drop_graph(graph), device.launch(GraphId(7))] {
            assert!(matches!(result, Err(DeviceError::UnknownGraph(_))));
        }
    }

    /// A list is refused as a whole when it is made, whatever stands before the command that would fail.
    #[test]
    fn a_list_that_would_be_refused_half_way_is_not_made() {
        let mut device = CpuDevice::new();
        let [a, b] = ["a", "b"].map(|name| alloc(&mut device, name, Dtype::F32, 4));
        let (short, ids) = (alloc(&mut device, "short", Dtype::F32, 3), alloc(&mut device, "ids", Dtype::U32, 4));
        let counter = alloc(&mut device, "counter", Dtype::U64, 1);
        for buf in [a, b, short] {
            device.issue(&Cmd::Fill { dst: buf, value: 1.5 }).unwrap();
        }
        device.issue(&Cmd::Fill { dst: ids, value: 1.0 }).unwrap();
        let first = Cmd::Fill { dst: a, value: 2.0 };
        for (cmd, message) in [
            (Cmd::Add { a, b, out: a }, "add: `a` is written and used a second time"),
            (Cmd::Add { a, b: ids, out: b }, "add: `ids` holds u32, not f32"),
            (Cmd::Copy { src: a, dst: short }, "copy: `short` has 3 elements, not 4"),
            // Flags hide nothing, whatever they are at the moment.
            (Cmd::CopyIf { flag: ids, src: a, dst: short }, "copy: `short` has 3 elements, not 4"),
            (Cmd::Advance { counter: a, unless: ids }, "advance: `a` holds f32, not u64"),
            (Cmd::Fill { dst: Buf(99), value: 0.0 }, "buffer #99 does not belong to this device"),
        ] {
            let before: Vec<Vec<u8>> = [a, b, short, ids].map(|buf| bytes(&mut device, buf)).into();
            let (issued, error) = (device.issued(), device.instantiate(vec![first.clone(), cmd]).unwrap_err());
            assert_eq!(error.to_string(), message);
            assert_eq!([a, b, short, ids].map(|buf| bytes(&mut device, buf)).to_vec(), before);
            assert_eq!(device.issued(), issued);
        }
        device.issue(&Cmd::Fill { dst: counter, value: 7.0 }).unwrap();
        device.issue(&Cmd::Fill { dst: ids, value: 0.0 }).unwrap();
        let good = vec![first, Cmd::Copy { src: a, dst: b }, Cmd::Advance { counter, unless: ids }];
        device.instantiate(good).unwrap();
        assert_eq!(floats(&mut device, b), [1.5; 4], "a list that is made has touched nothing");
        assert_eq!(bytes(&mut device, counter), 7u64.to_le_bytes());
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
            beside: None,
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
