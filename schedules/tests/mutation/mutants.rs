//! Single changes of a schedule.

use std::borrow::Cow;

use qeffect_core::action::{Item, Kind};
use qeffect_core::ids::Rank;
use qeffect_core::lang;
use qeffect_core::schedule::Schedule;

fn marker(item: &Item) -> bool {
    matches!(item.kind, Kind::OverlapBegin | Kind::OverlapBranch | Kind::OverlapEnd)
}

fn with(base: &Schedule, programs: Vec<Vec<Item>>) -> Schedule {
    let mut starts = vec![0];
    for program in &programs {
        starts.push(starts[starts.len() - 1] + program.len() as u32);
    }
    Schedule { items: Cow::Owned(programs.concat()), starts: Cow::Owned(starts), ..base.clone() }
}

/// Every drop, every duplicate (beside the action, and at the end of the program), every swap of neighbours
/// in a rank's program and of actions at the same place of two ranks' programs. Markers of overlaps stay.
pub fn all(base: &Schedule) -> Vec<(String, Schedule)> {
    let programs: Vec<Vec<Item>> = (0..base.ranks).map(|rank| base.rank(Rank(rank)).to_vec()).collect();
    let mut mutants = Vec::new();
    let mut push = |what: String, programs: Vec<Vec<Item>>| mutants.push((what, with(base, programs)));
    for (rank, program) in programs.iter().enumerate() {
        let actions: Vec<usize> = (0..program.len()).filter(|at| !marker(&program[*at])).collect();
        for (n, at) in actions.iter().copied().enumerate() {
            let item = program[at];
            let mut changed = programs.clone();
            changed[rank].remove(at);
            push(format!("{item} dropped"), changed);
            let mut changed = programs.clone();
            changed[rank].insert(at, item);
            push(format!("{item} doubled"), changed);
            let mut changed = programs.clone();
            changed[rank].push(item);
            push(format!("{item} once more at the end"), changed);
            if let Some(next) = actions.get(n + 1) {
                let mut changed = programs.clone();
                changed[rank].swap(at, *next);
                push(format!("{item} and {} swapped", program[*next]), changed);
            }
            for other in rank + 1..programs.len() {
                let Some(there) = programs[other].get(at).filter(|there| !marker(there)) else { continue };
                let mut changed = programs.clone();
                changed[rank][at] = *there;
                changed[other][at] = item;
                push(format!("{item} and {there} of rank {other} swapped"), changed);
            }
        }
    }
    mutants
}

/// Two ranks with two or three microbatches: small enough for every change there is.
pub fn is_small(base: &Schedule) -> bool {
    base.ranks == 2 && base.microbatches <= 3
}

/// [`everything`] of small schedules, [`all`] of others.
pub fn of(base: &Schedule) -> Vec<(String, Schedule)> {
    if is_small(base) { everything(base) } else { all(base) }
}

/// Every drop, every duplicate at every place of its program, every swap within one, and those of [`all`] between two.
pub fn everything(base: &Schedule) -> Vec<(String, Schedule)> {
    let mut mutants = all(base);
    let programs: Vec<Vec<Item>> = (0..base.ranks).map(|rank| base.rank(Rank(rank)).to_vec()).collect();
    for (rank, program) in programs.iter().enumerate() {
        let actions: Vec<usize> = (0..program.len()).filter(|at| !marker(&program[*at])).collect();
        for (n, at) in actions.iter().copied().enumerate() {
            // Right after itself is right before itself, and nothing stands between an overlap and its first branch.
            let known = |to: usize| to == at || to == at + 1 || to == program.len();
            let places = |to: &usize| !known(*to) && (*to == 0 || program[*to - 1].kind != Kind::OverlapBegin);
            for to in (0..program.len()).filter(places) {
                let mut changed = programs.clone();
                changed[rank].insert(to, program[at]);
                mutants.push((format!("{} once more at {to}", program[at]), with(base, changed)));
            }
            for other in actions[n + 1..].iter().skip(1) {
                let mut changed = programs.clone();
                changed[rank].swap(at, *other);
                mutants.push((format!("{} and {} swapped", program[at], program[*other]), with(base, changed)));
            }
        }
    }
    mutants
}

/// Small programs that write refresh, reduce and commit themselves.
pub fn with_versions() -> Vec<Schedule> {
    let bodies = [
        "refresh(r); for m in 0..M { F(r, m); } for m in 0..M { B(r, m); } reduce(r); commit;",
        "refresh(r); for m in 0..M { F(r, m); I(r, m); } for m in 0..M { W(r, m); } reduce(r); commit;",
        "refresh(r); F(r, 0); for m in 1..M { F(r, m); } for m in 0..M { I(r, m); W(r, m); } reduce(r); commit;",
    ];
    let one = bodies.iter().map(|body| written(1, 2, "stages: P; place: |s| s;", body));
    let two = "refresh(0); F(0, 0); F(0, 1); refresh(1); F(1, 0); F(1, 1); B(1, 0); B(1, 1); reduce(1); B(0, 0);
               B(0, 1); reduce(0); commit;";
    one.chain([written(1, 2, "stages: 2; place: |_| 0;", two)]).collect()
}

/// Schedules that recompute some of their forwards.
pub fn with_recomputation() -> Vec<Schedule> {
    let stages = "stages: P; place: |s| s;";
    let all = "for m in 0..M { F(r, m); } for m in 0..M { R(r, m); B(r, m); }";
    let some =
        "for m in 0..M { F(r, m); } for m in 0..M { if r == 0 { R(r, m); } I(r, m); } for m in 0..M { W(r, m); }";
    vec![written(2, 3, stages, all), written(3, 2, stages, some)]
}

fn written(p: i64, m: i64, stages: &str, body: &str) -> Schedule {
    let text = format!("written<P, M>; ranks: P; microbatches: M; {stages} rank |r| {{ {body} }}");
    lang::interpret(&lang::read("written.sched", &text).0.unwrap(), &[p, m]).unwrap()
}
