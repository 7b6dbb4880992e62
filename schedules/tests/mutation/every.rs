//! Every mutant of some schedules, on all cores.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{available_parallelism, scope};

use qeffect_core::schedule::Schedule;

use crate::mutants::{self, Change};

/// How many mutants a thread takes at a time.
const CHUNK: usize = 64;

/// Judges every mutant of `bases`, told whether the change [is near](Change::is_near), and counts the answers. Fails with the
/// message about the first mutant in order that has one, however many threads there are.
pub fn mutant<K: Ord + Send>(
    bases: &[Schedule],
    judge: impl Fn(&Schedule, bool) -> Result<K, String> + Sync,
) -> BTreeMap<K, usize> {
    let work: Vec<(&Schedule, Change)> =
        bases.iter().flat_map(|base| mutants::of(base).into_iter().map(move |change| (base, change))).collect();
    let next = AtomicUsize::new(0);
    // Chunks are taken in order and a taken one is judged up to its first fault: the first of all is always found.
    let worker = || {
        let mut counts: BTreeMap<K, usize> = BTreeMap::new();
        loop {
            let start = next.fetch_add(CHUNK, Ordering::Relaxed);
            let Some(rest) = work.get(start..).filter(|rest| !rest.is_empty()) else { return Ok(counts) };
            for (n, (base, change)) in rest.iter().take(CHUNK).enumerate() {
                match judge(&change.of(base), change.is_near(base)) {
                    Ok(answer) => *counts.entry(answer).or_default() += 1,
                    Err(fault) => {
                        next.store(work.len(), Ordering::Relaxed);
                        return Err((start + n, fault));
                    }
                }
            }
        }
    };
    let results: Vec<Result<BTreeMap<K, usize>, (usize, String)>> = scope(|scope| {
        let threads: Vec<_> =
            (0..available_parallelism().map_or(1, NonZero::get)).map(|_| scope.spawn(worker)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    let mut all = BTreeMap::new();
    let mut first: Option<(usize, String)> = None;
    for result in results {
        match result {
            Ok(counts) => counts.into_iter().for_each(|(answer, n)| *all.entry(answer).or_default() += n),
            Err(fault) => first = Some(first.map_or(fault.clone(), |first| first.min(fault))),
        }
    }
    if let Some((at, fault)) = first {
        let (base, change) = work[at];
        panic!(
            "{} {:?}, {}: {fault}\n{}",
            base.name,
            base.params,
            change.describe(base),
            crate::front_ends::printed(&change.of(base))
        );
    }
    all
}
