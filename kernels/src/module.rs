//! Kernels loaded into a context, and how they are launched.

use core::ffi::c_void;
use core::fmt;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};

use crate::arch::Arch;
use crate::compile::Compiler;
use crate::error::{Error, Result};
use crate::memory::{Element, Span};
use crate::probe;
use crate::quiet;
use crate::source::{self, Source};

/// All kernels, on one GPU. Launches are methods in the modules of [`launch`](crate::launch).
pub struct Kernels {
    context: Arc<CudaContext>,
    arch: Arch,
    modules: Vec<sys::CUmodule>,
    functions: HashMap<&'static str, Function>,
    compiled: usize,
}

// SAFETY: modules and functions are handles that the driver lets any thread use; they are not changed after loading.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

struct Function {
    handle: sys::CUfunction,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernels({} for {})", self.functions.len(), self.arch)
    }
}

/// A context on a GPU, without cudarc's event tracking, which would put waits into captures.
pub fn context(ordinal: usize) -> Result<Arc<CudaContext>> {
    let gpus = probe::gpus()?;
    if ordinal >= gpus.len() {
        return Err(Error::Library {
            library: probe::Library::Driver,
            found: format!("shows {} GPUs, GPU {ordinal} is not among them", gpus.len()),
            advice: "see which GPUs `CUDA_VISIBLE_DEVICES` leaves".into(),
        });
    }
    let context = CudaContext::new(ordinal).map_err(|source| Error::Driver { call: "opening a GPU", source })?;
    // SAFETY: nothing was allocated with this context, and all memory here is managed without cudarc's slices.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

impl Kernels {
    /// Compiles or finds all kernels, and loads them.
    pub fn load(context: &Arc<CudaContext>, compiler: &Compiler) -> Result<Kernels> {
        let fault = |call| move |source| Error::Driver { call, source };
        context.bind_to_thread().map_err(fault("binding a context"))?;
        let (major, minor) = context.compute_capability().map_err(fault("compute capability"))?;
        let arch = Arch::of(major as u32, minor as u32).ok_or_else(|| Error::Capability {
            ordinal: context.ordinal(),
            name: context.name().unwrap_or_default(),
            major: major as u32,
            minor: minor as u32,
        })?;
        Kernels::load_for(context, compiler, arch, source::ALL)
    }

    /// Some of them, as code for an architecture that this GPU runs.
    pub fn load_for(
        context: &Arc<CudaContext>,
        compiler: &Compiler,
        arch: Arch,
        sources: &[Source],
    ) -> Result<Kernels> {
        let fault = |call| move |source| Error::Driver { call, source };
        context.bind_to_thread().map_err(fault("binding a context"))?;
        let mut kernels =
            Kernels { context: context.clone(), arch, modules: Vec::new(), functions: HashMap::new(), compiled: 0 };
        for source in sources {
            let cubin = compiler.cubin(source, arch)?;
            kernels.compiled += usize::from(!cubin.cached);
            let _alone = quiet::alone();
            // SAFETY: the image is a whole cubin, from NVRTC or from a cache entry whose checksum is right.
            let module = unsafe { result::module::load_data(cubin.code.as_ptr().cast()) }
                .map_err(fault("loading compiled kernels"))?;
            kernels.modules.push(module);
            for kernel in source.kernels {
                let missing = |source_error| Error::Kernel { source_name: source.name, kernel, source: source_error };
                let name = CString::new(*kernel).unwrap_or_default();
                // SAFETY: the module was just loaded.
                let handle = unsafe { result::module::get_function(module, name) }.map_err(missing)?;
                let parameters = parameters(handle).map_err(missing)?;
                if source.shared > 0 {
                    let most = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    // SAFETY: the function was just loaded.
                    unsafe { result::function::set_function_attribute(handle, most, source.shared as i32) }
                        .map_err(missing)?;
                }
                kernels.functions.insert(kernel, Function { handle, parameters });
            }
        }
        Ok(kernels)
    }

    /// What they were compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The context that they are loaded into.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// How many sources had to be compiled, because the cache did not hold them.
    pub fn compiled(&self) -> usize {
        self.compiled
    }

    /// Puts a kernel into a stream. Wrappers pass the arguments that the source declares, in order; their number and sizes
    /// are checked here.
    pub(crate) fn launch(
        &self,
        stream: &CudaStream,
        kernel: &'static str,
        grid: [usize; 2],
        threads: usize,
        shared: usize,
        arguments: &[&dyn Argument],
    ) -> Result {
        let function = self.functions.get(kernel).ok_or(Error::Argument { kernel, found: "no such kernel".into() })?;
        let sizes: Vec<usize> = arguments.iter().map(|argument| argument.size()).collect();
        if sizes != function.parameters {
            let found = format!("arguments of {sizes:?} bytes for parameters of {:?}", function.parameters);
            return Err(Error::Argument { kernel, found });
        }
        if grid.contains(&0) {
            return Ok(()); // nothing to do
        }
        let [across, down] = grid;
        if across > i32::MAX as usize || down > 65_535 {
            return Err(Error::Argument { kernel, found: format!("a grid of {across} × {down} blocks") });
        }
        let fault = |source| Error::Driver { call: kernel, source };
        self.context.bind_to_thread().map_err(fault)?;
        let mut pointers: Vec<*mut c_void> = arguments.iter().map(|argument| argument.pointer()).collect();
        // SAFETY: the function belongs to a module that lives as long as `self`. Every pointer is to an argument of the
        // size that the kernel declares, live until the call returns, by which time the driver has copied it. Memory that
        // the kernel touches is vouched for by the views that the wrappers took, and its size was checked by them.
        unsafe {
            result::launch_kernel(
                function.handle,
                (across as u32, down as u32, 1),
                (threads as u32, 1, 1),
                shared as u32,
                stream.cu_stream(),
                &mut pointers,
            )
        }
        .map_err(fault)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        let _alone = quiet::alone();
        for module in self.modules.drain(..) {
            // SAFETY: the module was loaded once and is unloaded once. Errors have nowhere to go.
            let _ = unsafe { result::module::unload(module) };
        }
    }
}

/// The size of each parameter of a kernel.
fn parameters(function: sys::CUfunction) -> core::result::Result<Vec<usize>, cudarc::driver::DriverError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        // SAFETY: the function is loaded; the call writes two sizes.
        let status = unsafe { sys::cuFuncGetParamInfo(function, sizes.len(), &raw mut offset, &raw mut size) };
        match status {
            // What the driver says past the last parameter.
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(sizes),
            status => status.result()?,
        }
        sizes.push(size);
    }
}

