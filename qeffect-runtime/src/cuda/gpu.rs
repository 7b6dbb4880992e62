//! A GPU of this process: its context, kernels and products, opened once and shared by the devices on it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use qeffect_kernels::cache::Cache;
use qeffect_kernels::compile::Compiler;
use qeffect_kernels::gemm::{Algorithms, Products};
use qeffect_kernels::{CudaContext, Kernels, Result, module};

/// An open GPU. Ranks that share it share its table of algorithms, so a product has one algorithm in a process.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) context: Arc<CudaContext>,
    pub(super) kernels: Kernels,
    products: Mutex<Products>,
}

/// What a process has opened.
static OPEN: Mutex<Vec<(usize, Weak<Gpu>)>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner) // what it guards is whole between calls
}

impl Gpu {
    /// The GPU of that number, as `CUDA_VISIBLE_DEVICES` counts. Kernels are compiled, or found in the cache.
    pub(super) fn open(ordinal: usize) -> Result<Arc<Gpu>> {
        let mut open = locked(&OPEN);
        if let Some(gpu) = open.iter().find(|(other, _)| *other == ordinal).and_then(|(_, gpu)| gpu.upgrade()) {
            return Ok(gpu);
        }
        let context = module::context(ordinal)?;
        let kernels = Kernels::load(&context, &Compiler::new(Cache::standard()))?;
        let products = Mutex::new(Products::open(&context, Cache::standard())?);
        let gpu = Arc::new(Gpu { context, kernels, products });
        open.retain(|(other, _)| *other != ordinal);
        open.push((ordinal, Arc::downgrade(&gpu)));
        Ok(gpu)
    }

    /// Products, for one thread at a time.
    pub(super) fn products(&self) -> MutexGuard<'_, Products> {
        locked(&self.products)
    }

    /// The algorithms in use: part of what decides the bits of a run.
    pub(super) fn algorithms(&self) -> Algorithms {
        self.products().algorithms().clone()
    }
}
