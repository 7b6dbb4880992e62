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
}

/// What every source includes.
pub const HEADERS: &[(&str, &str)] =
    &[("common.cuh", include_str!("../cuda/common.cuh")), ("tile.cuh", include_str!("../cuda/tile.cuh"))];

macro_rules! sources {
    ($($(#[$doc:meta])* $constant:ident = $file:literal { $($kernel:ident),+ $(,)? })+) => {
        $($(#[$doc])*
        pub const $constant: Source = Source {
            name: $file,
            text: include_str!(concat!("../cuda/", $file)),
            kernels: &[$(stringify!($kernel)),+],
        };)+

        /// Every source.
        pub const ALL: &[Source] = &[$($constant),+];
    };
}

sources! {
    /// Casts to FP8, with what is fused into them.
    CAST = "cast.cu" {
        cast_bf16_e4m3, cast_bf16_e5m2, cast_f32_e4m3, cast_norm_e4m3, cast_gelu_e4m3, cast_gelu_backward_e5m2,
        cast_loss_e5m2, amax_bf16, amax_f32, finish_columns,
    }
    /// Delayed scaling.
    SCALE = "scale.cu" { roll_scales }
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
