//! What a command reads and writes: the one place that says so.
//!
//! The rule that a command does not read what it writes is checked against this, and a recorded list is put into
//! parallel lanes by it ([`order`]): two commands keep their order where they touch an element in ways that do not
//! commute, and nowhere else.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{Beside, Cmd, HEALTH_WORDS, Operand, Scalar};
use crate::device::{Buf, BufSpec, DeviceError};
use crate::kernels::optimizer::norm_pieces;

/// How elements are touched.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Mode {
    /// Read.
    Read,
    /// Written, whatever they held.
    Write,
    /// Read and written in place, or written under a condition.
    Update,
    /// A maximum, a count that is added to, or a flag that is raised: such accesses commute with each other, and with nothing else.
    Fold,
}

/// The same columns of every line of a buffer: what a matrix is that lies beside others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Columns {
    /// Elements of a line.
    pub line: usize,
    /// Which of them.
    pub columns: Range<usize>,
}

/// Elements of a buffer that a command touches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Access {
    /// The buffer.
    pub buf: Buf,
    /// Which elements; a range that ends at `usize::MAX` goes to the end of the buffer.
    pub range: Range<usize>,
    /// Of these, only some columns; `None`: all.
    pub columns: Option<Columns>,
    /// How.
    pub mode: Mode,
}

impl Access {
    /// Whether both touch an element, and their order matters.
    pub fn conflicts(&self, other: &Access) -> bool {
        self.overlaps(other) && !matches!((self.mode, other.mode), (Mode::Read, Mode::Read) | (Mode::Fold, Mode::Fold))
    }

    /// Lines of other lengths, or a range beside columns, are taken to overlap where their ranges do.
    fn overlaps(&self, other: &Access) -> bool {
        let meet = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
        let columns = match (&self.columns, &other.columns) {
            (Some(a), Some(b)) if a.line == b.line => meet(&a.columns, &b.columns),
            _ => true,
        };
        self.buf == other.buf && columns && meet(&self.range, &other.range)
    }

    /// Whether every element of the other one is touched.
    pub(super) fn covers(&self, other: &Access) -> bool {
        let within = |a: &Range<usize>, b: &Range<usize>| a.start <= b.start && b.end <= a.end;
        let columns = match (&self.columns, &other.columns) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(a), Some(b)) => a.line == b.line && within(&a.columns, &b.columns),
        };
        self.buf == other.buf && columns && within(&self.range, &other.range)
    }

    /// Whether all of a buffer of that size is touched.
    pub(crate) fn is_whole(&self, elements: usize) -> bool {
        self.columns.is_none() && self.range.start == 0 && self.range.end >= elements
    }

    /// How many elements of a buffer of that size are touched.
    pub(crate) fn count(&self, elements: usize) -> usize {
        let range = self.range.end.min(elements).saturating_sub(self.range.start);
        match &self.columns {
            None => range,
            Some(Columns { line, columns }) => range.div_ceil((*line).max(1)) * columns.len(),
        }
    }
}

/// Collects accesses.
#[derive(Default)]
struct Touched(Vec<Access>);

impl Touched {
    fn add(&mut self, mode: Mode, buf: Buf, range: Range<usize>) -> &mut Touched {
        self.0.push(Access { buf, range, columns: None, mode });
        self
    }

    fn all(&mut self, mode: Mode, bufs: impl IntoIterator<Item = Buf>) -> &mut Touched {
        bufs.into_iter().for_each(|buf| {
            self.add(mode, buf, 0..usize::MAX);
        });
        self
    }

    fn read(&mut self, bufs: impl IntoIterator<Item = Buf>) -> &mut Touched {
        self.all(Mode::Read, bufs)
    }

    fn write(&mut self, bufs: impl IntoIterator<Item = Buf>) -> &mut Touched {
        self.all(Mode::Write, bufs)
    }

    fn update(&mut self, bufs: impl IntoIterator<Item = Buf>) -> &mut Touched {
        self.all(Mode::Update, bufs)
    }

    fn fold(&mut self, bufs: impl IntoIterator<Item = Buf>) -> &mut Touched {
        self.all(Mode::Fold, bufs)
    }

