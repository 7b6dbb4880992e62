//! Joins commands that follow each other into fused ones ([`Fused`]), which a device may carry out in one pass over memory.
//!
//! A producer takes in the cast and the column sums of what it makes, a norm the residual sum in front of it, the gradient
//! of a norm the sum behind it, AdamW the weight cache. A later command is taken in only if nothing between stands in its
//! way, by the effects of each ([`Cmd::effects`]). A value that nobody reads any more is not stored. Every buffer that is kept
//! holds the same bits as before.

use crate::cmd::Cmd;
use crate::cmd::effects::{Access, Mode};
use crate::cmd::fused::{Codes, Fused, Outputs, Producer, Residual};
use crate::device::Buf;

/// How many commands after a producer are looked through.
const WINDOW: usize = 8;

/// Fuses a list. `kept`: whether a buffer's content matters after the list, or somebody else reads it meanwhile.
/// `elements`: the size of a buffer.
pub fn fuse(cmds: Vec<Cmd>, kept: &dyn Fn(Buf) -> bool, elements: &dyn Fn(Buf) -> Option<usize>) -> Vec<Cmd> {
    let touched = cmds.iter().map(|cmd| cmd.effects(elements)).collect();
    let cmds = cmds.into_iter().map(Some).collect();
    let mut list = List { cmds, taken: Vec::new(), touched, kept, elements };
    for at in 0..list.cmds.len() {
        if let Some(fused) = list.cmds[at].clone().and_then(|cmd| list.fuse_at(at, &cmd)) {
            let fused = Cmd::Fused(Box::new(fused));
            list.touched[at] = fused.effects(elements);
            list.cmds[at] = Some(fused);
        }
    }
    list.cmds.into_iter().flatten().collect()
}

/// A list from which commands are taken.
struct List<'a> {
    cmds: Vec<Option<Cmd>>,
    /// What was taken, to be put back where it turns out not to fit.
    taken: Vec<(usize, Cmd)>,
    touched: Vec<Vec<Access>>,
    kept: &'a dyn Fn(Buf) -> bool,
    elements: &'a dyn Fn(Buf) -> Option<usize>,
}

/// A producer, where its matrix would go, and its columns where they are known.
struct Made {
    producer: Producer,
    values: Buf,
    cols: Option<usize>,
}

