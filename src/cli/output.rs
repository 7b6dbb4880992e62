//! Where output goes and how it looks: text for people, JSON for programs, colours on a terminal only.

use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::ValueEnum;
use qeffect_core::diag::{Diagnostic, Place, Report};
use qeffect_core::source::SourceMap;
use qeffect_view::report;
use serde_json::{Value, json};

/// When to use colours.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// The terminal, or what stands in for it.
pub struct Screen {
    /// Colours on standard output.
    pub color: bool,
    /// Colours on standard error.
    color_errors: bool,
    /// JSON instead of text.
    pub json: bool,
    /// Columns.
    pub width: usize,
}

impl Screen {
    /// What this process writes to.
    pub fn new(color: Color, json: bool) -> Screen {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty())
            || std::env::var_os("TERM").is_some_and(|v| v == "dumb");
        let decide = |terminal: bool| match color {
            Color::Auto => terminal && !plain,
            Color::Always => true,
            Color::Never => false,
        };
        let asked = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
        let width = asked.or_else(|| terminal_size::terminal_size().map(|(width, _)| usize::from(width.0)));
        Screen {
            color: decide(std::io::stdout().is_terminal()),
            color_errors: decide(std::io::stderr().is_terminal()),
            json,
            width: width.unwrap_or(100),
        }
    }

    /// Writes text to standard output.
    ///
    /// # Errors
    ///
    /// If it cannot be written, but for a reader that has gone (`| head`): that is no fault.
    pub fn text(&self, text: &str) -> Result<(), Failure> {
        self.bytes(text.as_bytes())
    }

    /// Writes bytes to standard output.
    ///
    /// # Errors
    ///
    /// As [`Screen::text`].
    pub fn bytes(&self, bytes: &[u8]) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        match out.write_all(bytes).and_then(|()| out.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Failure::file("standard output", &error)),
            _ => Ok(()),
        }
    }

    /// Writes a JSON value to standard output.
    ///
    /// # Errors
    ///
    /// As [`Screen::text`].
    pub fn value(&self, value: &Value) -> Result<(), Failure> {
        self.text(&format!("{value:#}\n"))
    }

    /// Writes to the file, or to standard output without one.
    ///
    /// # Errors
    ///
    /// If it cannot be written.
    pub fn to(&self, file: Option<&Path>, text: &str) -> Result<(), Failure> {
        match file.filter(|file| *file != Path::new("-")) {
            Some(file) => {
                std::fs::write(file, text).map_err(|error| Failure::file(&file.display().to_string(), &error))
            }
            None => self.text(text),
        }
    }

    /// Bold, where there are colours.
    pub fn bold(&self, text: &str) -> String {
        if self.color { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// A schedule that was refused, and the text that it came from.
pub struct Refusal {
    /// Name of the schedule or file.
    pub name: String,
    /// The faults.
    pub report: Report,
    /// The text, if there is one.
    pub map: Option<SourceMap>,
}

impl Refusal {
    /// The faults drawn in their text.
    pub fn draw(&self, color: bool) -> String {
        let nothing = SourceMap::new("", "");
        let map = self.map.as_ref().unwrap_or(&nothing);
        if color { report::styled(&self.report, map) } else { report::plain(&self.report, map) }
    }

    /// The faults for programs.
    pub fn value(&self) -> Value {
        let diagnostics: Vec<Value> = self.report.diagnostics.iter().map(|d| self.diagnostic(d)).collect();
        json!({"schedule": self.name, "ok": false, "diagnostics": diagnostics, "omitted": self.report.omitted})
    }

    fn diagnostic(&self, d: &Diagnostic) -> Value {
        let labels: Vec<Value> =
            d.labels.iter().map(|l| json!({"text": l.text, "place": self.place(&l.place)})).collect();
        json!({
            "code": d.code.to_string(),
            "title": d.code.title(),
            "message": d.message,
            "role": d.role,
            "place": self.place(&d.primary),
            "at": d.at,
            "labels": labels,
            "notes": d.notes,
            "help": d.help,
        })
    }

    fn place(&self, place: &Place) -> Value {
        let at = self.map.as_ref().and_then(|map| Some((map, map.range(place.origin)?)));
        let at = at.map(|(map, range)| (map.file().to_owned(), map.position(range.start), map.position(range.end)));
        json!({
            "file": at.as_ref().map(|(file, ..)| file),
            "line": at.as_ref().map(|(_, start, _)| start.line),
            "column": at.as_ref().map(|(_, start, _)| start.column),
            "end_line": at.as_ref().map(|(.., end)| end.line),
            "end_column": at.as_ref().map(|(.., end)| end.column),
            "rank": place.item.map(|(rank, _)| rank.0),
            "step": place.item.map(|(_, step)| step),
        })
    }
}

/// Why a command did not do what it was asked.
pub enum Failure {
    /// A schedule is refused: exit code 1.
    Refused(Box<Refusal>),
    /// The command line is wrong: exit code 2.
    Usage(String),
    /// A file cannot be read or written: exit code 3.
    File(String),
    /// A training run has failed: exit code 4.
    Run(String),
}

impl Failure {
    /// A file that cannot be read or written.
    pub fn file(name: &str, error: &std::io::Error) -> Failure {
        let text = error.to_string();
        Failure::File(format!("{name}: {}", text.split(" (os error").next().unwrap_or(&text)))
    }

    /// Says it, and returns the exit code.
    pub fn report(self, screen: &Screen) -> ExitCode {
        let (code, kind, message) = match self {
            Failure::Refused(refusal) if screen.json => {
                return screen.value(&refusal.value()).map_or_else(|f| f.report(screen), |()| ExitCode::from(1));
            }
            Failure::Refused(refusal) => {
                eprint!("{}", refusal.draw(screen.color_errors));
                let hint = explain_hint(&refusal.report);
                if !hint.is_empty() {
                    eprintln!("\n{hint}");
                }
                return ExitCode::from(1);
            }
            Failure::Usage(message) => (2, "usage", message),
            Failure::File(message) => (3, "file", message),
            Failure::Run(message) => (4, "run", message),
        };
        if screen.json {
            println!("{:#}", json!({"ok": false, "error": kind, "message": message}));
        } else if screen.color_errors {
            eprintln!("\x1b[1;31merror\x1b[0m: {message}");
        } else {
            eprintln!("error: {message}");
        }
        ExitCode::from(code)
    }
}

/// Which codes to look up.
pub fn explain_hint(report: &Report) -> String {
    let mut codes = report.codes();
    codes.sort_unstable();
    codes.dedup();
    match codes.as_slice() {
        [] => String::new(),
        [code] => format!("`qeffect explain {code}` tells more"),
        [first, ..] => {
            let all: Vec<String> = codes.iter().map(ToString::to_string).collect();
            format!("{} are explained by `qeffect explain`, as in `qeffect explain {first}`", all.join(", "))
        }
    }
}

/// Columns of text, numbers to the right; the first row is the head.
pub fn table(screen: &Screen, rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
    let width = |column: usize| rows.iter().map(|row| cell(row, column).chars().count()).max().unwrap_or(0);
    let numeric = |column: usize| {
        let number =
            |text: &str| text.is_empty() || text.starts_with(|c: char| c.is_ascii_digit() || c == '-' || c == '+');
        rows.iter().skip(1).all(|row| number(&cell(row, column)))
    };
    let shape: Vec<(usize, bool)> = (0..columns).map(|column| (width(column), numeric(column))).collect();
    let mut out = String::new();
    for (n, row) in rows.iter().enumerate() {
        let mut line = String::new();
        for (column, (width, right)) in shape.iter().enumerate() {
            let text = cell(row, column);
            let pad = " ".repeat(width - text.chars().count());
            let gap = if column == 0 { "" } else { "  " };
            let _ = if *right { write!(line, "{gap}{pad}{text}") } else { write!(line, "{gap}{text}{pad}") };
        }
        let line = line.trim_end();
        out.push_str(&if n == 0 { screen.bold(line) } else { line.to_owned() });
        out.push('\n');
    }
    out
}

/// `1 rank`, `2 ranks`, `3 microbatches`.
pub fn counted(count: usize, what: &str) -> String {
    let plural = if what.ends_with("ch") { "es" } else { "s" };
    format!("{count} {what}{}", if count == 1 { "" } else { plural })
}
