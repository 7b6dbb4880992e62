//! Which CUDA libraries and GPUs are there, found without a panic.
//!
//! A library is looked for by the loader's own rules first (`LD_LIBRARY_PATH`, the system's cache), then in the Python
//! environment that is active, then in the folders of CUDA toolkits. What is found is loaded and stays loaded, so that
//! later users of the same library get this very one. A file that lacks a function which every release of the library has
//! is told as unusable, and passed over.

use core::ffi::c_int;
use core::fmt;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result, sys};

use crate::arch::Arch;
use crate::bindings;
use crate::error::{Error, Result};

/// A library of CUDA.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Library {
    /// The driver, installed with the GPU.
    Driver,
    /// The run-time compiler.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Communication between GPUs.
    Nccl,
}

impl Library {
    /// All of them.
    pub const ALL: [Library; 4] = [Library::Driver, Library::Nvrtc, Library::CublasLt, Library::Nccl];

    /// Names of the file, the preferred one first.
    pub const fn names(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &["libcuda.so.1", "libcuda.so"],
            Library::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so"],
            Library::CublasLt => &["libcublasLt.so.13", "libcublasLt.so"],
            Library::Nccl => &["libnccl.so.2", "libnccl.so"],
        }
    }

    /// Environment variable that names the file, and overrides the search.
    pub const fn variable(self) -> Option<&'static str> {
        match self {
            Library::Driver => None,
            Library::Nvrtc => Some("QEFFECT_NVRTC"),
            Library::CublasLt => Some("QEFFECT_CUBLASLT"),
            Library::Nccl => Some("QEFFECT_NCCL"),
        }
    }

    /// A function that tells the library from others: it gives the version.
    pub const fn function(self) -> &'static str {
        match self {
            Library::Driver => "cuDriverGetVersion",
            Library::Nvrtc => "nvrtcVersion",
            Library::CublasLt => "cublasLtGetVersion",
            Library::Nccl => "ncclGetVersion",
        }
    }

    /// How to get it.
    pub const fn advice(self) -> &'static str {
        match self {
            Library::Driver => {
                "install the NVIDIA driver (580 or newer) of this machine's GPU; in a container, pass the GPU through"
            }
            Library::Nvrtc => {
                "`pip install nvidia-cuda-nvrtc` in the active Python environment, or install CUDA 13, or name the file in QEFFECT_NVRTC"
            }
            Library::CublasLt => {
                "`pip install nvidia-cublas` in the active Python environment, or install CUDA 13, or name the file in QEFFECT_CUBLASLT"
            }
            Library::Nccl => {
                "`pip install nvidia-nccl-cu13` in the active Python environment, or install NCCL 2.27 or newer, or name the file in QEFFECT_NCCL; one GPU needs none"
            }
        }
    }

    /// Folders below `site-packages/nvidia` that its wheels use.
    const fn wheel_folders(self) -> &'static [&'static str] {
        match self {
            Library::Driver => &[],
            Library::Nvrtc => &["cu13/lib", "cuda_nvrtc/lib"],
            Library::CublasLt => &["cu13/lib", "cublas/lib"],
            Library::Nccl => &["nccl/lib", "cu13/lib"],
        }
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Library::Driver => "CUDA driver",
            Library::Nvrtc => "NVRTC",
            Library::CublasLt => "cuBLASLt",
            Library::Nccl => "NCCL",
        })
    }
}

/// A library that was loaded, and stays so.
#[derive(Clone, Debug)]
pub struct Found {
    /// The library.
    pub library: Library,
    /// Where it came from, as far as the system says.
    pub path: PathBuf,
    pub(crate) handle: &'static libloading::Library,
}

/// Finds and loads a library; the first answer is kept.
pub fn find(library: Library) -> Result<Found> {
    static FOUND: Mutex<Option<HashMap<Library, Found>>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    let found = found.get_or_insert_default();
    if let Some(known) = found.get(&library) {
        return Ok(known.clone());
    }
    let fresh = search(library)?;
    found.insert(library, fresh.clone());
    Ok(fresh)
}

fn search(library: Library) -> Result<Found> {
    if let Some(variable) = library.variable()
        && let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty())
    {
        return open(library, &path).map_err(|refused| Error::Library {
            library,
            found: format!("{variable} names {}, which {refused}", Path::new(&path).display()),
            advice: format!("correct {variable}, or unset it"),
        });
    }
    let mut refusals = Vec::new();
    let names = library.names().iter().map(PathBuf::from);
    for path in names.chain(candidates(library)) {
        match open(library, path.as_os_str()) {
            Ok(found) => return Ok(found),
            Err(Refused::Other { library, path }) => refusals.push((path.clone(), Refused::Other { library, path })),
            // A name that no folder holds is not worth a line of its own.
            Err(refused) if path.is_absolute() => refusals.push((path, refused)),
            Err(_) => {}
        }
    }
    let other = refusals.iter().any(|(_, refused)| matches!(refused, Refused::Other { .. }));
    let mut messages: Vec<String> =
        refusals.iter().map(|(path, refused)| format!("{} {refused}", path.display())).collect();
    messages.dedup(); // a name and a path may lead to one file
    if !other {
        messages.insert(0, format!("not found as {}", library.names().join(", ")));
    }
    let advice = match other {
        true => format!("take it out of LD_LIBRARY_PATH if it is not NVIDIA's; {}", library.advice()),
        false => library.advice().into(),
    };
    Err(Error::Library { library, found: messages.join("; "), advice })
}

