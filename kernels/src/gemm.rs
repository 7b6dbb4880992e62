//! Matrix products through cuBLASLt: FP8 and bf16, with an algorithm that is chosen once.
//!
//! A product is `out[rows, columns] = left[rows, depth] · right[columns, depth]ᵀ`, everything row-major: both operands lie
//! with their terms side by side, which is the only form that FP8 takes. Which kernel of the library computes it decides the
//! bits, so that choice is made outside of captures, once per [`Product`], by time, and kept in a table
//! ([`Algorithms`]) that is stored, compared between processes, and used again by the next run.

mod algorithms;
mod descriptor;
mod product;
mod trial;

use std::sync::Arc;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::{CudaContext, CudaStream};
use half::bf16;

pub use algorithms::{Algorithm, Algorithms};
pub use product::{BLOCK, BlockScale, Output, Product, Scaling, Type};

use crate::bindings;
use crate::cache::{Cache, Key};
use crate::error::{Error, Result};
use crate::memory::Span;
use crate::probe::{self, Library};
use crate::quiet;
use descriptor::Descriptor;
use trial::{Purpose, Trial};

/// Bytes of workspace that an algorithm may use. Streams that run products at once need one each.
pub const WORKSPACE: usize = 32 << 20;

/// A matrix.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Matrix {
    /// bf16.
    Bf16(Span<bf16>),
    /// FP8 codes.
    Codes(Span<u8>),
    /// Floats: only as a result.
    F32(Span<f32>),
}

impl Matrix {
    const fn len(&self) -> usize {
        match self {
            Matrix::Bf16(span) => span.len(),
            Matrix::Codes(span) => span.len(),
            Matrix::F32(span) => span.len(),
        }
    }

    const fn address(&self) -> u64 {
        match self {
            Matrix::Bf16(span) => span.address(),
            Matrix::Codes(span) => span.address(),
            Matrix::F32(span) => span.address(),
        }
    }
}

/// What a product works on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Operands {
    /// rows × depth, or depth × rows where the product says that it is transposed.
    pub left: Matrix,
    /// columns × depth, or depth × columns where the product says that it is transposed.
    pub right: Matrix,
    /// What left codes are multiplied by: one number, or one per block.
    pub left_scale: Option<Span<f32>>,
    /// What right codes are multiplied by: one number, or one per block.
    pub right_scale: Option<Span<f32>>,
    /// One per column.
    pub bias: Option<Span<bf16>>,
    /// rows × columns.
    pub out: Matrix,
    /// Whether the product is added to what `out` holds.
    pub accumulate: bool,
}

fn fault(call: &'static str) -> impl Fn(result::CublasError) -> Error {
    move |source| Error::Cublas { call, status: source.to_string() }
}

struct Handle(sys::cublasLtHandle_t);

// SAFETY: the library lets any thread use a handle, several at once too.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the handle was created once and is destroyed once, after the plans that hold it. Errors have nowhere to go.
        let _ = unsafe { result::destroy_handle(self.0) };
    }
}

/// cuBLASLt on one GPU, for one thread at a time.
pub struct Products {
    handle: Arc<Handle>,
    context: Arc<CudaContext>,
    device: String,
    multiprocessors: u32,
    cache: Option<Cache>,
    algorithms: Algorithms,
    searched: usize,
    asked: usize,
}

impl core::fmt::Debug for Products {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Products({}, {} algorithms)", self.device, self.algorithms.len())
    }
}

/// A product that is ready to be put into streams, captured or not.
pub struct Plan {
    product: Product,
    descriptor: Descriptor,
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
    handle: Arc<Handle>,
}

impl core::fmt::Debug for Plan {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Plan({})", self.product)
    }
}

impl Products {
    /// Finds and opens the library.
    pub fn open(context: &Arc<CudaContext>, cache: Option<Cache>) -> Result<Products> {
        probe::find(Library::CublasLt)?;
        bindings::cublaslt()?;
        let driver = |call| move |source| Error::Driver { call, source };
        context.bind_to_thread().map_err(driver("binding a context"))?;
        let handle = Arc::new(Handle(result::create_handle().map_err(fault("cublasLtCreate"))?));
        // SAFETY: the library is loaded; the call takes nothing.
        let version = unsafe { sys::cublasLtGetVersion() };
        let gpus = probe::gpus()?;
        let gpu = gpus.get(context.ordinal()).map(|gpu| (gpu.name.clone(), gpu.multiprocessors));
        let (name, multiprocessors) = gpu.unwrap_or_default();
        let device = format!("{name}, {multiprocessors} multiprocessors, cuBLASLt {version}");
        let algorithms = Algorithms::new(&device);
        Ok(Products {
            handle,
            context: context.clone(),
            device,
            multiprocessors,
            cache,
            algorithms,
            searched: 0,
            asked: 0,
        })
    }

    /// GPU, number of multiprocessors and version of the library: what algorithms are chosen for.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// The algorithms in use.
    pub fn algorithms(&self) -> &Algorithms {
        &self.algorithms
    }

    /// How many algorithms had to be searched for, because neither the table nor the cache held them.
    pub fn searched(&self) -> usize {
        self.searched
    }

    /// How often the library was asked for its proposals.
    pub fn asked(&self) -> usize {
        self.asked
    }

    /// Takes over the table of another process, which must be for the same GPU and library.
    pub fn adopt(&mut self, algorithms: Algorithms) -> Result {
        if algorithms.device() != self.device {
            let status = format!("the table is for {}, this is {}", algorithms.device(), self.device);
            return Err(Error::Cublas { call: "adopting a table of algorithms", status });
        }
        self.algorithms = algorithms;
        Ok(())
    }

