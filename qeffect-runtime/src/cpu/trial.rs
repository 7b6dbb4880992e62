//! A list of commands is tried out before it is kept: what would be refused is refused then, and not half way through a
//! replay.
//!
//! It runs once, on scratch memory in the place of every buffer that it touches. So the very checks of [`exec`] judge it,
//! for every type and size, and live buffers are neither read nor written.

use std::collections::BTreeSet;

use super::table::{Data, Table};
use super::{Workspace, exec};
use crate::cmd::Cmd;
use crate::device::{Buf, DeviceError};

type Result<T = (), E = DeviceError> = std::result::Result<T, E>;

/// Refuses a list of which a command would be refused.
pub(super) fn try_out(table: &mut Table, cmds: &[Cmd]) -> Result {
    let mut touched = BTreeSet::new();
    for cmd in cmds {
        let accesses = cmd.effects(|buf| table.spec(buf).ok().map(|spec| spec.elements()));
        cmd.check_aliases(&accesses, |buf| table.spec(buf))?;
        touched.extend(accesses.into_iter().map(|access| access.buf));
    }
    table.on_scratch(&touched, |table| {
        let mut workspace = Workspace::default();
        cmds.iter().try_for_each(|cmd| {
            prepare(table, &mut workspace, cmd)?;
            exec::run(table, &mut workspace, cmd)
        })
    })?
}

/// Makes scratch memory such that the command does all that it can do.
fn prepare(table: &mut Table, workspace: &mut Workspace, cmd: &Cmd) -> Result {
    let mut clear = |table: &mut Table, flag: Buf| exec::run(table, workspace, &Cmd::Fill { dst: flag, value: 0.0 });
    match cmd {
        // Skipped if the flag is set.
        Cmd::AdamW { unless, .. } | Cmd::Advance { unless, .. } | Cmd::Roll { unless: Some(unless), .. } => {
            clear(table, *unless)
        }
        // Done if the flag is set.
        Cmd::CopyIf { src, dst, .. } => exec::run(table, workspace, &Cmd::Copy { src: *src, dst: *dst }),
        // Tokens are all the same, and any order sorts them; but each row stands in it once.
        Cmd::EmbedGrad { order, .. } => {
            if let Data::U32(rows) = table.data_mut(*order)? {
                rows.iter_mut().zip(0..).for_each(|(row, at)| *row = at);
            }
            Ok(())
        }
        _ => Ok(()),
    }
}
