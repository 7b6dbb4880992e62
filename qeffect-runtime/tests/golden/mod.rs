//! Reads golden files and compares with them.
//!
//! The files hold what PyTorch computes in float32 (`scripts/goldens.py`, `scripts/README.md`).

#![allow(dead_code, reason = "every test binary uses its own part")]

use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors};

/// Largest error, relative to the largest element of a tensor, of any op and of any gradient of the model in `f32`.
pub const TOLERANCE: f64 = 1e-4;

/// One golden file.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    /// Reads `tests/golden/{name}.safetensors`.
    pub fn open(name: &str) -> Golden {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(format!("{name}.safetensors"));
        Golden { bytes: std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())) }
    }

    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.bytes).expect("a well-formed file")
    }

    /// Names with this prefix, which is cut off, in ascending order.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        let mut names: Vec<String> =
            self.file().names().iter().filter_map(|name| name.strip_prefix(prefix)).map(str::to_owned).collect();
        names.sort();
        names
    }

    /// Shape of a tensor.
    pub fn shape(&self, name: &str) -> Vec<usize> {
        self.file().tensor(name).unwrap_or_else(|_| panic!("no tensor `{name}`")).shape().to_vec()
    }

    fn words<T>(&self, name: &str, dtype: Dtype, from: fn([u8; 4]) -> T) -> Vec<T> {
        let file = self.file();
        let tensor = file.tensor(name).unwrap_or_else(|_| panic!("no tensor `{name}`"));
        assert_eq!(tensor.dtype(), dtype, "`{name}`");
        tensor.data().chunks_exact(4).map(|word| from(word.try_into().expect("4 bytes"))).collect()
    }

    /// Elements of a float tensor.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        self.words(name, Dtype::F32, f32::from_le_bytes)
    }

    /// Elements of a tensor of token ids.
    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.words(name, Dtype::I32, |word| i32::from_le_bytes(word).try_into().expect("no negative id"))
    }

    /// Panics unless `got` is the golden tensor `name` up to `TOLERANCE`; returns the error.
    #[track_caller]
    pub fn compare(&self, name: &str, got: &[f32]) -> f64 {
        let error = relative_error(got, &self.floats(name));
        assert!(error <= TOLERANCE, "`{name}` is off by {error:e} of its largest element");
        error
    }
}

/// Largest difference as a fraction of the largest element that is wanted; NaN anywhere gives NaN.
#[track_caller]
pub fn relative_error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len(), "number of elements");
    let largest = want.iter().fold(0f64, |largest, x| largest.max(f64::from(x.abs())));
    assert!(largest > 0.0, "a golden tensor of zeros proves nothing");
    let difference = got.iter().zip(want).map(|(got, want)| (f64::from(*got) - f64::from(*want)).abs());
    // `f64::max` would drop a NaN.
    difference.fold(0f64, |worst, x| if x.is_nan() || x > worst { x } else { worst }) / largest
}
