//! Compute-only CSV: any text is refused with a report that can be drawn, or checked without panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qeffect_core::check::{Options, check};
use qeffect_core::text::{read_csv, write_csv};
use qeffect_view::report::plain;

fuzz_target!(|text: &str| {
    let (schedule, map) = read_csv("fuzz", "fuzz.csv", text);
    match schedule.and_then(|schedule| check(schedule, &Options::AT_START)) {
        Ok(checked) => {
            if let Ok(written) = write_csv(&checked.schedule) {
                let (back, _) = read_csv("fuzz", "fuzz.csv", &written);
                assert_eq!(back.expect("what is written reads").starts.len(), checked.schedule.starts.len());
            }
        }
        Err(report) => drop(plain(&report, &map)),
    }
});
