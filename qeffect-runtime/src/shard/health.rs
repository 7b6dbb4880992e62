//! How state cells fare: what the casts of a step lose, and what their scales follow from.
//!
//! In a step for which that is asked, a count is issued beside every cast that stages an amax; it reads what the cast
//! reads and writes words of its own, so the step computes the same bits. Other steps know nothing of it.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_core::ids::Stage as StageId;

use super::Shard;
use crate::cmd::{Cmd, HEALTH_WORDS};
use crate::device::{Buf, BufSpec, Device};
use crate::error::Result;
use crate::stage::{Role, Stage};

/// A state cell after a step: its scale, and what the casts of the step did to the numbers they were given.
#[derive(Clone, PartialEq, Debug)]
pub struct CellHealth {
    /// The stage that owns it.
    pub stage: StageId,
    /// Its name in the whole model: `blocks.3.qkv.input`.
    pub name: String,
    /// What it scales.
    pub role: Role,
    /// The format of the codes.
    pub format: Format,
    /// The scale in force after the step.
    pub scale: f32,
    /// Whether an infinity in its history keeps the scale where it is.
    pub frozen: bool,
    /// The largest magnitude that was cast in the step; NaN is passed over.
    pub amax: f32,
    /// Casts in the step: one per microbatch, and one of a weight.
    pub casts: u64,
    /// Numbers that were cast.
    pub elements: u64,
    /// Finite ones that were scaled beyond the largest code.
    pub saturated: u64,
    /// Those that are not zero and whose code is.
    pub underflowed: u64,
    /// Those that were infinite or NaN.
    pub not_finite: u64,
}

impl CellHealth {
    /// Share of the numbers that saturated.
    pub fn saturated_share(&self) -> f64 {
        share(self.saturated, self.elements)
    }

    /// Share of the numbers that became zero.
    pub fn underflowed_share(&self) -> f64 {
        share(self.underflowed, self.elements)
    }

    /// Puts the worse cell first: one that met a number that is not finite, one that is frozen, one that saturates more, one
    /// that loses more to zero.
    pub fn worse_first(&self, other: &CellHealth) -> Ordering {
        let flags = |cell: &CellHealth| (cell.not_finite > 0, cell.frozen);
        let shares = |of: fn(&CellHealth) -> f64| of(other).total_cmp(&of(self));
        flags(other)
            .cmp(&flags(self))
            .then_with(|| shares(CellHealth::saturated_share))
            .then_with(|| shares(CellHealth::underflowed_share))
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole > 0 { part as f64 / whole as f64 } else { 0.0 }
}

impl<S: Stage> Shard<S> {
    /// From now on what casts lose is counted, from zero.
    pub(crate) fn count_casts(&mut self) -> Result<()> {
        let Shard { device, parts, counters, .. } = self;
        for part in parts.iter() {
            for (role, bank) in Role::ALL.into_iter().filter_map(|role| Some((role, part.state.bank(role)?))) {
                let counts = match counters.get(&bank.history) {
                    Some(counts) => *counts,
                    None => {
                        let name = format!("{} counts", role.name());
                        let counts = device.alloc(BufSpec::new(name, Dtype::U64, bank.len(), HEALTH_WORDS))?;
                        counters.insert(bank.history, counts);
                        counts
                    }
                };
                device.issue(&Cmd::Fill { dst: counts, value: 0.0 })?;
            }
        }
        device.count_casts(Some(counters.clone()));
        Ok(())
    }

    /// Counts no longer.
    pub(crate) fn stop_counting(&mut self) {
        self.device.count_casts(None);
    }

    /// The cells of every stage, with what was counted last.
    pub(crate) fn health(&mut self) -> Result<Vec<CellHealth>> {
        let counters = self.counters.clone();
        let mut banks = Vec::new();
        for part in &self.parts {
            for role in Role::ALL {
                let Some(bank) = part.state.bank(role) else { continue };
                let names = part.stage.spec().cells(role).to_vec();
                let counts = counters.get(&bank.history).copied();
                banks.push((part.id, role, names, bank.format, bank.rule, [bank.scales, bank.history], counts));
            }
        }
        let mut cells = Vec::new();
        for (stage, role, names, format, rule, [scales, history], counts) in banks {
            let (scales, history) = (self.read_pod::<f32>(scales)?, self.read_pod::<f32>(history)?);
            let counts = counts.map_or(Ok(Vec::new()), |counts| self.read_pod::<u64>(counts))?;
            for (cell, path) in names.iter().enumerate() {
                let column: Vec<f32> = history.iter().skip(cell).step_by(names.len()).copied().collect();
                let words = counts.as_chunks::<HEALTH_WORDS>().0.get(cell).copied().unwrap_or_default();
                let [elements, saturated, underflowed, not_finite, amax, casts] = words;
                cells.push(CellHealth {
                    stage,
                    name: format!("{path}.{}", role.name()),
                    role,
                    format,
                    scale: scales[cell],
                    frozen: rule.is_frozen(&column),
                    amax: f32::from_bits(amax as u32),
                    casts,
                    elements,
                    saturated,
                    underflowed,
                    not_finite,
                });
            }
        }
        Ok(cells)
    }
}

/// Where a shard counts, by the history of the cells.
pub(super) type Counters = BTreeMap<Buf, Buf>;
