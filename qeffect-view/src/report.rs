//! A refused schedule, drawn in its text as rustc draws: every place that takes part is underlined and says its role.
//!
//! What a file says reaches the terminal as text: [`printable`] escapes what would steer it.
//! A place without text is still named in a note, so nothing is lost: an empty [`SourceMap`] does where there is no text.

use annotate_snippets::{AnnotationKind, Group, Level, Origin, Renderer, Snippet};
use qeffect_core::diag::{Diagnostic, Report, printable};
use qeffect_core::source::SourceMap;

/// The faults of `report` in the text of `map`, one after another, without colours.
pub fn plain(report: &Report, map: &SourceMap) -> String {
    render(report, map, &Renderer::plain())
}

/// As [`plain`], with the escape sequences of a terminal's colours.
pub fn styled(report: &Report, map: &SourceMap) -> String {
    render(report, map, &Renderer::styled())
}

fn render(report: &Report, map: &SourceMap, renderer: &Renderer) -> String {
    let mut parts: Vec<String> = report.diagnostics.iter().map(|fault| renderer.render(&[group(fault, map)])).collect();
    if report.omitted > 0 {
        let more = format!("and {} more", report.omitted);
        parts.push(renderer.render(&[Group::with_title(Level::NOTE.secondary_title(more))]));
    }
    parts.join("\n\n") + "\n"
}

fn group<'a>(fault: &'a Diagnostic, map: &'a SourceMap) -> Group<'a> {
    let places = fault.labels.iter().map(|label| (AnnotationKind::Context, label.place.origin, label.text.as_str()));
    let primary = (AnnotationKind::Primary, fault.primary.origin, fault.role.as_str());
    let mut snippet = None;
    let mut nowhere = Vec::new();
    for (kind, origin, text) in places.chain([primary]) {
        match map.range(origin) {
            Some(range) => {
                let mark = kind.span(range).label((!text.is_empty()).then_some(text));
                let source = snippet.take().unwrap_or_else(|| Snippet::source(map.text()).path(map.file()));
                snippet = Some(source.annotation(mark));
            }
            None if !text.is_empty() => nowhere.push(Level::NOTE.message(printable(text))),
            None => {}
        }
    }
    Level::ERROR
        .primary_title(printable(&fault.message))
        .id(fault.code.to_string())
        .elements(fault.at.iter().filter(|_| snippet.is_none()).map(Origin::path))
        .elements(snippet)
        .elements(nowhere)
        .elements(fault.notes.iter().map(|note| Level::NOTE.message(printable(note))))
        .elements(fault.help.iter().map(|help| Level::HELP.message(printable(help))))
}

#[cfg(test)]
mod tests;
