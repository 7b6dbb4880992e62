//! Byte data: a text file, its held-out tail, and windows drawn by name.
//!
//! A window of a step belongs to (seed, step, microbatch, sequence), so the data of a step is the same for every
//! schedule, number of ranks, and after a restart.

use std::path::{Path, PathBuf};

use crate::rng;

/// One in this many bytes is held out, at the end.
pub const HELD_OUT: usize = 10;

/// Text that cannot be trained on.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// It cannot be read.
    #[error("cannot read `{}`: {cause}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// It has too few bytes.
    #[error(
        "`{}` has {found} bytes, at least {needed} are needed: windows of {seq} bytes, the last tenth is held out",
        path.display()
    )]
    TooShort {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        found: usize,
        /// Bytes that are needed.
        needed: usize,
        /// Bytes per window.
        seq: usize,
    },
}

/// A microbatch: windows of tokens, each with its successor.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Windows {
    /// Sequence after sequence.
    pub tokens: Vec<u32>,
    /// The token after each.
    pub targets: Vec<u32>,
}

impl Windows {
    /// Rows in the order of their tokens, those of one token ascending: how gradients of embeddings are added.
    pub(crate) fn rows_by_token(&self) -> Vec<u32> {
        let mut keys: Vec<u64> =
            self.tokens.iter().zip(0u64..).map(|(token, row)| u64::from(*token) << 32 | row).collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| key as u32).collect()
    }

    fn push(&mut self, window: &[u8]) {
        self.tokens.extend(window[..window.len() - 1].iter().map(|byte| u32::from(*byte)));
        self.targets.extend(window[1..].iter().map(|byte| u32::from(*byte)));
    }
}

/// A text of bytes.
#[derive(Clone, Debug)]
pub struct ByteData {
    text: Vec<u8>,
    split: usize,
    seq: usize,
}

impl ByteData {
    /// Reads a file for windows of `seq` bytes.
    pub fn open(path: &Path, seq: usize) -> Result<ByteData, DataError> {
        let text = std::fs::read(path).map_err(|cause| DataError::Unreadable { path: path.into(), cause })?;
        Self::new(text, path, seq)
    }

    /// From memory; `path` names it in messages.
    pub fn new(text: Vec<u8>, path: &Path, seq: usize) -> Result<ByteData, DataError> {
        let held_out = text.len() / HELD_OUT;
        let needed = (seq + 1) * HELD_OUT; // then the tail holds a whole window, and the head more
        if seq == 0 || text.len() < needed {
            return Err(DataError::TooShort { path: path.into(), found: text.len(), needed, seq });
        }
        let split = text.len() - held_out;
        Ok(ByteData { text, split, seq })
    }

    /// What is trained on.
    pub fn train(&self) -> &[u8] {
        &self.text[..self.split]
    }

    /// What is not.
    pub fn held_out(&self) -> &[u8] {
        &self.text[self.split..]
    }

    /// Bytes per window.
    pub const fn seq(&self) -> usize {
        self.seq
    }

    /// The windows of a microbatch, drawn from the training part.
    pub fn microbatch(&self, seed: u64, step: u64, microbatch: u32, sequences: usize) -> Windows {
        let train = self.train();
        let starts = (train.len() - self.seq) as u64;
        let mut windows = Windows::default();
        for sequence in 0..sequences {
            let word = rng::draw(&[seed, rng::name("data"), step, u64::from(microbatch), sequence as u64]);
            windows.push(&train[rng::below(word, starts) as usize..][..self.seq + 1]);
        }
        windows
    }

    /// Number of whole windows of the held-out part; neighbours share one byte, so every byte but the first of the part
    /// is predicted once.
    pub fn held_out_windows(&self) -> usize {
        (self.held_out().len() - 1) / self.seq
    }

    /// The held-out windows `first..first + sequences`. Past the last one, windows of the beginning stand in: the
    /// second value says how many are real.
    pub fn held_out_microbatch(&self, first: usize, sequences: usize) -> (Windows, usize) {
        let total = self.held_out_windows();
        let mut windows = Windows::default();
        for index in first..first + sequences {
            windows.push(&self.held_out()[index % total * self.seq..][..self.seq + 1]);
        }
        (windows, total.saturating_sub(first).min(sequences))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(len: usize, seq: usize) -> Result<ByteData, DataError> {
        ByteData::new((0..len).map(|i| (i % 251) as u8).collect(), Path::new("text"), seq)
    }

    #[test]
    fn the_tail_is_never_trained_on() {
        let data = data(1000, 8).unwrap();
        assert_eq!((data.train().len(), data.held_out().len()), (900, 100));
        let mut seen = [false; 1000];
        for step in 0..2000 {
            let windows = data.microbatch(1, step, 0, 4);
            assert_eq!((windows.tokens.len(), windows.targets.len()), (32, 32));
            for (tokens, targets) in windows.tokens.chunks(8).zip(windows.targets.chunks(8)) {
                assert_eq!(tokens[1..], targets[..7]);
                let bytes: Vec<u8> = tokens.iter().map(|t| *t as u8).chain([targets[7] as u8]).collect();
                let start = (0..992).filter(|s| data.text[*s..s + 9] == bytes[..]).collect::<Vec<_>>();
                assert!(start.iter().any(|s| s + 9 <= 900));
                seen[start[0]] = true;
            }
        }
        assert!(seen[..243].iter().all(|seen| *seen), "every window is drawn");
    }

    #[test]
    fn windows_are_a_function_of_their_name() {
        let data = data(5000, 16).unwrap();
        let window = |seed, step, microbatch| data.microbatch(seed, step, microbatch, 2);
        assert_eq!(window(1, 2, 3), window(1, 2, 3));
        for other in [window(2, 2, 3), window(1, 3, 3), window(1, 2, 4)] {
            assert_ne!(window(1, 2, 3), other);
        }
        // The first sequences do not depend on how many follow.
        assert_eq!(data.microbatch(1, 2, 3, 4).tokens[..32], window(1, 2, 3).tokens[..]);
    }

    #[test]
    fn held_out_windows_cover_the_tail_once() {
        let data = data(1000, 8).unwrap();
        assert_eq!(data.held_out_windows(), 12);
        let mut targets = Vec::new();
        let mut first = 0;
        while first < data.held_out_windows() {
            let (windows, real) = data.held_out_microbatch(first, 5);
            assert_eq!(windows.tokens.len(), 40);
            targets.extend_from_slice(&windows.targets[..real * 8]);
            first += 5;
        }
        let want: Vec<u32> = data.held_out()[1..97].iter().map(|byte| u32::from(*byte)).collect();
        assert_eq!(targets, want);
    }

    #[test]
    fn unusable_text_is_refused() {
        assert_eq!(
            data(89, 8).unwrap_err().to_string(),
            "`text` has 89 bytes, at least 90 are needed: windows of 8 bytes, the last tenth is held out"
        );
        let (windows, real) = data(90, 8).unwrap().held_out_microbatch(0, 1);
        assert_eq!((windows.tokens.len(), real), (8, 1));
        assert!(data(0, 8).is_err() && data(100, 0).is_err());
        let missing = ByteData::open(Path::new("no/such/file"), 8).unwrap_err().to_string();
        assert!(missing.starts_with("cannot read `no/such/file`: "), "{missing}");
    }
}