    /// A transposed matrix `[cols, rows]`, alone in its buffer or beside others.
    fn transposed(&mut self, buf: Buf, rows: usize, cols: usize, beside: Option<Beside>) -> &mut Touched {
        let Some(Beside { first, line }) = beside else { return self.write([buf]) };
        let end = first.saturating_add(line.saturating_mul(cols.saturating_sub(1))).saturating_add(rows);
        // Where the matrix begins in a line it goes on in every other.
        let at = first % line.max(1);
        let columns = (at + rows <= line).then_some(Columns { line, columns: at..at + rows });
        // Columns that run into the next line are no columns: between its ends anything may be touched, or kept.
        let mode = if columns.is_some() { Mode::Write } else { Mode::Update };
        self.0.push(Access { buf, range: first..end, columns, mode });
        self
    }

    fn one(&mut self, mode: Mode, scalar: Scalar) -> &mut Touched {
        self.add(mode, scalar.buf, scalar.index..scalar.index.saturating_add(1))
    }

    fn operand(&mut self, operand: &Operand) -> &mut Touched {
        self.read([operand.buf]).read(operand.scale_inv)
    }
}

impl Cmd {
    /// What it touches. `elements`: the size of a buffer, where it is known.
    pub fn effects(&self, elements: impl Fn(Buf) -> Option<usize>) -> Vec<Access> {
        let mut t = Touched::default();
        match self {
            Cmd::Fill { dst, .. } => t.write([*dst]),
            Cmd::Copy { src, dst } | Cmd::Convert { src, dst } => t.read([*src]).write([*dst]),
            Cmd::CopyRange { src, src_at, dst, dst_at, len } => {
                let range = |at: usize| at..at.saturating_add(*len);
                t.add(Mode::Read, *src, range(*src_at)).add(Mode::Write, *dst, range(*dst_at))
            }
            Cmd::Gemm { a, b, bias, out, accumulate, .. } => {
                let mode = if *accumulate { Mode::Update } else { Mode::Write };
                t.operand(a).operand(b).read(*bias).all(mode, [*out])
            }
            Cmd::GroupGemm { a, b, out, accumulate, .. } => {
                let mode = if *accumulate { Mode::Update } else { Mode::Write };
                let factors = a.scale_inv.iter().chain(&b.scale_inv).copied();
                t.read([a.buf, b.buf]).read(factors).all(mode, [*out])
            }
            Cmd::Quantise { src, rows, cols, scale, codes, transposed, beside, scale_inv, amax, flag, .. } => {
                t.read([*src]).one(Mode::Read, *scale).write([*codes, *scale_inv]).fold(*flag);
                if let Some(transposed) = transposed {
                    t.transposed(*transposed, *rows, *cols, *beside);
                }
                if let Some(amax) = amax {
                    t.one(Mode::Fold, *amax);
                }
                &mut t
            }
            Cmd::Health { src, scale, counts, cell, .. } => {
                let first = cell.saturating_mul(HEALTH_WORDS);
                let words = first..first.saturating_add(HEALTH_WORDS);
                t.read([*src]).one(Mode::Read, *scale).add(Mode::Fold, *counts, words)
            }
            // The staging entry stands for its column: what lies behind it is touched by rolls and whole copies alone.
            Cmd::Roll { scales, history, cells, unless, .. } => {
                let staged = if cells.end == usize::MAX && cells.start == 0 { 0..usize::MAX } else { cells.clone() };
                t.add(Mode::Update, *scales, cells.clone()).add(Mode::Update, *history, staged).read(*unless)
            }
            Cmd::Embed { tokens, table, positions, out, flag, .. } => {
                t.read([*tokens, *table]).read(*positions).write([*out]).fold(*flag)
            }
            Cmd::EmbedGrad { tokens, order, dy, table_grad, positions_grad, accumulate, .. } => {
                let mode = if *accumulate { Mode::Update } else { Mode::Write };
                t.read([*tokens, *order, *dy]).all(mode, [*table_grad]).all(mode, *positions_grad)
            }
            Cmd::LayerNorm { x, gain, bias, y, mean, rstd, .. } => t.read([*x, *gain, *bias]).write([*y, *mean, *rstd]),
            Cmd::LayerNormGrad { dy, x, gain, mean, rstd, dx, gain_grad, bias_grad, .. } => {
                t.read([*dy, *x, *gain, *mean, *rstd]).write([*dx, *gain_grad, *bias_grad])
            }
            Cmd::RmsNorm { x, gain, y, rstd, .. } => t.read([*x, *gain]).write([*y, *rstd]),
            Cmd::RmsNormGrad { dy, x, gain, rstd, dx, gain_grad, .. } => {
                t.read([*dy, *x, *gain, *rstd]).write([*dx, *gain_grad])
            }
            Cmd::Rotary { x, table, out, .. } => t.read([*x, *table]).write([*out]),
            Cmd::Launch { inputs, outputs, .. } => t.read(inputs.iter().copied()).write(outputs.iter().copied()),
            Cmd::Gelu { x, y } | Cmd::Silu { x, y } | Cmd::Swiglu { x, y, .. } => t.read([*x]).write([*y]),
            Cmd::GeluGrad { x, dy, dx } | Cmd::SiluGrad { x, dy, dx } | Cmd::SwigluGrad { x, dy, dx, .. } => {
                t.read([*x, *dy]).write([*dx])
            }
            Cmd::Dropout { x, y, step, .. } => t.read([*x, *step]).write([*y]),
            Cmd::Fused(fused) => return fused.effects(&elements),
            Cmd::Attention { qkv, out, lse, .. } => t.read([*qkv]).write([*out, *lse]),
            Cmd::AttentionGrad { qkv, lse, dout, dqkv, .. } => t.read([*qkv, *lse, *dout]).write([*dqkv]),
            Cmd::Add { a, b, out } => t.read([*a, *b]).write([*out]),
            Cmd::ColumnSums { x, out, .. } => t.read([*x]).write([*out]),
            Cmd::CrossEntropy { logits, targets, lse, loss, flag, .. } => {
                t.read([*logits, *targets]).write([*lse]).one(Mode::Write, *loss).fold(*flag)
            }
            Cmd::CrossEntropyGrad { logits, targets, lse, dlogits, .. } => {
                t.read([*logits, *targets, *lse]).write([*dlogits])
            }
            Cmd::SumSlots { slots, out, .. } => t.read(slots.iter().copied()).write([*out]),
            Cmd::SumSquares { src, partials, first, .. } => {
                let end = elements(*src).map_or(usize::MAX, |len| first.saturating_add(norm_pieces(len)));
                t.read([*src]).add(Mode::Write, *partials, *first..end)
            }
            Cmd::Settle { partials, flags, norm, clip, flag, .. } => {
                t.read([*partials, *flags]).write([*norm, *clip]).fold([*flag])
            }
            Cmd::AdamW { param, grad, moment1, moment2, clip, table, counter, unless, .. } => {
                t.read([*grad, *clip, *table, *counter, *unless]).update([*param, *moment1, *moment2])
            }
            Cmd::Advance { counter, unless } => t.update([*counter]).read([*unless]),
            Cmd::CopyIf { flag, src, dst } => t.read([*flag, *src]).update([*dst]),
            Cmd::WriteTag { tag, step, .. } => t.read([*step]).write([*tag]),
            Cmd::CheckTag { tag, step, flag, report, .. } => t.read([*tag, *step]).fold([*flag]).update([*report]),
            Cmd::CheckFinite { src, flag } => t.read([*src]).fold([*flag]),
        };
        t.0
    }

