//! Drawings, as they are shown.

use qeffect_core::code::Code;
use qeffect_core::diag::{Diagnostic, Place, Report};
use qeffect_core::origin::Origin;
use qeffect_core::source::SourceMap;

use super::*;

/// A map with one token per word, words being separated by blanks.
fn map(text: &str) -> SourceMap {
    let mut map = SourceMap::new("a.sched", text);
    let mut at = 0;
    for word in text.split_inclusive(char::is_whitespace) {
        let end = at + word.trim_end().len();
        if end > at {
            map.push(at..end);
        }
        at += word.len();
    }
    map
}

fn drawn(map: &SourceMap, fault: Diagnostic) -> String {
    plain(&Report { diagnostics: vec![fault], omitted: 0 }, map)
}

fn at(n: usize) -> Origin {
    Origin::token(n)
}

fn consumed_twice() -> Diagnostic {
    Diagnostic::new(Code::TapeConsumedTwice, at(8).to(at(10)), "I(1, 3) consumes a tape that is already consumed")
        .role("consumed again")
        .label(at(5).to(at(7)), "first consumed by I(1, 3)")
        .note("instance P = 2; here r = 1")
        .help("remove it")
}

#[test]
fn every_part_of_a_fault_is_drawn() {
    let expected = "\
error[QE0101]: I(1, 3) consumes a tape that is already consumed
 --> a.sched:4:5
  |
3 |     I r m
  |     ----- first consumed by I(1, 3)
4 |     I r m
  |     ^^^^^ consumed again
  |
  = note: instance P = 2; here r = 1
  = help: remove it
";
    assert_eq!(drawn(&map("rank r\n    F r m\n    I r m\n    I r m\n"), consumed_twice()), expected);
}

#[test]
fn colours_change_nothing_else() {
    let map = map("rank r\n    F r m\n    I r m\n    I r m\n");
    let report = Report { diagnostics: vec![consumed_twice(), consumed_twice()], omitted: 2 };
    let colored = styled(&report, &map);
    let bare: String = (colored.split('\x1b').enumerate())
        .map(|(n, part)| if n == 0 { part } else { part.split_once('m').expect("the end of a sequence").1 })
        .collect();
    assert!(colored.len() > bare.len());
    assert_eq!(bare, plain(&report, &map));
    assert!(bare.ends_with("\n\nnote: and 2 more\n"), "{bare}");
}

#[test]
fn several_places_of_a_line_keep_their_texts() {
    let fault = Diagnostic::new(Code::Syntax, at(2), "no").role("here").label(at(0), "first").label(at(1), "second");
    let expected = "\
error[QE0701]: no
 --> a.sched:1:9
  |
1 | one two three four
  | --- --- ^^^^^ here
  | |   |
  | |   second
  | first
";
    assert_eq!(drawn(&map("one two three four"), fault), expected);
}

/// A row of a schedule file may have thousands of cells.
#[test]
fn both_ends_of_a_long_line_are_shown() {
    let text: Vec<String> = (0..600).map(|m| format!("0F{m}")).collect();
    for (first, last) in [(0, 599), (10, 12), (300, 590), (599, 0)] {
        let fault = Diagnostic::new(Code::Syntax, at(last), "no").role("here").label(at(first), "and there");
        let drawn = drawn(&map(&text.join(" ")), fault);
        for part in ["here", "and there", &text[first], &text[last]] {
            assert!(drawn.contains(part), "{part}: {drawn}");
        }
    }
}

#[test]
fn places_without_text_lose_nothing() {
    let here = map("a b");
    let nowhere = Place::from(Origin::NONE);
    let fault = Diagnostic::new(Code::CommitMissing, Origin::NONE, "no").label(nowhere, "inserted here").help("do");
    assert_eq!(drawn(&here, fault), "error[QE0305]: no\n |\n = note: inserted here\n = help: do\n");
    let fault = Diagnostic::new(Code::CommitMissing, Origin::NONE, "no").label(at(1), "after this");
    let text = drawn(&here, fault);
    assert!(text.contains("--> a.sched:1:3") && text.contains("- after this"), "{text}");
    let mut fault = Diagnostic::new(Code::Syntax, at(77), "beyond");
    fault.at = Some("b.rs:7:9".to_owned());
    assert_eq!(drawn(&SourceMap::new("", ""), fault), "error[QE0701]: beyond\n--> b.rs:7:9\n");
}

#[test]
fn the_end_of_the_text_can_be_marked() {
    let mut map = SourceMap::new("a.sched", "ab\n");
    let end = map.push(3..3);
    let text = drawn(&map, Diagnostic::new(Code::Syntax, end, "more expected"));
    assert!(text.contains("--> a.sched:1:4") && text.contains("|   ^"), "{text}");
}
