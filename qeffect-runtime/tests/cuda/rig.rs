//! A GPU, if there is one, and two devices that are given the same commands.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_kernels::probe;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::{Buf, BufSpec, Device};
use qeffect_runtime::rng;

/// Held by tests that measure the whole GPU alone, and shared by all others.
static TURNS: RwLock<()> = RwLock::new(());

/// Whether there is a GPU; else a line says that the test was skipped.
pub fn there_is_a_gpu() -> bool {
    let found = probe::gpus().is_ok_and(|gpus| gpus.iter().any(|gpu| gpu.arch().is_some()));
    if !found {
        println!("skipped: no GPU");
    }
    found
}

/// A turn on the GPU, if there is one, beside other tests: held as long as the test uses it.
pub fn beside_others() -> Option<RwLockReadGuard<'static, ()>> {
    there_is_a_gpu().then(|| TURNS.read().unwrap_or_else(PoisonError::into_inner))
}

/// The same with no other test beside: what is free of the memory, and what the process holds, is then this test's doing.
pub fn alone() -> Option<RwLockWriteGuard<'static, ()>> {
    there_is_a_gpu().then(|| TURNS.write().unwrap_or_else(PoisonError::into_inner))
}

/// The cpu and a GPU with the same buffers.
pub struct Pair {
    pub cpu: CpuDevice,
    pub gpu: CudaDevice,
    seed: u64,
    _turn: RwLockReadGuard<'static, ()>,
}

impl Pair {
    pub fn new() -> Option<Pair> {
        let turn = beside_others()?;
        Some(Pair { cpu: CpuDevice::new(), gpu: CudaDevice::new(0).expect("the GPU opens"), seed: 0, _turn: turn })
    }

    /// A buffer on both, poisoned.
    pub fn empty(&mut self, name: &str, dtype: Dtype, rows: usize, cols: usize) -> Buf {
        let spec = BufSpec::new(name, dtype, rows, cols);
        let buf = self.cpu.alloc(spec.clone()).unwrap();
        assert_eq!(self.gpu.alloc(spec).unwrap(), buf);
        buf
    }

    /// A buffer on both with given bytes.
    pub fn bytes(&mut self, name: &str, dtype: Dtype, rows: usize, cols: usize, bytes: &[u8]) -> Buf {
        let buf = self.empty(name, dtype, rows, cols);
        self.cpu.write(buf, bytes).unwrap();
        self.gpu.write(buf, bytes).unwrap();
        buf
    }

    pub fn f32(&mut self, name: &str, cols: usize, values: &[f32]) -> Buf {
        self.bytes(name, Dtype::F32, values.len() / cols, cols, bytemuck::cast_slice(values))
    }

    pub fn u32(&mut self, name: &str, values: &[u32]) -> Buf {
        self.bytes(name, Dtype::U32, values.len(), 1, bytemuck::cast_slice(values))
    }

    pub fn bf16(&mut self, name: &str, cols: usize, values: &[f32]) -> Buf {
        let values: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        self.bytes(name, Dtype::Bf16, values.len() / cols, cols, bytemuck::cast_slice(&values))
    }

    /// Normal numbers, others every time.
    pub fn normal(&mut self, n: usize) -> Vec<f32> {
        self.seed += 1;
        (0..n as u64).map(|i| rng::normal(self.seed, 5, i) as f32).collect()
    }

    /// A bf16 matrix of normal numbers.
    pub fn activation(&mut self, name: &str, rows: usize, cols: usize) -> Buf {
        let values = self.normal(rows * cols);
        self.bf16(name, cols, &values)
    }

    /// A float matrix of normal numbers.
    pub fn master(&mut self, name: &str, rows: usize, cols: usize) -> Buf {
        let values = self.normal(rows * cols);
        self.f32(name, cols, &values)
    }

    /// Carries a command out on both.
    pub fn issue(&mut self, cmd: Cmd) {
        self.cpu.issue(&cmd).unwrap();
        self.gpu.issue(&cmd).unwrap();
    }

    /// Both contents.
    pub fn read(&mut self, buf: Buf) -> [Vec<u8>; 2] {
        let len = self.cpu.spec(buf).unwrap().bytes();
        let (mut a, mut b) = (vec![0; len], vec![0; len]);
        self.cpu.read(buf, &mut a).unwrap();
        self.gpu.read(buf, &mut b).unwrap();
        [a, b]
    }

    /// Asserts that a buffer holds the same bits.
    pub fn same(&mut self, what: &str, buf: Buf) {
        let [cpu, gpu] = self.read(buf);
        let differ = cpu.iter().zip(&gpu).filter(|(a, b)| a != b).count();
        assert_eq!(differ, 0, "{what}: {differ} of {} bytes differ", cpu.len());
    }

    /// Asserts ‖gpu - cpu‖ ≤ bound · ‖cpu‖, and that nothing is NaN; so that small rows count too, that every row is near by
    /// its own norm, and every element by that of its row.
    ///
    /// Rows of one tensor are made alike, and elements of one row: a row's error is within four times the bound, an element's
    /// within eight times the bound of the row's mean size. Numbers that lie nearer than that may still be rounded to
    /// neighbours, one unit in the last place apart. A column, and a vector, is one row.
    pub fn near(&mut self, what: &str, buf: Buf, bound: f64) {
        let spec = self.cpu.spec(buf).unwrap();
        let (dtype, cols) = (spec.dtype, if spec.cols == 1 { spec.rows } else { spec.cols });
        let last_place = if dtype == Dtype::Bf16 { 1.0 / 128.0 } else { f64::from(f32::EPSILON) };
        let [cpu, gpu] = self.read(buf).map(|bytes| reals(dtype, &bytes));
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let distance = |cpu: &[f64], gpu: &[f64]| norm(&mut cpu.iter().zip(gpu).map(|(a, b)| a - b));
        let error = distance(&cpu, &gpu);
        let scale = norm(&mut cpu.iter().copied());
        assert!(error <= bound * scale, "{what}: error {error:e} of {scale:e}, {:e} relative", error / scale);
        let [mut of_rows, mut of_elements] = [0.0f64; 2];
        for (row, (cpu, gpu)) in cpu.chunks(cols).zip(gpu.chunks(cols)).enumerate() {
            let (error, scale) = (distance(cpu, gpu), norm(&mut cpu.iter().copied()));
            let most = (4.0 * bound + last_place) * scale;
            assert!(error <= most, "{what}, row {row}: error {error:e} of {scale:e}, at most {most:e}");
            of_rows = of_rows.max(error / scale.max(f64::MIN_POSITIVE));
            let size = scale / (cols as f64).sqrt();
            for (column, (cpu, gpu)) in cpu.iter().zip(gpu).enumerate() {
                let (error, most) = ((cpu - gpu).abs(), last_place * cpu.abs() + 8.0 * bound * size);
                assert!(error <= most, "{what}, row {row}, column {column}: {gpu:e}, not {cpu:e} ± {most:e}");
                of_elements = of_elements.max(error / size.max(f64::MIN_POSITIVE));
            }
        }
        let (all, rows, elements) = (error / scale, of_rows, of_elements);
        println!("{what}: relative error {all:.2e}, of rows {rows:.2e}, of elements {elements:.2e}, bound {bound:.0e}");
    }
}

pub fn reals(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap()))).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|x| f64::from(bf16::from_le_bytes(x.try_into().unwrap()))).collect(),
        other => panic!("no numbers: {other}"),
    }
}
