//! Every kernel compiles for every architecture, without a GPU. Without NVRTC nothing is compiled, unless
//! `QEFFECT_REQUIRE_NVRTC` is set: then that is a failure.

use qeffect_kernels::cache::Cache;
use qeffect_kernels::compile::Compiler;
use qeffect_kernels::{Arch, Error, source};

fn compiler(cache: Option<Cache>) -> Option<Compiler> {
    let compiler = Compiler::new(cache);
    match compiler.nvrtc() {
        Ok(_) => Some(compiler),
        Err(error) => {
            assert!(std::env::var_os("QEFFECT_REQUIRE_NVRTC").is_none(), "NVRTC is required: {error}");
            println!("skipped: {error}");
            None
        }
    }
}

#[test]
fn every_source_compiles_for_every_architecture() {
    let Some(compiler) = compiler(None) else { return };
    let mut faults = Vec::new();
    for source in source::ALL {
        for arch in Arch::TESTED {
            match compiler.cubin(source, arch) {
                // The names of kernels stand in the table of symbols.
                Ok(cubin) => faults.extend(source.kernels.iter().filter_map(|kernel| {
                    let name = format!("\0{kernel}\0");
                    let found = cubin.code.windows(name.len()).any(|bytes| bytes == name.as_bytes());
                    (!found).then(|| format!("{} for {arch} lacks {kernel}", source.name))
                })),
                Err(error) => faults.push(error.to_string()),
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn the_second_compilation_comes_out_of_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let Some(first) = compiler(Some(Cache::at(folder.path()))) else { return };
    let fresh = first.cubin(&source::SCALE, Arch::SM_90A).unwrap();
    let again = compiler(Some(Cache::at(folder.path()))).unwrap().cubin(&source::SCALE, Arch::SM_90A).unwrap();
    assert_eq!((fresh.cached, again.cached), (false, true));
    assert_eq!(fresh.code, again.code);
    assert!(!first.cubin(&source::SCALE, Arch::SM_89).unwrap().cached);
}

#[test]
fn a_fault_in_a_source_is_shown_with_its_line() {
    let Some(compiler) = compiler(None) else { return };
    let broken = source::Source {
        name: "broken.cu",
        text: "#include \"common.cuh\"\nint f() { return x; }\n",
        kernels: &[],
        shared: 0,
    };
    match compiler.cubin(&broken, Arch::SM_89) {
        Err(Error::Compile { source_name: "broken.cu", log, .. }) => assert!(log.contains("broken.cu(2)"), "{log}"),
        other => panic!("{other:?}"),
    }
}
