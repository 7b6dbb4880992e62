//! A pre-norm transformer block: attention and MLP, each behind a norm and beside a residual connection.

use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::Act;
use crate::cmd::AttentionShape;
use crate::cx::Cx;
use crate::error::Result;
use crate::gpt::GptConfig;
use crate::op::{Op, PureOp};
use crate::ops::attention::{AttentionOp, AttentionTape};
use crate::ops::gelu::{GeluOp, GeluTape};
use crate::ops::layer_norm::{LayerNorm, LayerNormOp, LayerNormTape};
use crate::ops::linear::{Linear, LinearOp, LinearTape, LinearWork};
use crate::stage::{Layout, Retained, StageSpec};

/// A block.
#[derive(Clone, Debug)]
pub struct Block {
    ln1: LayerNorm,
    qkv: Linear,
    attention: AttentionShape,
    proj: Linear,
    ln2: LayerNorm,
    fc1: Linear,
    fc2: Linear,
}

/// From F to I.
#[must_use = "a tape is consumed by exactly one input gradient"]
#[derive(PartialEq, Eq, Debug)]
pub struct BlockTape {
    ln1: LayerNormTape,
    qkv: LinearTape,
    attention: AttentionTape,
    proj: LinearTape,
    ln2: LayerNormTape,
    fc1: LinearTape,
    gelu: GeluTape,
    fc2: LinearTape,
}

impl Retained for BlockTape {
    fn layout(&self, layout: &mut Layout) {
        self.ln1.layout(layout);
        self.qkv.layout(layout);
        self.attention.layout(layout);
        self.proj.layout(layout);
        self.ln2.layout(layout);
        self.fc1.layout(layout);
        self.gelu.layout(layout);
        self.fc2.layout(layout);
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        self.ln1.release(cx)?;
        self.qkv.release(cx)?;
        self.attention.release(cx)?;
        self.proj.release(cx)?;
        self.ln2.release(cx)?;
        self.fc1.release(cx)?;
        self.gelu.release(cx)?;
        self.fc2.release(cx)
    }
}

/// From I to W.
#[must_use = "retained work is consumed by exactly one weight gradient"]
#[derive(PartialEq, Eq, Debug)]
pub struct BlockWork {
    qkv: LinearWork,
    proj: LinearWork,
    fc1: LinearWork,
    fc2: LinearWork,
}

impl Retained for BlockWork {
    fn layout(&self, layout: &mut Layout) {
        self.qkv.layout(layout);
        self.proj.layout(layout);
        self.fc1.layout(layout);
        self.fc2.layout(layout);
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        self.qkv.release(cx)?;
        self.proj.release(cx)?;
        self.fc1.release(cx)?;
        self.fc2.release(cx)
    }
}

impl Block {
    /// Registers block `index` of the model.
    pub fn new(spec: &mut StageSpec, config: &GptConfig, index: usize) -> Block {
        let (hidden, ffn) = (config.hidden, config.ffn);
        let (normal, residual) = (config.init(), config.residual_init());
        let path = |name: &str| format!("blocks.{index}.{name}");
        let linear =
            |spec: &mut StageSpec, name: &str, shape, init| Linear::new(spec, &path(name), shape, true, init, true);
        Block {
            ln1: LayerNorm::new(spec, &path("ln1"), hidden),
            qkv: linear(spec, "qkv", [hidden, 3 * hidden], normal),
            attention: config.attention(),
            proj: linear(spec, "proj", [hidden, hidden], residual),
            ln2: LayerNorm::new(spec, &path("ln2"), hidden),
            fc1: linear(spec, "fc1", [hidden, ffn], normal),
            fc2: linear(spec, "fc2", [ffn, hidden], residual),
        }
    }