/// Files outside the loader's own search that exist.
fn candidates(library: Library) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(prefix) = std::env::var_os(variable) {
            let prefix = PathBuf::from(prefix);
            for python in entries(&prefix.join("lib"), "python3") {
                let wheels = python.join("site-packages/nvidia");
                folders.extend(library.wheel_folders().iter().map(|folder| wheels.join(folder)));
            }
            folders.push(prefix.join("lib"));
        }
    }
    if library != Library::Driver {
        for variable in ["CUDA_HOME", "CUDA_PATH"] {
            folders.extend(std::env::var_os(variable).map(|prefix| PathBuf::from(prefix).join("lib64")));
        }
        for toolkit in entries(Path::new("/usr/local"), "cuda") {
            folders.push(toolkit.join("lib64"));
        }
    }
    let mut files = Vec::new();
    for folder in folders {
        files.extend(library.names().iter().map(|name| folder.join(name)).filter(|file| file.exists()));
    }
    files
}

/// Entries of a folder whose names begin so, in order of name; none where there is no such folder.
fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(read) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut entries: Vec<PathBuf> = read
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    entries.sort();
    entries
}

/// Why a file is not taken, as what follows its name.
#[derive(Debug)]
enum Refused {
    /// The loader does not take it.
    Load(String),
    /// It is another library, or an empty one.
    Other { library: Library, path: PathBuf },
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Load(message) => write!(f, "cannot be loaded: {message}"),
            Refused::Other { library, .. } => {
                write!(f, "is not usable: it lacks the function `{}`", library.function())
            }
        }
    }
}

/// What the loader says of a file, without its name.
fn reason(path: &OsStr, error: &libloading::Error) -> String {
    let said = std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    match said.strip_prefix(&*path.to_string_lossy()).and_then(|said| said.strip_prefix(": ")) {
        Some(said) => said.to_owned(),
        None => said,
    }
}

fn open(library: Library, path: &OsStr) -> core::result::Result<Found, Refused> {
    // SAFETY: the initialisers of NVIDIA's libraries have no requirement on the caller; a file that the user names is
    // trusted as the user's own code is.
    let opened = unsafe { libloading::Library::new(path) }.map_err(|error| Refused::Load(reason(path, &error)))?;
    let path = if Path::new(path).is_absolute() { PathBuf::from(path) } else { mapped(path) };
    // SAFETY: the address is only looked for.
    if unsafe { opened.get::<*const ()>(library.function().as_bytes()) }.is_err() {
        return Err(Refused::Other { library, path });
    }
    if library == Library::Nvrtc {
        // NVRTC opens this companion by its bare name, which the loader finds only once it is loaded.
        for file in path.parent().map(|folder| entries(folder, "libnvrtc-builtins.so")).unwrap_or_default() {
            // SAFETY: as above.
            if let Ok(builtins) = unsafe { libloading::Library::new(file) } {
                Box::leak(Box::new(builtins));
            }
        }
    }
    Ok(Found { library, path, handle: Box::leak(Box::new(opened)) })
}

/// The file that the loader chose for a bare name; the name itself where the system does not tell.
fn mapped(name: &OsStr) -> PathBuf {
    let stem = name.to_string_lossy();
    let stem = stem.split(".so").next().unwrap_or_default().to_owned() + ".so";
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines()
        .filter_map(|line| line.split_once('/').map(|(_, path)| PathBuf::from(format!("/{path}"))))
        .find(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&stem)))
        .unwrap_or_else(|| PathBuf::from(name))
}

/// A GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gpu {
    /// Its number.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory: usize,
}

impl Gpu {
    /// What machine code is made for; none where FP8 is missing.
    pub fn arch(&self) -> Option<Arch> {
        Arch::of(self.capability.0, self.capability.1)
    }
}

/// The driver's version, as `(major, minor)` of the CUDA release that it supports.
pub fn driver_version() -> Result<(u32, u32)> {
    let library = Library::Driver;
    let found = find(library)?;
    let symbol = library.function();
    // SAFETY: this is the function's type in the driver's header; the library is never unloaded.
    let function = unsafe { found.handle.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(symbol.as_bytes()) }
        .map_err(|error| Error::Symbol { library, symbol, message: error.to_string() })?;
    let mut version = 0;
    // SAFETY: the call writes one integer; it needs no initialisation.
    match unsafe { function(&raw mut version) } {
        0 => Ok((version as u32 / 1000, version as u32 % 1000 / 10)),
        status => Err(Error::Library {
            library,
            found: format!("{symbol} of {} fails with status {status}", found.path.display()),
            advice: library.advice().into(),
        }),
    }
}

