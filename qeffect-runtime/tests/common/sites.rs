//! A device on which any command can be told to leave a NaN behind, in every mode: behind each stands a copy from a buffer
//! of NaN that a flag lets happen.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;

use qeffect_core::dtype::Dtype;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cmd::fused::{Fused, Producer};
use qeffect_runtime::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId};

use super::spoil::output;

/// What one command writes for others to read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Site {
    /// The kind of command.
    pub kind: &'static str,
    /// What of it; nothing more where it has one output.
    pub part: &'static str,
    /// Of the rank that issues it or writes it down: other ranks may do so at the same time. 0 in a list of all ranks.
    pub rank: u32,
}

/// The rank whose thread this is; 0 in the thread of a test, which does what is done for all of them.
fn rank() -> u32 {
    thread::current().name().and_then(|name| name.strip_prefix("rank ")?.parse().ok()).unwrap_or(0)
}

/// What a command writes for others to read.
fn written(cmd: &Cmd) -> Vec<(Site, Buf)> {
    let rank = rank();
    let site = |kind, part| Site { kind, part, rank };
    match cmd {
        Cmd::Fused(fused) => {
            fused_outputs(fused).into_iter().map(|(part, buf)| (site(fused.name(), part), buf)).collect()
        }
        _ => output(cmd).map(|buf| (site(cmd.name(), ""), buf)).into_iter().collect(),
    }
}

/// The sum in front, what the producer notes beside its matrix, and all that is taken from the matrix. AdamW is the commit,
/// and casts without a flag are those of weights.
fn fused_outputs(fused: &Fused) -> Vec<(&'static str, Buf)> {
    let mut found: Vec<(&'static str, Buf)> = fused.residual.map(|sum| ("sum", sum.out)).into_iter().collect();
    match fused.producer {
        Producer::AdamW { .. } => return Vec::new(),
        Producer::LayerNorm { mean, rstd, .. } => found.extend([("mean", mean), ("rstd", rstd)]),
        Producer::RmsNorm { rstd, .. } => found.push(("rstd", rstd)),
        Producer::LayerNormGrad { gain_grad, bias_grad, .. } => {
            found.extend([("gain", gain_grad), ("bias", bias_grad)]);
        }
        Producer::RmsNormGrad { gain_grad, .. } => found.push(("gain", gain_grad)),
        _ => {}
    }
    found.extend(fused.outputs.values.map(|values| ("values", values)));
    found.extend(fused.outputs.column_sums.map(|sums| ("column sums", sums)));
    if let Some(codes) = fused.outputs.codes.filter(|codes| codes.flag.is_some()) {
        found.extend([("codes", codes.codes), ("factor", codes.scale_inv)]);
        found.extend(codes.transposed.map(|transposed| ("transposed", transposed)));
    }
    found
}

/// What the device is told from outside, and tells.
pub struct Sites {
    device: Box<dyn Device>,
    /// Sites in lists, in order, with the flag of each.
    flags: Vec<(Site, Buf)>,
    /// Sites of commands one by one, since the last [`Sites::arm`].
    seen: BTreeMap<Site, usize>,
    /// The site that leaves a NaN behind, and the how manieth of its kind.
    armed: Option<(Site, usize)>,
    /// Buffers of NaN, by type and size.
    nans: BTreeMap<(Dtype, usize, usize), Buf>,
}

impl Sites {
    /// A buffer of NaN as large as another.
    fn nan(&mut self, like: Buf) -> Result<Buf, DeviceError> {
        let spec = self.device.spec(like)?;
        let key = (spec.dtype, spec.rows, spec.cols);
        if let Some(known) = self.nans.get(&key) {
            return Ok(*known);
        }
        let buf = self.device.alloc(BufSpec::new("NaN", spec.dtype, spec.rows, spec.cols))?; // poisoned
        self.nans.insert(key, buf);
        Ok(buf)
    }

    /// The commands with a way in for a NaN behind each.
    fn opened(&mut self, cmds: Vec<Cmd>) -> Result<Vec<Cmd>, DeviceError> {
        let mut opened = Vec::with_capacity(2 * cmds.len());
        for cmd in cmds {
            let sites = written(&cmd);
            opened.push(cmd);
            for (site, dst) in sites {
                let flag = self.device.alloc(BufSpec::new("armed", Dtype::U32, 1, 1))?;
                self.device.issue(&Cmd::Fill { dst: flag, value: 0.0 })?;
                self.flags.push((site, flag));
                opened.push(Cmd::CopyIf { flag, src: self.nan(dst)?, dst });
            }
        }
        Ok(opened)
    }

    /// How many there are of each in a step: in lists, or else of the commands since the last [`Sites::arm`].
    pub fn counts(&self) -> BTreeMap<Site, usize> {
        if self.flags.is_empty() {
            return self.seen.clone();
        }
        let mut counts = BTreeMap::new();
        self.flags.iter().for_each(|(site, _)| *counts.entry(*site).or_insert(0) += 1);
        counts
    }

    /// Of every site, those of its places that are chosen when it is told how many there are.
    pub fn targets(&self, places: fn(usize) -> Vec<usize>) -> Vec<(Site, usize)> {
        let of = |(site, count)| places(count).into_iter().map(move |place| (site, place));
        self.counts().into_iter().flat_map(of).collect()
    }

    fn set(&mut self, value: u32) {
        let Some((site, place)) = self.armed else { return };
        if let Some((_, flag)) = self.flags.iter().filter(|(other, _)| *other == site).nth(place) {
            self.device.write(*flag, &value.to_le_bytes()).unwrap();
        }
    }

    /// From now on this site leaves a NaN behind, or none does.
    pub fn arm(&mut self, target: Option<(Site, usize)>) {
        self.set(0);
        self.armed = target;
        self.seen.clear();
        self.set(1);
    }
}

/// A device with sites.
pub struct Open {
    sites: Arc<Mutex<Sites>>,
    specs: BTreeMap<Buf, BufSpec>,
    /// Whether commands are fused, where the device under it would.
    fused: bool,
}

impl Open {
    pub fn boxed(device: Box<dyn Device>, fused: bool) -> (Box<dyn Device>, Arc<Mutex<Sites>>) {
        let (flags, seen, nans) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let sites = Arc::new(Mutex::new(Sites { device, flags, seen, armed: None, nans }));
        (Box::new(Open { sites: Arc::clone(&sites), specs: BTreeMap::new(), fused }), sites)
    }

    fn sites(&self) -> MutexGuard<'_, Sites> {
        self.sites.lock().unwrap()
    }
}

