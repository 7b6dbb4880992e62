//! A real training step, recorded and replayed with its commands fused: the same bits in everything that a stage owns.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use crate::common::settings::small;
use crate::common::{Solo, batch};
use qeffect_core::bind::Gradients;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::{Buf, BufSpec, Caps, Device, DeviceError};
use qeffect_runtime::fuse::fuse;
use qeffect_runtime::optim::OptimConfig;

/// What a device was asked to do.
#[derive(Default)]
struct Log {
    on: bool,
    cmds: Vec<Cmd>,
    writes: Vec<(Buf, Vec<u8>)>,
    sizes: BTreeMap<Buf, usize>,
}

/// The cpu device with somebody who listens.
struct Tap {
    device: CpuDevice,
    log: Arc<Mutex<Log>>,
}

impl Device for Tap {
    qeffect_runtime::hand_on!(device: name caps spec read poison instantiate launch drop_graph);

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let elements = spec.elements();
        let buf = self.device.alloc(spec)?;
        self.log.lock().unwrap().sizes.insert(buf, elements);
        Ok(buf)
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        let mut log = self.log.lock().unwrap();
        if log.on {
            log.cmds.push(cmd.clone());
        }
        self.device.issue(cmd)
    }
    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        let mut log = self.log.lock().unwrap();
        if log.on {
            log.writes.push((buf, bytes.to_vec()));
        }
        self.device.write(buf, bytes)
    }
}

fn contents(device: &mut dyn Device, bufs: &BTreeSet<Buf>) -> BTreeMap<Buf, Vec<u8>> {
    let mut read = |buf: &Buf| {
        let mut bytes = vec![0; device.spec(*buf).unwrap().bytes()];
        device.read(*buf, &mut bytes).unwrap();
        (*buf, bytes)
    };
    bufs.iter().map(&mut read).collect()
}

/// Runs a step, then again from the same state as a fused list. Gives how often each fused command occurs, how many values
/// are not stored, how many norms have a residual sum in front, and how many gradients of norms are cast where they are
/// made.
fn replayed(recipe: &str, gradients: Gradients) -> (BTreeMap<&'static str, usize>, usize, usize, usize) {
    let config = small(recipe);
    let optim = OptimConfig { steps: 3, warmup: 1, ..OptimConfig::default() };
    let log = Arc::new(Mutex::new(Log::default()));
    let device = CpuDevice::with_caps(Caps { fp8_needs_transposes: true, ..Caps::default() });
    let device = Box::new(Tap { device, log: Arc::clone(&log) });
    let mut solo = Solo::on(device, &config, &[2, 2], 2, optim, (gradients, 1));
    let known = |log: &Mutex<Log>| log.lock().unwrap().sizes.keys().copied().collect::<BTreeSet<Buf>>();
    let owned = known(&log);
    solo.step(&batch(&config, 0, 2));
    let before = contents(solo.shard.device(), &known(&log));

    log.lock().unwrap().on = true;
    solo.step(&batch(&config, 1, 2));
    let after = contents(solo.shard.device(), &owned);
    let (cmds, writes, sizes) = {
        let mut log = log.lock().unwrap();
        log.on = false;
        (std::mem::take(&mut log.cmds), std::mem::take(&mut log.writes), log.sizes.clone())
    };
    let same = owned.iter().filter(|buf| before[buf] == after[buf]).count();
    assert!(same < owned.len() / 2, "the step did something");

    let fused = fuse(cmds.clone(), &|buf| owned.contains(&buf), &|buf| sizes.get(&buf).copied());
    for list in [&cmds, &fused] {
        let device = solo.shard.device();
        for (buf, bytes) in before.iter().chain(writes.iter().map(|(buf, bytes)| (buf, bytes))) {
            device.write(*buf, bytes).unwrap();
        }
        list.iter().for_each(|cmd| device.issue(cmd).unwrap());
        for (buf, bytes) in contents(device, &owned) {
            assert!(bytes == after[&buf], "{recipe}: `{}` differs", device.spec(buf).unwrap().name);
        }
    }
    let mut names = BTreeMap::new();
    let (mut dropped, mut residuals, mut cast) = (0, 0, 0);
    for cmd in &fused {
        if let Cmd::Fused(fused) = cmd {
            *names.entry(fused.name()).or_insert(0) += 1;
            residuals += usize::from(fused.residual.is_some());
            dropped += usize::from(fused.needs_scratch() && fused.plus.is_none());
            cast += usize::from(fused.name() == "fused_layer_norm_grad" && fused.outputs.codes.is_some());
        }
    }
    (names, dropped, residuals, cast)
}

#[test]
fn a_step_keeps_its_bits() {
    let (names, dropped, residuals, cast) = replayed("fp8-delayed:history=4", Gradients::Copied);
    // Per microbatch: four blocks with two norms, a GELU and its gradient; the head has a norm and a loss.
    let count = |name: &str| names.get(name).copied().unwrap_or(0);
    assert_eq!(
        ["layer_norm", "gelu", "gelu_grad", "cross_entropy_grad"].map(|name| count(&format!("fused_{name}"))),
        [18, 8, 8, 2]
    );
    // All norms but the first have a residual sum in front of them.
    assert_eq!(residuals, 16, "{names:?}");
    // That of the head's norm. Here, where buffers are reused at once, the other sums are written over what they are made from.
    assert_eq!(cast, 2, "{names:?}");
    // Four matrices and four biases of a block, and the head's matrix.
    assert_eq!(count("fused_adamw"), 33, "{names:?}");
    // What only products read is not stored: normalised rows, GELU, its gradient, gradients of logits.
    assert!(dropped >= 18 + 8 + 8 + 2, "{dropped}, {names:?}");
    replayed("fp8-delayed:history=4,update=step", Gradients::Direct);
    let (names, ..) = replayed("bf16", Gradients::Copied);
    assert_eq!(names["fused_adamw"], 33, "{names:?}");
}
