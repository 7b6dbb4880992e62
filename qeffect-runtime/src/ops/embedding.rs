//! Embeddings of tokens, and of their positions where there is a table of them, read from the masters. Their gradients come from W, a partial per microbatch, from the
//! gradient of the output that I retains.

use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_macros::retained;

use crate::act::{Act, Kept};
use crate::cmd::Cmd;
use crate::cx::Cx;
use crate::error::Result;
use crate::op::{Effects, Op, witness};
use crate::params::{Params, Registry};
use crate::stage::{Init, ParamId, ParamKind, ParamSpec, Retained, StageSpec, Working};

/// The tables.
#[derive(Clone, Debug)]
pub struct Embedding {
    table: ParamId,
    positions: Option<ParamId>,
    vocab: usize,
    seq: usize,
    hidden: usize,
    init: Init,
}

/// From I to W: the gradient of the output.
#[retained(crate = crate)]
#[derive(PartialEq, Eq, Debug)]
pub struct EmbeddingWork {
    dy: Kept,
}

impl Embedding {
    /// Registers `wte`, and `wpe` where positions are wanted.
    pub fn new(spec: &mut StageSpec, [vocab, seq, hidden]: [usize; 3], positions: bool, init: Init) -> Embedding {
        let mut matrix = |path: &str, rows: usize| {
            let (kind, working) = (ParamKind::Embedding, Working::Master);
            spec.param(ParamSpec { path: path.into(), rows, cols: hidden, init, kind, working })
        };
        let table = matrix("wte", vocab);
        let positions = positions.then(|| matrix("wpe", seq));
        Embedding { table, positions, vocab, seq, hidden, init }
    }

    /// Tables of so many tokens and positions, that are to be registered with the struct they stand in.
    pub const fn of(vocab: usize, seq: usize, hidden: usize) -> Embedding {
        let (table, positions) = (ParamId::UNREGISTERED, Some(ParamId::UNREGISTERED));
        Embedding { table, positions, vocab, seq, hidden, init: Init::Normal(0.02) }
    }

    /// Of tokens alone.
    pub fn without_positions(self) -> Embedding {
        Embedding { positions: None, ..self }
    }

    /// With other first values.
    pub fn init(self, init: Init) -> Embedding {
        Embedding { init, ..self }
    }

    fn run(&self, cx: &mut Cx<'_>) -> Result<Act> {
        let tokens = cx.tokens()?;
        let out = cx.lease(tokens.rows, self.hidden)?;
        let flag = Some(cx.flag());
        cx.issue(Cmd::Embed {
            tokens: tokens.buf,
            table: cx.master(self.table).buf,
            positions: self.positions.map(|positions| cx.master(positions).buf),
            out: out.buf,
            flag,
            seq: self.seq,
            cols: self.hidden,
        })?;
        Ok(out)
    }
}

impl Params for Embedding {
    fn register(&mut self, registry: &mut Registry<'_>) {
        let init = registry.init(self.init);
        let sizes = [self.vocab, self.seq, self.hidden];
        *self = Embedding::new(registry.spec(), sizes, self.positions.is_some(), init);
    }
}

/// The op.
#[derive(Debug)]
pub enum EmbeddingOp {}

pub use EmbeddingOp as embedding;

/// The embedded tokens of the microbatch, plus those of their positions where these have a table.
pub fn embedding(_p: &Embedding) -> Act {
    witness("embedding")
}

impl Op for EmbeddingOp {
    const EFFECTS: Effects = Effects::NONE;
    type Input = ();
    type Output = Act;
    type Param<'a> = &'a Embedding;
    type Tape = ();
    type Work = EmbeddingWork;

    fn forward(cx: &mut Cx<'_>, (): (), p: &Embedding, token: Token<Fwd>) -> Result<(Act, (), Token<Fwd>)> {
        Ok((p.run(cx)?, (), token))
    }

    /// There is no dX; dy is what W needs.
    fn input_grad(
        cx: &mut Cx<'_>,
        dy: Act,
        _: &Embedding,
        (): (),
        token: Token<Bwd>,
    ) -> Result<((), EmbeddingWork, Token<Bwd>)> {
        Ok(((), EmbeddingWork { dy: cx.keep(dy)? }, token))
    }

    fn weight_grad(cx: &mut Cx<'_>, p: &Embedding, work: EmbeddingWork) -> Result<()> {
        let (tokens, order, dy) = (cx.tokens()?.buf, cx.token_order()?.buf, work.dy.act().buf);
        let (seq, cols) = (p.seq, p.hidden);
        let mut dsts = vec![cx.grad(p.table)?];
        if let Some(positions) = p.positions {
            dsts.push(cx.grad(positions)?);
        }
        cx.add_gradients(dsts, |bufs, accumulate| Cmd::EmbedGrad {
            tokens,
            order,
            dy,
            table_grad: bufs[0],
            positions_grad: bufs.get(1).copied(),
            seq,
            cols,
            accumulate,
        })?;
        work.release(cx)
    }

    fn evaluate(cx: &mut Cx<'_>, (): (), p: &Embedding) -> Result<Act> {
        p.run(cx)
    }
}
