//! Which variables are visible where, with which values: what messages say about an instance.

use super::Machine;
use crate::diag::{Place, Report};
use crate::ids::Rank;
use crate::lang::ast::*;

/// The variables that are visible at an item, outermost first, with their values there.
///
/// `index` counts the rank's items as [`interpret`](super::interpret) emits them. Empty if there is no such item.
pub fn environment(program: &Program, params: &[i64], rank: Rank, index: u32) -> Vec<(String, i64)> {
    let name = |v: &Visible| (program.text(v.name).to_owned(), v.value);
    visible(program, params, rank, index).iter().map(name).collect()
}

/// Adds to each fault that belongs to an item which instance and which loop values it had, and to
/// each label that has the same place as its fault how its values differ.
pub fn annotate(report: &mut Report, program: &Program, params: &[i64]) {
    let instance = instance_text(program, params);
    for fault in &mut report.diagnostics {
        let here = fault.primary.item.map(|(rank, index)| varying(program, &visible(program, params, rank, index)));
        let same = |place: Place| place.origin == fault.primary.origin && place.item != fault.primary.item;
        for label in &mut fault.labels {
            if let Some((rank, index)) = label.place.item.filter(|_| same(label.place)) {
                let there = varying(program, &visible(program, params, rank, index));
                if !there.is_empty() {
                    label.text.push_str(&format!(", with {there}"));
                }
            }
        }
        fault.notes.extend(context_note(&instance, here.as_deref().unwrap_or("")));
    }
}

pub(super) fn context_note(instance: &str, here: &str) -> Option<String> {
    match (instance.is_empty(), here.is_empty()) {
        (true, true) => None,
        (true, false) => Some(format!("here {here}")),
        (false, true) => Some(format!("instance {instance}")),
        (false, false) => Some(format!("instance {instance}; here {here}")),
    }
}

/// `P = 2, M = 8`
pub(super) fn instance_text(program: &Program, params: &[i64]) -> String {
    list(program.params.iter().zip(params).map(|(p, v)| (program.text(p.name), *v)))
}

fn list<'a>(values: impl Iterator<Item = (&'a str, i64)>) -> String {
    values.map(|(name, value)| format!("{name} = {value}")).collect::<Vec<_>>().join(", ")
}

/// The variables that take several values: the rank, loop variables, `mut` ones and arguments.
pub(super) fn varying(program: &Program, visible: &[Visible]) -> String {
    list(visible.iter().filter(|v| v.varies).map(|v| (program.text(v.name), v.value)))
}

fn visible(program: &Program, params: &[i64], rank: Rank, index: u32) -> Vec<Visible> {
    if params.len() != program.params.len() {
        return Vec::new();
    }
    let mut m = Machine::new(program, params);
    m.quiet = true;
    if m.block(program.lets).is_err() {
        return Vec::new();
    }
    m.limit = index as usize;
    match m.rank(rank.0) {
        Err(stop) => {
            let mut seen = stop.visible;
            let lets = Machine::lets(program.statements(program.lets));
            m.see(&mut seen, lets);
            seen.reverse();
            seen
        }
        Ok(()) => Vec::new(),
    }
}

/// A variable and its value, as seen from inside.
pub(super) struct Visible {
    pub name: NameId,
    pub value: i64,
    pub varies: bool,
}
