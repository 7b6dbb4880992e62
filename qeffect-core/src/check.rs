//! The checker: judges an unrolled schedule, phase after phase.
//!
//! | phase | family | proves |
//! |---|---|---|
//! | [`placement`] | QE06 | every stage has a rank, every F runs once, where its stage lives |
//! | [`ownership`] | QE01 | every tape and work is made once, consumed once, in that order |
//! | [`order`] | QE02 | branches that may run at once write no common state and do not need each other |
//! | [`version`] | QE03 | no F reads a stale weight cache, commit comes last |
//! | [`comm`] | QE04 | every rank ends: no cycle of waits; both ends of a channel agree |
//! | [`resources`] | QE05 | declared bounds and contracts hold |
//!
//! Each phase may rely on the phases before it, and the first that finds a fault ends the check
//! with all of its faults. (The language phase, QE07, is the interpreter's.)

pub mod comm;
pub mod messages;
pub mod order;
pub mod ownership;
pub mod placement;
pub mod progress;
pub mod resources;
pub mod version;

use std::borrow::Cow;

use crate::action::Item;
use crate::coalesce::coalesce;
use crate::diag::{Diagnostic, Place, Report};
use crate::ids::Rank;
use crate::index::Index;
use crate::lower::lower;
use crate::plan::{Checked, Proved};
use crate::schedule::Schedule;
use crate::sim::{self, CostModel};

/// What the caller of a check decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Whether an `expect` that does not hold is a fault (at compile time) or a note (at start).
    pub expect_is_fault: bool,
    /// Recorded in [`Checked`].
    pub proved: Proved,
}

impl Options {
    /// As `schedule!` checks declared instances.
    pub const COMPILE_TIME: Options = Options { expect_is_fault: true, proved: Proved::AtCompileTime };
    /// As programs check what they build at start.
    pub const AT_START: Options = Options { expect_is_fault: false, proved: Proved::AtStart };
}

/// Checks and lowers a schedule.
///
/// # Errors
///
/// All faults of the first failing phase.
pub fn check(schedule: Schedule, options: &Options) -> Result<Checked, Report> {
    settle(placement::check(&schedule))?;
    let mut index = Index::new(&schedule);
    settle(ownership::check(&schedule, &index))?;
    settle(order::check(&schedule, &index))?;
    settle(version::check(&schedule, &index))?;
    // Coalescing moves weight gradients down to their group's last one: what is proved so far stays
    // true. Faults from here on name places of the rewritten program, whose loop values are lost.
    let written = schedule.coalesce <= 1;
    let schedule = coalesce(schedule);
    if !written {
        index = Index::new(&schedule);
    }
    let settle = |faults: Vec<Diagnostic>| {
        settle(faults).map_err(|report| if written { report } else { report.without_items() })
    };
    let timeline = match sim::run(&schedule, &index, &CostModel::unit()) {
        Ok(timeline) => timeline,
        Err(blocked) => return Err(settle(comm::deadlocks(&schedule, &blocked)).err().unwrap_or_default()),
    };
    settle(comm::check(&schedule))?;
    let plan = lower(&schedule, &index, &timeline);
    let (faults, notes) = resources::check(&schedule, &index, &plan, options);
    settle(faults)?;
    let order_dependent = order::depends_on_order(&schedule);
    Ok(Checked { schedule, plan, order_dependent, notes: Cow::Owned(notes), proved: options.proved })
}

fn settle(faults: Vec<Diagnostic>) -> Result<(), Report> {
    if faults.is_empty() { Ok(()) } else { Err(Report::from_faults(faults)) }
}

/// The place of an item, by rank and index within the rank.
pub(crate) fn place(rank: Rank, at: usize, item: &Item) -> Place {
    Place { origin: item.origin, item: Some((rank, at as u32)) }
}

/// The place of an item, by index into [`Schedule::items`].
pub(crate) fn place_of(schedule: &Schedule, at: u32) -> Place {
    let (rank, index) = schedule.locate(at);
    place(rank, index as usize, &schedule.items[at as usize])
}

/// `0, 1, 2 and 5 more`: a list for messages, capped.
pub(crate) fn list(numbers: &[u32]) -> String {
    const MOST: usize = 6;
    let shown: Vec<String> = numbers.iter().take(MOST).map(u32::to_string).collect();
    match (numbers.len().saturating_sub(MOST), shown.split_last()) {
        (0, Some((last, rest))) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        (0, _) => shown.join(", "),
        (more, _) => format!("{} and {more} more", shown.join(", ")),
    }
}
