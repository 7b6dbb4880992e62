//! QE0407: what a lowered file says of sharding.
//!
//! `0UNSHARD` gathers the parameters of a stage, `0RESHARD` lets them go. Nothing here is sharded, so
//! the words leave no node; but a file that has one says with it when parameters are whole, and a
//! stage that computes at another time computes with a part of them. Legal: each stage's actions
//! between its `UNSHARD` and its `RESHARD`, as often as one likes, the last `RESHARD` left out.

use std::collections::{HashMap, HashSet};

use super::cell::{Cell, Field, container};
use super::plan::lowered_cell;
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::origin::Origin;

/// What the last word about a stage said.
#[derive(Clone, Copy)]
enum Parameters {
    Whole(Origin),
    Sharded(Origin),
}

/// Judges the rows of a file whose cells are all legal; none has sharding words, or all are held to them.
pub(super) fn check(rows: &[Vec<Field<'_>>]) -> Vec<Diagnostic> {
    let sharding = |field: &Field<'_>| field.text.ends_with("UNSHARD") || field.text.ends_with("RESHARD");
    if !rows.iter().flatten().any(sharding) {
        return Vec::new();
    }
    let mut faults = Vec::new();
    for row in rows {
        let mut state: HashMap<u32, Parameters> = HashMap::new();
        // The first of a stage speaks for those after it.
        let mut told: HashSet<u32> = HashSet::new();
        for Field { text, origin } in row {
            let parts = container(text).map_or_else(|| vec![*text], |(parts, _)| parts);
            for (part, Cell { stage, word, .. }) in
                parts.iter().filter_map(|part| Some((part, lowered_cell(part).ok()?)))
            {
                let now = state.get(&stage).copied();
                let what = match (word, now) {
                    ("UNSHARD", Some(Parameters::Whole(since))) => {
                        let message = format!("`{part}` stands where stage {stage} is unsharded");
                        Some((message, Some((since, "unsharded here")), "remove one of them".to_owned()))
                    }
                    ("RESHARD", Some(Parameters::Sharded(since))) => {
                        let message = format!("`{part}` stands where stage {stage} is sharded");
                        Some((message, Some((since, "resharded here")), "remove one of them".to_owned()))
                    }
                    ("RESHARD", None) => {
                        let message = format!("`{part}` stands where stage {stage} is sharded");
                        Some((
                            message,
                            None,
                            format!("write `{stage}UNSHARD` before the first action of stage {stage}"),
                        ))
                    }
                    ("F" | "I" | "W" | "B" | "R" | "JOIN", None) if told.insert(stage) => {
                        let message = format!("`{part}` runs before stage {stage} is unsharded");
                        Some((message, None, format!("write `{stage}UNSHARD` before it")))
                    }
                    ("F" | "I" | "W" | "B" | "R" | "JOIN", Some(Parameters::Sharded(since))) if told.insert(stage) => {
                        let help = format!("write `{stage}RESHARD` behind the last action of stage {stage}");
                        Some((
                            format!("`{part}` runs after stage {stage} is resharded"),
                            Some((since, "resharded here")),
                            help,
                        ))
                    }
                    _ => None,
                };
                if let Some((message, label, help)) = what {
                    let fault = Diagnostic::new(Code::ShardMisplaced, *origin, message).help(help);
                    faults.push(label.into_iter().fold(fault, |fault, (since, role)| fault.label(since, role)));
                }
                match word {
                    "UNSHARD" => drop(state.insert(stage, Parameters::Whole(*origin))),
                    "RESHARD" => drop(state.insert(stage, Parameters::Sharded(*origin))),
                    _ => {}
                }
            }
        }
    }
    faults
}
