//! A device on which any command can be told to leave a NaN behind, in every mode: behind each stands a copy from a buffer
//! of NaN that a flag lets happen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::plan::Checked;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cmd::fused::{Fused, Producer};
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId};
use qeffect_runtime::error::Error;
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{OnNonFinite, Session, SessionConfig};

use super::batch;
use super::spoil::{kept, output};

/// A kind of command, and what of it; nothing more where it has one output.
pub type Site = (&'static str, &'static str);

/// What a command writes for others to read.
fn written(cmd: &Cmd) -> Vec<(Site, Buf)> {
    match cmd {
        Cmd::Fused(fused) => fused_outputs(fused).into_iter().map(|(what, buf)| ((fused.name(), what), buf)).collect(),
        _ => output(cmd).map(|buf| ((cmd.name(), ""), buf)).into_iter().collect(),
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

    /// The first, a middle and the last of every kind.
    pub fn targets(&self) -> Vec<(Site, usize)> {
        let of = |(site, count): (Site, usize)| {
            let mut places = vec![0, count / 2, count - 1];
            places.dedup();
            places.into_iter().map(move |place| (site, place))
        };
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

/// What is run, and how.
pub struct Spoilt<'a> {
    pub config: GptConfig,
    pub checked: &'a Checked,
    pub optim: OptimConfig,
    pub gradients: Gradients,
    pub capture: CaptureMode,
    /// Whether commands are fused.
    pub fused: bool,
}

impl Spoilt<'_> {
    fn session(&self, on_nonfinite: OnNonFinite, device: Box<dyn Device>) -> Session<GptStage> {
        let stages = self.config.stages(&[1, 1]).unwrap();
        let (gradients, capture) = (self.gradients, self.capture);
        let plain = SessionConfig::new(self.optim, self.config.tokens());
        let config = SessionConfig { gradients, capture, on_nonfinite, verify: true, ..plain };
        Session::on_one_device(self.checked.clone(), stages, config, device).unwrap()
    }

    fn batch(&self, step: u64) -> Vec<Windows> {
        batch(&self.config, step, self.checked.schedule.microbatches)
    }

    /// The first, a middle and the last command of each kind leave a NaN behind, in a session that skips bad steps and in one
    /// that stops there: nothing changes, and the next batch gives what it would have given without them. The kinds.
    pub fn a_nan_anywhere_changes_nothing(&self, device: impl Fn() -> Box<dyn Device>) -> BTreeSet<Site> {
        let mut clean = self.session(OnNonFinite::Skip, device());
        for step in 0..3 {
            clean.step(self.batch(step)).unwrap();
        }
        let after = clean.snapshot().unwrap();
        let mut kinds = BTreeSet::new();
        for policy in [OnNonFinite::Skip, OnNonFinite::Stop] {
            let (device, sites) = Open::boxed(device(), self.fused);
            let mut session = self.session(policy, device);
            let arm = |target| sites.lock().unwrap().arm(target);
            for step in 0..2 {
                arm(None);
                session.step(self.batch(step)).unwrap();
            }
            let before = kept(session.snapshot().unwrap());
            let targets = sites.lock().unwrap().targets();
            for target in targets {
                let ((kind, part), place) = target;
                let (capture, gradients) = (self.capture, self.gradients);
                let what = format!("{capture}, {gradients:?}, {policy}: a NaN in {part} of {kind} {place}");
                arm(Some(target));
                match (session.step(self.batch(2)), policy) {
                    (Ok(report), OnNonFinite::Skip) => assert!(report.skipped && report.epoch == 2, "{what}"),
                    (Err(error), OnNonFinite::Stop) if kind == "write_tag" => {
                        assert_eq!(error.code(), Some(Code::KeyMismatch), "{what}: {error}");
                        assert!(error.to_string().contains("a slot holds stage "), "{what}: {error}");
                    }
                    (Err(Error::NotFinite { .. }), OnNonFinite::Stop) => {}
                    (other, _) => panic!("{what}: {other:?}"),
                }
                assert!(kept(session.snapshot().unwrap()) == before, "{what} changed something");
                kinds.insert((kind, part));
            }
            arm(None);
            session.step(self.batch(2)).unwrap();
            assert!(session.snapshot().unwrap() == after, "{}, {:?}, {policy}", self.capture, self.gradients);
        }
        kinds
    }
}
