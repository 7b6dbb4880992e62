//! Work of several streams, captured once and launched as a whole.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::quiet::{self, Capturing};

fn fault(call: &'static str) -> impl Fn(DriverError) -> Error {
    move |source| Error::Driver { call, source }
}

/// A capture in progress: lanes that began together and will end together. What is put into their streams until
/// [`Capture::end`] becomes nodes, and events among them edges.
#[derive(Debug)]
pub struct Capture<'a> {
    lanes: &'a [Arc<CudaStream>],
    open: bool,
    _quiet: Capturing,
}

impl<'a> Capture<'a> {
    /// Begins on the first lane; the others join it. There is at least one lane. Events are used in here, and by nobody
    /// else until the capture has ended: one per lane.
    pub fn begin(lanes: &'a [Arc<CudaStream>], events: &[CudaEvent]) -> Result<Capture<'a>> {
        let fault = fault("beginning a capture");
        let (Some(first), true) = (lanes.first(), events.len() >= lanes.len()) else {
            let found = format!("{} lanes with {} events", lanes.len(), events.len());
            return Err(Error::Argument { kernel: "capture", found });
        };
        first.context().bind_to_thread().map_err(&fault)?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let quiet = quiet::capturing();
        first.begin_capture(mode).map_err(&fault)?;
        let capture = Capture { lanes, open: true, _quiet: quiet };
        events[0].record(first).map_err(&fault)?;
        lanes[1..].iter().try_for_each(|lane| lane.wait(&events[0])).map_err(&fault)?;
        Ok(capture)
    }

    /// Joins the lanes, and makes the graph ready to be launched.
    pub fn end(mut self, events: &[CudaEvent]) -> Result<Graph> {
        let fault = fault("ending a capture");
        let lanes = self.lanes;
        let first = &lanes[0];
        for (lane, event) in lanes.iter().zip(events).skip(1) {
            event.record(lane).and_then(|()| first.wait(event)).map_err(&fault)?;
        }
        self.open = false;
        // SAFETY: the stream is live, and the capture began on it in this thread.
        let graph = unsafe { result::stream::end_capture(first.cu_stream()) }.map_err(&fault)?;
        drop(self); // no capture any more
        let mut made = Graph { graph, exec: None, context: first.context().clone() };
        let flags = sys::CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just captured.
        made.exec = Some(unsafe { result::graph::instantiate(graph, flags) }.map_err(&fault)?);
        Ok(made)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.open {
            // After a fault: the streams leave the capture, and what it holds is given up. Errors have nowhere to go.
            // SAFETY: the stream is live, and the capture began on it in this thread.
            if let Ok(graph) = unsafe { result::stream::end_capture(self.lanes[0].cu_stream()) }
                && !graph.is_null()
            {
                // SAFETY: the graph was just given, and nobody else knows it.
                let _ = unsafe { result::graph::destroy(graph) };
            }
        }
    }
}

/// What a graph consists of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Kernels, copies and fills.
    pub nodes: usize,
    /// Kernels alone.
    pub kernels: usize,
    /// Dependencies.
    pub edges: usize,
    /// A digest of every node's kind and of all edges; of kernels also of name, grid, block, shared memory and parameters, of
    /// copies of both ends and the size, of fills of the place, the size and the value.
    pub digest: String,
}

/// A captured graph, ready to be launched.
#[derive(Debug)]
pub struct Graph {
    graph: sys::CUgraph,
    exec: Option<sys::CUgraphExec>,
    context: Arc<CudaContext>,
}

// SAFETY: graphs are handles that any thread may use, one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        let _alone = quiet::alone();
        // It may still run. Errors have nowhere to go.
        if self.context.synchronize().is_ok() {
            // SAFETY: both were made once and are destroyed once.
            unsafe {
                if let Some(exec) = self.exec {
                    let _ = result::graph::exec_destroy(exec);
                }
                let _ = result::graph::destroy(self.graph);
            }
        }
    }
}

impl Graph {
    fn exec(&self) -> Result<sys::CUgraphExec> {
        self.exec.ok_or(Error::Argument { kernel: "graph", found: "not instantiated".into() })
    }

