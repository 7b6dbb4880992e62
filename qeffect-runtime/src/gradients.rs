//! Gradients on their way from actions to the optimizer: destinations, and who has written what.
//!
//! | placement | gradient of a matrix | W |
//! |---|---|---|
//! | copied | one slot per microbatch, added in microbatch order by `reduce` | writes its slot |
//! | direct | one sum | adds its product to the sum; the first one executed overwrites |
//! | coalesced | one sum | of a group: one product over all its tokens, added likewise ([`groups`](crate::groups)) |
//!
//! Embeddings are added in place where matrices are, each microbatch to the rows that it touches. Vectors have a slot per
//! microbatch in every placement. What was written is known to
//! the [`GradArena`] of the stage; which of an action's writes were executed is known when the action ends.

use core::fmt;
use core::str::FromStr;

use qeffect_core::arena::{Declared, Destination, GradArena, Places, Write};
use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::ids::Microbatch;
use qeffect_core::recipe::Recipe;

use crate::act::Act;
use crate::error::{Error, Result};
use crate::groups::{Groups, Partition};
use crate::stage::{ParamId, ParamKind, StageSpec};
use crate::state::StageState;

/// Where the gradient of one parameter and microbatch goes. Given out once.
#[must_use = "a gradient destination is written by the action that asked for it"]
#[derive(PartialEq, Eq, Debug)]
pub struct GradDst {
    pub(crate) param: ParamId,
    pub(crate) act: Act,
}

impl GradDst {
    /// The buffer, to write as a whole. For vectors; matrices go through [`Cx::weight_product`] and embeddings through
    /// [`Cx::add_gradients`], because some placements add to what their buffer holds.
    ///
    /// [`Cx::weight_product`]: crate::cx::Cx::weight_product
    /// [`Cx::add_gradients`]: crate::cx::Cx::add_gradients
    pub const fn act(&self) -> Act {
        self.act
    }
}

/// What gradients of matrices are stored in between W and the optimizer. Those of embeddings, which are added to row by row,
/// of vectors, and of tied parameters are always stored as masters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum GradDtype {
    /// As masters: f32.
    #[default]
    Master,
    /// In bf16: a sum over a whole group of microbatches is rounded once. Less memory, and less to read for the optimizer.
    /// For coalesced gradients and masters in f32.
    Bf16,
}

impl GradDtype {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            GradDtype::Master => "master",
            GradDtype::Bf16 => "bf16",
        }
    }

    /// Refuses what it does not go together with.
    pub(crate) fn fits(self, gradients: Gradients, recipe: &Recipe) -> Result<()> {
        if self == GradDtype::Master {
            return Ok(());
        }
        if gradients != Gradients::Coalesced {
            let message = "gradients in bf16 are rounded once per group of microbatches: they must be coalesced";
            return Err(Error::Config(message.into()));
        }
        if recipe.master() != Dtype::F32 {
            return Err(Error::Config(format!(
                "gradients in bf16 need masters in f32, recipe `{}` has others",
                recipe.name()
            )));
        }
        Ok(())
    }
}

impl fmt::Display for GradDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for GradDtype {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<GradDtype, String> {
        let found = [GradDtype::Master, GradDtype::Bf16].into_iter().find(|dtype| dtype.name() == text);
        found.ok_or_else(|| format!("gradients are not stored in `{text}`; one of: master, bf16"))
    }
}

/// How many destinations a parameter has under a placement.
pub(crate) fn places(kind: ParamKind, gradients: Gradients) -> Places {
    match (kind, gradients) {
        (ParamKind::Matrix | ParamKind::Embedding, Gradients::Direct | Gradients::Coalesced) => Places::One,
        _ => Places::PerMicrobatch,
    }
}

/// The gradients of a stage in the step at hand.
#[derive(Debug)]
pub(crate) struct Grads {
    arena: GradArena,
    /// Writes that the running action was allowed.
    open: Vec<Write>,
    /// Where gradients are coalesced: what waits for the rest of its group.
    groups: Option<Groups>,
}

