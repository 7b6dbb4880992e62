//! What lanes are filled with: commands, or pieces of one that need not run one after the other.
//!
//! The backward of a norm gives the gradient of its rows, which the next product waits for, and sums over all rows, the
//! gradients of gain and bias, which nobody waits for before the optimizer. They are two pieces.

use crate::cmd::Cmd;
use crate::cmd::effects::{Access, Mode};
use crate::cmd::fused::Producer;
use crate::device::Buf;

/// Which part of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Piece {
    /// All of it.
    All,
    /// Of the backward of a norm: the gradient of the rows, and what is taken from it.
    Rows,
    /// The gradients of gain and bias.
    Vectors,
}

impl Piece {
    /// Whether it makes the gradient of the rows.
    pub(super) const fn has_rows(self) -> bool {
        matches!(self, Piece::All | Piece::Rows)
    }

    /// Whether it makes the gradients of gain and bias.
    pub(super) const fn has_vectors(self) -> bool {
        matches!(self, Piece::All | Piece::Vectors)
    }
}

/// A command or a piece of it, and what that touches.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Unit<'a> {
    pub(super) cmd: &'a Cmd,
    pub(super) piece: Piece,
    pub(super) effects: Vec<Access>,
}

/// A list in units, in its order.
pub(super) fn units<'a>(cmds: &'a [Cmd], elements: &dyn Fn(Buf) -> Option<usize>) -> Vec<Unit<'a>> {
    let mut units = Vec::with_capacity(cmds.len());
    for cmd in cmds {
        let effects = cmd.effects(elements);
        let Some(Norm { read, written }) = norm(cmd) else {
            units.push(Unit { cmd, piece: Piece::All, effects });
            continue;
        };
        let of_vectors = |access: &Access| access.mode == Mode::Write && written.contains(&Some(access.buf));
        let reads = |access: &Access| access.mode == Mode::Read && read.contains(&Some(access.buf));
        let vectors = effects.iter().filter(|access| of_vectors(access) || reads(access)).cloned().collect();
        let rows = effects.into_iter().filter(|access| !of_vectors(access)).collect();
        units.push(Unit { cmd, piece: Piece::Rows, effects: rows });
        units.push(Unit { cmd, piece: Piece::Vectors, effects: vectors });
    }
    units
}

/// The backward of a norm: what its vectors' gradients are made from, and where they go.
struct Norm {
    read: [Option<Buf>; 4],
    written: [Option<Buf>; 2],
}

fn norm(cmd: &Cmd) -> Option<Norm> {
    Some(match *cmd {
        Cmd::LayerNormGrad { dy, x, mean, rstd, gain_grad, bias_grad, .. } => {
            Norm { read: [dy, x, mean, rstd].map(Some), written: [gain_grad, bias_grad].map(Some) }
        }
        Cmd::RmsNormGrad { dy, x, rstd, gain_grad, .. } => {
            Norm { read: [Some(dy), Some(x), Some(rstd), None], written: [Some(gain_grad), None] }
        }
        Cmd::Fused(ref fused) => match fused.producer {
            Producer::LayerNormGrad { dy, x, mean, rstd, gain_grad, bias_grad, .. } => {
                Norm { read: [dy, x, mean, rstd].map(Some), written: [gain_grad, bias_grad].map(Some) }
            }
            Producer::RmsNormGrad { dy, x, rstd, gain_grad, .. } => {
                Norm { read: [Some(dy), Some(x), Some(rstd), None], written: [Some(gain_grad), None] }
            }
            _ => return None,
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_norm_touch_what_the_command_touches_and_do_not_wait_for_each_other() {
        let [dy, x, gain, mean, rstd, dx, gain_grad, bias_grad] = [0, 1, 2, 3, 4, 5, 6, 7].map(Buf);
        let norm = Cmd::LayerNormGrad { dy, x, gain, mean, rstd, dx, gain_grad, bias_grad, cols: 8 };
        let cmds = [Cmd::Add { a: dy, b: x, out: dx }, norm.clone()];
        let found = units(&cmds, &|_| Some(64));
        let pieces: Vec<Piece> = found.iter().map(|unit| unit.piece).collect();
        assert_eq!(pieces, [Piece::All, Piece::Rows, Piece::Vectors]);
        let bufs = |unit: &Unit<'_>, writes| {
            let accesses = unit.effects.iter().filter(|access| (access.mode != Mode::Read) == writes);
            let mut bufs: Vec<Buf> = accesses.map(|access| access.buf).collect();
            bufs.sort_unstable();
            bufs
        };
        assert_eq!((bufs(&found[1], false), bufs(&found[1], true)), (vec![dy, x, gain, mean, rstd], vec![dx]));
        assert_eq!(
            (bufs(&found[2], false), bufs(&found[2], true)),
            (vec![dy, x, mean, rstd], vec![gain_grad, bias_grad])
        );
        let conflict = found[1].effects.iter().any(|a| found[2].effects.iter().any(|b| a.conflicts(b)));
        assert!(!conflict);
    }
}