    /// Refuses a command that would write a buffer which it uses a second time.
    pub(crate) fn check_aliases<'a>(
        &self,
        accesses: &[Access],
        spec: impl Fn(Buf) -> Result<&'a BufSpec, DeviceError>,
    ) -> Result<(), DeviceError> {
        for (index, access) in accesses.iter().enumerate() {
            let twice =
                |other: &Access| access.overlaps(other) && (access.mode, other.mode) != (Mode::Read, Mode::Read);
            if accesses[..index].iter().any(twice) {
                return Err(DeviceError::Aliased { cmd: self.name(), buffer: spec(access.buf)?.name.clone() });
            }
        }
        Ok(())
    }
}

/// For each command of a list, those before it that it must follow. What follows from others is left out where it is
/// cheap to see.
pub fn order(effects: &[Vec<Access>]) -> Vec<Vec<usize>> {
    // Per buffer, the accesses that no later write has covered.
    let mut open: BTreeMap<Buf, Vec<(usize, &Access)>> = BTreeMap::new();
    let mut before = Vec::with_capacity(effects.len());
    for (index, accesses) in effects.iter().enumerate() {
        let mut after: Vec<usize> = Vec::new();
        for access in accesses {
            let earlier = open.entry(access.buf).or_default();
            after.extend(earlier.iter().filter(|(_, other)| access.conflicts(other)).map(|(index, _)| *index));
            if matches!(access.mode, Mode::Write | Mode::Update) {
                // Whoever conflicts with what is covered conflicts with this one, which follows it.
                earlier.retain(|(_, other)| !access.covers(other));
            }
            earlier.push((index, access));
        }
        after.sort_unstable();
        after.dedup();
        after.retain(|other| *other != index);
        before.push(after);
    }
    before
}

#[cfg(test)]
mod tests;
