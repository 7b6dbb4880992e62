//! The library's descriptors of a product: made once, destroyed once.
//!
//! The library is column-major: to it, a row-major result is its transpose, so its first operand is our right one.

use core::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::CudaStream;

use super::algorithms::Algorithm;
use super::product::{BlockScale, Output, Product, Scaling, Type};
use super::{Operands, WORKSPACE, fault};
use crate::error::Result;
use crate::memory::{Element, Span};

use sys::cublasLtMatmulDescAttributes_t as Attribute;
use sys::cublasLtMatmulPreferenceAttributes_t as Preference;

/// Descriptors of the operation, both operands, and the result.
pub(super) struct Descriptor {
    operation: sys::cublasLtMatmulDesc_t,
    right: sys::cublasLtMatrixLayout_t,
    left: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

// SAFETY: descriptors are memory of the library without ties to a thread; they are changed through one owner.
unsafe impl Send for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: each that is not null was created once and is destroyed once. Errors have nowhere to go.
        unsafe {
            for layout in [self.right, self.left, self.out] {
                if !layout.is_null() {
                    let _ = result::destroy_matrix_layout(layout);
                }
            }
            if !self.operation.is_null() {
                let _ = result::destroy_matmul_desc(self.operation);
            }
        }
    }
}

fn data_type(of: Type) -> sys::cudaDataType_t {
    match of {
        Type::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        Type::E4M3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        Type::E5M2 => sys::cudaDataType_t::CUDA_R_8F_E5M2,
    }
}

fn scale_mode(scale: BlockScale) -> sys::cublasLtMatmulMatrixScale_t {
    match scale {
        BlockScale::Vector => sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        BlockScale::Square => sys::cublasLtMatmulMatrixScale_t::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
    }
}

impl Descriptor {
    /// For a GPU of so many multiprocessors; 0 if that is not known.
    pub(super) fn new(product: &Product, multiprocessors: u32) -> Result<Descriptor> {
        let made = "describing a product";
        let float = sys::cudaDataType_t::CUDA_R_32F;
        let operation =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, float).map_err(fault(made))?;
        let none = core::ptr::null_mut();
        let mut descriptor = Descriptor { operation, right: none, left: none, out: none };
        let layout = |of, rows: usize, depth: usize, transposed: bool| {
            let (lines, line) = if transposed { (depth, rows) } else { (rows, depth) };
            result::create_matrix_layout(of, line as u64, lines as u64, line as i64).map_err(fault(made))
        };
        descriptor.right = layout(data_type(product.right), product.columns, product.depth, product.right_transposed)?;
        descriptor.left = layout(data_type(product.left), product.rows, product.depth, product.left_transposed)?;
        let out = match product.out {
            Output::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Output::F32 => float,
        };
        descriptor.out = layout(out, product.rows, product.columns, false)?;