impl Device for Open {
    fn name(&self) -> &str {
        "open"
    }
    fn caps(&self) -> Caps {
        let caps = self.sites().device.caps();
        Caps { fuses: caps.fuses && self.fused, ..caps }
    }
    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let buf = self.sites().device.alloc(spec.clone())?;
        self.specs.insert(buf, spec);
        Ok(buf)
    }
    fn spec(&self, buf: Buf) -> Result<&BufSpec, DeviceError> {
        self.specs.get(&buf).ok_or(DeviceError::UnknownBuffer(buf))
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        let mut sites = self.sites();
        sites.device.issue(cmd)?;
        for (site, dst) in written(cmd) {
            let seen = sites.seen.entry(site).or_insert(0);
            *seen += 1;
            let target = (site, *seen - 1);
            if sites.flags.is_empty() && sites.armed == Some(target) {
                let src = sites.nan(dst)?;
                sites.device.issue(&Cmd::Copy { src, dst })?;
            }
        }
        Ok(())
    }
    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        self.sites().device.write(buf, bytes)
    }
    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.sites().device.read(buf, bytes)
    }
    fn poison(&mut self, buf: Buf) -> Result<(), DeviceError> {
        self.sites().device.poison(buf)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        let mut sites = self.sites();
        let cmds = sites.opened(cmds)?;
        sites.device.instantiate(cmds)
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.sites().device.launch(graph)
    }
    fn drop_graph(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.sites().device.drop_graph(graph)
    }
}
