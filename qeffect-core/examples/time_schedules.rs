//! Times what `qeffect schedule check` does with PyTorch's schedule files, without the start of a process.
//!
//! `cargo run --release -p qeffect-core --example time_schedules FILE..`: for each compute-only CSV the best
//! time of many runs, one thread, as a line of JSON: `read` from text to schedule, `check` all phases, the run
//! at unit costs (the deadlock test) and lowering included, `simulate` that run alone. Microseconds.

use std::hint::black_box;
use std::time::{Duration, Instant};

use qeffect_core::check::{Options, check};
use qeffect_core::index::Index;
use qeffect_core::sim::{self, CostModel};
use qeffect_core::text::read_csv;

/// Best time of runs for about half a second, at least ten.
fn best<T>(mut run: impl FnMut() -> T) -> f64 {
    let begin = Instant::now();
    let mut least = Duration::MAX;
    let mut runs = 0;
    while runs < 10 || begin.elapsed() < Duration::from_millis(500) {
        let start = Instant::now();
        let result = black_box(run());
        least = least.min(start.elapsed());
        // Dropping the result is not part of the time, as it is not of PyTorch's.
        drop(result);
        runs += 1;
    }
    least.as_secs_f64() * 1e6
}

fn main() {
    for file in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{file}: {error}"));
        let read = || read_csv("schedule", &file, &text).0.unwrap_or_else(|report| panic!("{file}: {report}"));
        let schedule = read();
        let index = Index::new(&schedule);
        let all = best(|| check(read(), &Options::AT_START).unwrap_or_else(|report| panic!("{file}: {report}")));
        let read = best(read);
        let simulate = best(|| sim::run(&schedule, &index, &CostModel::unit()));
        println!(
            "{{\"file\": {file:?}, \"actions\": {}, \"read\": {read:.2}, \"simulate\": {simulate:.2}, \"all\": {all:.2}}}",
            schedule.items.len()
        );
    }
}
