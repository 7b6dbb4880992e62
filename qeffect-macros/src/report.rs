//! Faults as `compile_error!`s: one per fault, underlining the whole offending call, laid out as
//! rustc lays out its own.
//!
//! Stable Rust gives a macro error one range and no labels, so the headline says what is wrong at
//! that range and every other place becomes a note with file, line and column.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Write;

use proc_macro2::{Delimiter, Group, Ident, Literal, Punct, Spacing, Span, TokenStream, TokenTree};
use qeffect_core::code::{Code, Family};
use qeffect_core::diag::{Diagnostic, Label, Report, SHOWN};
use qeffect_core::origin::Origin;

use crate::tokens::Source;

/// The faults of one instance, or of the program itself.
pub struct Found {
    /// Values of the parameters; `None`: found before any instance was looked at.
    pub instance: Option<Vec<i64>>,
    /// What was found.
    pub report: Report,
}

/// A fault as it is shown: once, however many instances have it.
struct Shown<'a> {
    diagnostic: &'a Diagnostic,
    /// Other instances that have it.
    elsewhere: Vec<&'a [i64]>,
}

/// All faults of the first phase that failed in any instance, as errors in source order.
pub fn errors(source: &Source, found: &[Found]) -> TokenStream {
    let Some(phase) = found.iter().flat_map(|f| &f.report.diagnostics).map(|d| d.code.family()).min() else {
        return TokenStream::new();
    };
    let (shown, omitted) = merge(phase, found);
    let mut out = TokenStream::new();
    let last = shown.len().min(SHOWN);
    let hidden = omitted + shown.len() - last;
    for (n, fault) in shown.iter().take(last).enumerate() {
        let mut message = headline_and_notes(source, fault);
        if n + 1 == last && hidden > 0 {
            line(&mut message, "note", &format!("{hidden} more like these are not shown"));
        }
        out.extend(compile_error(source.spans_of(fault.diagnostic.primary.origin), &message));
    }
    out
}

/// Groups equal faults of different instances: same code, same place in the source. (Within one
/// instance a report has grouped them already.)
fn merge(phase: Family, found: &[Found]) -> (Vec<Shown<'_>>, usize) {
    let mut shown: BTreeMap<(Origin, Code), Shown<'_>> = BTreeMap::new();
    let mut omitted = 0;
    for Found { instance, report } in found {
        let of_phase = report.diagnostics.iter().filter(|d| d.code.family() == phase);
        omitted += of_phase.clone().next().map_or(0, |_| report.omitted);
        for diagnostic in of_phase {
            match shown.entry((diagnostic.primary.origin, diagnostic.code)) {
                Entry::Vacant(entry) => {
                    entry.insert(Shown { diagnostic, elsewhere: Vec::new() });
                }
                Entry::Occupied(mut entry) => entry.get_mut().elsewhere.extend(instance.as_deref()),
            }
        }
    }
    (shown.into_values().collect(), omitted)
}

fn headline_and_notes(source: &Source, fault: &Shown<'_>) -> String {
    let d = fault.diagnostic;
    let mut message = format!("{} [{}]", d.message, d.code);
    for label in &d.labels {
        line(&mut message, "note", &placed(source, label));
    }
    // The last note of a fault in an instance says which instance and where in its loops.
    let (last, rest) = match d.notes.split_last() {
        Some((last, rest)) => (Some(last.as_str()), rest),
        None => (None, &[][..]),
    };
    for note in rest {
        line(&mut message, "note", note);
    }
    let mut last: Vec<String> = last.into_iter().map(str::to_owned).collect();
    if !fault.elsewhere.is_empty() {
        let others: Vec<String> = fault.elsewhere.iter().map(|values| tuple(values)).collect();
        last.push(format!("also in {}", listed(&others)));
    }
    if !last.is_empty() {
        line(&mut message, "note", &last.join("; "));
    }
    if let Some(help) = &d.help {
        line(&mut message, "help", help);
    }
    message
}

/// The role of a further place, and where that is.
fn placed(source: &Source, label: &Label) -> String {
    match position(source, label.place.origin) {
        Some(at) if has_clauses(&label.text) => format!("{} ({at})", label.text),
        Some(at) => format!("{} at {at}", label.text.strip_suffix(" here").unwrap_or(&label.text)),
        None => label.text.clone(),
    }
}

/// Whether a sentence has commas of its own: those of `I(1, 3)` do not count.
fn has_clauses(text: &str) -> bool {
    let mut depth = 0;
    text.chars().any(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    })
}

/// `(2, 4)`
pub fn tuple(values: &[i64]) -> String {
    let values: Vec<String> = values.iter().map(i64::to_string).collect();
    format!("({})", values.join(", "))
}

/// At most four of them, then a count.
fn listed(items: &[String]) -> String {
    match items.len() {
        0..=4 => items.join(", "),
        n => format!("{} and {} more", items[..3].join(", "), n - 3),
    }
}

/// Appends an indented line; rustc keeps the indentation under the headline.
fn line(message: &mut String, kind: &str, text: &str) {
    let _ = write!(message, "\n{kind}: {}", text.replace('\n', "\n      "));
}

/// `src/my_schedule.rs:12:13`; none outside a compiler, where spans know no file.
fn position(source: &Source, origin: Origin) -> Option<String> {
    let (first, _) = source.try_spans_of(origin)?;
    place_of(first)
}

/// File, line and column of a span.
pub fn place_of(span: Span) -> Option<String> {
    if !inside_compiler() {
        return None;
    }
    let span = span.unwrap();
    Some(format!("{}:{}:{}", span.file(), span.line(), span.column()))
}

/// The file of the last token, as the compiler names it, and `line:column` of every token, divided by blanks: `-` for
/// what another file wrote, as the macro around the program did. Nothing outside a compiler.
pub fn places(spans: &[Span]) -> (String, String) {
    let last = spans.last().filter(|_| inside_compiler());
    let file = last.map_or_else(String::new, |span| span.unwrap().file());
    let place = |span: &Span| {
        let span = inside_compiler().then(|| span.unwrap()).filter(|span| span.file() == file);
        span.map_or_else(|| "-".to_owned(), |span| format!("{}:{}", span.line(), span.column()))
    };
    let tokens: Vec<String> = spans.iter().map(place).collect();
    (file, tokens.join(" "))
}

/// Whether this runs inside rustc (and not in a test of ours).
pub fn inside_compiler() -> bool {
    proc_macro::is_available()
}

/// `::core::compile_error! { "message" }`, underlining from the first span to the last.
pub fn compile_error((first, last): (Span, Span), message: &str) -> TokenStream {
    let punct = |c, spacing| {
        let mut punct = Punct::new(c, spacing);
        punct.set_span(first);
        TokenTree::Punct(punct)
    };
    let mut text = Literal::string(message);
    text.set_span(last);
    let mut group = Group::new(Delimiter::Brace, TokenTree::Literal(text).into());
    group.set_span(last);
    TokenStream::from_iter([
        punct(':', Spacing::Joint),
        punct(':', Spacing::Alone),
        TokenTree::Ident(Ident::new("core", first)),
        punct(':', Spacing::Joint),
        punct(':', Spacing::Alone),
        TokenTree::Ident(Ident::new("compile_error", first)),
        punct('!', Spacing::Alone),
        TokenTree::Group(group),
    ])
}
