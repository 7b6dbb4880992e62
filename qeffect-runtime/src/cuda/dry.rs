//! A GPU that only counts: what a run would take of one, found on any machine.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use qeffect_kernels::gemm::WORKSPACE;

use super::layout::Layout;
use super::product;
use super::scratch::Need;
use super::{CAPS, LANES};
use crate::cmd::Cmd;
use crate::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId, Memory};

/// A device that places buffers as a GPU does, and carries nothing out: reads give zeros. Clones count together.
#[derive(Clone, Debug)]
pub struct DryRun {
    name: String,
    caps: Caps,
    lanes: usize,
    specs: Vec<BufSpec>,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    layout: Layout,
    need: Need,
    trial: usize,
    graphs: u32,
}

impl Default for DryRun {
    fn default() -> DryRun {
        DryRun::new()
    }
}

impl DryRun {
    /// Of a GPU with block scales, with graphs of [`LANES`] lanes.
    pub fn new() -> DryRun {
        let (name, specs, counts) = ("a GPU that only counts".to_owned(), Vec::new(), Arc::default());
        DryRun { name, caps: CAPS, lanes: LANES, specs, counts }
    }

    /// Of a device like that one, which may be open already.
    pub(crate) fn like(device: &dyn Device, memory: &Memory) -> DryRun {
        DryRun { name: device.name().to_owned(), caps: device.caps(), lanes: memory.lanes, ..DryRun::new() }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner) // numbers that are whole between calls
    }

    /// Bytes of all buffers.
    pub fn held(&self) -> usize {
        self.counts().layout.held()
    }

    /// Bytes that the device takes beyond its buffers: the rest of its allocations, and what each lane works in.
    pub fn beside(&self) -> usize {
        let counts = self.counts();
        counts.layout.allocated() - counts.layout.held() + self.lanes * (WORKSPACE + counts.need.bytes())
    }

    /// Bytes that the search for the algorithm of a product takes, and gives back: the most of all products, since they are
    /// searched for one after the other.
    pub fn trial(&self) -> usize {
        self.counts().trial
    }
}

