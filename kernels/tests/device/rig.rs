//! A GPU with loaded kernels, and the numbers that tests are fed with.

use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, CudaStream};
use half::bf16;
use qeffect_kernels::cache::Cache;
use qeffect_kernels::compile::Compiler;
use qeffect_kernels::memory::Element;
use qeffect_kernels::{Buffer, Kernels, module, probe};

pub struct Rig {
    pub context: Arc<CudaContext>,
    pub stream: Arc<CudaStream>,
    pub kernels: Kernels,
}

/// The GPU, or none with a line that says so.
pub fn rig() -> Option<&'static Rig> {
    static RIG: OnceLock<Option<Rig>> = OnceLock::new();
    let rig = RIG.get_or_init(|| match probe::gpus() {
        Ok(gpus) if gpus.iter().any(|gpu| gpu.arch().is_some()) => {
            let context = module::context(0).expect("the GPU opens");
            let stream = context.new_stream().expect("a stream");
            let kernels = Kernels::load(&context, &Compiler::new(Cache::standard())).expect("the kernels load");
            Some(Rig { context, stream, kernels })
        }
        _ => None,
    });
    if rig.is_none() {
        println!("skipped: no GPU");
    }
    rig.as_ref()
}

impl Rig {
    pub fn upload<T: Element>(&self, elements: &[T]) -> Buffer<T> {
        Buffer::from_host(&self.context, elements).unwrap()
    }

    /// Memory of which every byte is 0xFF, so that what is not written shows.
    pub fn poisoned<T: Element>(&self, len: usize) -> Buffer<T> {
        Buffer::poisoned(&self.context, len).unwrap()
    }
}

/// Numbers between -1 and 1, different for every seed.
pub fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            ((state >> 40) as f32) / f32::from(1u16 << 12) / f32::from(1u16 << 11) - 1.0
        })
        .collect()
}

/// Such numbers of many magnitudes, as bf16.
pub fn values(seed: u64, len: usize) -> Vec<bf16> {
    let (x, spread) = (numbers(seed, len), numbers(seed + 1000, len));
    x.iter().zip(spread).map(|(x, spread)| bf16::from_f32(x * (spread * 6.0).exp2())).collect()
}

pub fn floats(x: &[bf16]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

pub fn rounded(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub fn bf16_bits(x: &[bf16]) -> Vec<u16> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Asserts ‖got - want‖ ≤ bound · ‖want‖ over the whole, and that nothing is NaN.
pub fn close(what: &str, got: impl IntoIterator<Item = f32>, want: &[f64], bound: f64) {
    let got: Vec<f64> = got.into_iter().map(f64::from).collect();
    assert_eq!(got.len(), want.len(), "{what}");
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(want).map(|(got, want)| got - want));
    let scale = norm(&mut want.iter().copied());
    assert!(error <= bound * scale.max(f64::MIN_POSITIVE), "{what}: error {:e} of {scale:e}", error);
}

/// Rounding to bf16, which has 8 significant bits, is within 2^-8.
pub const BF16: f64 = 1.0 / 256.0;

/// Asserts that every element is within what it is allowed: |got - want| ≤ allowed, and that nothing is NaN. A norm over the
/// whole does not see wrong elements among small ones.
pub fn within(what: &str, got: impl IntoIterator<Item = f32>, want: &[f64], allowed: impl Fn(usize) -> f64) {
    let got: Vec<f64> = got.into_iter().map(f64::from).collect();
    assert_eq!(got.len(), want.len(), "{what}");
    let fits = |i: usize| (got[i] - want[i]).abs() <= allowed(i);
    let beyond: Vec<usize> = (0..want.len()).filter(|i| !fits(*i)).collect();
    if let Some(&i) = beyond.first() {
        let (count, all, found, wanted, most) = (beyond.len(), want.len(), got[i], want[i], allowed(i));
        panic!("{what}: {count} of {all} elements are off; element {i} is {found:e}, not {wanted:e} ± {most:e}");
    }
}

/// Shapes with and without whole tiles, groups and words.
pub const SHAPES: [(usize, usize); 9] =
    [(1, 1), (3, 5), (16, 8), (64, 64), (17, 23), (130, 272), (256, 520), (33, 64), (96, 1001)];