    /// Makes a product ready. Refused inside a capture: the algorithm may have to be searched for, which takes the stream, and
    /// memory for the operands.
    pub fn plan(&mut self, stream: &CudaStream, product: Product) -> Result<Plan> {
        product.validate()?;
        if quiet::is_capturing() {
            let reason = "it has no plan, and none is made inside a capture".into();
            return Err(Error::Product { product: product.to_string(), reason });
        }
        self.context.bind_to_thread().map_err(|source| Error::Driver { call: "binding a context", source })?;
        let descriptor = Descriptor::new(&product, self.multiprocessors)?;
        let chosen = match self.algorithms.get(&product) {
            Some(known) => known,
            None => {
                let key = Key::of([b"gemm".as_slice(), self.device.as_bytes(), product.to_string().as_bytes()]);
                let cached = self.cache.as_ref().and_then(|cache| cache.get(&key));
                let chosen = match cached.and_then(|bytes| Algorithm::from_bytes(&bytes)) {
                    Some(known) => known,
                    None => {
                        let found = self.search(stream, &product, &descriptor)?;
                        self.searched += 1;
                        if let Some(cache) = &self.cache {
                            let _ = cache.put(&key, &found.to_bytes());
                        }
                        found
                    }
                };
                self.algorithms.insert(&product, chosen);
                chosen
            }
        };
        let algorithm = sys::cublasLtMatmulAlgo_t { data: chosen.data };
        let workspace = descriptor.check(self.handle.0, &algorithm, &product)?;
        if workspace > WORKSPACE {
            return Err(Error::Product {
                product: product.to_string(),
                reason: "its algorithm needs too much workspace".into(),
            });
        }
        Ok(Plan { product, descriptor, algorithm, workspace, handle: self.handle.clone() })
    }

    /// How many algorithms the library proposes for a product, at most eight, whatever [`Product::validate`] says of it.
    pub fn offered(&mut self, product: &Product) -> Result<usize> {
        self.context.bind_to_thread().map_err(|source| Error::Driver { call: "binding a context", source })?;
        self.asked += 1;
        match Descriptor::new(product, self.multiprocessors)?.proposals(self.handle.0, product, 8) {
            Ok(proposals) => Ok(proposals.len()),
            Err(Error::Product { .. }) => Ok(0),
            Err(fault) => Err(fault),
        }
    }

    /// Runs a plan once on memory of its own, so that a later capture need not load its kernels. Never inside a capture.
    pub fn warm(&self, stream: &CudaStream, plan: &Plan) -> Result {
        let trial = Trial::new(&self.context, &plan.product, Purpose::Warm)?;
        plan.run(stream, &trial.operands, trial.workspace)
    }

    /// The fastest of the library's proposals, operands out of the second cache.
    fn search(&mut self, stream: &CudaStream, product: &Product, descriptor: &Descriptor) -> Result<Algorithm> {
        const PROPOSALS: usize = 16;
        const REPEATS: usize = 7;
        self.asked += 1;
        let proposals = descriptor.proposals(self.handle.0, product, PROPOSALS)?;
        if proposals.len() == 1 {
            return Ok(proposals[0]);
        }
        let fault = |source| Error::Driver { call: "timing of algorithms", source };
        let trial = Trial::new(&self.context, product, Purpose::Search)?;
        let event =
            || self.context.new_event(Some(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(fault);
        let mut best: Option<(f32, Algorithm)> = None;
        for proposal in proposals {
            let plan = Plan {
                product: *product,
                descriptor: Descriptor::new(product, self.multiprocessors)?,
                algorithm: sys::cublasLtMatmulAlgo_t { data: proposal.data },
                workspace: proposal.workspace,
                handle: self.handle.clone(),
            };
            let mut times = Vec::with_capacity(REPEATS);
            for _ in 0..REPEATS {
                crate::memory::zero(stream, trial.flush)?;
                let (start, end) = (event()?, event()?);
                start.record(stream).map_err(fault)?;
                // A proposal that does not run after all is passed over.
                if plan.run(stream, &trial.operands, trial.workspace).is_err() {
                    break;
                }
                end.record(stream).map_err(fault)?;
                times.push(start.elapsed_ms(&end).map_err(fault)?);
            }
            if times.len() < REPEATS {
                continue;
            }
            times.sort_by(f32::total_cmp);
            let median = times[REPEATS / 2];
            if best.is_none_or(|(time, _)| median < time) {
                best = Some((median, proposal));
            }
        }
        best.map(|(_, algorithm)| algorithm).ok_or_else(|| Error::Product {
            product: product.to_string(),
            reason: "none of the library's algorithms runs".into(),
        })
    }
}

impl Plan {
    /// The product.
    pub fn product(&self) -> &Product {
        &self.product
    }

    /// Bytes of workspace that it uses.
    pub fn workspace(&self) -> usize {
        self.workspace
    }

    /// Puts the product into a stream.
    pub fn run(&self, stream: &CudaStream, operands: &Operands, workspace: Span<u8>) -> Result {
        self.product.check(operands, workspace, self.workspace)?;
        stream.context().bind_to_thread().map_err(|source| Error::Driver { call: "binding a context", source })?;
        self.descriptor.set_pointers(operands)?;
        let beta = if operands.accumulate { 1.0f32 } else { 0.0 };
        // SAFETY: descriptors, algorithm and handle are live; sizes and alignments of all matrices, scales and the workspace
        // were checked against the product; memory is vouched for by the views; the numbers are read before the call returns.
        unsafe {
            self.descriptor.multiply(self.handle.0, &self.algorithm, operands, beta, workspace, self.workspace, stream)
        }
        .map_err(fault("cublasLtMatmul"))
    }
}
