//! What a model is written with: the ops and their parameters, and the attributes that make stages of functions.

pub use qeffect_macros::{effect, retained, stage};

pub use crate::act::{Act, Fp8, Kept};
pub use crate::built::{Built, Cut};
pub use crate::cmd::Kernel;
pub use crate::cx::Cx;
pub use crate::error::{Error, Result};
pub use crate::op::{Bwd, Effects, Fwd, Op, PureOp, Token, witness};
pub use crate::ops::add::add;
pub use crate::ops::attention::attention;
pub use crate::ops::cross_entropy::cross_entropy;
pub use crate::ops::dropout::{Dropout, dropout};
pub use crate::ops::embedding::{Embedding, embedding};
pub use crate::ops::gelu::gelu;
pub use crate::ops::layer_norm::{LayerNorm, layer_norm};
pub use crate::ops::linear::{Linear, Saved, linear};
pub use crate::ops::rms_norm::{RmsNorm, rms_norm};
pub use crate::ops::rotary::{Rotary, rotary};
pub use crate::ops::silu::{silu, swiglu};
pub use crate::params::{Layers, Params, Registry};
pub use crate::retained::{Layout, Retained};
pub use crate::value::Loss;
