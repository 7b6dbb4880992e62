//! What `build` refuses at start is named with file, line and column, as the compiler would.

use qeffect_core::code::Code;

/// The line before the schedule.
const ABOVE: u32 = line!() + 1;
qeffect_schedules::schedule! {
    /// Right for two microbatches, and for no more.
    pub two<P, M> for (1, 2);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..min(M, 2) { B(r, m); }
        for m in 2..M { if M == 4 { W(r, m); B(r, m); } }
    }
}

#[test]
fn a_fault_names_its_place() {
    let report = two::build(1, 3).expect_err("a tape is never consumed");
    assert_eq!(report.codes(), [Code::TapeNeverConsumed]);
    let at = format!("{}:{}:25", file!(), ABOVE + 10);
    assert_eq!(report.diagnostics[0].at.as_deref(), Some(at.as_str()));
    assert!(report.to_string().contains(&format!("\n  --> {at}")), "{report}");
    // Values that the language refuses have a place as well.
    let report = two::build(0, 3).expect_err("no rank");
    assert!(report.to_string().contains(&format!("{}:", file!())), "{report}");
    // And so have the other places of a fault.
    let report = two::build(1, 4).expect_err("work consumed before it is made");
    let labels: Vec<&str> = report.diagnostics.iter().flat_map(|d| &d.labels).map(|l| l.text.as_str()).collect();
    assert!(labels.iter().any(|text| text.contains(&format!("at {}:{}:", file!(), ABOVE + 12))), "{report}");
}
