//! The schedule language: parser, interpreter and checker of any program, at small parameters.
//!
//! The interpreter's own limits are far higher than what a fuzzer has time for; programs that ask for
//! many rounds are left to the tests of those limits.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qeffect_core::check::{Options, check};
use qeffect_core::lang::{annotate, interpret, print, read};
use qeffect_view::report::plain;

fuzz_target!(|text: &str| {
    if text.len() > 4096 || text.split(|c: char| !c.is_ascii_digit()).any(|number| number.len() > 2) {
        return;
    }
    let (program, map) = read("fuzz.sched", text);
    let program = match program {
        Ok(program) => program,
        Err(report) => return drop(plain(&report, &map)),
    };
    let printed = print(&program);
    assert_eq!(print(&read("again.sched", &printed).0.expect("what is printed reads")), printed);
    let values: Vec<i64> = (0..program.params.len() as i64).map(|n| n + 2).collect();
    if let Err(mut report) = interpret(&program, &values).and_then(|schedule| check(schedule, &Options::AT_START)) {
        annotate(&mut report, &program, &values);
        plain(&report, &map);
    }
});
