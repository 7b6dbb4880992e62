//! Every fault of the language, each with its place and its wording.

use super::{Refused, refused, with_body};
use crate::code::Code::{self, *};

/// Refuses a body with one fault whose underlined text is `at`.
#[track_caller]
fn one(body: &str, code: Code, at: &str, message: &str) {
    let fault = refused(&with_body(body), &[2, 4]);
    assert_eq!(fault.codes, [code], "{}", fault.text);
    assert!(fault.text.contains(message), "`{message}` is not in:\n{}", fault.text);
    assert_eq!(fault.at, at, "{}", fault.text);
}

#[test]
fn what_only_rust_has_is_named() {
    let cases: &[(&str, &str, &str)] = &[
        ("loop { F(r, 0); }", "loop", "`loop` is not in the schedule language"),
        ("for m in 0..M { break; }", "break", "`break`"),
        ("for m in 0..M { continue; }", "continue", "`continue`"),
        ("return;", "return", "`return`"),
        ("match r { 0 => F(0, 0), _ => {} }", "match", "use `if` and `else if`"),
        ("let x = r as i32; F(x, 0);", "as i32", "a cast"),
        ("let x = 1.5; F(x, 0);", "1.5", "a floating-point number"),
        ("let x = 3u32; F(x, 0);", "3u32", "write `3`"),
        ("let x = \"no\"; F(x, 0);", "\"no\"", "a string"),
        ("let x: i64 = 3; F(x, 0);", ": i64", "a type"),
        ("let (a, b) = (1, 2);", "(", "a pattern"),
        ("println!(\"{r}\");", "println!", "the macro `println!`"),
        ("assert!(r > 0);", "assert!", "`expect ..`"),
        ("let x = r.pow(2); F(x, 0);", "pow", "the method `pow`"),
        ("let x = r.0;", "0", "a field"),
        ("let x = i64::MAX;", "i64::", "a path"),
        ("let x = &r; F(x, 0);", "&", "a reference"),
        ("let x = r?; F(x, 0);", "?", "`?`"),
        ("let x = [1, 2];", "[", "a list"),
        ("let x = r << 2; F(x, 0);", "<<", "a bit operator"),
        ("let x = 0..M;", "..", "a range as a value"),
        ("for m in [0, 1] { F(r, m); }", "[", "a list"),
        ("if let Some(x) = r { F(r, 0); }", "let", "`let` in a condition"),
        ("fn f() {}", "fn", "use a helper closure"),
        ("let f = 3; let g = f[0];", "[", "indexing"),
        ("let f = |a| { F(a, 0); 1 }; F(r, f(0));", "F(a, 0)", "inside a helper closure"),
        ("let mut a = 1; let f = |b| a + b; a = 2; F(r, f(a));", "a", "which is `mut`"),
        ("let f = 3 + |a| a;", "|", "a closure as a value"),
        ("'outer: for m in 0..M { F(r, m); }", "'outer", "a label or lifetime"),
    ];
    for (body, at, message) in cases {
        one(body, NotInLanguage, at, message);
    }
}

#[test]
fn syntax() {
    one("F(r 0);", Syntax, "0", "expected `,` or `)`, found `0`");
    one("let x = ;", Syntax, ";", "expected a value, found `;`");
    one("if r = 3 { F(r, 0); }", Syntax, "=", "`==` compares two values");
    one("if 0 < r < 3 { F(r, 0); }", Syntax, "<", "comparisons cannot be chained");
    one("r + 1;", Syntax, "r + 1", "this value is never used");
    one("Fwd(r, 0);", Syntax, "Fwd(r, 0)", "`Fwd(..)` is not an action");
    one("let x = F(r, 0);", Syntax, "F(r, 0)", "an action is a statement, not a value");
    one("for m in 0..3.rev() { F(r, m); }", Syntax, "rev", "(a..b).rev()");
    one("for m 0..3 { F(r, 0); }", Syntax, "0", "expected `in`, found `0`");
    one("overlap { { F(r, 0); } }", Syntax, "overlap", "two branches");
    one("F(r, 0)\n I(r, 0);", Syntax, "I", "expected `;`, found `I`");
    one("M", Syntax, "M", "never used");
    one("let mut f = |a| a; F(r, f(0));", Syntax, "mut", "cannot be `mut`");
    one("let F = |a| a; F(r, 0);", Syntax, "F", "cannot name a helper closure");
    one("let while = 3;", Syntax, "while", "a keyword");
    one("x++;", Syntax, "+", "`x += 1`");
}