impl List<'_> {
    fn fuse_at(&mut self, at: usize, cmd: &Cmd) -> Option<Fused> {
        match *cmd {
            Cmd::Add { a, b, out } => self.with_norm(at, Residual { a, b, out }),
            Cmd::ColumnSums { x, .. } | Cmd::Quantise { src: x, .. } => self.both_of_stored(at, x),
            Cmd::AdamW { .. } => self.with_cache(at, cmd),
            Cmd::LayerNormGrad { .. } | Cmd::RmsNormGrad { .. } => {
                let made = made(cmd)?;
                self.with_sum(at, &made).or_else(|| self.with_outputs_stored(at, &made))
            }
            _ => {
                let made = made(cmd)?;
                let (rows, cols, outputs) = self.with_outputs(&[at], &made)?;
                Some(Fused { residual: None, producer: made.producer, plus: None, rows, cols, outputs })
            }
        }
    }

    /// What can be taken from a matrix where it is made; `None` if that is nothing.
    fn with_outputs(&mut self, group: &[usize], made: &Made) -> Option<(usize, usize, Outputs)> {
        let mut group = group.to_vec();
        let of_shape = |cols: usize| made.cols.is_none_or(|known| known == cols);
        let cast = |cmd: &Cmd| codes_of(cmd, made.values).filter(|(_, cols, _)| of_shape(*cols));
        let codes = self.find(&group, made.values, cast).map(|(index, found)| {
            group.push(index);
            found
        });
        let known = codes.map(|(_, cols, _)| cols).or(made.cols);
        let sums = self.find(&group, made.values, |cmd| match cmd {
            Cmd::ColumnSums { x, out, cols } if *x == made.values && known.is_none_or(|known| known == *cols) => {
                Some((*cols, *out))
            }
            _ => None,
        });
        let (rows, cols) = match (codes, sums) {
            (Some((rows, cols, _)), _) => (rows, cols),
            (None, Some((_, (cols, _)))) => (self.rows(made.values, cols)?, cols),
            (None, None) => return None,
        };
        group.extend(sums.map(|(index, _)| index));
        group[1..].iter().for_each(|index| self.take(*index));
        let values = (!self.dead(made.values, group[0])).then_some(made.values);
        let (codes, column_sums) = (codes.map(|(_, _, codes)| codes), sums.map(|(_, (_, out))| out));
        Some((rows, cols, Outputs { values, codes, column_sums }))
    }

    /// A residual sum, and the norm of it.
    fn with_norm(&mut self, at: usize, residual: Residual) -> Option<Fused> {
        let is_norm = |cmd: &Cmd| made(cmd).filter(|made| reads_as_norm(&made.producer, residual.out));
        // The normalised rows often go where a term of the sum was. That is no obstacle if they are not stored.
        let stored = self.find(&[at], residual.out, is_norm).map(|(norm, _)| norm);
        let (norm, made) = self.find_within(WINDOW, &[at], residual.out, is_norm, true)?;
        let cols = made.cols?;
        let rows = self.rows(made.values, cols)?;
        let before = self.taken.len();
        let outputs = match self.with_outputs(&[at, norm], &made) {
            Some((_, _, outputs)) => outputs,
            None => Outputs { values: Some(made.values), ..Outputs::default() },
        };
        if outputs.values.is_some() && stored.is_none() {
            self.put_back(before);
            return None;
        }
        self.take(norm);
        Some(Fused { residual: Some(residual), producer: made.producer, plus: None, rows, cols, outputs })
    }

    /// The cast and the column sums of one matrix, read once for both.
    fn both_of_stored(&mut self, at: usize, x: Buf) -> Option<Fused> {
        let cast = self.cmds[at].as_ref().and_then(|cmd| codes_of(cmd, x));
        let sums = |cmd: &Cmd| match cmd {
            Cmd::ColumnSums { x: of, out, cols } if *of == x => Some((*cols, *out)),
            _ => None,
        };
        let (other, (rows, cols, codes), (width, out)) = match cast {
            Some(cast) => {
                let (other, sums) = self.find(&[at], x, sums)?;
                (other, cast, sums)
            }
            None => {
                let own = self.cmds[at].as_ref().and_then(sums)?;
                let (other, cast) = self.find(&[at], x, |cmd| codes_of(cmd, x))?;
                (other, cast, own)
            }
        };
        if width != cols {
            return None;
        }
        self.take(other);
        let outputs = Outputs { values: None, codes: Some(codes), column_sums: Some(out) };
        Some(Fused { residual: None, producer: Producer::Stored { x }, plus: None, rows, cols, outputs })
    }

    /// The gradient of a norm, and the gradient that bypasses it.
    fn with_sum(&mut self, at: usize, made: &Made) -> Option<Fused> {
        let (sum, (other, out)) = self.find(&[at], made.values, |cmd| match *cmd {
            Cmd::Add { a, b, out } if (a == made.values) != (b == made.values) => {
                Some((if a == made.values { b } else { a }, out))
            }
            _ => None,
        })?;
        let cols = made.cols?;
        let rows = self.rows(made.values, cols)?;
        let before = self.taken.len();
        self.take(sum);
        if !self.dead(made.values, at) {
            self.put_back(before);
            return None;
        }
        // The sum takes the place of the matrix that outputs are taken from.
        let total = Made { values: out, ..*made };
        let outputs = self.with_outputs(&[at, sum], &total).map_or_else(Outputs::default, |(_, _, outputs)| outputs);
        let outputs = Outputs { values: Some(out), ..outputs };
        Some(Fused { residual: None, producer: made.producer, plus: Some(other), rows, cols, outputs })
    }

    /// The gradient of a norm, which is stored, and what is taken from it.
    fn with_outputs_stored(&mut self, at: usize, made: &Made) -> Option<Fused> {
        let (rows, cols, outputs) = self.with_outputs(&[at], made)?;
        let outputs = Outputs { values: Some(made.values), ..outputs };
        Some(Fused { residual: None, producer: made.producer, plus: None, rows, cols, outputs })
    }

    /// The update of a weight, and the form of it that ops read.
    fn with_cache(&mut self, at: usize, cmd: &Cmd) -> Option<Fused> {
        let Cmd::AdamW { param, grad, factor, moment1, moment2, clip, table, counter, config, unless } = *cmd else {
            return None;
        };
        let producer = Producer::AdamW { param, grad, factor, moment1, moment2, clip, table, counter, config, unless };
        let elements = (self.elements)(param)?;
        let form = |cmd: &Cmd| match *cmd {
            Cmd::Convert { src, dst } if src == param => {
                Some((1, elements, Outputs { values: Some(dst), ..Outputs::default() }))
            }
            _ => codes_of(cmd, param)
                .map(|(rows, cols, codes)| (rows, cols, Outputs { codes: Some(codes), ..Outputs::default() })),
        };
        // The cache is written after all weights.
        let (index, (rows, cols, outputs)) = self.find_within(usize::MAX, &[at], param, form, false)?;
        self.take(index);
        Some(Fused { residual: None, producer, plus: None, rows, cols, outputs })
    }

    fn rows(&self, values: Buf, cols: usize) -> Option<usize> {
        (self.elements)(values)?.checked_div(cols)
    }

    fn take(&mut self, index: usize) {
        self.taken.extend(self.cmds[index].take().map(|cmd| (index, cmd)));
    }

    /// Puts back what was taken since there were so many.
    fn put_back(&mut self, count: usize) {
        for (index, cmd) in self.taken.drain(count..) {
            self.cmds[index] = Some(cmd);
        }
    }

    /// The first command that is wanted after those of `group`, if it can be carried out right after the first of these and
    /// shares nothing with them but `via`, which one of them makes.
    fn find<T>(&self, group: &[usize], via: Buf, wanted: impl Fn(&Cmd) -> Option<T>) -> Option<(usize, T)> {
        self.find_within(WINDOW, group, via, wanted, false)
    }

    /// As [`List::find`], in a window of another size. `unstored`: as if the command did not store the matrix that it makes.
    fn find_within<T>(
        &self,
        window: usize,
        group: &[usize],
        via: Buf,
        wanted: impl Fn(&Cmd) -> Option<T>,
        unstored: bool,
    ) -> Option<(usize, T)> {
        let at = group[0];
        let end = self.cmds.len().min(window.saturating_add(at + 1));
        let mut open = (at + 1..end).filter(|index| !group.contains(index));
        let (index, found) = open.find_map(|index| Some((index, wanted(self.cmds[index].as_ref()?)?)))?;
        let values = self.cmds[index].as_ref().and_then(made).map(|made| made.values);
        let apart = |other: usize, via: Option<Buf>| {
            let conflict = |a: &Access| self.touched[other].iter().any(|b| a.conflicts(b));
            let passed = |a: &Access| match a.mode {
                Mode::Read => Some(a.buf) == via,
                _ => unstored && Some(a.buf) == values,
            };
            !self.touched[index].iter().any(|access| !passed(access) && conflict(access))
        };
        let mut between = (at + 1..index).filter(|other| self.cmds[*other].is_some() && !group.contains(other));
        let free = between.all(|other| apart(other, None)) && group.iter().all(|other| apart(*other, Some(via)));
        free.then_some((index, found))
    }

    /// Whether nobody reads a buffer after `at` before it is written anew.
    fn dead(&self, buf: Buf, at: usize) -> bool {
        let all = (self.elements)(buf).unwrap_or(usize::MAX);
        let later = (at + 1..self.cmds.len()).filter(|index| self.cmds[*index].is_some());
        match later.flat_map(|index| &self.touched[index]).find(|access| access.buf == buf) {
            Some(next) => next.mode == Mode::Write && next.is_whole(all),
            None => !(self.kept)(buf),
        }
    }
}