impl Grads {
    /// Binds every destination of a stage.
    pub fn new(spec: &StageSpec, state: &StageState, gradients: Gradients, partition: Partition) -> Result<Grads> {
        let declared = spec.params.iter().zip(&state.params).map(|(param, bufs)| Declared {
            name: param.path.clone(),
            dtype: bufs.grad.dtype,
            rows: param.rows as u64,
            cols: param.cols as u64,
            places: places(param.kind, gradients),
        });
        let mut arena = GradArena::new(0, partition.microbatches, declared);
        for (index, bufs) in state.params.iter().enumerate() {
            let one = [bufs.grad];
            let places = if bufs.slots.is_empty() { &one[..] } else { &bufs.slots };
            for (place, act) in places.iter().enumerate() {
                arena.bind(index, place as u32, destination(act))?;
            }
        }
        let groups = (gradients == Gradients::Coalesced).then(|| Groups::new(partition));
        Ok(Grads { arena, open: Vec::new(), groups })
    }

    /// A step begins.
    pub fn begin_step(&mut self) {
        self.arena.reset();
        self.forget();
    }

    /// A replayed step begins: all that its rehearsal wrote.
    pub fn replay(&mut self) -> Result<()> {
        self.begin_step();
        Ok(self.arena.replay()?)
    }

    /// The step is aborted: nothing is written until the next one begins.
    pub fn abort(&mut self) {
        self.arena.poison();
        self.forget();
    }

    fn forget(&mut self) {
        self.open.clear();
        self.groups.iter_mut().for_each(Groups::clear);
    }

    /// Where gradients are coalesced: what is incomplete.
    pub fn groups(&mut self) -> Option<&mut Groups> {
        self.groups.as_mut()
    }

    /// Bytes of all destinations.
    pub fn bytes(&self) -> usize {
        self.arena.bytes() as usize
    }

    /// Allows the running action a write.
    pub fn open(&mut self, param: ParamId, microbatch: Microbatch) -> Result<()> {
        self.open.push(self.arena.begin(param.0, microbatch.0)?);
        Ok(())
    }

    /// Takes over a write that the running action was allowed, and says whether it adds to what is there.
    pub fn take(&mut self, param: ParamId, microbatch: Microbatch) -> Result<(Write, bool)> {
        let at = self.open.iter().position(|write| (write.param(), write.microbatch()) == (param.0, microbatch.0));
        let Some(at) = at else {
            return Err(Error::Contract {
                code: Code::ArenaDuplicate,
                message: format!("a gradient for microbatch {microbatch} is written that was not asked for"),
            });
        };
        let write = self.open.swap_remove(at);
        let adds = !self.arena.initialises(&write);
        Ok((write, adds))
    }

    /// Writes that were taken over have been executed by one command, or have failed.
    pub fn executed<E: Into<Error>>(
        &mut self,
        writes: impl IntoIterator<Item = Write>,
        act: &Act,
        result: Result<(), E>,
    ) -> Result<()> {
        let mut writes = writes.into_iter();
        match result {
            Ok(()) => writes.try_for_each(|write| Ok(self.arena.finish(write, &destination(act))?)),
            Err(error) => {
                writes.for_each(|write| self.arena.abort(write));
                Err(error.into())
            }
        }
    }

    /// The action ends. What it was allowed and nobody took over, it has written itself.
    pub fn close<T>(&mut self, spec: &StageSpec, state: &StageState, result: Result<T>) -> Result<T> {
        if result.is_err() {
            self.abort();
            return result;
        }
        for write in std::mem::take(&mut self.open) {
            let (param, m) = (write.param(), write.microbatch() as usize);
            let bufs = &state.params[param];
            let Some(slot) = bufs.slots.get(m) else {
                self.arena.abort(write);
                let path = &spec.params[param].path;
                return Err(Error::Contract {
                    code: Code::ArenaMismatch,
                    message: format!(
                        "the gradient of `{path}` is a sum over microbatches, and its op did not add to it: a matrix is \
                         written by `Cx::weight_product`, a parameter of kind `Embedding` by `Cx::add_gradients`"
                    ),
                });
            };
            self.arena.finish(write, &destination(slot))?;
        }
        result
    }

    /// Refuses unless the gradient of a parameter is complete.
    pub fn require_final(&self, param: ParamId) -> Result<()> {
        Ok(self.arena.require_final(param.0)?)
    }

    /// Refuses unless every gradient is complete.
    pub fn all_final(&self) -> Result<()> {
        Ok(self.arena.all_final()?)
    }

    /// A parameter has all contributions.
    pub fn complete(&mut self, param: ParamId) -> Result<()> {
        Ok(self.arena.complete(param.0)?)
    }
}

fn destination(act: &Act) -> Destination {
    Destination {
        device: 0, // a stage lives on one
        buffer: act.buf.index() as u64,
        offset: 0,
        dtype: act.dtype,
        rows: act.rows as u64,
        cols: act.cols as u64,
    }
}
