//! Faults as `compile_error!`s: one per fault, underlining the whole offending call, laid out as
//! rustc lays out its own.
//!
//! Stable Rust gives a macro error one range and no labels, so the headline says what is wrong at
//! that range and every other place becomes a note with file, line and column.

use std::collections::BTreeMap;
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

/// A fault as it is shown: once, however many instances and rounds of a loop have it.
struct Shown<'a> {
    diagnostic: &'a Diagnostic,
    instance: Option<&'a [i64]>,
    /// Other occurrences in the same instance.
    repeats: usize,
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

/// Groups equal faults: same code, same place in the source.
fn merge(phase: Family, found: &[Found]) -> (Vec<Shown<'_>>, usize) {
    let mut shown: Vec<Shown<'_>> = Vec::new();
    let mut known: BTreeMap<(Origin, Code, &str), usize> = BTreeMap::new();
    let mut omitted = 0;
    for Found { instance, report } in found {
        let instance = instance.as_deref();
        let mut of_phase = 0;
        for diagnostic in report.diagnostics.iter().filter(|d| d.code.family() == phase) {
            of_phase += 1;
            // Outside instances nothing repeats: two messages at one place are two faults.
            let message = if instance.is_some() { "" } else { diagnostic.message.as_str() };
            let at = *known.entry((diagnostic.primary.origin, diagnostic.code, message)).or_insert_with(|| {
                shown.push(Shown { diagnostic, instance, repeats: 0, elsewhere: Vec::new() });
                shown.len() - 1
            });
            let first = &mut shown[at];
            if std::ptr::eq(first.diagnostic, diagnostic) {
                continue;
            }
            match instance {
                here if here == first.instance => first.repeats += 1,
                Some(other) if first.elsewhere.last() != Some(&other) => first.elsewhere.push(other),
                _ => {}
            }
        }
        if of_phase > 0 {
            omitted += report.omitted;
        }
    }
    shown.sort_by_key(|fault| (fault.diagnostic.primary.origin, fault.diagnostic.code));
    (shown, omitted)
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
    last.extend(occurrences(fault));
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
        Some(at) if label.text.contains(',') => format!("{} ({at})", label.text),
        Some(at) => format!("{} at {at}", label.text.strip_suffix(" here").unwrap_or(&label.text)),
        None => label.text.clone(),
    }
}

/// How often else this fault is found: in this instance, in others.
fn occurrences(fault: &Shown<'_>) -> Vec<String> {
    let mut out = Vec::new();
    match fault.repeats {
        0 => {}
        1 => out.push("once more at this place".to_owned()),
        n => out.push(format!("{n} times more at this place")),
    }
    if !fault.elsewhere.is_empty() {
        let others: Vec<String> = fault.elsewhere.iter().map(|values| tuple(values)).collect();
        out.push(format!("also in {}", listed(&others)));
    }
    out
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
