//! Token and position embeddings, read from the masters. Their gradients come from W, a partial per microbatch, from the
//! gradient of the output that I retains.

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::Cx;
use crate::error::Result;
use crate::stage::{Init, Layout, ParamId, ParamKind, ParamSpec, Retained, StageSpec, Working};

/// The two tables.
#[derive(Clone, Debug)]
pub struct Embedding {
    table: ParamId,
    positions: ParamId,
    seq: usize,
    hidden: usize,
}

/// From I to W: the gradient of the output.
#[must_use = "retained work is consumed by exactly one weight gradient"]
#[derive(PartialEq, Eq, Debug)]
pub struct EmbeddingWork {
    dy: Kept,
}

impl Retained for EmbeddingWork {
    fn layout(&self, layout: &mut Layout) {
        layout.kept("dy", &self.dy);
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        cx.release(self.dy)
    }
}

impl Embedding {
    /// Registers `wte` and `wpe`.
    pub fn new(spec: &mut StageSpec, vocab: usize, seq: usize, hidden: usize, init: Init) -> Embedding {
        let mut matrix = |path: &str, rows: usize| {
            let (kind, working) = (ParamKind::Embedding, Working::Master);
            spec.param(ParamSpec { path: path.into(), rows, cols: hidden, init, kind, working })
        };
        Embedding { table: matrix("wte", vocab), positions: matrix("wpe", seq), seq, hidden }
    }

    /// F: the embedded tokens of the microbatch.
    pub fn forward(&self, cx: &mut Cx<'_>) -> Result<Act> {
        let tokens = cx.tokens()?;
        let out = cx.lease(tokens.rows, self.hidden)?;
        cx.issue(Cmd::Embed {
            tokens: tokens.buf,
            table: cx.master(self.table).buf,
            positions: cx.master(self.positions).buf,
            out: out.buf,
            seq: self.seq,
            cols: self.hidden,
        })?;
        Ok(out)
    }

    /// I: there is no dX; dy is what W needs.
    pub fn input_grad(&self, cx: &mut Cx<'_>, dy: Act) -> Result<EmbeddingWork> {
        Ok(EmbeddingWork { dy: cx.keep(dy)? })
    }

    /// W.
    pub fn weight_grad(&self, cx: &mut Cx<'_>, work: EmbeddingWork) -> Result<()> {
        let (table_grad, positions_grad) = (cx.grad(self.table)?, cx.grad(self.positions)?);
        cx.issue(Cmd::EmbedGrad {
            tokens: cx.tokens()?.buf,
            order: cx.token_order()?.buf,
            dy: work.dy.act().buf,
            table_grad: table_grad.act().buf,
            positions_grad: positions_grad.act().buf,
            seq: self.seq,
            cols: self.hidden,
        })?;
        work.release(cx)
    }
}
