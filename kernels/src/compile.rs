//! From a source to machine code: out of the cache where it is there, else through NVRTC.

use std::sync::OnceLock;

use crate::arch::Arch;
use crate::cache::{Cache, Key};
use crate::error::Result;
use crate::nvrtc::Nvrtc;
use crate::source::{HEADERS, Source};

/// Products are not contracted with sums; subnormal numbers, roots and quotients are exact. Stated although most of it is
/// the default, for the bits depend on it.
pub const OPTIONS: &[&str] =
    &["--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "-default-device"];

/// Compiles and caches.
#[derive(Debug, Default)]
pub struct Compiler {
    cache: Option<Cache>,
    nvrtc: OnceLock<Nvrtc>,
}

/// Machine code, and whether it had to be compiled.
#[derive(Clone, Debug)]
pub struct Cubin {
    /// The code.
    pub code: Vec<u8>,
    /// Whether it came out of the cache.
    pub cached: bool,
}

impl Compiler {
    /// With a cache, or without.
    pub fn new(cache: Option<Cache>) -> Compiler {
        Compiler { cache, nvrtc: OnceLock::new() }
    }

    /// NVRTC, loaded at the first call.
    pub fn nvrtc(&self) -> Result<&Nvrtc> {
        match self.nvrtc.get() {
            Some(nvrtc) => Ok(nvrtc),
            None => {
                let loaded = Nvrtc::load()?;
                Ok(self.nvrtc.get_or_init(|| loaded))
            }
        }
    }

    /// The options for an architecture.
    pub fn options(arch: Arch) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={arch}")];
        options.extend(OPTIONS.iter().map(|option| option.to_string()));
        options
    }

    /// The key of a compilation: its source and headers, options with architecture, and NVRTC's version.
    pub fn key(source: &Source, arch: Arch, nvrtc: (u32, u32)) -> Key {
        let options = Compiler::options(arch);
        let version = format!("nvrtc {}.{}", nvrtc.0, nvrtc.1);
        let mut parts: Vec<&[u8]> = vec![b"cubin", source.name.as_bytes(), source.text.as_bytes(), version.as_bytes()];
        for (name, text) in HEADERS {
            parts.extend([name.as_bytes(), text.as_bytes()]);
        }
        parts.extend(options.iter().map(|option| option.as_bytes()));
        Key::of(parts)
    }

    /// The machine code of a source. A cache that cannot be written is no error: the next start compiles again.
    pub fn cubin(&self, source: &Source, arch: Arch) -> Result<Cubin> {
        let nvrtc = self.nvrtc()?;
        let key = Compiler::key(source, arch, nvrtc.version());
        if let Some(code) = self.cache.as_ref().and_then(|cache| cache.get(&key)) {
            return Ok(Cubin { code, cached: true });
        }
        let code = nvrtc.compile(source, arch, &Compiler::options(arch))?;
        if let Some(cache) = &self.cache {
            let _ = cache.put(&key, &code);
        }
        Ok(Cubin { code, cached: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{CAST, SCALE};

    #[test]
    fn a_key_depends_on_source_architecture_and_compiler() {
        let key = Compiler::key(&CAST, Arch::SM_90A, (13, 0));
        assert_eq!(key, Compiler::key(&CAST, Arch::SM_90A, (13, 0)));
        let edited = Source { text: "", ..CAST };
        let others = [
            Compiler::key(&SCALE, Arch::SM_90A, (13, 0)),
            Compiler::key(&edited, Arch::SM_90A, (13, 0)),
            Compiler::key(&CAST, Arch::SM_89, (13, 0)),
            Compiler::key(&CAST, Arch::SM_90A, (13, 1)),
        ];
        assert!(others.iter().all(|other| *other != key));
    }
}