    /// Brings it to the device, so that the first launch need not.
    pub fn upload(&self, stream: &CudaStream) -> Result {
        let fault = fault("uploading a graph");
        self.context.bind_to_thread().map_err(&fault)?;
        // SAFETY: graph and stream are live.
        unsafe { result::graph::upload(self.exec()?, stream.cu_stream()) }.map_err(&fault)
    }

    /// Puts all of it into a stream.
    pub fn launch(&self, stream: &CudaStream) -> Result {
        let fault = fault("launching a graph");
        self.context.bind_to_thread().map_err(&fault)?;
        // SAFETY: graph and stream are live.
        unsafe { result::graph::launch(self.exec()?, stream.cu_stream()) }.map_err(&fault)
    }

    /// What it consists of.
    pub fn shape(&self) -> Result<Shape> {
        let fault = fault("reading a graph");
        let mut count = 0;
        // SAFETY: the graph is live; without room for nodes, their number is given.
        unsafe { sys::cuGraphGetNodes(self.graph, core::ptr::null_mut(), &raw mut count) }.result().map_err(&fault)?;
        let mut nodes = vec![core::ptr::null_mut(); count];
        if count > 0 {
            // SAFETY: there is room for that many. The call takes no room for none.
            unsafe { sys::cuGraphGetNodes(self.graph, nodes.as_mut_ptr(), &raw mut count) }.result().map_err(&fault)?;
        }
        let mut digest = Sha256::new();
        let mut kernels = 0;
        for node in &nodes {
            let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
            // SAFETY: the node belongs to the live graph.
            unsafe { sys::cuGraphNodeGetType(*node, &raw mut kind) }.result().map_err(&fault)?;
            digest.update((kind as u32).to_le_bytes());
            match kind {
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL => {
                    kernels += 1;
                    describe_kernel(*node, &mut digest)
                }
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => describe_copy(*node, &mut digest),
                sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET => describe_fill(*node, &mut digest),
                _ => Ok(()),
            }
            .map_err(&fault)?;
        }
        let edges = self.edges().map_err(&fault)?;
        let position = |node| nodes.iter().position(|other| *other == node).unwrap_or(usize::MAX) as u64;
        for (from, to) in &edges {
            digest.update(position(*from).to_le_bytes());
            digest.update(position(*to).to_le_bytes());
        }
        let digest = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Shape { nodes: nodes.len(), kernels, edges: edges.len(), digest })
    }

    fn edges(&self) -> core::result::Result<Vec<(sys::CUgraphNode, sys::CUgraphNode)>, DriverError> {
        let none: sys::CUgraphNode = core::ptr::null_mut();
        let absent = core::ptr::null_mut();
        let mut count = 0;
        // SAFETY: the graph is live; without room for edges, their number is given.
        unsafe { sys::cuGraphGetEdges_v2(self.graph, absent, absent, core::ptr::null_mut(), &raw mut count) }
            .result()?;
        if count == 0 {
            return Ok(Vec::new()); // The next call takes no room for none.
        }
        let (mut from, mut to) = (vec![none; count], vec![none; count]);
        // SAFETY: plain numbers, for which zero is a value.
        let mut data: Vec<sys::CUgraphEdgeData> = (0..count).map(|_| unsafe { core::mem::zeroed() }).collect();
        // SAFETY: there is room for that many.
        unsafe {
            sys::cuGraphGetEdges_v2(self.graph, from.as_mut_ptr(), to.as_mut_ptr(), data.as_mut_ptr(), &raw mut count)
        }
        .result()?;
        Ok(from.into_iter().zip(to).collect())
    }
}

