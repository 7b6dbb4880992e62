//! Rotary position embedding of packed queries and keys. Linear, so nothing is retained: the gradient turns back.

use crate::act::Act;
use crate::cmd::{AttentionShape, Cmd, RotaryShape};
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::kernels::rotary::rotary_table;
use crate::op::{PureOp, witness};
use crate::params::{Params, Registry};
use crate::stage::{StageSpec, TableId, TableSpec};

/// The rotation of the queries and keys of `[q | k | v]`.
#[derive(Clone, Debug)]
pub struct Rotary {
    shape: RotaryShape,
    base: f64,
    table: TableId,
}

impl Rotary {
    /// For rows of attention of this shape. The angle of pair j at a position is `position · base^(-2j/head_dim)`; 10,000 is
    /// the usual base. Layers of the same shape share one table.
    ///
    /// # Errors
    ///
    /// If `head_dim` is odd, or the base not a positive number.
    pub fn new(spec: &mut StageSpec, attention: &AttentionShape, base: f64) -> Result<Rotary> {
        Ok(Rotary::of(attention, base)?.placed(spec))
    }

    /// The same, that is to be registered with the struct it stands in.
    ///
    /// # Errors
    ///
    /// As [`Rotary::new`].
    pub fn of(attention: &AttentionShape, base: f64) -> Result<Rotary> {
        let AttentionShape { length, heads, kv_heads, head_dim, .. } = *attention;
        if !head_dim.is_multiple_of(2) {
            return Err(Error::Config(format!("rotary: `head_dim` is {head_dim}, it must be a multiple of 2")));
        }
        if !(base > 0.0 && base.is_finite()) {
            return Err(Error::Config(format!("rotary: the base is {base}, it must be positive")));
        }
        let shape = RotaryShape { length, heads: heads + kv_heads, head_dim, width: attention.width() };
        Ok(Rotary { shape, base, table: TableId(usize::MAX) })
    }

    fn placed(self, spec: &mut StageSpec) -> Rotary {
        let RotaryShape { length, head_dim, .. } = self.shape;
        let values = rotary_table(length, head_dim, self.base);
        let table = spec.table(TableSpec { name: "rotary angles".into(), rows: length, cols: head_dim, values });
        Rotary { table, ..self }
    }

    fn run(&self, cx: &mut Cx<'_>, x: Act, inverse: bool) -> Result<Act> {
        if x.cols != self.shape.width {
            return Err(Error::shape("rotary", &format!("{} columns", self.shape.width), Some(x)));
        }
        let out = cx.lease(x.rows, x.cols)?;
        let table = cx.table(self.table).buf;
        cx.issue(Cmd::Rotary { x: x.buf, table, out: out.buf, shape: self.shape, inverse })?;
        Ok(out)
    }
}

impl Params for Rotary {
    fn register(&mut self, registry: &mut Registry<'_>) {
        *self = self.clone().placed(registry.spec());
    }
}

/// The op.
#[derive(Debug)]
pub enum RotaryOp {}

pub use RotaryOp as rotary;

/// Packed `[q | k | v]` with queries and keys turned by their positions.
pub fn rotary(_qkv: Act, _p: &Rotary) -> Act {
    witness("rotary")
}

impl PureOp for RotaryOp {
    type Param<'a> = &'a Rotary;
    type Tape = ();

    fn forward(cx: &mut Cx<'_>, x: Act, p: &Rotary) -> Result<(Act, ())> {
        Ok((p.run(cx, x, false)?, ()))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, p: &Rotary, (): ()) -> Result<Act> {
        p.run(cx, dy, true)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, p: &Rotary) -> Result<Act> {
        p.run(cx, x, false)
    }
}
