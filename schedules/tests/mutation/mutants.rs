//! Single changes of a schedule.

use std::borrow::Cow;

use qeffect_core::action::{Item, Kind};
use qeffect_core::ids::Rank;
use qeffect_core::lang;
use qeffect_core::schedule::Schedule;

fn marker(item: &Item) -> bool {
    matches!(item.kind, Kind::OverlapBegin | Kind::OverlapBranch | Kind::OverlapEnd)
}

/// A single change of a schedule. Ranks and places in their programs, as they are before it.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    /// The action is gone.
    Drop { rank: usize, at: usize },
    /// The action is there once more, in front of what stood at `to`.
    Double { rank: usize, at: usize, to: usize },
    /// Two actions of two programs (or of one) stand in each other's places.
    Swap { rank: usize, at: usize, other: usize, there: usize },
}

impl Change {
    /// The schedule with the change.
    pub fn of(self, base: &Schedule) -> Schedule {
        let start = |rank: usize| base.starts[rank] as usize;
        let (mut items, mut starts) = (base.items.to_vec(), base.starts.to_vec());
        match self {
            Change::Drop { rank, at } => {
                items.remove(start(rank) + at);
                starts[rank + 1..].iter_mut().for_each(|start| *start -= 1);
            }
            Change::Double { rank, at, to } => {
                items.insert(start(rank) + to, items[start(rank) + at]);
                starts[rank + 1..].iter_mut().for_each(|start| *start += 1);
            }
            Change::Swap { rank, at, other, there } => items.swap(start(rank) + at, start(other) + there),
        }
        Schedule { items: Cow::Owned(items), starts: Cow::Owned(starts), ..base.clone() }
    }

    /// Whether it is any change of a [small](is_small) schedule, or one that moves nothing far: a drop, a duplicate beside
    /// the action or at the end of its program, a swap of neighbours or between two programs.
    pub fn is_near(self, base: &Schedule) -> bool {
        let program = |rank: usize| base.rank(Rank(rank as u32));
        is_small(base)
            || match self {
                Change::Drop { .. } => true,
                Change::Double { rank, at, to } => to == at || to == program(rank).len(),
                Change::Swap { rank, at, other, there } => {
                    rank != other || program(rank)[at + 1..there].iter().all(marker)
                }
            }
    }

    /// What is done, in words.
    pub fn describe(self, base: &Schedule) -> String {
        let item = |rank: usize, at: usize| base.rank(Rank(rank as u32))[at];
        match self {
            Change::Drop { rank, at } => format!("{} of rank {rank} dropped", item(rank, at)),
            Change::Double { rank, at, to } => format!("{} of rank {rank} once more at {to}", item(rank, at)),
            Change::Swap { rank, at, other, there } => {
                format!("{} of rank {rank} and {} of rank {other} swapped", item(rank, at), item(other, there))
            }
        }
    }
}

/// Two ranks with two or three microbatches.
fn is_small(base: &Schedule) -> bool {
    base.ranks == 2 && base.microbatches <= 3
}

/// Every drop; every duplicate, at every place of the action's program; every swap of two actions of one program, and of
/// two actions that stand at the same place of two programs. Markers of overlaps stay, and no action comes to stand
/// outside the branches of an overlap.
pub fn of(base: &Schedule) -> Vec<Change> {
    let programs: Vec<&[Item]> = (0..base.ranks).map(|rank| base.rank(Rank(rank))).collect();
    let mut changes = Vec::new();
    for (rank, program) in programs.iter().enumerate() {
        let actions: Vec<usize> = (0..program.len()).filter(|at| !marker(&program[*at])).collect();
        for (n, at) in actions.iter().copied().enumerate() {
            changes.push(Change::Drop { rank, at });
            // Right after itself is right before itself, and nothing stands between an overlap and its first branch.
            let place = |to: &usize| {
                *to != at + 1 && (*to == 0 || *to == program.len() || program[*to - 1].kind != Kind::OverlapBegin)
            };
            changes.extend((0..=program.len()).filter(place).map(|to| Change::Double { rank, at, to }));
            changes.extend(actions[n + 1..].iter().map(|there| Change::Swap { rank, at, other: rank, there: *there }));
            let faces = |other: &usize| programs[*other].get(at).is_some_and(|there| !marker(there));
            let others = (rank + 1..programs.len()).filter(faces);
            changes.extend(others.map(|other| Change::Swap { rank, at, other, there: at }));
        }
    }
    changes
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
