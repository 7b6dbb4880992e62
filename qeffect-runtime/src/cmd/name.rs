//! Names of commands.

use super::Cmd;

impl Cmd {
    /// Its name, for messages and profiles.
    pub const fn name(&self) -> &'static str {
        match self {
            Cmd::Fill { .. } => "fill",
            Cmd::Copy { .. } => "copy",
            Cmd::CopyRange { .. } => "copy_range",
            Cmd::Convert { .. } => "convert",
            Cmd::Gemm { .. } => "gemm",
            Cmd::GroupGemm { .. } => "group_gemm",
            Cmd::Quantise { .. } => "quantise",
            Cmd::Health { .. } => "health",
            Cmd::Roll { .. } => "roll",
            Cmd::Embed { .. } => "embed",
            Cmd::EmbedGrad { .. } => "embed_grad",
            Cmd::LayerNorm { .. } => "layer_norm",
            Cmd::LayerNormGrad { .. } => "layer_norm_grad",
            Cmd::RmsNorm { .. } => "rms_norm",
            Cmd::RmsNormGrad { .. } => "rms_norm_grad",
            Cmd::Rotary { .. } => "rotary",
            Cmd::Silu { .. } => "silu",
            Cmd::SiluGrad { .. } => "silu_grad",
            Cmd::Swiglu { .. } => "swiglu",
            Cmd::SwigluGrad { .. } => "swiglu_grad",
            Cmd::Dropout { .. } => "dropout",
            Cmd::Gelu { .. } => "gelu",
            Cmd::GeluGrad { .. } => "gelu_grad",
            Cmd::Attention { .. } => "attention",
            Cmd::AttentionGrad { .. } => "attention_grad",
            Cmd::Add { .. } => "add",
            Cmd::ColumnSums { .. } => "column_sums",
            Cmd::CrossEntropy { .. } => "cross_entropy",
            Cmd::CrossEntropyGrad { .. } => "cross_entropy_grad",
            Cmd::SumSlots { .. } => "sum_slots",
            Cmd::SumSquares { .. } => "sum_squares",
            Cmd::Settle { .. } => "settle",
            Cmd::AdamW { .. } => "adamw",
            Cmd::Launch { kernel, .. } => kernel.name,
            Cmd::Advance { .. } => "advance",
            Cmd::CopyIf { .. } => "copy_if",
            Cmd::Fused(fused) => fused.name(),
            Cmd::WriteTag { .. } => "write_tag",
            Cmd::CheckTag { .. } => "check_tag",
            Cmd::CheckFinite { .. } => "check_finite",
        }
    }
}
