//! A session is held against the memory of its devices before it takes any: it is rehearsed on devices that only count.

use std::collections::BTreeMap;

use qeffect_core::check::{self, Options};
use qeffect_core::plan::Checked;

use super::{Footprint, Session, SessionConfig, by_stage, settle};
use crate::capture::CaptureMode;
use crate::capture::record::{Entry, Trace};
use crate::cmd::Cmd;
use crate::cuda::DryRun;
use crate::data::Windows;
use crate::device::{Device, Memory, SharedDevice};
use crate::error::{Error, Result};
use crate::stage::Stage;

/// Devices that count.
enum Place {
    /// One for all ranks.
    Together(DryRun),
    /// One per rank.
    Apart(Vec<DryRun>),
}

/// What a rehearsal has found, per device, and the stages, which it needs no longer.
struct Rehearsal<S> {
    footprints: Vec<Footprint>,
    stages: Vec<S>,
}

impl<S> Session<S>
where
    S: Stage + Send + 'static,
    S::Tape: Send,
    S::Work: Send,
{
    /// What [`Session::on_one_device`] will take of a GPU. One step and one evaluation of every microbatch are written down over
    /// buffers that are only counted.
    ///
    /// # Errors
    ///
    /// As [`Session::new`].
    pub fn footprint(checked: Checked, stages: Vec<S>, config: SessionConfig) -> Result<Footprint> {
        let Rehearsal { footprints, .. } = Session::rehearse(checked, stages, config, Place::Together(DryRun::new()))?;
        footprints.first().copied().ok_or_else(|| Error::Config("no rank".into()))
    }

    /// Refuses what does not fit into a device of all ranks. Gives the stages back.
    pub(super) fn fitting_together(
        checked: &Checked,
        stages: Vec<S>,
        config: SessionConfig,
        device: &SharedDevice,
    ) -> Result<Vec<S>> {
        let Some(memory) = device.memory()? else { return Ok(stages) };
        let place = Place::Together(DryRun::like(device, &memory));
        let Rehearsal { footprints, stages } = Session::rehearse(checked.clone(), stages, config, place)?;
        footprints.iter().try_for_each(|footprint| fits(device.name(), footprint, memory))?;
        Ok(stages)
    }

    /// Refuses what does not fit into the devices of ranks. Those of one name share one memory.
    pub(super) fn fitting_each(
        checked: &Checked,
        stages: Vec<S>,
        config: SessionConfig,
        devices: &[Box<dyn Device>],
    ) -> Result<Vec<S>> {
        let memories = devices.iter().map(|device| device.memory()).collect::<Result<Vec<_>, _>>()?;
        if memories.iter().all(Option::is_none) {
            return Ok(stages);
        }
        let dry = devices.iter().zip(&memories).map(|(device, memory)| match memory {
            Some(memory) => DryRun::like(device.as_ref(), memory),
            None => DryRun::like(device.as_ref(), &Memory { free: 0, workspaces: 0, lanes: 0 }),
        });
        let place = Place::Apart(dry.collect());
        let Rehearsal { footprints, stages } = Session::rehearse(checked.clone(), stages, config, place)?;
        let mut shared: BTreeMap<&str, (Footprint, Memory)> = BTreeMap::new();
        for ((device, memory), footprint) in devices.iter().zip(memories).zip(footprints) {
            let Some(memory) = memory else { continue };
            let add = |(all, of): &mut (Footprint, Memory)| {
                *all = all.beside(footprint);
                of.free = of.free.min(memory.free);
                of.workspaces += memory.workspaces;
            };
            shared.entry(device.name()).and_modify(add).or_insert((footprint, memory));
        }
        shared.into_iter().try_for_each(|(name, (footprint, memory))| fits(name, &footprint, memory))?;
        Ok(stages)
    }

    fn rehearse(checked: Checked, stages: Vec<S>, config: SessionConfig, place: Place) -> Result<Rehearsal<S>> {
        let (dry, together) = match place {
            Place::Together(dry) => (vec![dry], true),
            Place::Apart(dry) => (dry, false),
        };
        let mut devices: Vec<SharedDevice> = dry.iter().map(|dry| SharedDevice::new(Box::new(dry.clone()))).collect();
        let at = |rank: usize| if together { 0 } else { rank };
        let ranks = checked.schedule.ranks as usize;
        let handles = (0..ranks).map(|rank| Box::new(devices[at(rank)].clone()) as Box<dyn Device>).collect();
        let mut session = Session::ranks(checked, stages, config, handles)?;
        let states: Vec<usize> = dry.iter().map(DryRun::held).collect();
        let traces = session.traces()?;
        let regions = session.on_all(|state| Ok(state.shard.pool().regions()))?;
        let (mut tapes, mut works) = (vec![0; dry.len()], vec![0; dry.len()]);
        for (rank, regions) in regions.iter().enumerate() {
            tapes[at(rank)] += regions.tape.owned;
            works[at(rank)] += regions.work.owned;
        }
        let lists = match (together, config.capture) {
            (true, CaptureMode::Step) => vec![session.joint_step(&mut devices[0], traces)?],
            _ => traces.into_iter().map(commands).collect(),
        };
        for (rank, cmds) in lists.into_iter().enumerate() {
            devices[at(rank)].instantiate(cmds)?;
        }
        let mut footprints: Vec<Footprint> = dry
            .iter()
            .enumerate()
            .map(|(at, dry)| {
                let (state, tapes, works) = (states[at], tapes[at], works[at]);
                let messages = dry.held() - state - tapes - works;
                Footprint { state, tapes, works, messages, device: dry.beside(), evaluation: 0, search: 0 }
            })
            .collect();
        // A stage or a placement that is not evaluated says so when it is asked to be.
        let _ = session.rehearse_evaluation();
        for (footprint, dry) in footprints.iter_mut().zip(&dry) {
            footprint.evaluation = dry.held() + dry.beside() - footprint.bytes();
            footprint.search = dry.trial();
        }
        let stages = settle(session.call_all(|state| Ok(state.shard.take_stages())))?;
        Ok(Rehearsal { footprints, stages: by_stage(stages.into_iter().flatten()) })
    }

    /// Every microbatch forward, one by one.
    fn rehearse_evaluation(&mut self) -> Result<()> {
        let checked = check::check(self.schedule().schedule.forward_only(), &Options::AT_START)?;
        let windows = Windows { tokens: vec![0; self.config.tokens], targets: vec![0; self.config.tokens] };
        let batch = vec![windows; checked.schedule.microbatches as usize];
        let evaluation = self.evaluation(checked)?;
        self.evaluate(&evaluation, batch)?;
        Ok(())
    }
}

fn commands(trace: Trace) -> Vec<Cmd> {
    let entries = trace.parts.into_iter().flat_map(|part| part.entries);
    entries.filter_map(|entry| if let Entry::Cmd(cmd) = entry { Some(cmd) } else { None }).collect()
}

/// What the device has taken for its lanes is part of the footprint, and of what there is.
fn fits(device: &str, footprint: &Footprint, memory: Memory) -> Result<()> {
    let fitting = footprint.fits(memory.free + memory.workspaces);
    fitting.map_err(|error| Error::Config(format!("{device}: {error}")))
}
