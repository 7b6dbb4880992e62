//! Finer commands for devices that run commands of a list in parallel.

use crate::cmd::Cmd;
use crate::device::Buf;

/// Cells that are rolled by one command: about those of a block, which are used shortly after each other.
const CELLS: usize = 4;

/// Splits each roll of a whole bank: the cells of a block then wait for the last use of these cells, not of the whole stage,
/// and the next microbatch enters the block as soon as the one before it has left.
pub(crate) fn split_rolls(cmds: Vec<Cmd>, elements: &dyn Fn(Buf) -> Option<usize>) -> Vec<Cmd> {
    let mut split = Vec::with_capacity(cmds.len());
    for cmd in cmds {
        match cmd {
            Cmd::Roll { scales, history, cells, rule, unless } => {
                let end = elements(scales).map_or(cells.end, |all| cells.end.min(all));
                split.extend((cells.start..end).step_by(CELLS).map(|first| Cmd::Roll {
                    scales,
                    history,
                    cells: first..(first + CELLS).min(end),
                    rule,
                    unless,
                }));
            }
            cmd => split.push(cmd),
        }
    }
    split
}