/// Adds a kernel to a digest: name, launch and parameters.
fn describe_kernel(node: sys::CUgraphNode, digest: &mut Sha256) -> core::result::Result<(), DriverError> {
    // SAFETY: plain numbers and pointers, for which zero is a value.
    let mut params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { core::mem::zeroed() };
    // SAFETY: the node is a kernel of a live graph; one structure is written.
    unsafe { sys::cuGraphKernelNodeGetParams_v2(node, &raw mut params) }.result()?;
    for size in [
        params.gridDimX,
        params.gridDimY,
        params.gridDimZ,
        params.blockDimX,
        params.blockDimY,
        params.blockDimZ,
        params.sharedMemBytes,
    ] {
        digest.update(size.to_le_bytes());
    }
    let mut name = core::ptr::null();
    let mut index = 0;
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function, or else the kernel, is what the node runs; the calls write two sizes, or a name that lives
        // as long as its module.
        let status = unsafe {
            if params.func.is_null() {
                if index == 0 {
                    sys::cuKernelGetName(&raw mut name, params.kern).result()?;
                }
                sys::cuKernelGetParamInfo(params.kern, index, &raw mut offset, &raw mut size)
            } else {
                if index == 0 {
                    sys::cuFuncGetName(&raw mut name, params.func).result()?;
                }
                sys::cuFuncGetParamInfo(params.func, index, &raw mut offset, &raw mut size)
            }
        };
        if status == sys::CUresult::CUDA_ERROR_INVALID_VALUE || params.kernelParams.is_null() {
            break; // past the last parameter
        }
        status.result()?;
        // SAFETY: the graph keeps a copy of each parameter, of that size, as long as the node lives.
        let bytes = unsafe { core::slice::from_raw_parts((*params.kernelParams.add(index)).cast::<u8>(), size) };
        digest.update(bytes);
        index += 1;
    }
    if !name.is_null() {
        // SAFETY: a string of the driver that ends in zero.
        digest.update(unsafe { CStr::from_ptr(name) }.to_bytes());
    }
    Ok(())
}

/// Adds a copy to a digest: where from, where to, and how much.
fn describe_copy(node: sys::CUgraphNode, digest: &mut Sha256) -> core::result::Result<(), DriverError> {
    let mut params = MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
    // SAFETY: the node is a copy of a live graph; one structure is written.
    unsafe { sys::cuGraphMemcpyNodeGetParams(node, params.as_mut_ptr()) }.result()?;
    let params = params.as_ptr();
    // SAFETY: every field holds zero or what the call has written. Kinds of memory are read as numbers, as zero is none.
    let (ends, [width, height, depth]) = unsafe {
        let p = params;
        let from = (
            (&raw const (*p).srcMemoryType).cast::<u32>().read(),
            [(*p).srcHost as u64, (*p).srcArray as u64, (*p).srcDevice],
            [(*p).srcXInBytes, (*p).srcY, (*p).srcZ],
            [(*p).srcPitch, (*p).srcHeight],
        );
        let to = (
            (&raw const (*p).dstMemoryType).cast::<u32>().read(),
            [(*p).dstHost as u64, (*p).dstArray as u64, (*p).dstDevice],
            [(*p).dstXInBytes, (*p).dstY, (*p).dstZ],
            [(*p).dstPitch, (*p).dstHeight],
        );
        ([from, to], [(*p).WidthInBytes, (*p).Height, (*p).Depth])
    };
    for (kind, [host, array, device], at, lines) in ends {
        // The other addresses mean nothing, and so does the distance of lines where there is one.
        let address = match kind {
            kind if kind == sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32 => host,
            kind if kind == sys::CUmemorytype::CU_MEMORYTYPE_ARRAY as u32 => array,
            _ => device,
        };
        digest.update(kind.to_le_bytes());
        digest.update(address.to_le_bytes());
        at.iter().for_each(|at| digest.update((*at as u64).to_le_bytes()));
        if height > 1 || depth > 1 {
            lines.iter().for_each(|size| digest.update((*size as u64).to_le_bytes()));
        }
    }
    [width, height, depth].iter().for_each(|size| digest.update((*size as u64).to_le_bytes()));
    Ok(())
}

/// Adds a fill to a digest: where, how much, and with what.
fn describe_fill(node: sys::CUgraphNode, digest: &mut Sha256) -> core::result::Result<(), DriverError> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut params: sys::CUDA_MEMSET_NODE_PARAMS = unsafe { core::mem::zeroed() };
    // SAFETY: the node is a fill of a live graph; one structure is written.
    unsafe { sys::cuGraphMemsetNodeGetParams(node, &raw mut params) }.result()?;
    // The distance of lines means nothing where there is one, nor do bits beyond an element.
    let pitch = if params.height > 1 { params.pitch } else { 0 };
    let value = match params.elementSize {
        size @ 1..4 => params.value & ((1 << (8 * size)) - 1),
        _ => params.value,
    };
    for number in [params.dst, pitch as u64, params.width as u64, params.height as u64] {
        digest.update(number.to_le_bytes());
    }
    digest.update(params.elementSize.to_le_bytes());
    digest.update(value.to_le_bytes());
    Ok(())
}
