//! What an expansion of `schedule!` names and calls.
//!
//! Expansions must compile wherever the user puts them, so they reach every type, also `Result` and
//! `Cow`, through this module and never through the names in scope. Not for use by hand.

pub use core::option::Option;
pub use core::result::Result;

pub use crate::diag::Report;
pub use crate::lang::{Program, embed};
use crate::origin::Origin;
pub use crate::plan::Checked;
pub use crate::shadow;

/// The type of a schedule's parameters: one that no `type i64` of the user shadows.
pub type Value = i64;

/// The names of a checked schedule's tables.
pub mod data {
    pub use core::option::Option::{None, Some};
    pub use std::borrow::Cow;

    pub use crate::action::Item;
    pub use crate::ids::{Rank, Stage};
    pub use crate::origin::Origin;
    pub use crate::packed::{items, nodes};
    pub use crate::plan::{Checked, Direction, Edge, Node, Peaks, Plan, Proved};
    pub use crate::schedule::{
        Bounds, Bytes, Compare, Costs, Expect, HeaderOrigins, Measure, Schedule, Transport, Update,
    };

    /// An edge from plain numbers.
    pub const fn edge(direction: Direction, from: u32, to: u32, from_rank: u32, to_rank: u32, buffers: u32) -> Edge {
        let (from, to) = (Stage(from), Stage(to));
        Edge { direction, from, to, from_rank: Rank(from_rank), to_rank: Rank(to_rank), buffers }
    }
}

/// Where the tokens of a program stand in the file that wrote it.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The file, as the compiler names it.
    pub file: &'static str,
    /// `line:column` of each token, divided by blanks; `-` where it is not known. Read after a fault only.
    pub tokens: &'static str,
}

impl Places {
    fn of(&self, origin: Origin) -> Option<String> {
        let place =
            self.tokens.split(' ').nth(origin.first()).filter(|place| origin.is_some() && place.contains(':'))?;
        Some(format!("{}:{place}", self.file))
    }
}

/// `build` of an expansion.
///
/// # Errors
/// All faults of the first failing phase, with their places in the program's file.
pub fn build(program: &Program, values: &[Value], places: &Places) -> Result<Checked, Report> {
    crate::lang::interpret(program, values)
        .and_then(|schedule| crate::check::check(schedule, &crate::check::Options::AT_START))
        .map_err(|report| report.located(|origin| places.of(origin)))
}

/// A declared instance: its values, and how to get at it.
pub type Declared<'a> = (&'a [Value], fn() -> &'static Checked);

/// `find` of an expansion.
pub fn find(declared: &[Declared<'_>], values: &[Value]) -> Option<&'static Checked> {
    declared.iter().find(|(instance, _)| *instance == values).map(|(_, checked)| checked())
}

/// The body of what was emitted after an error.
///
/// # Panics
/// Always; a program with such a body does not compile.
#[cold]
pub fn refused() -> ! {
    panic!("this schedule was refused by the compiler")
}
