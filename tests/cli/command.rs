//! The command as a test runs it, and a folder for its files.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qeffect"));
    command.args(args).current_dir(env!("CARGO_MANIFEST_DIR")).env_remove("NO_COLOR").env("COLUMNS", "100");
    command
}

pub fn run(args: &[&str]) -> Output {
    command(args).output().expect("the command starts")
}

/// Standard output and exit code.
pub fn out(args: &[&str]) -> (String, i32) {
    let output = run(args);
    (String::from_utf8(output.stdout).expect("UTF-8"), output.status.code().expect("an exit code"))
}

/// Standard error of a command that fails with that code.
pub fn fails(args: &[&str], code: i32) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).expect("UTF-8")
}

pub fn json(args: &[&str]) -> (Value, i32) {
    let (text, code) = out(args);
    (serde_json::from_str(&text).unwrap_or_else(|e| panic!("{args:?}: {e}\n{text}")), code)
}

pub fn with_input(args: &[&str], input: &str) -> (String, i32) {
    let mut child = command(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the command starts");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("written");
    let output = child.wait_with_output().expect("it ends");
    (String::from_utf8(output.stdout).expect("UTF-8"), output.status.code().expect("an exit code"))
}

pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("qeffect-cli-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }

    pub fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// The beginning of the text that the examples train on, as a file.
    pub fn play(&self) -> String {
        let text = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/shakespeare.txt");
        let text = std::fs::read(text).expect("the text");
        let path = self.path("play.txt");
        std::fs::write(&path, &text[..60_000]).expect("written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}
