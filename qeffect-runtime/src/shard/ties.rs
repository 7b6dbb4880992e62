//! Tied parameters: one weight that is held at two places of the model, by the embedding and by the head.
//!
//! Each place has its own copy of the weight, of its gradient and of its moments. Once per step, before the norm is
//! taken, the two gradients are added, the first place's first, and both places get the sum; from equal gradients the
//! optimizer makes equal weights. Where both live on one rank that is commands alone; else the ranks exchange theirs.

use super::Shard;
use crate::act::Act;
use crate::capture::record::Far;
use crate::cmd::Cmd;
use crate::device::{Buf, BufSpec, Device};
use crate::error::{Error, Result};
use crate::optim::Measured;
use crate::stage::{Init, Stage, StageSpec};

/// A tie between two parameters of a model.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Tie {
    /// Paths: of the parameter itself, and of the one that is tied to it.
    pub ends: [String; 2],
    /// The stages of both.
    pub stages: [usize; 2],
}

impl Tie {
    /// All ties of a model.
    pub fn of<'a>(specs: impl Iterator<Item = &'a StageSpec> + Clone) -> Result<Vec<Tie>> {
        let mut ties = Vec::new();
        for (stage, spec) in specs.clone().enumerate() {
            for (param, to) in spec.ties() {
                let echo = &spec.params[param.0];
                let mut owners =
                    specs.clone().enumerate().flat_map(|(at, spec)| spec.params.iter().map(move |p| (at, p)));
                let Some((owner_stage, owner)) = owners.find(|(_, owner)| owner.path == *to) else {
                    let path = &echo.path;
                    return Err(Error::Config(format!("`{path}` is tied to `{to}`, which the model does not have")));
                };
                let shape = |rows: usize, cols: usize, init: Init| (rows, cols, init);
                if shape(echo.rows, echo.cols, echo.init) != shape(owner.rows, owner.cols, owner.init) {
                    let path = &echo.path;
                    return Err(Error::Config(format!(
                        "`{path}` and `{to}` are tied, and differ in shape or first values"
                    )));
                }
                ties.push(Tie { ends: [to.clone(), echo.path.clone()], stages: [owner_stage, stage] });
            }
        }
        Ok(ties)
    }
}

/// What a rank has of a tie.
pub(super) struct Held {
    /// Gradients of the ends that are here.
    ends: [Option<Buf>; 2],
    /// The gradient of the end that is not here, and which end this rank has, for other ranks to know.
    far: Option<Far>,
    sum: Buf,
}

impl<S: Stage> Shard<S> {
    /// Makes the buffers of the model's ties. `across`: whether one of them, here or elsewhere, spans two ranks.
    pub(crate) fn tie(&mut self, ties: &[Tie], across: bool) -> Result<()> {
        self.ties.clear();
        self.ties_across = across;
        for (at, tie) in ties.iter().enumerate() {
            let ends = [0, 1].map(|end| self.find(&tie.ends[end]).ok().map(|found| (found.part, found.index)));
            let Some((part, index)) = ends[0].or(ends[1]) else { continue };
            let grad = self.parts[part].state.params[index].grad;
            if grad.dtype != self.recipe.master() {
                let path = &tie.ends[0];
                return Err(Error::Config(format!(
                    "`{path}` is tied: its gradient is stored as a master, not in bf16"
                )));
            }
            let mut buffer = |what: &str| {
                let Act { dtype, rows, cols, .. } = grad;
                self.device.alloc(BufSpec::new(format!("{} ({what})", tie.ends[0]), dtype, rows, cols))
            };
            let sum = buffer("tied gradient")?;
            let bufs = ends.map(|end| end.map(|(part, index)| self.parts[part].state.params[index].grad.buf));
            let far = match bufs {
                [Some(grad), None] => Some(Far { slot: 2 * at, grad, other: buffer("gradient of the other end")? }),
                [None, Some(grad)] => Some(Far { slot: 2 * at + 1, grad, other: buffer("gradient of the other end")? }),
                _ => None,
            };
            self.ties.push(Held { ends: bufs, far, sum });
        }
        Ok(())
    }

    /// Whether ranks exchange gradients before they agree.
    pub(crate) const fn ties_across(&self) -> bool {
        self.ties_across
    }

    /// The ends of this rank whose other end is elsewhere.
    pub(crate) fn far_ends(&self) -> Vec<Far> {
        self.ties.iter().filter_map(|tie| tie.far).collect()
    }

    /// What this rank gives to the exchange.
    pub(crate) fn offer_ties(&mut self) -> Result<Measured> {
        let far = self.far_ends();
        let tied = far.into_iter().map(|far| Ok((far.slot, self.read_reals(far.grad)?))).collect::<Result<_>>()?;
        Ok(Measured { tied, ..Measured::default() })
    }

    /// What all ranks gave, by rank.
    pub(crate) fn accept_ties(&mut self, all: &[Measured]) -> Result<()> {
        for far in self.far_ends() {
            let mut given = all.iter().flat_map(|measured| &measured.tied);
            let Some((_, values)) = given.find(|(slot, _)| *slot == far.partner()) else {
                return Err(Error::Config(format!("the other end of tie {} gave no gradient", far.slot / 2)));
            };
            self.upload_reals(far.other, values)?;
        }
        Ok(())
    }

    /// Both ends of every tie get the sum.
    pub(crate) fn combine_ties(&mut self) -> Result<()> {
        for tie in &self.ties {
            let slots = tie.ends.iter().map(|end| end.or(tie.far.map(|far| far.other))).collect::<Option<Vec<Buf>>>();
            let Some(slots) = slots else { return Err(Error::Config("a tie has lost an end".into())) };
            let slots = slots.into_boxed_slice();
            self.device.issue(&Cmd::SumSlots { slots, out: tie.sum })?;
            for dst in tie.ends.into_iter().flatten() {
                self.device.issue(&Cmd::Copy { src: tie.sum, dst })?;
            }
        }
        Ok(())
    }
}
