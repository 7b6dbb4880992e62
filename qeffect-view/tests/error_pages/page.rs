//! Reading and rewriting of pages.

use std::fs;
use std::path::{Path, PathBuf};

use qeffect_core::code::Code;

/// Where the pages lie.
pub fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/errors")
}

/// The pages: what the name of the file says, and the text.
pub fn pages() -> Vec<(String, PathBuf, String)> {
    let mut pages: Vec<_> = fs::read_dir(directory())
        .expect("docs/errors is there")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .map(|path| {
            let name = path.file_stem().expect("a file").to_string_lossy().into_owned();
            let text = fs::read_to_string(&path).expect("readable");
            (name, path, text)
        })
        .collect();
    pages.sort();
    assert!(pages.len() > 40, "{} pages in {}", pages.len(), directory().display());
    pages
}

/// A fenced block of a page.
#[derive(Debug)]
pub struct Block {
    /// What stands behind the fence.
    pub info: String,
    pub body: String,
    /// Bytes of the body in the page.
    pub range: std::ops::Range<usize>,
}

impl Block {
    pub fn words(&self) -> impl Iterator<Item = &str> {
        self.info.split(' ')
    }

    pub fn language(&self) -> &str {
        self.words().next().unwrap_or_default()
    }

    /// The code that this block is refused with; `None`: it is accepted.
    pub fn expectation(&self) -> Option<Code> {
        let verdict = self.words().nth(1).unwrap_or_default();
        match verdict.strip_prefix("fails=") {
            Some(code) => Some(Code::parse(code).unwrap_or_else(|| panic!("no code {code}"))),
            None => {
                assert_eq!(verdict, "ok", "{}", self.info);
                None
            }
        }
    }
}

/// The fenced blocks of a text.
pub fn blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<(String, usize)> = None;
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let fence = line.trim_end().strip_prefix("```");
        match (&mut open, fence) {
            (None, Some(info)) => open = Some((info.to_owned(), at + line.len())),
            (Some((info, start)), Some("")) => {
                let range = *start..at;
                blocks.push(Block { info: std::mem::take(info), body: text[range.clone()].to_owned(), range });
                open = None;
            }
            (Some(_), Some(info)) => panic!("a fence inside a fence: {info}"),
            _ => {}
        }
        at += line.len();
    }
    assert!(open.is_none(), "an open fence");
    blocks
}

/// Whether messages are to be written anew.
pub fn bless() -> bool {
    std::env::var_os("BLESS").is_some()
}

/// Writes a page in one go, for the tests that read at the same time.
pub fn rewrite(path: &Path, text: &str) {
    let fresh = path.with_extension("tmp");
    fs::write(&fresh, text).and_then(|()| fs::rename(fresh, path)).expect("writable");
}
