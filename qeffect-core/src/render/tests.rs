//! Drawings, as they are shown.

use super::*;
use crate::code::Code;
use crate::diag::Place;

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

fn drawn(map: &SourceMap, diagnostic: Diagnostic) -> String {
    render(&Report { diagnostics: vec![diagnostic], omitted: 0 }, map)
}

fn at(n: usize) -> Origin {
    Origin::token(n)
}

#[test]
fn headline_notes_and_help_stand_above_the_source() {
    let map = map("rank r\n    F r m\n    I r m\n    I r m\n");
    let fault =
        Diagnostic::new(Code::TapeConsumedTwice, at(8).to(at(10)), "I(1, 3) consumes a tape that is already consumed")
            .role("consumed again")
            .label(at(5).to(at(7)), "first consumed by I(1, 3)")
            .note("instance P = 2; here r = 1")
            .help("remove it");
    let expected = "\
error: I(1, 3) consumes a tape that is already consumed [QE0101]
  note: instance P = 2; here r = 1
  help: remove it
 --> a.sched:4:5
  |
3 |     I r m
  |     ----- first consumed by I(1, 3)
4 |     I r m
  |     ^^^^^ consumed again
";
    assert_eq!(drawn(&map, fault), expected);
}

#[test]
fn several_labels_share_a_line() {
    let map = map("one two three four");
    let fault = Diagnostic::new(Code::Syntax, at(2), "no").role("here").label(at(0), "first").label(at(1), "second");
    let expected = "\
error: no [QE0701]
 --> a.sched:1:9
  |
1 | one two three four
  | --- --- ^^^^^ here
  | |   second
  | first
";
    assert_eq!(drawn(&map, fault), expected);
    let fault = Diagnostic::new(Code::Syntax, at(0).to(at(3)), "no").role("all of it").label(at(1), "this part");
    let expected = "\
error: no [QE0701]
 --> a.sched:1:1
  |
1 | one two three four
  | ^^^^^^^^^^^^^^^^^^
  | |   this part
  | all of it
";
    assert_eq!(drawn(&map, fault), expected);
}

#[test]
fn lines_between_are_left_out() {
    let map = map("a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n");
    let fault = Diagnostic::new(Code::Syntax, at(9), "no").label(at(0), "x").label(at(2), "y");
    let expected = "\
error: no [QE0701]
  --> a.sched:10:1
   |
 1 | a
   | - x
 2 | b
 3 | c
   | - y
...
10 | j
   | ^
";
    assert_eq!(drawn(&map, fault), expected);
}

#[test]
fn tabs_and_letters_of_several_bytes_keep_columns() {
    let map = map("\tgrün\tx € y");
    let fault = Diagnostic::new(Code::Syntax, at(3), "no").label(at(0), "a word");
    let expected = "\
error: no [QE0701]
 --> a.sched:1:11
  |
1 |     grün    x € y
  |     ----        ^
  |     a word
";
    assert_eq!(drawn(&map, fault), expected);
}

#[test]
fn a_place_of_several_lines_is_marked_on_its_first() {
    let map = map("a bb\nc d");
    let fault = Diagnostic::new(Code::Syntax, at(1).to(at(3)), "no").note("two\nlines");
    let expected = "\
error: no [QE0701]
  note: two
        lines
 --> a.sched:1:3
  |
1 | a bb
  |   ^^
";
    assert_eq!(drawn(&map, fault), expected);
}

#[test]
fn places_without_text_lose_nothing() {
    let map = map("a b");
    let nowhere = Place::from(Origin::NONE);
    let fault = Diagnostic::new(Code::CommitMissing, Origin::NONE, "no").label(nowhere, "inserted here").help("do");
    assert_eq!(drawn(&map, fault), "error: no [QE0305]\n  note: inserted here\n  help: do\n");
    let fault = Diagnostic::new(Code::CommitMissing, Origin::NONE, "no").label(at(1), "after this");
    let text = drawn(&map, fault);
    assert!(text.contains("--> a.sched:1:3") && text.contains("- after this"), "{text}");
    let fault = Diagnostic::new(Code::Syntax, at(77), "beyond");
    assert_eq!(drawn(&map, fault), "error: beyond [QE0701]\n");
    let report = Report { diagnostics: vec![Diagnostic::new(Code::Syntax, at(0), "x")], omitted: 3 };
    assert!(render(&report, &map).ends_with("\nnote: and 3 more\n"));
    assert_eq!(drawn(&SourceMap::new("empty", ""), Diagnostic::new(Code::Syntax, at(0), "x")), "error: x [QE0701]\n");
}

#[test]
fn the_end_of_the_text_can_be_marked() {
    let mut map = SourceMap::new("a.sched", "ab\n");
    let end = map.push(3..3);
    let text = drawn(&map, Diagnostic::new(Code::Syntax, end, "more expected"));
    assert!(text.contains("--> a.sched:2:1") && text.contains("| ^"), "{text}");
}
