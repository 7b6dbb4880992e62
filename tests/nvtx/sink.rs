//! What stands in for a profiler's library: it writes down the ranges of a process, one line per begin or end, with the
//! thread. A test builds it, and knows nothing of the crate that is tested but NVTX's tables.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::io::Write;
use std::sync::Mutex;

static FILE: Mutex<Option<File>> = Mutex::new(None);

fn line(text: &str) {
    let thread = std::thread::current();
    let (id, name) = (thread.id(), thread.name().unwrap_or("?").to_owned());
    let mut file = FILE.lock().unwrap();
    let path = || std::env::var_os("QEFFECT_TEST_RANGES").expect("where ranges are written");
    let file = file.get_or_insert_with(|| File::create(path()).expect("a file"));
    writeln!(file, "{id:?} {name}\t{text}").expect("written");
}

unsafe extern "C" fn push(name: *const c_char) -> c_int {
    line(&unsafe { CStr::from_ptr(name) }.to_string_lossy());
    0
}

unsafe extern "C" fn pop() -> c_int {
    line("-");
    0
}

#[repr(C)]
struct Callbacks {
    size: usize,
    module: unsafe extern "C" fn(c_int, *mut *const *mut *const c_void, *mut c_uint) -> c_int,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn InitializeInjectionNvtx2(tables: unsafe extern "C" fn(u32) -> *const c_void) -> c_int {
    let (mut table, mut size) = (std::ptr::null(), 0);
    unsafe {
        let callbacks = &*tables(1).cast::<Callbacks>();
        if (callbacks.module)(1, &mut table, &mut size) == 0 || size < 16 {
            return 0;
        }
        **table.add(9) = push as *const c_void; // nvtxRangePushA
        **table.add(11) = pop as *const c_void; // nvtxRangePop
    }
    1
}
