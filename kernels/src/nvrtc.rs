//! NVRTC, the run-time compiler: the few functions that are needed, resolved once and called directly.
//!
//! The bindings are our own because the library may lie where only [`probe`] looks, and because nothing
//! here may panic when a function is missing.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use crate::arch::Arch;
use crate::error::{Error, Result};
use crate::probe::{self, Library};
use crate::source::{HEADERS, Source};

type Program = *mut c_void;
type Status = c_int;

/// The compiler, ready to use.
#[derive(Debug)]
pub struct Nvrtc {
    version: (u32, u32),
    path: std::path::PathBuf,
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy: unsafe extern "C" fn(*mut Program) -> Status,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status,
    cubin_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> Status,
    log: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
}

/// Compilation errors are reported through the log; every other status is an error of the call.
const COMPILATION: Status = 6;

fn symbol<F: Copy>(found: &probe::Found, symbol: &'static str) -> Result<F> {
    let probe::Found { library, handle, .. } = found;
    // SAFETY: each caller asks for the type that NVRTC's header declares for that name; the library is never unloaded.
    unsafe { handle.get::<F>(symbol.as_bytes()) }.map(|function| *function).map_err(|error| Error::Symbol {
        library: *library,
        symbol,
        message: error.to_string(),
    })
}

impl Nvrtc {
    /// Finds and loads it.
    pub fn load() -> Result<Nvrtc> {
        let found = probe::find(Library::Nvrtc)?;
        let version_of: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status = symbol(&found, "nvrtcVersion")?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the call writes two integers.
        let status = unsafe { version_of(&raw mut major, &raw mut minor) };
        let nvrtc = Nvrtc {
            version: (major as u32, minor as u32),
            create: symbol(&found, "nvrtcCreateProgram")?,
            destroy: symbol(&found, "nvrtcDestroyProgram")?,
            compile: symbol(&found, "nvrtcCompileProgram")?,
            cubin_size: symbol(&found, "nvrtcGetCUBINSize")?,
            cubin: symbol(&found, "nvrtcGetCUBIN")?,
            log_size: symbol(&found, "nvrtcGetProgramLogSize")?,
            log: symbol(&found, "nvrtcGetProgramLog")?,
            error_string: symbol(&found, "nvrtcGetErrorString")?,
            path: found.path,
        };
        nvrtc.check("nvrtcVersion", status)?;
        Ok(nvrtc)
    }

    /// Its version, as the CUDA release that it belongs to.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Where it was found.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    fn check(&self, call: &'static str, status: Status) -> Result {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any status and returns a static string.
        let message = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(Error::Nvrtc { call, message: message.to_string_lossy().into_owned() })
    }

    /// Compiles a source to machine code.
    pub fn compile(&self, source: &Source, arch: Arch, options: &[String]) -> Result<Vec<u8>> {
        // One compilation at a time: the library is safe for threads only in newer releases.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);

        let text = |text: &str| {
            CString::new(text).map_err(|_| Error::Nvrtc {
                call: "nvrtcCreateProgram",
                message: format!("{} holds a zero byte", source.name),
            })
        };
        let (code, name) = (text(source.text)?, text(source.name)?);
        let mut names = Vec::new();
        let mut bodies = Vec::new();
        for (header, body) in HEADERS {
            names.push(text(header)?);
            bodies.push(text(body)?);
        }
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let mut program = ptr::null_mut();
        // SAFETY: all strings outlive the call and end in zero; both arrays have the length that is passed.
        let status = unsafe {
            (self.create)(
                &raw mut program,
                code.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                pointers(&bodies).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        self.check("nvrtcCreateProgram", status)?;
        let mut program = Owned { nvrtc: self, program };
        program.compile(source, arch, options)
    }
}

/// A program that is destroyed in the end.
struct Owned<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the program was created and is destroyed once. There is nothing to do about a failure.
        unsafe { (self.nvrtc.destroy)(&raw mut self.program) };
    }
}

impl Owned<'_> {
    fn compile(&mut self, source: &Source, arch: Arch, options: &[String]) -> Result<Vec<u8>> {
        let strings: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()))
            .collect::<core::result::Result<_, _>>()
            .map_err(|_| Error::Nvrtc { call: "nvrtcCompileProgram", message: "an option holds a zero byte".into() })?;
        let pointers: Vec<*const c_char> = strings.iter().map(|string| string.as_ptr()).collect();
        // SAFETY: the program is live, the array has the length that is passed, its strings outlive the call.
        let status = unsafe { (self.nvrtc.compile)(self.program, pointers.len() as c_int, pointers.as_ptr()) };
        if status == COMPILATION {
            let log = self.read("nvrtcGetProgramLog", self.nvrtc.log_size, self.nvrtc.log)?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim_end().to_owned();
            return Err(Error::Compile { source_name: source.name, arch, log });
        }
        self.nvrtc.check("nvrtcCompileProgram", status)?;
        self.read("nvrtcGetCUBIN", self.nvrtc.cubin_size, self.nvrtc.cubin)
    }

    fn read(
        &self,
        call: &'static str,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        read: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the program is live; the call writes one size.
        self.nvrtc.check(call, unsafe { size(self.program, &raw mut bytes) })?;
        let mut buffer = vec![0u8; bytes];
        // SAFETY: the buffer has the size that the library asked for.
        self.nvrtc.check(call, unsafe { read(self.program, buffer.as_mut_ptr().cast()) })?;
        Ok(buffer)
    }
}
