//! What flows between ops: activations, none, several, or the loss.

use crate::act::Act;
use crate::cx::Cx;
use crate::error::{Error, Result};

/// Activations, or their gradients.
pub trait Value: Copy {
    /// One more share of each tensor.
    fn share(self, cx: &mut Cx<'_>) -> Result<Self>;

    /// Gives up a share of each tensor.
    fn free(self, cx: &mut Cx<'_>) -> Result<()>;

    /// The sum, element by element; both stay as they are.
    fn sum(self, other: Self, cx: &mut Cx<'_>) -> Result<Self>;
}

impl Value for Act {
    fn share(self, cx: &mut Cx<'_>) -> Result<Act> {
        cx.share(self)
    }

    fn free(self, cx: &mut Cx<'_>) -> Result<()> {
        cx.free(self)
    }

    fn sum(self, other: Act, cx: &mut Cx<'_>) -> Result<Act> {
        cx.add(self, other)
    }
}

/// The end of a model: its loss is written where the run wants it. Evaluation also gives the logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Loss {
    pub(crate) logits: Option<Act>,
}

impl Loss {
    /// A loss that was written.
    pub const fn written() -> Loss {
        Loss { logits: None }
    }

    /// The logits that it came from, for evaluation.
    pub const fn of_logits(logits: Act) -> Loss {
        Loss { logits: Some(logits) }
    }
}

impl Value for Loss {
    fn share(self, cx: &mut Cx<'_>) -> Result<Loss> {
        Ok(Loss { logits: self.logits.map(|logits| cx.share(logits)).transpose()? })
    }

    fn free(self, cx: &mut Cx<'_>) -> Result<()> {
        self.logits.map_or(Ok(()), |logits| cx.free(logits))
    }

    fn sum(self, _: Loss, _: &mut Cx<'_>) -> Result<Loss> {
        Err(Error::Config("a loss is used once".into()))
    }
}

macro_rules! tuples {
    ($(($($value:ident $at:tt),*);)*) => {$(
        impl<$($value: Value),*> Value for ($($value,)*) {
            fn share(self, _cx: &mut Cx<'_>) -> Result<Self> {
                Ok(($(self.$at.share(_cx)?,)*))
            }

            fn free(self, _cx: &mut Cx<'_>) -> Result<()> {
                $(self.$at.free(_cx)?;)*
                Ok(())
            }

            fn sum(self, _other: Self, _cx: &mut Cx<'_>) -> Result<Self> {
                Ok(($(self.$at.sum(_other.$at, _cx)?,)*))
            }
        }
    )*};
}

tuples! {
    ();
    (A 0, B 1);
    (A 0, B 1, C 2);
    (A 0, B 1, C 2, D 3);
    (A 0, B 1, C 2, D 3, E 4);
    (A 0, B 1, C 2, D 3, E 4, F 5);
}

/// What a stage takes from, or gives to, its neighbour in the pipeline: the tensors of one message.
pub trait Edge: Value {
    /// How many tensors cross.
    const TENSORS: usize;

    /// From what came.
    ///
    /// # Errors
    ///
    /// If it is another number of tensors.
    fn from_edge(acts: &[Act]) -> Result<Self>;

    /// To what goes.
    fn into_edge(self) -> Vec<Act>;
}

impl Edge for Act {
    const TENSORS: usize = 1;

    fn from_edge(acts: &[Act]) -> Result<Act> {
        let [act] = crossing(acts)?;
        Ok(act)
    }

    fn into_edge(self) -> Vec<Act> {
        vec![self]
    }
}

/// The first stage is fed by its context.
impl Edge for () {
    const TENSORS: usize = 0;

    fn from_edge(acts: &[Act]) -> Result<()> {
        crossing(acts).map(|[]| ())
    }

    fn into_edge(self) -> Vec<Act> {
        Vec::new()
    }
}

/// The last stage ends in the loss.
impl Edge for Loss {
    const TENSORS: usize = 0;

    fn from_edge(acts: &[Act]) -> Result<Loss> {
        crossing(acts).map(|[]| Loss::written())
    }

    fn into_edge(self) -> Vec<Act> {
        self.logits.into_iter().collect()
    }
}

macro_rules! several {
    ($($count:literal: ($($act:ident),*) $types:ty;)*) => {$(
        impl Edge for $types {
            const TENSORS: usize = $count;

            fn from_edge(acts: &[Act]) -> Result<Self> {
                let [$($act),*] = crossing(acts)?;
                Ok(($($act),*))
            }

            fn into_edge(self) -> Vec<Act> {
                let ($($act),*) = self;
                vec![$($act),*]
            }
        }
    )*};
}

several! {
    2: (a, b) (Act, Act);
    3: (a, b, c) (Act, Act, Act);
    4: (a, b, c, d) (Act, Act, Act, Act);
    5: (a, b, c, d, e) (Act, Act, Act, Act, Act);
    6: (a, b, c, d, e, f) (Act, Act, Act, Act, Act, Act);
}

fn crossing<const N: usize>(acts: &[Act]) -> Result<[Act; N]> {
    <[Act; N]>::try_from(acts).map_err(|_| {
        let expected = match N {
            0 => "no tensor, for it ends the pipeline".to_owned(),
            1 => "a tensor of its neighbour".to_owned(),
            n => format!("{n} tensors of its neighbour"),
        };
        Error::shapes("a stage", &expected, acts)
    })
}
