//! One cell: `<stage><type><microbatch>`, or several of them in brackets.

use std::ops::Range;

use crate::code::Code;
use crate::diag::Diagnostic;
use crate::lang::{MAX_MICROBATCHES, MAX_STAGES, nearest};
use crate::origin::Origin;
use crate::source::SourceMap;

/// `0F1`: stage, type, microbatch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cell<'a> {
    pub stage: u32,
    pub word: &'a str,
    pub microbatch: Option<u32>,
}

/// A field of a row, without the blanks around it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Field<'a> {
    pub text: &'a str,
    pub origin: Origin,
}

/// Rows of fields. Blank lines at the end are no rows; CRLF and LF both end a line.
pub(super) fn rows<'a>(text: &'a str, map: &mut SourceMap) -> Result<Vec<Vec<Field<'a>>>, Vec<Diagnostic>> {
    let end = text.trim_end().len();
    let mut rows = Vec::new();
    let mut fields = Vec::new();
    let (mut start, mut number) = (0, 0);
    for (at, byte) in text[..end].bytes().chain([b'\n']).enumerate() {
        if byte != b',' && byte != b'\n' {
            continue;
        }
        if number >= Origin::MAX_TOKENS {
            let message = format!("the file has more than {} cells", Origin::MAX_TOKENS);
            return Err(vec![Diagnostic::new(Code::LimitExceeded, Origin::NONE, message)]);
        }
        number += 1;
        let Range { start: from, end: to } = trimmed(text, start..at);
        fields.push(Field { text: &text[from..to], origin: map.push(from..to) });
        start = at + 1;
        if byte == b'\n' {
            let room = Vec::with_capacity(fields.len());
            rows.push(std::mem::replace(&mut fields, room));
        }
    }
    Ok(rows)
}

fn trimmed(text: &str, range: Range<usize>) -> Range<usize> {
    let field = &text[range.clone()];
    let start = range.start + (field.len() - field.trim_start().len());
    start..start + field.trim().len()
}

/// Reads `0F1`; `words` are the types that may stand here, `alone` those without a microbatch.
pub(super) fn cell<'a>(
    text: &'a str,
    words: &[&str],
    alone: &[&str],
) -> Result<Cell<'a>, (Code, String, Option<String>)> {
    let syntax = |message: String, help: Option<String>| Err((Code::Syntax, message, help));
    let shape = || Some("an action is `<stage><type><microbatch>`, as in `0F1`".to_owned());
    let (stage, rest) = split(text, u8::is_ascii_digit);
    let (word, rest) = split(rest, |byte| byte.is_ascii_alphabetic() || *byte == b'_');
    let (microbatch, junk) = split(rest, u8::is_ascii_digit);
    if stage.is_empty() {
        return syntax(format!("`{text}` names no stage"), shape());
    }
    if word.is_empty() {
        return syntax(format!("`{text}` names no action"), shape());
    }
    let numbered = words.contains(&word);
    let single = alone.contains(&word);
    if !numbered && !single {
        let upper = word.to_ascii_uppercase();
        let known = || words.iter().chain(alone).copied();
        let near = known().find(|w| *w == upper).or_else(|| nearest(word, known()));
        let help = match near {
            Some(near) => format!("did you mean `{stage}{near}{microbatch}`?"),
            None => format!("the types are `{}`", known().collect::<Vec<_>>().join("`, `")),
        };
        return syntax(format!("`{word}` is no action here"), Some(help));
    }
    if !junk.is_empty() {
        return syntax(format!("`{junk}` behind the action `{}`", &text[..text.len() - junk.len()]), None);
    }
    if single && !microbatch.is_empty() {
        return syntax(format!("`{word}` has no microbatch"), Some(format!("write `{stage}{word}`")));
    }
    if numbered && microbatch.is_empty() {
        return syntax(format!("`{text}` names no microbatch"), shape());
    }
    let number = |digits: &str, what: &str, end: u32| match digits.parse::<u32>() {
        Ok(n) if n < end => Ok(n),
        _ => Err((Code::OutOfRange, format!("{what} {digits} does not exist: the most is {}", end - 1), None)),
    };
    let stage = number(stage, "stage", MAX_STAGES)?;
    let microbatch =
        if microbatch.is_empty() { None } else { Some(number(microbatch, "microbatch", MAX_MICROBATCHES)?) };
    Ok(Cell { stage, word, microbatch })
}

/// The longest start of a text that has only such ASCII characters, and the rest.
fn split(text: &str, is: impl Fn(&u8) -> bool) -> (&str, &str) {
    text.split_at(text.bytes().position(|byte| !is(&byte)).unwrap_or(text.len()))
}

/// The parts of `(a;b)NAME`, if the text has that shape; their ranges within it.
pub(super) fn container(text: &str) -> Option<(Vec<&str>, &str)> {
    let (inside, name) = text.strip_prefix('(')?.split_once(')')?;
    Some((inside.split(';').map(str::trim).collect(), name))
}

/// The fault of a cell.
pub(super) fn fault(origin: Origin, (code, message, help): (Code, String, Option<String>)) -> Diagnostic {
    let mut fault = Diagnostic::new(code, origin, message);
    fault.help = help;
    fault
}
