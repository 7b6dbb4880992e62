//! The cuda device: commands on the kernels of `qeffect-kernels` and on cuBLASLt, on one GPU.
//!
//! Commands go into one stream, in the order in which they are issued. A list of them can be made a graph, whose commands
//! run in a few lanes as far as their effects allow. The GPU's own stream of graphs and the stream of commands wait for each
//! other at both ends of a launch, so neither sees what the other has not finished.
//!
//! What decides bits beside the commands is the table of algorithms ([`CudaDevice::algorithms`]).

mod dry;
mod exec;
mod fused;
mod gpu;
mod graph;
mod lanes;
mod layout;
mod marks;
mod product;
mod scratch;
mod table;
mod unit;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use qeffect_kernels::gemm::{Algorithms, Plan, Product, Scaling};
use qeffect_kernels::graph::Shape;
use qeffect_kernels::pinned::Ring;
use qeffect_kernels::{CudaStream, Error as KernelError};

use crate::cmd::Cmd;
use crate::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId, Mark, Memory};
use crate::error::Result;

pub use dry::DryRun;

use exec::Lane;
use gpu::Gpu;
use graph::Graphs;
use marks::Marks;
use scratch::{Need, Scratch};
use table::Table;
use unit::Piece;

/// Lanes of a graph where nothing else is asked for.
pub const LANES: usize = 8;

/// Of a GPU that has block scales.
const CAPS: Caps = Caps {
    fp8_needs_transposes: true,
    fp8_multiple: 16,
    bf16_only: true,
    fuses: true,
    parallel: true,
    one_factor: false,
};

fn failed(cmd: &'static str) -> impl Fn(KernelError) -> DeviceError + Copy {
    move |error| DeviceError::Failed { cmd, reason: error.to_string() }
}

/// A GPU, or a rank's share of it.
pub struct CudaDevice {
    name: String,
    // Graphs and plans go before the memory that they name.
    graphs: Graphs,
    plans: HashMap<Product, Plan>,
    scratch: Vec<Scratch>,
    table: Table,
    ring: Ring,
    marks: Marks,
    stream: Arc<CudaStream>,
    gpu: Arc<Gpu>,
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaDevice({}, {} products)", self.name, self.plans.len())
    }
}

impl CudaDevice {
    /// A device on GPU `ordinal`, as `CUDA_VISIBLE_DEVICES` counts, with graphs of up to [`LANES`] lanes.
    ///
    /// # Errors
    ///
    /// A library or GPU that is missing, with what to do about it.
    pub fn new(ordinal: usize) -> Result<CudaDevice> {
        CudaDevice::with_lanes(ordinal, LANES)
    }

    /// The same with another number of lanes, at least one.
    ///
    /// # Errors
    ///
    /// As [`CudaDevice::new`].
    pub fn with_lanes(ordinal: usize, lanes: usize) -> Result<CudaDevice> {
        let gpu = Gpu::open(ordinal)?;
        let context = &gpu.context;
        let driver = |source| KernelError::Driver { call: "making a stream", source };
        let scratch = (0..lanes.max(1)).map(|_| Scratch::new(context)).collect::<std::result::Result<_, _>>()?;
        Ok(CudaDevice {
            name: format!("cuda:{ordinal}"),
            graphs: Graphs::new(context, lanes.max(1))?,
            plans: HashMap::new(),
            scratch,
            table: Table::new(context),
            ring: Ring::new(context)?,
            marks: Marks::default(),
            stream: context.new_stream().map_err(driver)?,
            gpu,
        })
    }

    /// The algorithms of matrix products in use: with them, another process gets the same bits.
    pub fn algorithms(&self) -> Algorithms {
        self.gpu.algorithms()
    }

    /// Bytes of device memory that it has taken: for buffers, and for what its lanes work in.
    pub fn bytes(&self) -> usize {
        self.table.layout().allocated() + self.scratch.iter().map(Scratch::bytes).sum::<usize>()
    }

    /// Bytes of device memory that are free.
    ///
    /// # Errors
    ///
    /// A driver that does not say.
    pub fn free_bytes(&self) -> Result<usize> {
        let (free, _) = self
            .gpu
            .context
            .mem_get_info()
            .map_err(|source| KernelError::Driver { call: "asking for free memory", source })?;
        Ok(free)
    }

    /// The last fault of a call that had nowhere to tell of it, such as the end of a stream or event. It is told once.
    ///
    /// # Errors
    ///
    /// That fault.
    pub fn stored_fault(&self) -> Result<()> {
        let stored = |source| KernelError::Driver { call: "a call before, which could not tell", source };
        Ok(self.gpu.context.check_err().map_err(stored)?)
    }

    /// What a graph consists of.
    ///
    /// # Errors
    ///
    /// A graph that was dropped, or of another device.
    pub fn graph_shape(&self, graph: GraphId) -> std::result::Result<Shape, DeviceError> {
        self.graphs.get(graph)?.shape().map_err(failed("graph"))
    }

