//! Ranges of host time with names, for a profiler that listens.
//!
//! A profiler names a library in `NVTX_INJECTION64_PATH`. The library is loaded at the first range and handed the tables
//! through which it puts its functions in place, as version 3 of NVIDIA's tools extension (NVTX) has it: its headers do the
//! same in C programs, so nothing else needs to be installed. Where no profiler listens, or its library cannot be used, a
//! range costs one look at a flag, and its name is never made.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::fmt::Display;
use core::marker::PhantomData;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};
use std::ffi::CString;
use std::sync::OnceLock;

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;
type GetExportTable = unsafe extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;

/// A range of this thread. It ends when this is dropped; ranges of a thread nest.
#[must_use = "a range that is dropped is over"]
#[derive(Debug)]
pub struct Range {
    pop: Option<Pop>,
    /// It ends on the thread on which it began.
    thread: PhantomData<*const ()>,
}

impl Range {
    /// None.
    pub const fn none() -> Range {
        Range { pop: None, thread: PhantomData }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        if let Some(pop) = self.pop {
            // SAFETY: the profiler's function of that name; this thread has pushed a range that is still open.
            unsafe { pop() };
        }
    }
}

/// Begins a range of this thread, if a profiler listens.
pub fn range(name: impl Display) -> Range {
    static TOOL: OnceLock<Option<Tool>> = OnceLock::new();
    match TOOL.get_or_init(Tool::from_environment) {
        None => Range::none(),
        Some(tool) => tool.begin(&name),
    }
}

/// What a profiler has put in place.
#[derive(Clone, Copy, Debug)]
struct Tool {
    push: Push,
    pop: Pop,
}

impl Tool {
    fn from_environment() -> Option<Tool> {
        let path = std::env::var_os("NVTX_INJECTION64_PATH").filter(|path| !path.is_empty())?;
        // SAFETY: a profiler's library, which whoever started this process wants loaded.
        let library = unsafe { libloading::Library::new(path) }.ok()?;
        // SAFETY: the type that NVTX gives to the function of this name.
        let initialize = unsafe { library.get::<Initialize>(b"InitializeInjectionNvtx2\0") }.ok()?;
        let tool = Tool::attach(*initialize);
        core::mem::forget(library); // its functions are called until the process ends
        tool
    }

    /// Has a profiler put its functions in place.
    fn attach(initialize: Initialize) -> Option<Tool> {
        // SAFETY: the profiler is given what NVTX promises it: a function that finds tables, all of which live for ever.
        if unsafe { initialize(export_table) } == 0 {
            return None;
        }
        let [push, pop] = [RANGE_PUSH, RANGE_POP].map(|id| tables().core(id));
        if push.is_null() || pop.is_null() {
            return None; // it does not care for ranges
        }
        // SAFETY: who writes to these places of the table puts functions of these types there.
        Some(unsafe {
            Tool {
                push: core::mem::transmute::<*mut c_void, Push>(push),
                pop: core::mem::transmute::<*mut c_void, Pop>(pop),
            }
        })
    }

    fn begin(self, name: &dyn Display) -> Range {
        let Ok(name) = CString::new(name.to_string()) else { return Range::none() };
        // SAFETY: the profiler's function of that name, which copies the text.
        unsafe { (self.push)(name.as_ptr()) };
        Range { pop: Some(self.pop), thread: PhantomData }
    }
}

/// Places of the core table.
const RANGE_PUSH: usize = 9;
const RANGE_POP: usize = 11;

/// Tables by the number of their module, from 1 on, and how many places each has. Only the first is read here; a profiler
/// may fill the others, for functions that nobody calls.
const MODULES: [usize; 6] = [16, 9, 15, 7, 16, 7];
const CORE: usize = 0;

/// Where a profiler puts the address of a function.
type Place = AtomicPtr<c_void>;

/// Pointers to places; the first one is null, and so is the one behind the last.
struct Table(Box<[*const Place]>);

/// What a profiler asks for.
struct Tables {
    modules: Vec<Table>,
    callbacks: Callbacks,
    version: Version,
}

// SAFETY: pointers in tables lead to places that live for ever and are atomic; nothing else is changed.
unsafe impl Send for Tables {}
// SAFETY: as above.
unsafe impl Sync for Tables {}

/// NVTX's table of tables.
#[repr(C)]
struct Callbacks {
    size: usize,
    module: unsafe extern "C" fn(c_int, *mut *const *const Place, *mut c_uint) -> c_int,
}