impl Device for DryRun {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let mut counts = self.counts();
        let slot = counts.layout.next(spec.bytes());
        counts.layout.take(slot, spec.bytes());
        drop(counts);
        self.specs.push(spec);
        Ok(Buf((self.specs.len() - 1) as u32))
    }

    fn spec(&self, buf: Buf) -> Result<&BufSpec, DeviceError> {
        self.specs.get(buf.index()).ok_or(DeviceError::UnknownBuffer(buf))
    }

    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        let need = Need::of(cmd, |buf| self.spec(buf))?;
        let product = product::of(cmd, |buf| self.spec(buf))?;
        let mut counts = self.counts();
        counts.need = counts.need.max(need);
        counts.trial = counts.trial.max(product.map_or(0, |product| product.trial_bytes()));
        Ok(())
    }

    fn write(&mut self, _: Buf, _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn read(&mut self, _: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bytes.fill(0);
        Ok(())
    }

    fn poison(&mut self, _: Buf) -> Result<(), DeviceError> {
        Ok(())
    }

    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        cmds.iter().try_for_each(|cmd| self.issue(cmd))?;
        let mut counts = self.counts();
        counts.graphs += 1;
        Ok(GraphId(counts.graphs - 1))
    }

    fn launch(&mut self, _: GraphId) -> Result<(), DeviceError> {
        Ok(())
    }

    fn drop_graph(&mut self, _: GraphId) -> Result<(), DeviceError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use qeffect_core::dtype::Dtype;

    use super::*;
    use crate::cmd::fused::{Fused, Outputs, Producer};
    use crate::cmd::{AdamWConfig, GroupOperand, Operand};

    /// A product of a step, over buffers of its own.
    fn product(device: &mut DryRun, [m, n, k]: [usize; 3]) -> Cmd {
        let mut make = |dtype, rows, cols| device.alloc(BufSpec::new("x", dtype, rows, cols)).unwrap();
        let (a, b, out) = (make(Dtype::Bf16, m, k), make(Dtype::Bf16, n, k), make(Dtype::F32, m, n));
        let (a, b) = (
            Operand { buf: a, scale_inv: None, transposed: false },
            Operand { buf: b, scale_inv: None, transposed: true },
        );
        Cmd::Gemm { m, n, k, a, b, bias: None, out, accumulate: false, fast: false }
    }

    /// One search follows the other, so the largest counts; 32 MiB are a workspace and 128 MiB empty the second cache.
    #[test]
    fn the_largest_search_counts() {
        let mut device = DryRun::new();
        assert_eq!(device.trial(), 0);
        let (small, large) = (product(&mut device, [64, 64, 64]), product(&mut device, [128, 256, 512]));
        device.issue(&small).unwrap();
        let of = |[m, n, k]: [usize; 3]| 2 * (m * k + n * k) + 4 * m * n + (160 << 20);
        assert_eq!(device.trial(), of([64, 64, 64]));
        let held = device.held();
        device.instantiate(vec![large, small]).unwrap();
        assert_eq!((device.trial(), device.held()), (of([128, 256, 512]), held));
    }

    /// Sums over columns take partial ones, a norm's gradient three kinds of them; a weight of one long row takes nothing.
    #[test]
    fn only_sums_over_columns_need_partial_ones() {
        let beside = |make: &dyn Fn(Buf) -> (Producer, Option<Buf>)| {
            let mut device = DryRun::new();
            let [x, sums] = [(), ()].map(|()| device.alloc(BufSpec::new("x", Dtype::Bf16, 1, 128 << 10)).unwrap());
            let (producer, column_sums) = make(x);
            let before = device.beside();
            let outputs = Outputs { values: Some(sums), column_sums, ..Outputs::default() };
            let (rows, cols) = if column_sums.is_some() { (128, 1024) } else { (1, 128 << 10) };
            let fused = Fused { residual: None, producer, plus: None, rows, cols, outputs };
            device.issue(&Cmd::Fused(Box::new(fused))).unwrap();
            device.beside() - before
        };
        let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
        let weight = |x| Producer::AdamW {
            param: x,
            grad: x,
            factor: 1.0,
            moment1: x,
            moment2: x,
            clip: x,
            table: x,
            counter: x,
            config,
            unless: x,
        };
        assert_eq!(beside(&|x| (weight(x), None)), 0);
        assert_eq!(beside(&|x| (Producer::Gelu { x }, None)), 0);
        // case: two pieces of 64 rows × 1,024 columns, and a counter per 64 columns.
        assert_eq!(beside(&|x| (Producer::Stored { x }, Some(x))), LANES * 4 * (2 * 1024 + 16));
        let norm = |x| Producer::RmsNormGrad { dy: x, x, gain: x, rstd: x, gain_grad: x };
        assert_eq!(beside(&|x| (norm(x), Some(x))), LANES * 4 * (3 * 2 * 1024 + 16));
    }

    /// Members with one factor need no tables of block scales.
    #[test]
    fn a_group_with_one_factor_is_a_product_like_any_other() {
        let beside = |factors: usize| {
            let mut device = DryRun::new();
            let (m, n, k, members) = (128, 128, 1024, 4);
            let mut make = |dtype, rows, cols| device.alloc(BufSpec::new("x", dtype, rows, cols)).unwrap();
            let mut side = |dtype, rows, transposed| GroupOperand {
                buf: make(dtype, rows, members * k),
                scale_inv: (0..factors).map(|_| make(Dtype::F32, 1, 1)).collect(),
                transposed,
            };
            let (a, b) = (side(Dtype::E5M2, m, false), side(Dtype::E4M3, n, true));
            let out = make(Dtype::F32, m, n);
            let before = device.beside();
            device.issue(&Cmd::GroupGemm { m, n, k, stride: k, members, a, b, out, accumulate: true })?;
            Ok::<_, DeviceError>(device.beside() - before)
        };
        assert_eq!(beside(1).unwrap(), 0);
        // case: 32 blocks of terms: a square one for all 128 rows, in lines of four, and 128 vectors each; in 8 lanes.
        assert_eq!(beside(4).unwrap(), LANES * 4 * (32 + 32 * 128));
        assert!(beside(2).unwrap_err().to_string().contains("4 members in E5M2 × E4M3 have 2 factors"));
    }
}
