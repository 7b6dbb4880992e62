//! JSON: any text is refused with a report that can be drawn, or is written back the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qeffect_core::check::{Options, check};
use qeffect_view::json::{read_schedule, write_schedule};
use qeffect_view::report::plain;

fuzz_target!(|text: &str| {
    let (schedule, map) = read_schedule("fuzz.json", text);
    match schedule {
        Ok(schedule) => {
            let written = write_schedule(&schedule);
            let (back, _) = read_schedule("fuzz.json", &written);
            assert_eq!(write_schedule(&back.expect("what is written reads")), written);
            if let Err(report) = check(schedule, &Options::AT_START) {
                plain(&report, &map);
            }
        }
        Err(report) => drop(plain(&report, &map)),
    }
});
