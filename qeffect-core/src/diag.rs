//! Diagnostics: what is wrong, where each end of it is, in which instance, and how to mend it.
//!
//! Wording follows rustc: lower case, no full stop, names in backticks as the user wrote them. The
//! headline states the violated fact; a label states the role of its place; a note is a fact
//! needed to believe it; help is one edit.

use core::fmt;
use std::borrow::Cow;

use crate::code::Code;
use crate::ids::Rank;
use crate::origin::Origin;

/// A place in a program and, where it is an item of an unrolled schedule, which one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    /// Where it was written.
    pub origin: Origin,
    /// Rank and index in [`Schedule::rank`](crate::schedule::Schedule::rank), to recover loop values.
    pub item: Option<(Rank, u32)>,
}

impl From<Origin> for Place {
    fn from(origin: Origin) -> Self {
        Place { origin, item: None }
    }
}

/// A further place that takes part in a fault.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Label {
    /// Where.
    pub place: Place,
    /// Its role, as a short clause: `first consumed by I(1, 3)`.
    pub text: String,
}

/// One fault.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Diagnostic {
    /// Its code.
    pub code: Code,
    /// The headline.
    pub message: String,
    /// The offending place.
    pub primary: Place,
    /// File, line and column of the offending place, where they are known and the source is not at hand.
    pub at: Option<String>,
    /// The role of the offending place, for drawings with labels.
    pub role: String,
    /// The other places.
    pub labels: Vec<Label>,
    /// Facts.
    pub notes: Vec<String>,
    /// One edit that mends it.
    pub help: Option<String>,
}

impl Diagnostic {
    /// A fault with headline and offending place.
    pub fn new(code: Code, primary: impl Into<Place>, message: impl Into<String>) -> Self {
        Diagnostic {
            code,
            message: message.into(),
            primary: primary.into(),
            at: None,
            role: String::new(),
            labels: Vec::new(),
            notes: Vec::new(),
            help: None,
        }
    }

    /// Whether `other` is the same mistake, met again by a loop.
    fn repeats(&self, other: &Diagnostic) -> bool {
        self.code == other.code && self.primary.origin == other.primary.origin && self.primary.origin.is_some()
    }

    /// Sets the role of the offending place.
    #[must_use]
    pub fn role(mut self, text: impl Into<String>) -> Self {
        self.role = text.into();
        self
    }

    /// Adds a place that takes part.
    #[must_use]
    pub fn label(mut self, place: impl Into<Place>, text: impl Into<String>) -> Self {
        self.labels.push(Label { place: place.into(), text: text.into() });
        self
    }

    /// Adds a fact.
    #[must_use]
    pub fn note(mut self, text: impl Into<String>) -> Self {
        self.notes.push(text.into());
        self
    }

    /// Sets the edit that mends it.
    #[must_use]
    pub fn help(mut self, text: impl Into<String>) -> Self {
        self.help = Some(text.into());
        self
    }
}

/// All faults of the first failing phase, in source order, capped.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// The faults shown.
    pub diagnostics: Vec<Diagnostic>,
    /// How many more there are.
    pub omitted: usize,
}

/// Most faults shown per report.
pub const SHOWN: usize = 20;

impl Report {
    /// Puts faults in source order, makes one of those that share code and written place (a loop
    /// repeats one mistake), and caps the list.
    pub fn from_faults(mut faults: Vec<Diagnostic>) -> Report {
        faults.sort_by_key(|d| (d.primary.origin, d.code, d.primary.item));
        let mut kept: Vec<Diagnostic> = Vec::new();
        let mut repeats = 0;
        for fault in faults {
            match kept.last_mut() {
                Some(last) if last.repeats(&fault) => {
                    repeats += usize::from(last.message != fault.message);
                    if repeats == 1 {
                        last.notes.push(format!("likewise, {}", fault.message));
                    }
                }
                _ => {
                    close(&mut kept, &mut repeats);
                    kept.push(fault);
                }
            }
        }
        close(&mut kept, &mut repeats);
        let omitted = kept.len().saturating_sub(SHOWN);
        kept.truncate(SHOWN);
        Report { diagnostics: kept, omitted }
    }

    /// The same faults, without the positions of their items in the unrolled program.
    #[must_use]
    pub fn without_items(mut self) -> Report {
        for fault in &mut self.diagnostics {
            fault.primary.item = None;
            fault.labels.iter_mut().for_each(|label| label.place.item = None);
        }
        self
    }

    /// The same faults, with file, line and column of their places as `at` knows them.
    #[must_use]
    pub fn located(mut self, at: impl Fn(Origin) -> Option<String>) -> Report {
        for fault in &mut self.diagnostics {
            fault.at = at(fault.primary.origin);
            for label in &mut fault.labels {
                if let Some(at) = at(label.place.origin) {
                    label.text = format!("{} at {at}", label.text);
                }
            }
        }
        self
    }

    /// The codes of the faults shown, for tests.
    pub fn codes(&self) -> Vec<Code> {
        self.diagnostics.iter().map(|d| d.code).collect()
    }
}

/// A text of somebody else's, such as a name from a file, for a terminal: control characters, and those that turn
/// the direction of writing, as Rust escapes them (`\u{1b}`).
pub fn printable(text: &str) -> Cow<'_, str> {
    let steers = |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let escaped = text.chars().flat_map(|c| {
        let (kept, escaped) = if steers(c) { (None, Some(c.escape_default())) } else { (Some(c), None) };
        kept.into_iter().chain(escaped.into_iter().flatten())
    });
    Cow::Owned(escaped.collect())
}

/// Says how many repetitions of the last fault are not shown.
fn close(kept: &mut [Diagnostic], repeats: &mut usize) {
    let more = std::mem::take(repeats).saturating_sub(1);
    if let Some(last) = kept.last_mut().filter(|_| more > 0) {
        last.notes.push(format!("and {more} more like these at the same place"));
    }
}

impl fmt::Display for Report {
    /// Headlines, places, notes and help without source lines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, d) in self.diagnostics.iter().enumerate() {
            if n > 0 {
                writeln!(f)?;
            }
            write!(f, "error: {} [{}]", printable(&d.message), d.code)?;
            if let Some(at) = &d.at {
                write!(f, "\n  --> {at}")?;
            }
            for label in &d.labels {
                write!(f, "\n  note: {}", printable(&label.text))?;
            }
            for note in &d.notes {
                write!(f, "\n  note: {}", printable(note))?;
            }
            if let Some(help) = &d.help {
                write!(f, "\n  help: {}", printable(help))?;
            }
        }
        if self.omitted > 0 {
            write!(f, "\n  note: and {} more", self.omitted)?;
        }
        Ok(())
    }
}

impl std::error::Error for Report {}
