//! A device that is watched, and told where to leave a NaN behind; sessions on it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::common::how::How;
use crate::common::settings::{adamw, tiny};
use crate::common::spoil::{element, output};
use qeffect_core::dtype::Dtype;
use qeffect_core::plan::Checked;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cmd::effects::Mode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::{Buf, BufSpec, Device, DeviceError, GraphId};
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::stage::Stage;

pub const OPTIM: OptimConfig = adamw(200, 2, 4e-3, 1e-3);

pub fn model() -> GptConfig {
    tiny("fp8-delayed:history=4", 2)
}

/// What a device under test does beside its work, and what it has seen.
#[derive(Default)]
pub struct Watch {
    pub allocs: usize,
    pub launches: usize,
    /// Commands since the last [`Watch::arm`], by name; only those that [`output`] knows.
    pub seen: Vec<&'static str>,
    /// Which of them leaves a NaN behind.
    spoil: Option<usize>,
    /// Whether casts fail.
    pub fails: bool,
    /// Names of the buffers that casts have written since the last [`Watch::arm`], before and after `Settle`.
    pub casts: [Vec<String>; 2],
    /// Buffers of gradients that commands have touched since the last [`Watch::arm`]: the command's name, and whether it
    /// only reads.
    pub gradients: BTreeSet<(String, Buf, &'static str, bool)>,
    settled: bool,
}

impl Watch {
    pub fn arm(&mut self, spoil: Option<usize>) {
        self.seen.clear();
        self.spoil = spoil;
        self.casts.iter_mut().for_each(Vec::clear);
        self.gradients.clear();
        self.settled = false;
    }
}

/// A cpu device that runs lists command by command, so that it can spoil one in every mode.
struct Watched {
    device: CpuDevice,
    graphs: Vec<Vec<Cmd>>,
    watch: Arc<Mutex<Watch>>,
}

impl Watched {
    fn boxed(watch: &Arc<Mutex<Watch>>) -> Box<dyn Device> {
        Box::new(Watched { device: CpuDevice::new(), graphs: Vec::new(), watch: watch.clone() })
    }
}

impl Device for Watched {
    qeffect_runtime::hand_on!(device: caps spec write read poison);

    fn name(&self) -> &str {
        "watched"
    }
    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        self.watch.lock().unwrap().allocs += 1;
        self.device.alloc(spec)
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        let mut watch = self.watch.lock().unwrap();
        if watch.fails && matches!(cmd, Cmd::Quantise { .. }) {
            return Err(DeviceError::Failed { cmd: cmd.name(), reason: "it was told to".into() });
        }
        self.device.issue(cmd)?;
        watch.settled |= matches!(cmd, Cmd::Settle { .. });
        if let Cmd::Quantise { codes, .. } = cmd {
            let commits = usize::from(watch.settled);
            watch.casts[commits].push(self.device.spec(*codes)?.name.clone());
        }
        for access in cmd.effects(|_| None) {
            let name = &self.device.spec(access.buf)?.name;
            if name.contains("(gradient") {
                watch.gradients.insert((name.clone(), access.buf, cmd.name(), access.mode == Mode::Read));
            }
        }
        let Some(buf) = output(cmd) else { return Ok(()) };
        watch.seen.push(cmd.name());
        if watch.spoil != Some(watch.seen.len() - 1) {
            return Ok(());
        }
        let spec = self.device.spec(buf)?.clone();
        let mut bytes = vec![0; spec.bytes()];
        self.device.read(buf, &mut bytes)?;
        let at = element(cmd) * spec.dtype.size();
        match spec.dtype {
            Dtype::Bf16 => bytes[at..at + 2].copy_from_slice(&[0xC0, 0x7F]),
            Dtype::F32 => bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes()),
            Dtype::U64 => bytes[8] ^= 1, // the microbatch of a tag
            dtype => panic!("{} writes {dtype}", cmd.name()),
        }
        self.device.write(buf, &bytes)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        self.graphs.push(cmds);
        self.device.instantiate(Vec::new()) // its number is that of our list
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.watch.lock().unwrap().launches += 1;
        let cmds = std::mem::take(&mut self.graphs[graph.index()]);
        let result = cmds.iter().try_for_each(|cmd| self.issue(cmd));
        self.graphs[graph.index()] = cmds;
        result
    }
    fn drop_graph(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.graphs[graph.index()].clear();
        self.device.drop_graph(graph)
    }
}

/// A session on watched devices: one per rank, or one for all.
pub fn session<S>(
    how: How,
    checked: &Checked,
    stages: Vec<S>,
    config: SessionConfig,
) -> (Session<S>, Vec<Arc<Mutex<Watch>>>)
where
    S: Stage + Send + 'static,
    S::Tape: Send,
    S::Work: Send,
{
    let mut watches = Vec::new();
    let session = how.session(checked.clone(), stages, config, || {
        let watch = Arc::default();
        let device = Watched::boxed(&watch);
        watches.push(watch);
        device
    });
    (session.unwrap(), watches)
}