/// An argument of a kernel: plain bytes, laid out as CUDA lays them out.
///
/// # Safety
///
/// The bytes at `pointer` are what the kernel takes for that parameter.
pub(crate) unsafe trait Argument {
    fn size(&self) -> usize;
    fn pointer(&self) -> *mut c_void;
}

macro_rules! plain_arguments {
    ($($type:ty),*) => {
        $(
            // Padding would put bytes that nobody wrote into a graph's parameters.
            const _: fn() = || {
                fn without_padding<T: bytemuck::NoUninit>() {}
                without_padding::<$type>();
            };
            // SAFETY: the type has one representation in Rust and in CUDA.
            unsafe impl Argument for $type {
                fn size(&self) -> usize {
                    size_of::<$type>()
                }
                fn pointer(&self) -> *mut c_void {
                    core::ptr::from_ref(self).cast_mut().cast()
                }
            }
        )*
    };
}
pub(crate) use plain_arguments;
plain_arguments!(i32, i64, u32, u64, f32, f64);

// SAFETY: a kernel takes an address of eight bytes, which is the first field's value.
unsafe impl<T: Element> Argument for Span<T> {
    fn size(&self) -> usize {
        size_of::<u64>()
    }
    fn pointer(&self) -> *mut c_void {
        self.address_of().cast_mut().cast()
    }
}

/// The address of an optional view: null where there is none.
pub(crate) fn optional<T: Element>(span: Option<Span<T>>) -> u64 {
    span.map_or(0, |span| span.address())
}

/// Checks the size of an operand.
pub(crate) fn expect<T: Element>(
    kernel: &'static str,
    operand: &'static str,
    span: Span<T>,
    expected: usize,
) -> Result {
    if span.len() != expected {
        return Err(Error::Length { kernel, operand, expected, found: span.len() });
    }
    // Matrices are read in groups of 16 bytes; single numbers need their own alignment.
    let alignment = if expected > 1 { 16 } else { size_of::<T>() };
    if !(span.address() as usize).is_multiple_of(alignment) {
        return Err(Error::Alignment { kernel, operand, address: span.address(), alignment });
    }
    Ok(())
}

/// Checks an optional operand.
pub(crate) fn expect_if<T: Element>(
    kernel: &'static str,
    operand: &'static str,
    span: Option<Span<T>>,
    expected: usize,
) -> Result {
    span.map_or(Ok(()), |span| expect(kernel, operand, span, expected))
}

/// A dimension as kernels take it.
pub(crate) fn dimension(kernel: &'static str, dimension: &'static str, found: usize) -> Result<i32> {
    let rule = "it must lie between 1 and 2^31 - 1";
    match i32::try_from(found) {
        Ok(size) if size > 0 => Ok(size),
        _ => Err(Error::Dimension { kernel, dimension, found, rule }),
    }
}

/// Rows of a matrix: its size over that of a row, which must divide it.
pub(crate) fn rows_of(kernel: &'static str, name: &'static str, len: usize, row: usize) -> Result<i32> {
    if !len.is_multiple_of(row.max(1)) {
        let rule = "it must be a multiple of the size of a row";
        return Err(Error::Dimension { kernel, dimension: name, found: len, rule });
    }
    dimension(kernel, name, len / row.max(1))
}
