//! The constant expression of a program compiles, and is the program.

use crate::lang::ast::Program;
use crate::lang::{constant, lex, parse};

/// Every construct of the language once.
const EVERYTHING: &str = include_str!("everything.sched");

#[allow(clippy::all)]
static EMBEDDED: Program = {
    use crate::lang::embed::*;
    include!("everything.rs.in")
};

#[test]
fn the_embedded_program_is_the_parsed_one() {
    let parsed = parse(&lex("everything.sched", EVERYTHING).0).into_result().unwrap();
    let text = constant(&parsed);
    if std::env::var_os("QEFFECT_BLESS").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/lang/tests/everything.rs.in"), &text).unwrap();
    }
    assert!(text == include_str!("everything.rs.in"), "run this test with QEFFECT_BLESS=1 and read the difference");
    assert_eq!(EMBEDDED, parsed);
}
