//! Draws a [`Report`] with the source lines it speaks of, as rustc would.
//!
//! Every place that takes part is underlined: carets for the offending one, dashes for the others.
//! A place without text is still named in a note, so nothing is lost.

use core::fmt::{self, Write};
use core::ops::Range;

use crate::diag::{Diagnostic, Report};
use crate::origin::Origin;

/// A source text and the byte range of each of its tokens (or cells).
#[derive(Clone, Debug)]
pub struct SourceMap {
    file: String,
    text: String,
    lines: Vec<usize>,
    tokens: Vec<(u32, u32)>,
}

/// A line and a column, both counted from 1; the column counts characters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Position {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

impl SourceMap {
    /// A map without tokens; `file` is the name that messages show.
    pub fn new(file: impl Into<String>, text: &str) -> SourceMap {
        let lines = core::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        SourceMap { file: file.into(), text: text.to_owned(), lines, tokens: Vec::new() }
    }

    /// Adds the next token and returns its origin.
    pub fn push(&mut self, range: Range<usize>) -> Origin {
        self.tokens.push((range.start as u32, range.end as u32));
        Origin::token(self.tokens.len() - 1)
    }

    /// The name that messages show.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The bytes of a place.
    pub fn range(&self, origin: Origin) -> Option<Range<usize>> {
        if !origin.is_some() {
            return None;
        }
        let start = self.tokens.get(origin.first())?.0;
        let end = self.tokens.get(origin.last()).map_or(start, |t| t.1);
        Some(start as usize..(end as usize).max(start as usize))
    }

    /// Where a byte stands.
    pub fn position(&self, at: usize) -> Position {
        let line = self.lines.partition_point(|start| *start <= at) - 1;
        let start = self.lines[line];
        let column = self.text.get(start..at).map_or(1, |text| text.chars().count() + 1);
        Position { line: line + 1, column }
    }

    /// Where a place starts.
    pub fn start(&self, origin: Origin) -> Option<Position> {
        self.range(origin).map(|range| self.position(range.start))
    }

    /// The text of a line, without its end.
    fn line(&self, number: usize) -> &str {
        let start = self.lines[number - 1];
        let end = self.lines.get(number).copied().unwrap_or(self.text.len());
        self.text[start..end].trim_end_matches(['\n', '\r'])
    }
}

/// The report as text, without colour.
pub fn render(report: &Report, map: &SourceMap) -> String {
    let mut out = String::new();
    for (n, diagnostic) in report.diagnostics.iter().enumerate() {
        if n > 0 {
            out.push('\n');
        }
        draw(&mut out, diagnostic, map).expect("writing to a string cannot fail");
    }
    if report.omitted > 0 {
        let _ = writeln!(out, "\nnote: and {} more", report.omitted);
    }
    out
}

/// Drawn column of a character: tabs are four wide.
const TAB: usize = 4;

/// One underlined part of one line.
struct Mark {
    line: usize,
    start: usize,
    width: usize,
    primary: bool,
    text: String,
}

fn draw(out: &mut String, d: &Diagnostic, map: &SourceMap) -> fmt::Result {
    writeln!(out, "error: {} [{}]", d.message, d.code)?;
    for label in d.labels.iter().filter(|l| map.range(l.place.origin).is_none()) {
        writeln!(out, "  note: {}", label.text)?;
    }
    for note in &d.notes {
        write_indented(out, "  note: ", note)?;
    }
    if let Some(help) = &d.help {
        write_indented(out, "  help: ", help)?;
    }
    let places = core::iter::once((d.primary.origin, true, d.role.as_str()))
        .chain(d.labels.iter().map(|l| (l.place.origin, false, l.text.as_str())));
    let mut marks: Vec<Mark> =
        places.filter_map(|(origin, primary, text)| Some(mark(map, map.range(origin)?, primary, text))).collect();
    let head = map.start(d.primary.origin).or_else(|| {
        let first = marks.first()?;
        Some(Position { line: first.line, column: first.start + 1 })
    });
    let Some(head) = head else { return Ok(()) };
    let gutter = marks.iter().map(|m| m.line).max().unwrap_or(1).to_string().len();
    writeln!(out, "{:gutter$}--> {}:{head}", "", map.file())?;
    writeln!(out, "{:gutter$} |", "")?;
    marks.sort_by_key(|m| (m.line, m.start, !m.primary));
    let mut previous: Option<usize> = None;
    for group in marks.chunk_by(|a, b| a.line == b.line) {
        let line = group[0].line;
        if previous.is_some_and(|p| p + 2 == line) {
            writeln!(out, "{:>gutter$} | {}", line - 1, expand(map.line(line - 1)).trim_end())?;
        } else if previous.is_some_and(|p| p + 1 < line) {
            writeln!(out, "...")?;
        }
        previous = Some(line);
        writeln!(out, "{line:>gutter$} | {}", expand(map.line(line)).trim_end())?;
        underline(out, group, gutter)?;
    }
    Ok(())
}

/// A text of several lines keeps its shape under its first word.
fn write_indented(out: &mut String, head: &str, text: &str) -> fmt::Result {
    for (n, line) in text.lines().enumerate() {
        match n {
            0 => writeln!(out, "{head}{line}")?,
            _ => writeln!(out, "{:width$}{line}", "", width = head.len())?,
        }
    }
    Ok(())
}

/// The part of a place that lies on its first line.
fn mark(map: &SourceMap, range: Range<usize>, primary: bool, text: &str) -> Mark {
    let line = map.position(range.start).line;
    let start = map.lines[line - 1];
    let content = map.line(line);
    let from = range.start.min(start + content.len());
    let to = range.end.clamp(from, start + content.len());
    let before = expand(&map.text[start..from]).chars().count();
    let inside = expand(&map.text[start..to]).chars().count() - before;
    Mark { line, start: before, width: inside.max(1), primary, text: text.to_owned() }
}

fn expand(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    for c in line.chars() {
        match c {
            '\t' => out.extend(core::iter::repeat_n(' ', TAB)),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// Underlines, then the texts: the last one beside its underline, the others below, hung on bars.
fn underline(out: &mut String, marks: &[Mark], gutter: usize) -> fmt::Result {
    let width = marks.iter().map(|m| m.start + m.width).max().unwrap_or(0);
    let mut row = vec![' '; width];
    for primary in [false, true] {
        for m in marks.iter().filter(|m| m.primary == primary) {
            row[m.start..m.start + m.width].fill(if primary { '^' } else { '-' });
        }
    }
    let row: String = row.into_iter().collect();
    let last = marks.len() - 1;
    // Beside the underline only if nothing else would stand in the way.
    let beside = marks[..last].iter().all(|m| m.start + m.width <= marks[last].start);
    let text = if beside { marks[last].text.as_str() } else { "" };
    writeln!(out, "{:gutter$} | {}", "", format!("{row} {text}").trim_end())?;
    let hung: Vec<&Mark> =
        (if beside { &marks[..last] } else { marks }).iter().filter(|m| !m.text.is_empty()).collect();
    for n in (0..hung.len()).rev() {
        let mut row = vec![' '; hung[n].start];
        for m in &hung[..n] {
            if m.start < row.len() {
                row[m.start] = '|';
            }
        }
        let row: String = row.into_iter().collect();
        writeln!(out, "{:gutter$} | {row}{}", "", hung[n].text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
