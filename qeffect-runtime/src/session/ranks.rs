//! Making a session: schedule, model and run are held against each other, and every rank gets its part.

use std::sync::Arc;

use qeffect_core::bind::{Bound, RunFacts, bind};
use qeffect_core::code::Code;
use qeffect_core::effects::{CellEffect, StageEffects};
use qeffect_core::ids::{Rank, Stage as StageId};
use qeffect_core::plan::{Checked, Direction, Edge};
use qeffect_core::recipe::Recipe;

use super::{Session, SessionConfig};
use crate::capture::CaptureMode;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::optim::NormPlan;
use crate::rank::{RankState, Route};
use crate::shard::{Shard, ShardConfig, Tie};
use crate::stage::{Role, Stage};
use crate::transport::local::{EdgeSpec, Fabric};
use crate::wire::MessageShape;
use crate::worker::Worker;

impl<S> Session<S>
where
    S: Stage + Send + 'static,
    S::Tape: Send,
    S::Work: Send,
{
    /// Ranks whose parameters have no values yet, on a device each.
    pub(super) fn ranks(
        checked: Checked,
        stages: Vec<S>,
        config: SessionConfig,
        devices: Vec<Box<dyn Device>>,
    ) -> Result<Session<S>> {
        let recipe = common_recipe(&stages)?;
        let facts = RunFacts {
            update: recipe.update(),
            microbatches: checked.schedule.microbatches,
            gradients: config.gradients,
            allow_order_dependent: config.allow_order_dependent,
        };
        config.grad_dtype.fits(config.gradients, &recipe)?;
        let bound = bind(checked, facts, stages.iter().map(declared).collect())?;
        let schedule = &bound.checked().schedule;
        let fabric = fabric(&bound, &stages)?;
        let params = stages.iter().flat_map(|stage| stage.spec().params.iter());
        let shard_config = ShardConfig {
            rank: 0,
            microbatches: schedule.microbatches,
            gradients: config.gradients,
            grad_dtype: config.grad_dtype,
            fast_accumulation: config.fast_accumulation,
            coalesce: schedule.coalesce,
            data_parallel: 1,
            tokens: config.tokens,
            ranks: schedule.ranks,
            lists: config.capture != CaptureMode::Eager,
            optim: config.optim,
            norm: NormPlan::new(params.map(|param| (param.path.as_str(), param.elements())))?,
        };
        let ties = Tie::of(stages.iter().map(Stage::spec))?;
        let rank_of = |stage: usize| schedule.placement[stage];
        let across = ties.iter().any(|tie| rank_of(tie.stages[0]) != rank_of(tie.stages[1]));
        let mut parts: Vec<Vec<(StageId, S)>> = (0..schedule.ranks).map(|_| Vec::new()).collect();
        for (id, stage) in stages.into_iter().enumerate() {
            parts[schedule.placement[id].index()].push((StageId(id as u32), stage));
        }
        let route = Arc::new(Route::new(bound, fabric));
        let mut workers = Vec::with_capacity(parts.len());
        for ((rank, stages), device) in parts.into_iter().enumerate().zip(devices) {
            let rank = Rank(rank as u32);
            let shard_config = ShardConfig { rank: rank.0, ..shard_config.clone() };
            let mut shard = Shard::new(device, stages, shard_config)?;
            shard.tie(&ties, across)?;
            let mut state = RankState::new(rank, shard, &route.bound)?;
            if config.verify {
                state.verify()?;
            }
            workers.push(Worker::new(format!("rank {rank}"), state)?);
        }
        Ok(Session { workers, route, recipe, config, ties, commits: 0, joint: None, broken: None })
    }
}

fn common_recipe<S: Stage>(stages: &[S]) -> Result<Recipe> {
    let recipe = stages.first().map(|stage| stage.spec().recipe);
    let recipe = recipe.ok_or_else(|| Error::Config("the model has no stage".into()))?;
    match stages.iter().position(|stage| stage.spec().recipe != recipe) {
        None => Ok(recipe),
        Some(stage) => Err(Error::Config(format!("stage {stage} has another recipe than stage 0"))),
    }
}

/// What a stage declares to do to its state, cell by cell.
fn declared(stage: &impl Stage) -> StageEffects {
    let (spec, effects) = (stage.spec(), stage.effects());
    let of = |role| CellEffect { owned: !spec.cells(role).is_empty(), access: effects.access(role) };
    StageEffects { forward: of(Role::Input), backward: of(Role::GradOutput), cache: of(Role::Weight) }
}

pub(super) fn crosses(edge: &Edge) -> bool {
    edge.from_rank != edge.to_rank
}

pub(super) const fn edge_spec(edge: &Edge, bytes: usize) -> EdgeSpec {
    EdgeSpec { from: edge.from_rank, to: edge.to_rank, buffers: edge.buffers, bytes }
}

/// What connects the ranks: both ends of every edge must mean the same tensors.
fn fabric<S: Stage, T>(bound: &Bound, stages: &[S]) -> Result<Fabric<T>> {
    let plan = &bound.checked().plan;
    let mut edges = Vec::with_capacity(plan.edges.len());
    for edge in plan.edges.iter() {
        let other = match edge.direction {
            Direction::Forward => Direction::Backward,
            Direction::Backward => Direction::Forward,
        };
        // What comes in at one end goes out at the other: Y is what dY has the shape of.
        let taken = MessageShape::of(&stages[edge.to.index()], edge.direction);
        let made = MessageShape::of(&stages[edge.from.index()], other);
        match (taken, made) {
            (Some(taken), Some(made)) if taken == made => {
                edges.push(crosses(edge).then(|| edge_spec(edge, taken.bytes())));
            }
            _ => {
                let message = format!("stages {} and {} do not exchange the same tensors", edge.from, edge.to);
                return Err(Error::Contract { code: Code::StageMismatch, message });
            }
        }
    }
    Ok(Fabric::new(bound.checked().schedule.ranks, edges))
}