/// Whether this is a norm of `x`.
fn reads_as_norm(producer: &Producer, x: Buf) -> bool {
    match producer {
        Producer::LayerNorm { x: of, .. } | Producer::RmsNorm { x: of, .. } => *of == x,
        _ => false,
    }
}

fn codes_of(cmd: &Cmd, x: Buf) -> Option<(usize, usize, Codes)> {
    match *cmd {
        Cmd::Quantise { src, rows, cols, format, scale, codes, transposed, beside, scale_inv, amax, flag }
            if src == x =>
        {
            Some((rows, cols, Codes { format, scale, codes, transposed, beside, scale_inv, amax, flag }))
        }
        _ => None,
    }
}

fn made(cmd: &Cmd) -> Option<Made> {
    let (producer, values, cols) = match *cmd {
        Cmd::LayerNorm { x, gain, bias, y, mean, rstd, cols } => {
            (Producer::LayerNorm { x, gain, bias, mean, rstd }, y, Some(cols))
        }
        Cmd::RmsNorm { x, gain, y, rstd, cols } => (Producer::RmsNorm { x, gain, rstd }, y, Some(cols)),
        Cmd::LayerNormGrad { dy, x, gain, mean, rstd, dx, gain_grad, bias_grad, cols } => {
            (Producer::LayerNormGrad { dy, x, gain, mean, rstd, gain_grad, bias_grad }, dx, Some(cols))
        }
        Cmd::RmsNormGrad { dy, x, gain, rstd, dx, gain_grad, cols } => {
            (Producer::RmsNormGrad { dy, x, gain, rstd, gain_grad }, dx, Some(cols))
        }
        Cmd::Gelu { x, y } => (Producer::Gelu { x }, y, None),
        Cmd::GeluGrad { x, dy, dx } => (Producer::GeluGrad { x, dy }, dx, None),
        Cmd::Silu { x, y } => (Producer::Silu { x }, y, None),
        Cmd::SiluGrad { x, dy, dx } => (Producer::SiluGrad { x, dy }, dx, None),
        Cmd::Swiglu { x, y, cols } => (Producer::Swiglu { x }, y, Some(cols)),
        Cmd::SwigluGrad { x, dy, dx, cols } => (Producer::SwigluGrad { x, dy }, dx, Some(2 * cols)),
        Cmd::CrossEntropyGrad { logits, targets, lse, dlogits, vocabulary, factor } => {
            (Producer::CrossEntropyGrad { logits, targets, lse, factor }, dlogits, Some(vocabulary))
        }
        _ => return None,
    };
    Some(Made { producer, values, cols })
}

#[cfg(test)]
mod tests;
