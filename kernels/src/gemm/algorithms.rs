//! The table of algorithms: part of what decides the bits of a run.
//!
//! Its text is one line per product, sorted, so that two tables are equal where their digests are.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::product::Product;
use crate::error::{Error, Result};

/// An algorithm of the library, as it wants it back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Algorithm {
    pub(super) data: [u64; 8],
    pub(super) workspace: usize,
}

impl Algorithm {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let words = self.data.into_iter().chain([self.workspace as u64]);
        words.flat_map(u64::to_le_bytes).collect()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Algorithm> {
        let words: Vec<u64> = bytes
            .chunks(8)
            .map(|word| word.try_into().map(u64::from_le_bytes))
            .collect::<std::result::Result<_, _>>()
            .ok()?;
        let (data, workspace) = words.split_first_chunk::<8>()?;
        match workspace {
            [workspace] => Some(Algorithm { data: *data, workspace: usize::try_from(*workspace).ok()? }),
            _ => None,
        }
    }
}

/// The algorithm of each product, for one kind of GPU and one version of the library.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Algorithms {
    device: String,
    entries: BTreeMap<String, Algorithm>,
}

impl Algorithms {
    pub(super) fn new(device: &str) -> Algorithms {
        Algorithms { device: device.to_owned(), entries: BTreeMap::new() }
    }

    /// What it is for.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Number of products.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn get(&self, product: &Product) -> Option<Algorithm> {
        self.entries.get(&product.to_string()).copied()
    }

    pub(super) fn insert(&mut self, product: &Product, algorithm: Algorithm) {
        self.entries.insert(product.to_string(), algorithm);
    }

    /// As text, to be sent to other processes and stored.
    pub fn to_text(&self) -> String {
        let hex =
            |algorithm: &Algorithm| algorithm.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let mut text = format!("{}\n", self.device);
        for (product, algorithm) in &self.entries {
            text += &format!("{} {product}\n", hex(algorithm));
        }
        text
    }

    /// From text.
    pub fn from_text(text: &str) -> Result<Algorithms> {
        let wrong = |line: usize| Error::Cublas {
            call: "reading a table of algorithms",
            status: format!("line {} is no entry", line + 1),
        };
        let mut lines = text.lines().enumerate();
        let device = lines.next().ok_or_else(|| wrong(0))?.1.to_owned();
        let mut entries = BTreeMap::new();
        for (number, line) in lines {
            let (hex, product) = line.split_once(' ').ok_or_else(|| wrong(number))?;
            let digit = |pair: &[u8]| {
                let pair = core::str::from_utf8(pair).ok()?;
                u8::from_str_radix(pair, 16).ok()
            };
            let bytes: Vec<u8> =
                hex.as_bytes().chunks(2).map(digit).collect::<Option<_>>().ok_or_else(|| wrong(number))?;
            entries.insert(product.to_owned(), Algorithm::from_bytes(&bytes).ok_or_else(|| wrong(number))?);
        }
        Ok(Algorithms { device, entries })
    }

    /// A digest of all of it: 64 hexadecimal digits.
    pub fn digest(&self) -> String {
        Sha256::digest(self.to_text()).iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::product::Type;

    #[test]
    fn text_round_trips_and_digests_differ_where_tables_do() {
        let mut table = Algorithms::new("a GPU, 132 multiprocessors");
        let first = Product::fp8(1, 2, 16, Type::E4M3, Type::E4M3);
        let algorithm = Algorithm { data: [1, 2, 3, 4, 5, 6, u64::MAX, 8], workspace: 77 };
        table.insert(&Product { bias: true, ..first }, Algorithm { workspace: 0, ..algorithm });
        let one = table.digest();
        table.insert(&first, algorithm);
        assert_ne!(table.digest(), one);
        let read = Algorithms::from_text(&table.to_text()).unwrap();
        assert_eq!(read, table);
        assert_eq!(read.digest(), table.digest());
        assert_eq!(read.get(&first), Some(algorithm));
        assert_eq!(read.get(&Product { fast: true, ..first }), None);
    }

    #[test]
    fn damaged_text_is_refused() {
        for text in ["", "device\nnonsense", "device\n0102 1 × 1", "device\nzz 1 × 1"] {
            assert!(Algorithms::from_text(text).is_err(), "{text:?}");
        }
    }
}