    /// Checks a command and makes what it needs besides its buffers: a lane's scratch, and the plan of a product, which
    /// is run once on memory of its own. Never inside a capture.
    fn prepare(&mut self, cmd: &Cmd, lane: usize) -> std::result::Result<(), DeviceError> {
        let name = cmd.name();
        let accesses = cmd.effects(|buf| self.table.spec(buf).ok().map(BufSpec::elements));
        cmd.check_aliases(&accesses, |buf| self.table.spec(buf))?;
        if let Cmd::EmbedGrad { table_grad, cols, .. } = cmd {
            self.table.track_rows(&self.stream, name, *table_grad, *cols)?;
        }
        let need = Need::of(cmd, |buf| self.table.spec(buf))?;
        let product = product::of(cmd, |buf| self.table.spec(buf))?;
        self.scratch[lane].reserve(&self.gpu.context, &self.stream, need).map_err(failed(name))?;
        if let Some(product) = product {
            if product.scaling != Scaling::Tensor && !self.gpu.kernels.arch().has_block_scaled_products() {
                let arch = self.gpu.kernels.arch();
                let reason = format!("{arch} has no products with block scales: take gradients direct or copied");
                return Err(DeviceError::Failed { cmd: name, reason });
            }
            if !self.plans.contains_key(&product) {
                let mut products = self.gpu.products();
                let plan = products.plan(&self.stream, product).map_err(failed(name))?;
                products.warm(&self.stream, &plan).map_err(failed(name))?;
                self.plans.insert(product, plan);
            }
        }
        Ok(())
    }

    fn size(&self, cmd: &'static str, buf: Buf, given: usize) -> std::result::Result<(), DeviceError> {
        let spec = self.table.spec(buf)?;
        let found = spec.bytes();
        if found != given {
            let reason = format!("`{}` has {found} bytes, {given} were given", spec.name);
            return Err(DeviceError::Failed { cmd, reason });
        }
        Ok(())
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        Caps { one_factor: !self.gpu.kernels.arch().has_block_scaled_products(), ..CAPS }
    }

    fn memory(&self) -> std::result::Result<Option<Memory>, DeviceError> {
        let free =
            self.free_bytes().map_err(|error| DeviceError::Failed { cmd: "memory", reason: error.to_string() })?;
        let workspaces = self.scratch.iter().map(Scratch::bytes).sum();
        Ok(Some(Memory { free, workspaces, lanes: self.scratch.len() }))
    }

    fn alloc(&mut self, spec: BufSpec) -> std::result::Result<Buf, DeviceError> {
        let buf = self.table.alloc(spec)?;
        self.table.poison(&self.stream, buf)?;
        Ok(buf)
    }

    fn spec(&self, buf: Buf) -> std::result::Result<&BufSpec, DeviceError> {
        self.table.spec(buf)
    }

    fn issue(&mut self, cmd: &Cmd) -> std::result::Result<(), DeviceError> {
        self.prepare(cmd, 0)?;
        let CudaDevice { table, plans, scratch, stream, gpu, .. } = self;
        Lane { table, kernels: &gpu.kernels, plans, stream, scratch: &scratch[0] }.issue(cmd, Piece::All)
    }

    fn write(&mut self, buf: Buf, bytes: &[u8]) -> std::result::Result<(), DeviceError> {
        self.size("write", buf, bytes.len())?;
        self.table.touch(&self.stream, "write", buf)?;
        self.ring.write(&self.stream, bytes, self.table.bytes_of(buf)?).map_err(failed("write"))
    }

    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> std::result::Result<(), DeviceError> {
        self.size("read", buf, bytes.len())?;
        self.ring.read(&self.stream, self.table.bytes_of(buf)?, bytes).map_err(failed("read"))
    }

    fn poison(&mut self, buf: Buf) -> std::result::Result<(), DeviceError> {
        self.table.poison(&self.stream, buf)
    }

    fn instantiate(&mut self, cmds: Vec<Cmd>) -> std::result::Result<GraphId, DeviceError> {
        self.capture(&cmds)
    }

    fn launch(&mut self, graph: GraphId) -> std::result::Result<(), DeviceError> {
        self.graphs.launch(graph, &self.stream)
    }

    fn drop_graph(&mut self, graph: GraphId) -> std::result::Result<(), DeviceError> {
        self.graphs.drop(graph)
    }

    fn mark(&mut self) -> std::result::Result<Option<Mark>, DeviceError> {
        self.marks.mark(&self.gpu.context, &self.stream).map(Some)
    }

    fn times(&mut self, marks: &[Mark]) -> std::result::Result<Vec<Instant>, DeviceError> {
        self.marks.times(marks)
    }
}
