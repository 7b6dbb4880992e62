//! The header of a schedule, evaluated: sizes, placement, bounds and contracts.

use std::borrow::Cow;

use super::visible::{context_note, instance_text};
use super::{MAX_ITEMS, MAX_MICROBATCHES, MAX_RANKS, MAX_STAGES, MAX_STEPS, Machine, SMALL_SCHEDULE};
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::ids::Rank;
use crate::lang::ast::*;
use crate::origin::Origin;
use crate::schedule::{Bounds, Bytes, Costs, Expect, Measure, Schedule};

impl Machine<'_> {
    /// A value of the header; `None` if it has none.
    fn header(&mut self, id: ExprId) -> Option<i64> {
        match self.value(id) {
            Ok(value) => Some(value),
            Err(stop) => {
                self.stopped(*stop);
                None
            }
        }
    }

    fn header_fault(&mut self, code: Code, origin: Origin, message: String) {
        let note = context_note(&instance_text(self.p, self.params), "");
        let mut fault = Diagnostic::new(code, origin, message);
        fault.notes.extend(note);
        self.record(fault);
    }

    /// A number from 0 to `most`.
    fn amount(&mut self, id: ExprId, what: &str, most: u32) -> Option<u32> {
        let value = self.header(id)?;
        match u32::try_from(value) {
            Ok(value) if value <= most => Some(value),
            _ => {
                let message = format!("`{what}:` is {value}, outside 0..={most}");
                self.header_fault(Code::Header, self.p.exprs[id as usize].origin, message);
                None
            }
        }
    }

    /// A one-parameter closure of the header.
    fn apply(&mut self, lambda: u32, argument: u32) -> Option<i64> {
        let binding = self.p.parameters(lambda)[0];
        self.frame[binding.slot as usize] = i64::from(argument);
        let body = self.p.lambdas[lambda as usize].body;
        match self.value(body) {
            Ok(value) => Some(value),
            Err(mut stop) => {
                self.see(&mut stop.visible, core::iter::once((binding.name, binding.slot, true)));
                self.stopped(*stop);
                None
            }
        }
    }

    pub(super) fn schedule(&mut self) -> Option<Schedule> {
        let p = self.p;
        if let Err(stop) = self.block(p.lets) {
            self.stopped(*stop);
            return None;
        }
        let ranks = self.amount(p.header.ranks, "ranks", MAX_RANKS);
        let microbatches = self.amount(p.header.microbatches, "microbatches", MAX_MICROBATCHES);
        let stages = self.amount(p.header.stages, "stages", MAX_STAGES);
        let (ranks, microbatches, stages) = (ranks?, microbatches?, stages?);
        if u64::from(stages) * u64::from(microbatches) > MAX_ITEMS as u64 {
            let message =
                format!("{stages} stages times {microbatches} microbatches are more than {MAX_ITEMS} actions");
            self.header_fault(Code::LimitExceeded, p.header.origins.microbatches, message);
            return None;
        }
        let placement = self.placement(ranks, stages);
        let bounds = self.bounds(ranks);
        let bytes = p.header.bytes.map(|line| self.bytes(&line, ranks, stages));
        let coalesce = match p.header.coalesce {
            Some(id) => self.amount(id, "coalesce", MAX_MICROBATCHES),
            None => Some(1),
        };
        if coalesce == Some(0) {
            let origin = p.header.coalesce.map_or(Origin::NONE, |id| p.exprs[id as usize].origin);
            self.header_fault(Code::Header, origin, "`coalesce:` is 0; 1 means that nothing is coalesced".to_owned());
        }
        let expects = self.expects();
        self.limit = most_items(ranks, stages, microbatches);
        let starts = self.ranks(ranks)?;
        self.items.shrink_to_fit();
        let params = p.params.iter().zip(self.params).map(|(b, v)| (p.names[b.name as usize].clone(), *v)).collect();
        Some(Schedule {
            name: p.name.clone(),
            params: Cow::Owned(params),
            ranks,
            stages,
            microbatches,
            placement: placement.into(),
            items: std::mem::take(&mut self.items).into(),
            starts: starts.into(),
            bounds: bounds.into(),
            expects: expects.into(),
            transport: p.header.transport.unwrap_or_default(),
            update: p.header.update.unwrap_or_default(),
            eval: p.header.eval,
            coalesce: coalesce?,
            bytes: match bytes {
                Some(bytes) => Some(bytes?),
                None => None,
            },
            origins: p.header.origins,
        })
    }

    fn placement(&mut self, ranks: u32, stages: u32) -> Vec<Rank> {
        let place = self.p.header.place;
        let mut placement = Vec::with_capacity(stages as usize);
        self.steps = MAX_STEPS;
        for stage in 0..stages {
            let Some(rank) = self.apply(place, stage) else { break };
            let Ok(rank) = u32::try_from(rank) else {
                let body = self.p.lambdas[place as usize].body;
                let message = format!("stage {stage} is placed on rank {rank}, outside 0..{ranks}");
                self.header_fault(Code::PlacementInvalid, self.p.exprs[body as usize].origin, message);
                break;
            };
            placement.push(Rank(rank));
        }
        placement
    }

    fn bounds(&mut self, ranks: u32) -> Vec<Bounds> {
        let lambdas = self.p.header.bounds;
        if lambdas == [None; 3] {
            return Vec::new();
        }
        self.steps = MAX_STEPS;
        let mut bounds = Vec::with_capacity(ranks as usize);
        for rank in 0..ranks {
            let mut values = [None; 3];
            for ((value, lambda), name) in values.iter_mut().zip(lambdas).zip(["slots", "tapes", "works"]) {
                let Some(lambda) = lambda else { continue };
                let Some(bound) = self.apply(lambda, rank) else { return bounds };
                *value = u32::try_from(bound).ok();
                if value.is_none() {
                    let body = self.p.lambdas[lambda as usize].body;
                    let message = format!("`{name}:` of rank {rank} is {bound}, outside 0..={}", u32::MAX);
                    self.header_fault(Code::Header, self.p.exprs[body as usize].origin, message);
                }
            }
            let [slots, tapes, works] = values;
            bounds.push(Bounds { slots, tapes, works });
        }
        bounds
    }

    fn bytes(&mut self, line: &BytesLine, ranks: u32, stages: u32) -> Option<Bytes> {
        self.steps = MAX_STEPS;
        Some(Bytes {
            tape: self.sizes(line.tape, stages)?.into(),
            work: self.sizes(line.work, stages)?.into(),
            input: match line.input {
                Some(input) => self.sizes(input, stages)?.into(),
                None => Cow::Borrowed(&[]),
            },
            budget: self.sizes(line.budget, ranks)?.into(),
            origin: line.origin,
        })
    }

    /// A number of bytes for each of `count` stages or ranks.
    fn sizes(&mut self, lambda: u32, count: u32) -> Option<Vec<u64>> {
        let mut sizes = Vec::with_capacity(count as usize);
        for n in 0..count {
            let value = self.apply(lambda, n)?;
            let Ok(size) = u64::try_from(value) else {
                let body = self.p.lambdas[lambda as usize].body;
                let message = format!("`bytes` has {value} for {n}, below 0");
                self.header_fault(Code::Header, self.p.exprs[body as usize].origin, message);
                return None;
            };
            sizes.push(size);
        }
        Some(sizes)
    }

    fn expects(&mut self) -> Vec<Expect> {
        let mut expects = Vec::new();
        for line in self.p.header.expects.iter() {
            let holds = line.condition.map_or(Some(1), |condition| self.header(condition));
            if holds != Some(1) {
                continue;
            }
            let costs: Option<Vec<i64>> = self.p.list(line.costs).iter().map(|id| self.header(*id)).collect();
            let (Some(costs), Some(bound)) = (costs, self.header(line.bound)) else { continue };
            if let Some(n) = costs.iter().position(|cost| *cost < 0) {
                let origin = self.p.exprs[self.p.list(line.costs)[n] as usize].origin;
                self.header_fault(Code::Header, origin, format!("a cost is {}, below 0", costs[n]));
                continue;
            }
            let measure = match (line.measure, &costs[..]) {
                (MeasureKind::Bubble, &[f, i, w]) => Measure::Bubble(Costs { f, i, w }),
                (MeasureKind::Idle, &[f, i, w]) => Measure::Idle(Costs { f, i, w }),
                _ => Measure::Peak,
            };
            expects.push(Expect { measure, compare: line.compare, bound, origin: line.origin });
        }
        expects
    }
}

/// No legal schedule has more items: F, R, I and W of each stage and microbatch, each perhaps with
/// the three markers of an overlap, and refresh, reduce and commit. Small schedules may have more, so
/// that the checker can name what is repeated.
fn most_items(ranks: u32, stages: u32, microbatches: u32) -> usize {
    let legal = u64::from(stages) * (u64::from(microbatches) * 16 + 2) + u64::from(ranks);
    legal.clamp(SMALL_SCHEDULE, MAX_ITEMS as u64) as usize
}
