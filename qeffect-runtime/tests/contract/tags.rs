//! Tags of slots are written and compared on request; without it they cost nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::common::batch;
use crate::common::how::{HOW, How};
use crate::watched::{OPTIM, model};
use qeffect_core::bind::Gradients;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId};
use qeffect_runtime::gpt::GptStage;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::zb_h1;

/// What devices have been asked for.
#[derive(Default)]
struct Asked {
    /// Commands one by one and in lists, by name.
    cmds: BTreeMap<&'static str, usize>,
    buffers: usize,
    lists: usize,
}

struct Counted {
    device: CpuDevice,
    asked: Arc<Mutex<Asked>>,
}

impl Device for Counted {
    qeffect_runtime::hand_on!(device: name caps spec write read poison launch drop_graph);

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        self.asked.lock().unwrap().buffers += 1;
        self.device.alloc(spec)
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        *self.asked.lock().unwrap().cmds.entry(cmd.name()).or_insert(0) += 1;
        self.device.issue(cmd)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        let mut asked = self.asked.lock().unwrap();
        asked.lists += 1;
        cmds.iter().for_each(|cmd| *asked.cmds.entry(cmd.name()).or_insert(0) += 1);
        self.device.instantiate(cmds)
    }
}

/// What two steps ask for.
fn asked(how: How, gradients: Gradients, verify: bool) -> Asked {
    let groups = if gradients == Gradients::Coalesced { 2 } else { 1 };
    let checked = zb_h1::<2, 4>().clone().coalesced(groups).unwrap();
    let session_config = SessionConfig { gradients, verify, ..SessionConfig::new(OPTIM, model().tokens()) };
    let caps = Caps { fp8_needs_transposes: true, fuses: true, parallel: true, ..Caps::default() };
    let asked: Arc<Mutex<Asked>> = Arc::default();
    let device = || Box::new(Counted { device: CpuDevice::with_caps(caps), asked: Arc::clone(&asked) }) as Box<_>;
    let stages = model().stages(&[1, 1]).unwrap();
    let mut session: Session<GptStage> = how.session(checked, stages, session_config, device).unwrap();
    for step in 0..2 {
        session.step(batch(&model(), step, 4)).unwrap();
    }
    drop(session);
    std::mem::take(&mut *asked.lock().unwrap())
}

#[test]
fn without_verify_no_command_and_no_buffer_is_there_for_tags() {
    for (how, gradients) in
        HOW.into_iter().flat_map(|how| [Gradients::Copied, Gradients::Coalesced].map(|of| (how, of)))
    {
        let [off, mut on] = [false, true].map(|verify| asked(how, gradients, verify));
        let [written, compared] = ["write_tag", "check_tag"].map(|name| {
            assert!(!off.cmds.contains_key(name), "{how:?}, {gradients:?}: {name}");
            on.cmds.remove(name).unwrap_or(0)
        });
        // F of each stage and microbatch writes, I and W compare; eager, in each of two steps.
        let steps = if how.is_eager() { 2 } else { 1 };
        assert!(written >= 8 * steps && compared >= 16 * steps, "{how:?}: {written} written, {compared} compared");
        assert!(on.buffers > off.buffers);
        // The report of a step is cleared first; all else is the same.
        let [off_fills, on_fills] = [&off, &on].map(|asked| asked.cmds["fill"]);
        assert_eq!(on_fills, off_fills + 2 * steps);
        on.cmds.insert("fill", off_fills);
        assert_eq!((on.cmds, on.lists), (off.cmds, off.lists), "{how:?}, {gradients:?}");
    }
}