        // cublasOperation_t: 0 as stored, 1 transposed.
        let operation = |transposed: bool| i32::from(transposed);
        // Stored with the terms side by side, our right operand is to the library what has to be transposed.
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &operation(!product.right_transposed))?;
        descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &operation(product.left_transposed))?;
        if product.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &sys::cudaDataType_t::CUDA_R_16BF)?;
        }
        if product.is_fp8() {
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(product.fast))?;
        }
        if product.beside && multiprocessors > 1 {
            let half = (multiprocessors / 2) as i32;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &half)?;
        }
        if let Scaling::Blocks { left, right } = product.scaling {
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &scale_mode(right))?;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &scale_mode(left))?;
            // Until the first call says where scales lie, any address but null: without one no algorithm is proposed.
            const SOMEWHERE: u64 = 256;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &SOMEWHERE)?;
            descriptor.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &SOMEWHERE)?;
        }
        Ok(descriptor)
    }

    fn set<V>(&self, attribute: Attribute, value: &V) -> Result {
        let value = core::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: the descriptor is live; the library copies as many bytes as the value has, and refuses a wrong number.
        unsafe { result::set_matmul_desc_attribute(self.operation, attribute, value, size_of::<V>()) }
            .map_err(fault("describing a product"))
    }

    fn set_address<T: Element>(&self, attribute: Attribute, span: Option<Span<T>>) -> Result {
        span.map_or(Ok(()), |span| self.set(attribute, &span.address()))
    }

    /// Where scales and bias lie, for the next call.
    pub(super) fn set_pointers(&self, operands: &Operands) -> Result {
        self.set_address(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.right_scale)?;
        self.set_address(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.left_scale)?;
        self.set_address(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias)
    }

    /// What the library proposes, its favourite first.
    pub(super) fn proposals(
        &self,
        handle: sys::cublasLtHandle_t,
        product: &Product,
        most: usize,
    ) -> Result<Vec<Algorithm>> {
        let call = "asking for algorithms";
        let preference = result::create_matmul_pref().map_err(fault(call))?;
        let mut schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
        if product.split {
            // Partial sums in fp32, added by a second kernel: an order that does not change.
            schemes |= sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        }
        let mut found = vec![
            sys::cublasLtMatmulHeuristicResult_t {
                algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
                workspaceSize: 0,
                state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
                wavesCount: 0.0,
                reserved: [0; 4],
            };
            most
        ];
        let mut count = 0;
        let set = |attribute, value: *const c_void, size| {
            // SAFETY: the preference is live, the value has that size.
            unsafe { result::set_matmul_pref_attribute(preference, attribute, value, size) }
        };
        let asked = set(
            Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            core::ptr::from_ref(&WORKSPACE).cast(),
            size_of::<usize>(),
        )
        .and_then(|()| {
            let schemes = core::ptr::from_ref(&schemes).cast();
            set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes, size_of::<u32>())
        })
        .and_then(|()| {
            // SAFETY: handle, descriptors and preference are live; the array has room for as many as are asked for.
            unsafe {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle,
                    self.operation,
                    self.right,
                    self.left,
                    self.out,
                    self.out,
                    preference,
                    most as i32,
                    found.as_mut_ptr(),
                    &raw mut count,
                )
            }
            .result()
        });
        // SAFETY: it was created above and is destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        let usable: Vec<Algorithm> = found
            .iter()
            .take(count.max(0) as usize)
            .filter(|found| found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS)
            .map(|found| Algorithm { data: found.algo.data, workspace: found.workspaceSize })
            .collect();
        match asked {
            Ok(()) if !usable.is_empty() => Ok(usable),
            Ok(()) | Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => {
                Err(product.refused("the library has no algorithm for it on this GPU"))
            }
            Err(error) => Err(fault(call)(error)),
        }
    }

    /// Whether an algorithm takes the product, and the workspace that it needs.
    pub(super) fn check(
        &self,
        handle: sys::cublasLtHandle_t,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        product: &Product,
    ) -> Result<usize> {
        let mut answer = sys::cublasLtMatmulHeuristicResult_t {
            algo: *algorithm,
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        // SAFETY: handle, descriptors and algorithm are live; the call writes one answer.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(
                handle,
                self.operation,
                self.right,
                self.left,
                self.out,
                self.out,
                algorithm,
                &raw mut answer,
            )
        };
        match status.result() {
            Ok(()) => Ok(answer.workspaceSize),
            Err(error) => Err(product.refused(format!("the algorithm that was chosen does not take it: {error}"))),
        }
    }

    /// # Safety
    ///
    /// All memory has the sizes that the descriptors say and stays allocated until the product has run.
    #[expect(clippy::too_many_arguments, reason = "what the library's call takes")]
    pub(super) unsafe fn multiply(
        &self,
        handle: sys::cublasLtHandle_t,
        algorithm: &sys::cublasLtMatmulAlgo_t,
        operands: &Operands,
        beta: f32,
        workspace: Span<u8>,
        workspace_bytes: usize,
        stream: &CudaStream,
    ) -> core::result::Result<(), CublasError> {
        let alpha = 1.0f32;
        let out = operands.out.address() as *mut c_void;
        // SAFETY: as the caller promises.
        unsafe {
            result::matmul(
                handle,
                self.operation,
                core::ptr::from_ref(&alpha).cast(),
                core::ptr::from_ref(&beta).cast(),
                operands.right.address() as *const c_void,
                self.right,
                operands.left.address() as *const c_void,
                self.left,
                out,
                self.out,
                out,
                self.out,
                algorithm,
                workspace.address() as *mut c_void,
                workspace_bytes,
                stream.cu_stream().cast(),
            )
        }
    }
}
