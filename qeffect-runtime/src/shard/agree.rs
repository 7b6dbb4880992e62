//! What all ranks decide from, and what they decide: the norm of the gradient, and whether the step counts.

use std::ops::Range;

use qeffect_core::ids::Rank;

use super::{OptimBufs, Shard};
use crate::cmd::Cmd;
use crate::device::{Buf, Device};
use crate::error::{Error, Result};
use crate::kernels::optimizer::norm_pieces;
use crate::optim::{Measured, Verdict};
use crate::stage::{ParamId, Role, Stage};

/// Where a rank keeps what all ranks decide from, and which part of it is its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Exchange {
    /// Its number: the position of its flag.
    pub rank: usize,
    /// Partial sums of squares of the whole model.
    pub partials: Buf,
    /// One flag per rank.
    pub flags: Buf,
    /// Its own partial sums.
    pub partials_of_rank: Vec<Range<usize>>,
}

impl<S: Stage> Shard<S> {
    /// What this rank knows before `agree`: partial sums of squares of its gradients, and whether a value was not
    /// finite. The cells are looked at too, since commit would make them permanent.
    pub fn measure(&mut self) -> Result<()> {
        let OptimBufs { partials, flags, .. } = self.optim;
        let (flag, factor) = (self.run.flag, self.gradient_factor());
        for part in &self.parts {
            let stage = part.stage.spec();
            for (at, (spec, param)) in stage.params.iter().zip(&part.state.params).enumerate() {
                let first = self.config.norm.first(&spec.path)?;
                // A tied gradient counts once, where its other end is.
                let factor = if stage.tied_to(ParamId(at)).is_some() { 0.0 } else { factor };
                self.device.issue(&Cmd::SumSquares { src: param.grad.buf, factor, partials, first })?;
            }
            for bank in Role::ALL.into_iter().filter_map(|role| part.state.bank(role)) {
                for src in [bank.scales, bank.history] {
                    self.device.issue(&Cmd::CheckFinite { src, flag })?;
                }
            }
        }
        let dst_at = self.config.rank as usize;
        Ok(self.device.issue(&Cmd::CopyRange { src: flag, src_at: 0, dst: flags, dst_at, len: 1 })?)
    }

    /// Where what [`Shard::measure`] left lies.
    pub(crate) fn exchange(&self) -> Result<Exchange> {
        let mut partials_of_rank = Vec::new();
        for spec in self.parts.iter().flat_map(|part| &part.stage.spec().params) {
            let first = self.config.norm.first(&spec.path)?;
            partials_of_rank.push(first..first + norm_pieces(spec.elements()));
        }
        let OptimBufs { partials, flags, .. } = self.optim;
        Ok(Exchange { rank: self.config.rank as usize, partials, flags, partials_of_rank })
    }

    /// What this rank gives to the exchange.
    pub fn offer(&mut self) -> Result<Measured> {
        let Exchange { rank, partials, flags, partials_of_rank } = self.exchange()?;
        let all = self.read_reals(partials)?;
        let bad = self.read_pod::<u32>(flags)?[rank] != 0;
        let partials = partials_of_rank.into_iter().flatten().map(|at| (at, all[at])).collect();
        Ok(Measured { partials, bad, tied: Vec::new() })
    }

    /// What all ranks gave, by rank.
    pub fn accept(&mut self, measured: &[Measured]) -> Result<()> {
        let mut all = vec![None; self.config.norm.len()];
        for (at, value) in measured.iter().flat_map(|measured| &measured.partials) {
            match all.get_mut(*at) {
                Some(slot @ None) => *slot = Some(*value),
                _ => return Err(Error::Config(format!("partial sum {at} of the norm is doubled or out of range"))),
            }
        }
        let Some(all) = all.into_iter().collect::<Option<Vec<f64>>>() else {
            return Err(Error::Config("a partial sum of the norm is missing".into()));
        };
        let ranks = self.config.ranks as usize;
        if measured.len() != ranks {
            return Err(Error::Config(format!("{} of {ranks} ranks took part in the agreement", measured.len())));
        }
        self.upload_reals(self.optim.partials, &all)?;
        let flags: Vec<u32> = measured.iter().map(|measured| u32::from(measured.bad)).collect();
        Ok(self.device.write(self.optim.flags, bytemuck::cast_slice(&flags))?)
    }

    /// Norm, clipping factor and flag, the same on every rank.
    pub fn settle(&mut self) -> Result<()> {
        let OptimBufs { partials, flags, norm, clip, .. } = self.optim;
        let limit = self.config.optim.clip;
        Ok(self.device.issue(&Cmd::Settle { partials, flags, limit, norm, clip, flag: self.run.flag })?)
    }

    /// What came of the step. After a bad one the counts of the host follow what commit has put back.
    pub fn verdict(&mut self) -> Result<Verdict> {
        let norm = self.read_reals(self.optim.norm)?[0];
        let commit = self.read_pod::<u32>(self.run.flag)?[0] == 0;
        if !commit {
            self.forget_rolls();
        }
        Ok(Verdict { norm, commit })
    }

    /// Returns when the device has carried out all that was issued.
    pub(crate) fn idle(&mut self) -> Result<()> {
        self.read_pod::<u32>(self.run.flag).map(|_| ())
    }

    /// The ranks that met a value that is not finite before they agreed.
    pub(crate) fn raised(&mut self) -> Result<Vec<Rank>> {
        let flags = self.read_pod::<u32>(self.optim.flags)?;
        Ok((0..).zip(flags).filter(|(_, flag)| *flag != 0).map(|(rank, _)| Rank(rank)).collect())
    }
}
