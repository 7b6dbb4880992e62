//! Compiled kernels on disk.
//!
//! An entry is one file, named by its key, with a checksum: what is damaged, cut short or of another key is treated as
//! absent. A file appears whole or not at all, so processes that start together may share the folder.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"qeffect\x01";
const DIGEST: usize = 32;

/// What an entry is found by: a digest of everything that its content depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key([u8; DIGEST]);

impl Key {
    /// The key of named parts. Lengths are part of it, so that no two lists of parts are confused.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Key {
        let mut digest = Sha256::new();
        for part in parts {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        Key(digest.finalize().into())
    }

    /// As text: 64 hexadecimal digits.
    pub fn hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A folder of entries.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The folder `QEFFECT_CACHE`, else `qeffect` in the user's folder for caches; none where neither is known.
    pub fn standard() -> Option<Cache> {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = variable("QEFFECT_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("qeffect")))
            .or_else(|| variable("HOME").map(|folder| folder.join(".cache/qeffect")))?;
        Some(Cache { folder })
    }

    /// A given folder; it is made when something is written.
    pub fn at(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: folder.into() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn file(&self, key: &Key) -> PathBuf {
        self.folder.join(key.hex())
    }

    /// The content of an entry; none where it is absent, damaged or unreadable.
    pub fn get(&self, key: &Key) -> Option<Vec<u8>> {
        let bytes = fs::read(self.file(key)).ok()?;
        let rest = bytes.strip_prefix(MAGIC)?.strip_prefix(&key.0)?;
        let (checksum, content) = rest.split_at_checked(DIGEST)?;
        (Sha256::digest(content)[..] == *checksum).then(|| content.to_vec())
    }

    /// Writes an entry, through a file of another name that is renamed in the end.
    pub fn put(&self, key: &Key, content: &[u8]) -> Result {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let fault = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Cache { path, source }
        };
        fs::create_dir_all(&self.folder).map_err(fault(&self.folder))?;
        let unique = format!(".{}-{}-{}", key.hex(), std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let temporary = self.folder.join(unique);
        let write = || -> io::Result<()> {
            let mut file = fs::File::create_new(&temporary)?;
            file.write_all(MAGIC)?;
            file.write_all(&key.0)?;
            file.write_all(&Sha256::digest(content))?;
            file.write_all(content)?;
            file.sync_all()?;
            fs::rename(&temporary, self.file(key))
        };
        write().map_err(|source| {
            let _ = fs::remove_file(&temporary);
            Error::Cache { path: self.file(key), source }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        Key::of([name.as_bytes()])
    }

    #[test]
    fn what_was_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("made/when/needed"));
        assert_eq!(cache.get(&key("a")), None);
        cache.put(&key("a"), b"one").unwrap();
        cache.put(&key("b"), b"").unwrap();
        cache.put(&key("a"), b"two").unwrap();
        assert_eq!(cache.get(&key("a")).unwrap(), b"two");
        assert_eq!(cache.get(&key("b")).unwrap(), b"");
        let left: Vec<_> = fs::read_dir(cache.folder()).unwrap().collect();
        assert_eq!(left.len(), 2, "no temporary file stays");
    }

    #[test]
    fn keys_differ_where_parts_do() {
        let keys = [vec!["ab", "c"], vec!["a", "bc"], vec!["abc"], vec!["abc", ""], vec![]];
        for (i, a) in keys.iter().enumerate() {
            for (j, b) in keys.iter().enumerate() {
                let of = |parts: &[&str]| Key::of(parts.iter().map(|part| part.as_bytes()));
                assert_eq!(of(a) == of(b), i == j);
            }
        }
    }

    #[test]
    fn damage_is_absence() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        cache.put(&key("a"), b"content").unwrap();
        let file = cache.file(&key("a"));
        let whole = fs::read(&file).unwrap();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            fs::write(&file, bytes).unwrap();
            assert_eq!(cache.get(&key("a")), None, "byte {at}");
            fs::write(&file, &whole[..at]).unwrap();
            assert_eq!(cache.get(&key("a")), None, "cut at {at}");
        }
        fs::rename(&file, cache.file(&key("b"))).unwrap();
        fs::write(cache.file(&key("b")), &whole).unwrap();
        assert_eq!(cache.get(&key("b")), None, "an entry of another key");
        cache.put(&key("b"), b"content").unwrap();
        assert!(cache.get(&key("b")).is_some(), "a damaged entry is replaced");
    }

    #[test]
    fn a_folder_that_cannot_be_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache::at(file.path().join("below a file"));
        assert!(cache.put(&key("a"), b"").is_err());
        assert_eq!(cache.get(&key("a")), None);
    }
}