/// What NVTX says of itself.
#[repr(C)]
struct Version {
    size: usize,
    version: u32,
    reserved: u32,
    set_version_of_tool: unsafe extern "C" fn(u32),
}

impl Tables {
    /// The function that was put in a place of the core table.
    fn core(&self, id: usize) -> *mut c_void {
        let place = self.modules[CORE].0[id];
        // SAFETY: a place of a table, neither the first nor the one behind the last.
        unsafe { &*place }.load(Ordering::Acquire)
    }
}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let table = |places: usize| {
            let place = |_| -> *const Place { Box::leak(Box::new(AtomicPtr::new(ptr::null_mut()))) };
            Table([ptr::null()].into_iter().chain((1..places).map(place)).chain([ptr::null()]).collect())
        };
        Tables {
            modules: MODULES.into_iter().map(table).collect(),
            callbacks: Callbacks { size: size_of::<Callbacks>(), module: module_table },
            version: Version { size: size_of::<Version>(), version: 3, reserved: 0, set_version_of_tool },
        }
    })
}

unsafe extern "C" fn export_table(id: u32) -> *const c_void {
    match id {
        1 => ptr::from_ref(&tables().callbacks).cast(),
        3 => ptr::from_ref(&tables().version).cast(),
        _ => ptr::null(),
    }
}

unsafe extern "C" fn module_table(module: c_int, table: *mut *const *const Place, places: *mut c_uint) -> c_int {
    let found = usize::try_from(module).ok().and_then(|module| module.checked_sub(1));
    let Some((Table(found), size)) = found.and_then(|at| tables().modules.get(at).zip(MODULES.get(at))) else {
        return 0;
    };
    // SAFETY: either pointer is null or leads to where the caller wants the answer.
    unsafe {
        if let Some(table) = table.as_mut() {
            *table = found.as_ptr();
        }
        if let Some(places) = places.as_mut() {
            *places = *size as c_uint;
        }
    }
    1
}

unsafe extern "C" fn set_version_of_tool(_: u32) {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::ffi::CStr;

    thread_local! {
        static HEARD: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    unsafe extern "C" fn push(name: *const c_char) -> c_int {
        // SAFETY: a string that ends.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        HEARD.with_borrow_mut(|heard| heard.push(name));
        0
    }

    unsafe extern "C" fn pop() -> c_int {
        HEARD.with_borrow_mut(|heard| heard.push("-".into()));
        0
    }

    unsafe extern "C" fn deaf(_: GetExportTable) -> c_int {
        0
    }

    /// What a profiler does, after NVTX's headers.
    unsafe extern "C" fn initialize(export: GetExportTable) -> c_int {
        // SAFETY: tables are as NVTX says.
        unsafe {
            assert!(export(2).is_null(), "a table that does not exist");
            let version = &*export(3).cast::<Version>();
            assert_eq!((version.size, version.version), (24, 3));
            let callbacks = &*export(1).cast::<Callbacks>();
            assert_eq!(callbacks.size, 16);
            let (mut table, mut size) = (ptr::null(), 0);
            assert_eq!((callbacks.module)(0, &raw mut table, &raw mut size), 0);
            assert_eq!((callbacks.module)(7, &raw mut table, &raw mut size), 0);
            for (module, places) in (1..).zip(MODULES) {
                assert_eq!((callbacks.module)(module, &raw mut table, &raw mut size), 1);
                assert_eq!(size as usize, places);
                assert!((*table).is_null() && (*table.add(places)).is_null());
                assert!((1..places).all(|id| !(*table.add(id)).is_null()));
            }
            assert_eq!((callbacks.module)(1, &raw mut table, ptr::null_mut()), 1);
            (**table.add(9)).store(push as *mut c_void, Ordering::Release);
            (**table.add(11)).store(pop as *mut c_void, Ordering::Release);
        }
        1
    }

    #[test]
    fn a_profiler_hears_ranges_as_they_nest() {
        assert!(Tool::attach(deaf).is_none(), "a profiler that refuses");
        let tool = Tool::attach(initialize).unwrap();
        {
            let _outer = tool.begin(&"step 3");
            drop(tool.begin(&format_args!("F({}, {})", 1, 2)));
            drop(tool.begin(&"no \0 text"));
        }
        assert_eq!(HEARD.take(), ["step 3", "F(1, 2)", "-", "-"]);
    }

    #[test]
    fn where_nobody_listens_names_are_not_made() {
        struct Never;
        impl Display for Never {
            fn fmt(&self, _: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                panic!("a name was made")
            }
        }
        if std::env::var_os("NVTX_INJECTION64_PATH").is_none() {
            drop(range(Never));
        }
    }
}