/// The GPUs of this machine. A driver that is older than CUDA 13 is an error, and so is one that lacks functions.
pub fn gpus() -> Result<Vec<Gpu>> {
    let (major, minor) = driver_version()?;
    if major < 13 {
        return Err(Error::Library {
            library: Library::Driver,
            found: format!("supports CUDA {major}.{minor}, which is too old"),
            advice: Library::Driver.advice().into(),
        });
    }
    bindings::driver()?;
    let fault = |call| move |source| Error::Driver { call, source };
    match result::init() {
        Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Ok(Vec::new()),
        other => other.map_err(fault("cuInit"))?,
    }
    let count = result::device::get_count().map_err(fault("cuDeviceGetCount"))?;
    (0..count)
        .map(|ordinal| {
            let device = result::device::get(ordinal).map_err(fault("cuDeviceGet"))?;
            let attribute = |attribute| {
                // SAFETY: the device was just returned by the driver.
                unsafe { result::device::get_attribute(device, attribute) }.map_err(fault("cuDeviceGetAttribute"))
            };
            use sys::CUdevice_attribute as Attribute;
            Ok(Gpu {
                ordinal: ordinal as usize,
                name: result::device::get_name(device).map_err(fault("cuDeviceGetName"))?,
                capability: (
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
                ),
                multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
                // SAFETY: the device was just returned by the driver.
                memory: unsafe { result::device::total_mem(device) }.map_err(fault("cuDeviceTotalMem"))?,
            })
        })
        .collect()
}

/// Everything there is to say about CUDA on this machine: one line per library and GPU, with advice for what is missing.
#[derive(Debug)]
pub struct Survey {
    /// Each library, in the order of [`Library::ALL`].
    pub libraries: Vec<(Library, Result<Found>)>,
    /// The driver's version.
    pub driver: Result<(u32, u32)>,
    /// The GPUs.
    pub gpus: Result<Vec<Gpu>>,
}

/// Looks at all of it. Never panics, and takes no GPU.
pub fn survey() -> Survey {
    Survey {
        libraries: Library::ALL.into_iter().map(|library| (library, find(library))).collect(),
        driver: driver_version(),
        gpus: gpus(),
    }
}

impl fmt::Display for Survey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (library, found) in &self.libraries {
            match (found, library, &self.driver) {
                (Ok(found), Library::Driver, Ok((major, minor))) => {
                    writeln!(f, "{library}: CUDA {major}.{minor}, {}", found.path.display())?;
                }
                (Ok(found), ..) => writeln!(f, "{library}: {}", found.path.display())?,
                (Err(Error::Library { found, advice, .. }), ..) => {
                    writeln!(f, "{library}: {found}\n  help: {advice}")?;
                }
                (Err(error), ..) => writeln!(f, "{error}")?,
            }
        }
        match &self.gpus {
            Ok(gpus) if gpus.is_empty() => writeln!(f, "GPU: none\n  help: {}", Library::Driver.advice()),
            Ok(gpus) => gpus.iter().try_for_each(|gpu| {
                let (major, minor) = gpu.capability;
                let fp8 = if gpu.arch().is_some() { "" } else { "; no FP8, which needs 8.9" };
                let memory = gpu.memory as f64 / f64::from(1 << 30);
                writeln!(
                    f,
                    "GPU {}: {}, compute capability {major}.{minor}, {} multiprocessors, {memory:.1} GiB{fp8}",
                    gpu.ordinal, gpu.name, gpu.multiprocessors
                )
            }),
            // A driver that was not found has been told.
            Err(error) if self.driver.is_ok() => writeln!(f, "GPU: {error}"),
            Err(_) => writeln!(f, "GPU: none that the driver shows"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_survey_says_something_about_everything() {
        let text = survey().to_string();
        for library in Library::ALL {
            assert!(text.contains(&library.to_string()), "{text}");
        }
        assert!(text.contains("GPU"), "{text}");
        for (library, found) in survey().libraries {
            if found.is_err() {
                assert!(text.contains(library.advice()), "{text}");
            }
        }
    }

    #[test]
    fn what_is_no_library_is_refused_with_a_reason() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let refused = open(Library::Nvrtc, file.path().as_os_str()).unwrap_err();
        let empty = matches!(&refused, Refused::Load(message) if message.is_empty() || message == "dlopen failed");
        assert!(matches!(refused, Refused::Load(_)) && !empty, "{refused}");
        assert!(open(Library::Nvrtc, OsStr::new("/nowhere/libnvrtc.so")).is_err());
    }

    #[test]
    fn wheels_of_a_python_environment_are_candidates() {
        let prefix = tempfile::tempdir().unwrap();
        let folder = prefix.path().join("lib/python3.12/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&folder).unwrap();
        assert_eq!(entries(&prefix.path().join("lib"), "python3"), [prefix.path().join("lib/python3.12")]);
        assert!(entries(&prefix.path().join("nowhere"), "").is_empty());
        assert!(Library::ALL.iter().all(|library| !library.names().is_empty()));
    }
}