#[test]
fn names_types_arguments_and_mutability() {
    one("let warm = 1; F(r, wram);", UnknownName, "wram", "did you mean `warm`?");
    one("if false { let x = y; }", UnknownName, "y", "`y` is not defined here");
    one("for _ in 0..M { F(r, _); }", UnknownName, "_", "not defined");
    one("{ let x = 1; F(r, x); } F(r, x);", UnknownName, "x", "not defined");
    one("while false { if r { F(r, 0); } }", TypeMismatch, "r", "expected a bool, found an integer");
    one("F(r, r == 0);", TypeMismatch, "r == 0", "expected an integer, found a bool");
    one("let f = |a| a; F(r, f);", TypeMismatch, "f", "call it: `f(..)`");
    one("F(r, r(0));", TypeMismatch, "r(0)", "it cannot be called");
    one("let x = if r > 0 { 1 }; F(r, x);", TypeMismatch, "if", "without `else`");
    one("let x = if r > 0 { 1 } else { true }; F(r, x);", TypeMismatch, "true", "expected an integer");
    one("let f = |a| a && true; F(r, 0); if f(1) { F(r, 1); }", TypeMismatch, "1", "expected a bool");
    one("let mut x = 1; x = true;", TypeMismatch, "true", "expected an integer");
    one("if false { F(r); }", WrongArguments, "F(r)", "`F` takes a stage and a microbatch, found 1 argument");
    one("F(r, [0, 1]);", WrongArguments, "[0, 1]", "only `W` can take a list");
    one("W(r, []);", WrongArguments, "[]", "at least one");
    one("F(r, min(1, 2, 3));", WrongArguments, "min(1, 2, 3)", "`min(a, min(b, c))`");
    one("let f = |a| a; F(r, f());", WrongArguments, "f()", "`f` takes 1 argument, found 0");
    one("commit(1);", WrongArguments, "commit", "`commit` takes nothing");
    one("let x = 1; if false { x = 2; }", Immutable, "x", "`let mut x = ..`");
    one("for m in 0..M { m += 1; }", Immutable, "m", "not `mut`");
    one("P = 3;", Immutable, "P", "not `mut`");
}

#[test]
fn running_faults_carry_their_values() {
    one("let z = r - r; F(r, M / z);", Arithmetic, "M / z", "4 / 0 divides by zero");
    one("for m in 1..M { F(r, 9223372036854775807 + m); }", Arithmetic, "9223372036854775807 + m", "overflows");
    one("for m in (0..M).step_by(r) { F(r, m); }", Arithmetic, "r", "in steps of 0");
    one("F(r, 99999999999999999999);", Arithmetic, "99999999999999999999", "does not fit an `i64`");
    one("let mut x = 1; for m in 0..100 { x *= 2; }", Arithmetic, "x", "here r = 0, x = 4611686018427387904, m = 62");
    one("let f = |a| 1 / a; F(r, f(0));", Arithmetic, "1 / a", "instance P = 2, M = 4; here r = 0, a = 0");
    one("let mut n = 1; while n > 0 { n += 1; }", LimitExceeded, "while", "does not end");
    one("F(r, 0 - 1);", OutOfRange, "F(r, 0 - 1)", "F(0, -1) names microbatch -1");
    one("for m in 3..M { F(m - 5, m); }", OutOfRange, "F(m - 5, m)", "here r = 0, m = 3");
}

#[track_caller]
fn header(text: &str, code: Code, message: &str) {
    let fault = refused(text, &[2, 4]);
    assert_eq!(fault.codes, [code], "{}", fault.text);
    assert!(fault.text.contains(message), "`{message}` is not in:\n{}", fault.text);
}

