//! What lanes are filled with: commands, or pieces of one that need not run one after the other.
//!
//! The backward of a norm gives the gradient of its rows, which the next product waits for, and sums over all rows, the
//! gradients of gain and bias, which nobody waits for before the optimizer. They are two pieces. Of what a fused command takes
//! from the gradient of the rows, transposed codes and column sums are the second piece's, which then follows the first: they
//! are for weight gradients and the optimizer too.

use crate::cmd::Cmd;
use crate::cmd::effects::{Access, Mode};
use crate::cmd::fused::{Outputs, Producer};
use crate::device::Buf;

/// Which part of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Piece {
    /// All of it.
    All,
    /// Of the backward of a norm: the gradient of the rows, and its codes.
    Rows,
    /// What goes down the columns: the gradients of gain and bias, column sums, transposed codes.
    Vectors,
}

impl Piece {
    /// Whether it makes the gradient of the rows.
    pub(super) const fn has_rows(self) -> bool {
        matches!(self, Piece::All | Piece::Rows)
    }

    /// Whether it makes what goes down the columns.
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
        let Some(Norm { read, written, made }) = norm(cmd) else {
            units.push(Unit { cmd, piece: Piece::All, effects });
            continue;
        };
        let of_vectors = |access: &Access| access.mode != Mode::Read && written.contains(&Some(access.buf));
        let reads = |access: &Access| access.mode == Mode::Read && read.contains(&Some(access.buf));
        let mut vectors: Vec<Access> =
            effects.iter().filter(|access| of_vectors(access) || reads(access)).cloned().collect();
        let between = effects.iter().filter(|access| made.contains(&Some(access.buf)));
        vectors.extend(between.map(|made| Access { mode: Mode::Read, ..made.clone() }));
        let rows = effects.into_iter().filter(|access| !of_vectors(access)).collect();
        units.push(Unit { cmd, piece: Piece::Rows, effects: rows });
        units.push(Unit { cmd, piece: Piece::Vectors, effects: vectors });
    }
    units
}

/// The second piece of the backward of a norm: what it reads that was there before and that the first piece makes, and what
/// it writes.
struct Norm {
    read: [Option<Buf>; 4],
    made: [Option<Buf>; 2],
    written: [Option<Buf>; 4],
}

fn norm(cmd: &Cmd) -> Option<Norm> {
    let (read, written, outputs) = match *cmd {
        Cmd::LayerNormGrad { dy, x, mean, rstd, gain_grad, bias_grad, .. } => {
            ([Some(dy), Some(x), Some(rstd), Some(mean)], (gain_grad, Some(bias_grad)), None)
        }
        Cmd::RmsNormGrad { dy, x, rstd, gain_grad, .. } => {
            ([Some(dy), Some(x), Some(rstd), None], (gain_grad, None), None)
        }
        Cmd::Fused(ref fused) => match fused.producer {
            Producer::LayerNormGrad { dy, x, mean, rstd, gain_grad, bias_grad, .. } => {
                ([Some(dy), Some(x), Some(rstd), Some(mean)], (gain_grad, Some(bias_grad)), Some(fused.outputs))
            }
            Producer::RmsNormGrad { dy, x, rstd, gain_grad, .. } => {
                ([Some(dy), Some(x), Some(rstd), None], (gain_grad, None), Some(fused.outputs))
            }
            _ => return None,
        },
        _ => return None,
    };
    let Outputs { values, codes, column_sums } = outputs.unwrap_or_default();
    let transposed = codes.and_then(|codes| codes.transposed);
    let made = [column_sums.and(values), transposed.and(codes.map(|codes| codes.codes))];
    Some(Norm { read, made, written: [Some(written.0), written.1, column_sums, transposed] })
}

#[cfg(test)]
mod tests {
    use qeffect_core::fp8::Fp8 as Format;

    use super::*;
    use crate::cmd::Scalar;
    use crate::cmd::fused::{Codes, Fused};

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
        let conflict = |a: &Unit<'_>, b: &Unit<'_>| a.effects.iter().any(|x| b.effects.iter().any(|y| x.conflicts(y)));
        assert!(!conflict(&found[1], &found[2]));

        // Column sums and transposed codes are made from what the rows' piece writes, and belong to the other one.
        let [plus, out, sums, scale, codes, transposed, scale_inv] = [8, 9, 10, 11, 12, 13, 14].map(Buf);
        let producer = Producer::LayerNormGrad { dy, x, gain, mean, rstd, gain_grad, bias_grad };
        let of_rows = Codes {
            format: Format::E5M2,
            scale: Scalar { buf: scale, index: 0 },
            codes,
            transposed: Some(transposed),
            beside: None,
            scale_inv,
            amax: None,
            flag: None,
        };
        let outputs = Outputs { values: Some(out), codes: Some(of_rows), column_sums: Some(sums) };
        let fused = Fused { residual: None, producer, plus: Some(plus), rows: 8, cols: 8, outputs };
        let cmds = [Cmd::Fused(Box::new(fused))];
        let found = units(&cmds, &|_| Some(64));
        assert_eq!(
            (bufs(&found[0], false), bufs(&found[0], true)),
            (vec![dy, x, gain, mean, rstd, plus, scale], vec![out, codes, scale_inv])
        );
        assert_eq!(
            (bufs(&found[1], false), bufs(&found[1], true)),
            (vec![dy, x, mean, rstd, out, codes], vec![gain_grad, bias_grad, sums, transposed])
        );
        assert!(conflict(&found[0], &found[1]));
    }
}
