//! Where a NaN may come from, and what a bad step must leave alone.

use std::collections::BTreeMap;

use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::device::Buf;
use qeffect_runtime::session::Snapshot;

/// What a command of F, I, W, B, refresh, reduce or agree computes and hands on. Copies of state are none of these, and
/// what follows `Settle` is the commit itself.
pub fn output(cmd: &Cmd) -> Option<Buf> {
    match cmd {
        Cmd::Gemm { out, .. }
        | Cmd::GroupGemm { out, .. }
        | Cmd::Embed { out, .. }
        | Cmd::Attention { out, .. }
        | Cmd::Rotary { out, .. }
        | Cmd::Add { out, .. }
        | Cmd::ColumnSums { out, .. }
        | Cmd::SumSlots { out, .. } => Some(*out),
        Cmd::Quantise { scale_inv, flag: Some(_), .. } => Some(*scale_inv),
        Cmd::Roll { scales, unless: None, .. } => Some(*scales),
        Cmd::EmbedGrad { table_grad, .. } => Some(*table_grad),
        Cmd::SumSquares { partials, .. } => Some(*partials),
        Cmd::LayerNorm { y, .. } | Cmd::RmsNorm { y, .. } | Cmd::Gelu { y, .. } | Cmd::Swiglu { y, .. } => Some(*y),
        Cmd::LayerNormGrad { dx, .. }
        | Cmd::RmsNormGrad { dx, .. }
        | Cmd::GeluGrad { dx, .. }
        | Cmd::SwigluGrad { dx, .. } => Some(*dx),
        Cmd::AttentionGrad { dqkv, .. } => Some(*dqkv),
        Cmd::CrossEntropy { lse, .. } => Some(*lse),
        Cmd::WriteTag { tag, .. } => Some(*tag),
        Cmd::CrossEntropyGrad { dlogits, .. } => Some(*dlogits),
        _ => None,
    }
}

/// Which element of [`output`] is the command's own: others of that buffer may be written anew after it.
pub fn element(cmd: &Cmd) -> usize {
    match cmd {
        Cmd::SumSquares { first, .. } => *first,
        Cmd::Roll { cells, .. } => cells.start,
        _ => 0,
    }
}

/// All that must not move in a bad step: values, and versions of weights. Its gradients are nobody's.
pub fn kept(snapshot: Snapshot) -> (BTreeMap<String, Vec<u8>>, Vec<String>) {
    let values = snapshot.values.into_iter().filter(|(name, _)| !name.ends_with("/gradient"));
    let values = values.map(|(name, value)| (name, value.bytes)).collect();
    (values, snapshot.versions.iter().map(|version| format!("{version:?}")).collect())
}

/// The commands of a GPT that [`output`] knows.
pub const KINDS: &[&str] = &[
    "embed",
    "layer_norm",
    "quantise",
    "gemm",
    "attention",
    "gelu",
    "add",
    "cross_entropy",
    "cross_entropy_grad",
    "layer_norm_grad",
    "attention_grad",
    "gelu_grad",
    "embed_grad",
    "column_sums",
    "roll",
    "sum_slots",
    "sum_squares",
    "write_tag",
];

/// Fused commands of a GPT before its commit.
pub const FUSED: &[&str] = &[
    "fused_layer_norm",
    "fused_gelu",
    "fused_gelu_grad",
    "fused_layer_norm_grad",
    "fused_cross_entropy_grad",
    "fused_quantise",
];

/// Those of a Llama.
pub const FUSED_OF_LLAMA: &[&str] = &["fused_rms_norm", "fused_swiglu", "fused_swiglu_grad", "fused_rms_norm_grad"];

/// The commands of a Llama that [`output`] knows.
pub const KINDS_OF_LLAMA: &[&str] = &[
    "embed",
    "rms_norm",
    "quantise",
    "gemm",
    "rotary",
    "attention",
    "swiglu",
    "add",
    "cross_entropy",
    "cross_entropy_grad",
    "rms_norm_grad",
    "attention_grad",
    "swiglu_grad",
    "embed_grad",
    "roll",
    "sum_slots",
    "sum_squares",
    "write_tag",
];
