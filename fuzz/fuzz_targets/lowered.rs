//! Lowered programs: as for CSV, with their communication.
#![no_main]

use libfuzzer_sys::fuzz_target;
use qeffect_core::check::{Options, check, messages};
use qeffect_core::diag::Report;
use qeffect_core::text::{read_plan, write_plan};
use qeffect_view::report::plain;

fuzz_target!(|text: &str| {
    let (raw, map) = read_plan("fuzz", "fuzz.csv", text);
    let judged = raw.and_then(|raw| {
        let placement = raw.schedule.placement.clone();
        let checked = check(raw.schedule, &Options::AT_START)?;
        let faults = messages::check(&raw.nodes, &placement);
        if faults.is_empty() { Ok(checked) } else { Err(Report::from_faults(faults)) }
    });
    match judged {
        Ok(checked) => {
            drop(read_plan("fuzz", "fuzz.csv", &write_plan(&checked.plan)).0.expect("what is written reads"))
        }
        Err(report) => drop(plain(&report, &map)),
    }
});