#[test]
fn the_header_is_judged() {
    let good = with_body("F(r, 0);");
    let edit = |from: &str, to: &str| good.replacen(from, to, 1);
    header(&edit("stages: P;", ""), Header, "add `stages: P;`");
    header(&edit("stages: P;", "stages: P; stages: P;"), Header, "`stages` is repeated");
    header(&edit("stages: P;", "stages: P; stage: P;"), Header, "did you mean `stages`?");
    header(&edit("ranks: P;", "ranks: -P;"), Header, "`ranks:` is -2, outside 0..=65536");
    header(&edit("place: |s| s;", "place: |s| s - 1;"), PlacementInvalid, "stage 0 is placed on rank -1");
    header(&edit("place: |s| s;", "place: |s| s; slots: |r| r - 5;"), Header, "`slots:` of rank 0 is -5");
    header(&edit("place: |s| s;", "place: s;"), Syntax, "write `place: |s| ..`");
    header(&edit("place: |s| s;", "place: |s, t| s;"), WrongArguments, "takes one parameter");
    header(&edit("place: |s| s;", "place: |s| s; update: sometimes;"), Header, "`microbatch`, `step`, `none`");
    header(&edit("place: |s| s;", "place: |s| s; transport: edges;"), Header, "did you mean `edge`?");
    header(&edit("place: |s| s;", "place: |s| s; expect bubbel(1, 1, 1) <= 3;"), Header, "did you mean `bubble`?");
    header(
        &edit("place: |s| s;", "place: |s| s; expect bubble(1, 1) <= 3;"),
        WrongArguments,
        "the costs of F, I and W",
    );
    header(&edit("place: |s| s;", "place: |s| s; expect bubble(1, 0 - 1, 1) <= 3;"), Header, "a cost is -1");
    header(&edit("place: |s| s;", "place: |s| s; bytes(tape = |_| 3);"), Header, "and a budget");
    header(&edit("place: |s| s;", "place: |s| s; coalesce: 0;"), Header, "`coalesce:` is 0");
    header(&edit("place: |s| s;", "place: |s| s; F(0, 0);"), Syntax, "outside `rank");
    header(&edit("rank |r|", "rank |r, q|"), WrongArguments, "`rank` has one variable");
    header(&edit("t<P, M>;", "t<P, M> for (2, 4), (2);"), Instance, "this instance has 1 value");
    header(&edit("t<P, M>;", "t<P, M> for (2, N);"), Instance, "integer literals");
    header(&edit("t<P, M>;", "t<P, M> for (2, 4), (2, 4);"), Instance, "declared twice");
    header(&edit("stages: P;", "stage: P;"), Header, "did you mean `stages`?");
    header(&edit("t<P, M>;", "t<P, M>"), Syntax, "expected `;`, found `ranks`");
    header("t<P, M>;", Header, "add `ranks: P;`");
    assert_eq!(refused(&good, &[2]).codes, [Instance]);
}

#[test]
fn deep_nesting_is_refused_not_followed() {
    let deep = format!("F(r, {}1{});", "(".repeat(5000), ")".repeat(5000));
    assert_eq!(refused(&with_body(&deep), &[2, 4]).codes, [LimitExceeded]);
    let long = format!("F(r, 0{});", " + 1".repeat(50_000));
    assert_eq!(refused(&with_body(&long), &[2, 4]).codes, [LimitExceeded]);
    let blocks = format!("{}{}", "{ ".repeat(5000), "}".repeat(5000));
    assert_eq!(refused(&with_body(&blocks), &[2, 4]).codes, [LimitExceeded]);
    let minus = format!("F(r, {}1);", "-".repeat(50_000));
    assert_eq!(refused(&with_body(&minus), &[2, 4]).codes, [LimitExceeded]);
    let mut chain = "let f0 = |a| a + 1;\n".to_owned();
    for n in 1..20_000 {
        chain += &format!("let f{n} = |a| f{}(a);\n", n - 1);
    }
    assert_eq!(refused(&with_body(&chain), &[2, 4]).codes[0], LimitExceeded);
}

#[test]
fn every_broken_statement_is_reported() {
    let Refused { codes, text, .. } = refused(
        &with_body("let x = ;\nF(r, x);\nloop { I(r, y); }\nmatch r { }\nW(r, m +);\nP = 1;\nlet z = break;\nB(r, z);"),
        &[2, 4],
    );
    assert_eq!(codes, [Syntax, NotInLanguage, UnknownName, NotInLanguage, Syntax, Immutable, NotInLanguage], "{text}");
}
