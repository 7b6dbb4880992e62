//! The CUDA sources, embedded.

/// A source file and the kernels that it defines.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Source {
    /// File name.
    pub name: &'static str,
    /// Its text.
    pub text: &'static str,
    /// The names of its kernels.
    pub kernels: &'static [&'static str],
    /// The most bytes of dynamic shared memory that a launch of one asks for; every architecture has 99 KiB for a block.
    pub shared: usize,
}

/// What every source includes.
pub const HEADERS: &[(&str, &str)] = &[
    ("common.cuh", include_str!("../cuda/common.cuh")),
    ("tile.cuh", include_str!("../cuda/tile.cuh")),
    ("tensor.cuh", include_str!("../cuda/tensor.cuh")),
];

macro_rules! sources {
    ($($(#[$doc:meta])* $constant:ident = $file:literal $(, shared $shared:literal)? { $($kernel:ident),+ $(,)? })+) => {
        $($(#[$doc])*
        pub const $constant: Source = Source {
            name: $file,
            text: include_str!(concat!("../cuda/", $file)),
            kernels: &[$(stringify!($kernel)),+],
            shared: 0 $(+ $shared)?,
        };)+

        /// Every source.
        pub const ALL: &[Source] = &[$($constant),+];
    };
}

sources! {
    /// Casts to FP8, with what is fused into them.
    CAST = "cast.cu" {
        cast_bf16_e4m3, cast_bf16_e5m2, cast_f32_e4m3, cast_norm_e4m3, cast_gelu_e4m3, cast_gelu_backward_e5m2,
        cast_silu_e4m3, cast_silu_backward_e5m2, cast_swiglu_e4m3, cast_swiglu_backward_e5m2, cast_loss_e5m2, health_bf16, health_f32, amax_bf16, amax_f32,
    }
    /// Delayed scaling.
    SCALE = "scale.cu" { roll_scales, spread_scales }
    /// Layer norm.
    NORM = "norm.cu" {
        layer_norm_forward, layer_norm_cast_2048, layer_norm_cast_4096, layer_norm_backward, layer_norm_backward_cast_2048,
        layer_norm_backward_cast_4096,
    }
    /// Gradients of gain and bias, and what else goes down the columns of a norm's gradient.
    NORM_COLUMNS = "norm_columns.cu" { layer_norm_gradients }
    /// Sums and conversions.
    ELEMENTWISE = "elementwise.cu" { add_bf16, convert_f32_bf16, convert_bf16_f32, sum_slots, accumulate_f32, dropout }
    /// Embeddings.
    EMBEDDING = "embedding.cu" { embedding_forward, clear_rows, token_gradient, position_gradient, rotary }
    /// Cross-entropy.
    LOSS = "loss.cu" { loss_rows, loss_mean }
    /// Norm of the gradients, clipping, AdamW.
    OPTIMIZER = "optimizer.cu" {
        sum_squares, sum_few_squares, sum_squares_bf16, sum_few_squares_bf16, settle, adamw_e4m3, adamw_e4m3_bf16, adamw,
        adamw_bf16,
    }
    /// Causal attention.
    ATTENTION = "attention.cu", shared 100352 {
        attention_forward_64, attention_forward_128, attention_delta_64, attention_delta_128, attention_gradients_64,
        attention_gradients_128,
    }
    /// Counters, state after a bad step, tags, a delay.
    STEP = "step.cu" { copy_if, check_finite, advance, write_tag, check_tag, delay }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_defined_where_the_table_says() {
        for source in ALL {
            let mut defined: Vec<&str> = source
                .text
                .match_indices("KERNEL(")
                .filter(|(at, _)| !source.text[..*at].ends_with("define "))
                .map(|(at, _)| source.text[at + "KERNEL(".len()..].split([',', ')']).next().unwrap().trim())
                .collect();
            let mut listed = source.kernels.to_vec();
            defined.sort_unstable();
            listed.sort_unstable();
            assert_eq!(defined, listed, "{}", source.name);
        }
    }
}
