//! A source text and where its tokens stand: what turns an [`Origin`] back into file, line and column.

use core::fmt;
use core::ops::Range;

use crate::diag::Report;
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

    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The report with `file:line:column` of each place, for messages without the text.
    #[must_use]
    pub fn locate(&self, report: Report) -> Report {
        report.located(|origin| self.start(origin).map(|at| format!("{}:{at}", self.file)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::Code;
    use crate::diag::Diagnostic;

    #[test]
    fn places_are_lines_and_columns_of_characters() {
        let mut map = SourceMap::new("a.sched", "\tgrün\n x");
        let word = map.push(1..6);
        let x = map.push(8..9);
        let end = map.push(9..9);
        assert_eq!(map.range(word.to(x)), Some(1..9));
        assert_eq!(map.range(Origin::NONE), None);
        assert_eq!(map.range(Origin::token(7)), None);
        assert_eq!(map.start(word).unwrap().to_string(), "1:2");
        assert_eq!(map.position(6), Position { line: 1, column: 6 });
        assert_eq!(map.start(x), Some(Position { line: 2, column: 2 }));
        assert_eq!(map.start(end), Some(Position { line: 2, column: 3 }));
    }

    #[test]
    fn a_report_says_where_its_places_are() {
        let mut map = SourceMap::new("a.sched", "a b\nc");
        let [a, _, c] = [0..1, 2..3, 4..5].map(|range| map.push(range));
        let fault = Diagnostic::new(Code::Syntax, c, "no").label(a, "because of this").label(Origin::NONE, "and that");
        let report = map.locate(Report { diagnostics: vec![fault], omitted: 0 });
        let expected =
            "error: no [QE0701]\n  --> a.sched:2:1\n  note: because of this at a.sched:1:1\n  note: and that";
        assert_eq!(report.to_string(), expected);
    }
}
