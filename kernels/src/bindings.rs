//! What bindings need of a library, checked before they are used: a function that is missing makes them panic.
//!
//! Bindings open the driver and cuBLASLt by names of their own, so theirs may be another file than the one that [`probe`]
//! has found: it is theirs that is checked here.
//!
//! [`probe`]: crate::probe

use cudarc::{cublaslt, driver};

use crate::error::{Error, Result};
use crate::probe::Library;

/// What this crate calls of the driver, through safe wrappers too.
const DRIVER: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime_v2",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetName",
    "cuFuncGetParamInfo",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphGetEdges_v2",
    "cuGraphGetNodes",
    "cuGraphInstantiateWithFlags",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphLaunch",
    "cuGraphMemcpyNodeGetParams",
    "cuGraphMemsetNodeGetParams",
    "cuGraphNodeGetType",
    "cuGraphUpload",
    "cuInit",
    "cuKernelGetName",
    "cuKernelGetParamInfo",
    "cuLaunchKernel",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD16Async",
    "cuMemsetD2D32Async",
    "cuMemsetD8Async",
    "cuMemsetD8_v2",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// What it calls of cuBLASLt.
const CUBLASLT: &[&str] = &[
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoCheck",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
];

/// Has the bindings of the driver open it, once it was found.
pub(crate) fn driver() -> Result {
    // SAFETY: the driver was found and loaded without a fault; looking for it again has no other effect.
    let present = unsafe { driver::sys::is_culib_present() };
    // SAFETY: as above; it is there.
    let has = |name: &str| unsafe { driver::sys::culib().get::<*const ()>(name.as_bytes()).is_ok() };
    check(Library::Driver, present, DRIVER, has)
}

/// As [`driver`], for cuBLASLt.
pub(crate) fn cublaslt() -> Result {
    // SAFETY: as in `driver`.
    let present = unsafe { cublaslt::sys::is_culib_present() };
    // SAFETY: as in `driver`.
    let has = |name: &str| unsafe { cublaslt::sys::culib().get::<*const ()>(name.as_bytes()).is_ok() };
    check(Library::CublasLt, present, CUBLASLT, has)
}

fn check(library: Library, present: bool, functions: &[&str], has: impl Fn(&str) -> bool) -> Result {
    let unusable = |found, advice: &str| Err(Error::Library { library, found, advice: advice.into() });
    if !present {
        let found = "was found, but under a name that bindings do not look for".into();
        return unusable(found, "add its folder to LD_LIBRARY_PATH");
    }
    let missing: Vec<&str> = functions.iter().copied().filter(|name| !has(name)).collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let others = if missing.len() > 1 { format!(" and {} others", missing.len() - 1) } else { String::new() };
    // Unversioned names are looked for first, and stand for whatever a link or a copy makes of them.
    let file = library.names()[library.names().len() - 1];
    let found = format!("the file that the loader takes for {file} lacks the function `{first}`{others}");
    unusable(found, &format!("take it out of LD_LIBRARY_PATH if it is not NVIDIA's; else {}", library.advice()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_a_function_is_no_panic() {
        let two: &[&str] = &["cuInit", "cuDeviceGet"];
        let said =
            |present, has: fn(&str) -> bool| check(Library::Driver, present, two, has).map_err(|e| e.to_string());
        assert_eq!(said(true, |_| true), Ok(()));
        let error = said(true, |name| name == "cuInit").unwrap_err();
        assert!(error.contains("CUDA driver: ") && error.contains("lacks the function `cuDeviceGet`\n"), "{error}");
        let error = said(true, |_| false).unwrap_err();
        assert!(error.contains("`cuInit` and 1 others") && error.contains("help: "), "{error}");
        assert!(said(false, |_| panic!("nothing is open")).unwrap_err().contains("LD_LIBRARY_PATH"));
    }

    #[test]
    fn functions_are_listed_once() {
        for list in [DRIVER, CUBLASLT] {
            assert!(list.is_sorted() && list.windows(2).all(|pair| pair[0] != pair[1]));
        }
    }
    /// What is called without a wrapper stands in the sources as `sys::name(`.
    #[test]
    fn every_function_that_is_called_directly_is_listed() {
        let mut folders = vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
        let mut called = std::collections::BTreeSet::new();
        while let Some(folder) = folders.pop() {
            for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = std::fs::read_to_string(&path).unwrap();
                for after in text.split("sys::cu").skip(1) {
                    let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(after.len());
                    if after[end..].starts_with('(') {
                        called.insert(format!("cu{}", &after[..end]));
                    }
                }
            }
        }
        // Opening a library is no function of it.
        called.remove("culib");
        assert!(called.contains("cuGraphGetNodes") && called.contains("cublasLtGetVersion"), "{called:?}");
        let listed = |name: &String| DRIVER.contains(&name.as_str()) || CUBLASLT.contains(&name.as_str());
        let missing: Vec<&String> = called.iter().filter(|name| !listed(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
