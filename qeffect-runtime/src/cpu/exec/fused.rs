//! Fused commands, by their parts.

use super::{Result, Workspace};
use crate::cmd::fused::Fused;
use crate::cpu::table::Table;
use crate::device::{Buf, BufSpec};

pub(super) fn run(table: &mut Table, workspace: &mut Workspace, fused: &Fused) -> Result {
    let scratch = match fused.needs_scratch() {
        true => scratch(table, workspace, fused)?,
        false => fused.producer.input(),
    };
    fused.parts(scratch).iter().try_for_each(|part| super::run(table, workspace, part))
}

/// Memory for the values that nobody else reads: one buffer per type and size.
fn scratch(table: &mut Table, workspace: &mut Workspace, fused: &Fused) -> Result<Buf> {
    let key = (table.spec(fused.producer.input())?.dtype, fused.rows, fused.cols);
    if let Some((_, buf)) = workspace.values.iter().find(|(known, _)| *known == key) {
        return Ok(*buf);
    }
    let (dtype, rows, cols) = key;
    let buf = table.alloc(BufSpec::new("values of a fused command", dtype, rows, cols))?;
    workspace.values.push((key, buf));
    Ok(buf)
}
