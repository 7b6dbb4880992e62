//! Whole training steps in orders that their effects allow: what runs in parallel lanes on a GPU gives the same bits in any.
//!
//! The device is the cpu one, except that it plays a list in a random order of those that the effects of its commands
//! leave; it asks for what a GPU asks for, so lists are split, fused and spread over buffers as they are there.

use crate::common::batch;
use qeffect_core::bind::Gradients;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cmd::effects::{Access, order};
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::{BufSpec, Caps, Device, DeviceError, GraphId};
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::rng;
use qeffect_runtime::session::{Session, SessionConfig, Snapshot};
use qeffect_schedules::library;

const STEPS: u64 = 3;
const MICROBATCHES: u32 = 4;

/// As the cuda device.
const CAPS: Caps = Caps {
    fp8_needs_transposes: true,
    fp8_multiple: 16,
    bf16_only: false,
    fuses: true,
    parallel: true,
    one_factor: false,
};

/// Plays lists in random orders; seed 0: in their own.
struct Shuffled {
    device: CpuDevice,
    lists: Vec<(Vec<Cmd>, Vec<Vec<usize>>)>,
    seed: u64,
    launches: u64,
}

impl Device for Shuffled {
    qeffect_runtime::hand_on!(device: alloc spec issue write read poison drop_graph);

    fn name(&self) -> &str {
        "shuffled"
    }
    fn caps(&self) -> Caps {
        CAPS
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        let elements = |buf| self.device.spec(buf).ok().map(BufSpec::elements);
        let effects: Vec<Vec<Access>> = cmds.iter().map(|cmd| cmd.effects(elements)).collect();
        let id = self.device.instantiate(Vec::new())?; // an id that counts as the lists here do
        assert_eq!(id.index(), self.lists.len());
        self.lists.push((cmds, order(&effects)));
        Ok(id)
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        let (cmds, before) = &self.lists[graph.index()];
        self.launches += 1;
        let mut missing: Vec<usize> = before.iter().map(Vec::len).collect();
        let mut after = vec![Vec::new(); cmds.len()];
        for (index, others) in before.iter().enumerate() {
            others.iter().for_each(|other| after[*other].push(index));
        }
        let mut ready: Vec<usize> = (0..cmds.len()).filter(|index| missing[*index] == 0).collect();
        for turn in 0..cmds.len() as u64 {
            let draw = rng::below(rng::draw(&[self.seed, self.launches, turn]), ready.len() as u64) as usize;
            let at = if self.seed == 0 { (0..ready.len()).min_by_key(|at| ready[*at]).unwrap() } else { draw };
            let index = ready.swap_remove(at);
            self.device.issue(&cmds[index])?;
            for next in &after[index] {
                missing[*next] -= 1;
                if missing[*next] == 0 {
                    ready.push(*next);
                }
            }
        }
        assert!(ready.is_empty());
        Ok(())
    }
}

fn run(model: &GptConfig, name: &str, ranks: i64, gradients: Gradients, seed: u64) -> Option<Snapshot> {
    let entry = qeffect_schedules::by_name(name).unwrap();
    let mut checked = entry.checked(ranks, i64::from(MICROBATCHES)).unwrap().into_owned();
    if gradients == Gradients::Coalesced {
        checked = checked.coalesced(MICROBATCHES).ok()?;
    }
    let stages = model.stages(&model.split(checked.schedule.stages as usize).ok()?).unwrap();
    let optim = OptimConfig { steps: STEPS, peak: 8e-3, floor: 1e-3, ..OptimConfig::default() };
    let config = SessionConfig { gradients, ..SessionConfig::new(optim, model.tokens()) };
    let device = Shuffled { device: CpuDevice::with_caps(CAPS), lists: Vec::new(), seed, launches: 0 };
    let mut session = Session::on_one_device(checked, stages, config, Box::new(device)).unwrap();
    for step in 0..STEPS {
        session.step(batch(model, step, MICROBATCHES)).unwrap();
    }
    Some(session.snapshot().unwrap())
}

#[test]
fn every_order_that_effects_allow_gives_the_same_bits() {
    let model = crate::common::settings::small("fp8-delayed:history=4,update=microbatch");
    for gradients in [Gradients::Copied, Gradients::Coalesced] {
        for ranks in [1, 2] {
            let mut reference: Option<Snapshot> = None;
            for entry in library().iter().filter(|entry| !entry.eval) {
                for seed in 0..4 {
                    let Some(found) = run(&model, entry.name, ranks, gradients, seed) else { continue };
                    let what = || format!("{} on {ranks} ranks, {gradients:?}, order {seed}", entry.name);
                    let wanted = reference.get_or_insert_with(|| found.clone());
                    for (name, value) in &wanted.values {
                        assert_eq!(found.values.get(name), Some(value), "{}: `{name}`", what());
                    }
                }
            }
        }
    }
}