    /// F.
    pub fn forward(&self, cx: &mut Cx<'_>, x: Act, token: Token<Fwd>) -> Result<(Act, BlockTape, Token<Fwd>)> {
        let (a, ln1) = <LayerNormOp as PureOp>::forward(cx, x, &self.ln1)?;
        let (packed, qkv, token) = LinearOp::forward(cx, a, &self.qkv, token)?;
        cx.free(a)?;
        let (a, attention) = <AttentionOp as PureOp>::forward(cx, packed, &self.attention)?;
        cx.free(packed)?;
        let (branch, proj, token) = LinearOp::forward(cx, a, &self.proj, token)?;
        cx.free(a)?;
        let middle = cx.add(x, branch)?;
        cx.free(branch)?;

        let (h, ln2) = <LayerNormOp as PureOp>::forward(cx, middle, &self.ln2)?;
        let (wide, fc1, token) = LinearOp::forward(cx, h, &self.fc1, token)?;
        cx.free(h)?;
        let (h, gelu) = <GeluOp as PureOp>::forward(cx, wide, ())?;
        cx.free(wide)?;
        let (branch, fc2, token) = LinearOp::forward(cx, h, &self.fc2, token)?;
        cx.free(h)?;
        let y = cx.add(middle, branch)?;
        cx.free(branch)?;
        cx.free(middle)?;
        Ok((y, BlockTape { ln1, qkv, attention, proj, ln2, fc1, gelu, fc2 }, token))
    }

    /// I.
    pub fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: Act,
        tape: BlockTape,
        token: Token<Bwd>,
    ) -> Result<(Act, BlockWork, Token<Bwd>)> {
        let (dh, fc2, token) = LinearOp::input_grad(cx, dy, &self.fc2, tape.fc2, token)?;
        let dwide = <GeluOp as PureOp>::input_grad(cx, dh, (), tape.gelu)?;
        cx.free(dh)?;
        let (dh, fc1, token) = LinearOp::input_grad(cx, dwide, &self.fc1, tape.fc1, token)?;
        cx.free(dwide)?;
        let branch = <LayerNormOp as PureOp>::input_grad(cx, dh, &self.ln2, tape.ln2)?;
        cx.free(dh)?;
        let dmiddle = cx.add(dy, branch)?;
        cx.free(branch)?;

        let (da, proj, token) = LinearOp::input_grad(cx, dmiddle, &self.proj, tape.proj, token)?;
        let dpacked = <AttentionOp as PureOp>::input_grad(cx, da, &self.attention, tape.attention)?;
        cx.free(da)?;
        let (da, qkv, token) = LinearOp::input_grad(cx, dpacked, &self.qkv, tape.qkv, token)?;
        cx.free(dpacked)?;
        let branch = <LayerNormOp as PureOp>::input_grad(cx, da, &self.ln1, tape.ln1)?;
        cx.free(da)?;
        let dx = cx.add(dmiddle, branch)?;
        cx.free(branch)?;
        cx.free(dmiddle)?;
        Ok((dx, BlockWork { qkv, proj, fc1, fc2 }, token))
    }

    /// W.
    pub fn weight_grad(&self, cx: &mut Cx<'_>, work: BlockWork) -> Result<()> {
        let layers = [(&self.fc2, work.fc2), (&self.fc1, work.fc1), (&self.proj, work.proj), (&self.qkv, work.qkv)];
        for (linear, work) in layers {
            LinearOp::weight_grad(cx, linear, work)?;
        }
        Ok(())
    }

    /// F of evaluation.
    pub fn evaluate(&self, cx: &mut Cx<'_>, x: Act) -> Result<Act> {
        let a = <LayerNormOp as PureOp>::evaluate(cx, x, &self.ln1)?;
        let packed = LinearOp::evaluate(cx, a, &self.qkv)?;
        cx.free(a)?;
        let a = <AttentionOp as PureOp>::evaluate(cx, packed, &self.attention)?;
        cx.free(packed)?;
        let branch = LinearOp::evaluate(cx, a, &self.proj)?;
        cx.free(a)?;
        let middle = cx.add(x, branch)?;
        cx.free(branch)?;

        let h = <LayerNormOp as PureOp>::evaluate(cx, middle, &self.ln2)?;
        let wide = LinearOp::evaluate(cx, h, &self.fc1)?;
        cx.free(h)?;
        let h = <GeluOp as PureOp>::evaluate(cx, wide, ())?;
        cx.free(wide)?;
        let branch = LinearOp::evaluate(cx, h, &self.fc2)?;
        cx.free(h)?;
        let y = cx.add(middle, branch)?;
        cx.free(branch)?;
        cx.free(middle)?;
        Ok(y)
    }
}
