//! A NaN that a command leaves behind, in every mode and placement: a bad step changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::{Buf, BufSpec, Caps, Device, DeviceError, GraphId};
use qeffect_runtime::error::Error;
use qeffect_runtime::session::{OnNonFinite, Session, SessionConfig};
use qeffect_schedules::zb_h1;

use crate::common::batch;
use crate::common::spoil::{KINDS, kept, output};
use crate::rig::beside_others;
use crate::sessions::{blocks, in_groups, session};
use crate::training::{MICROBATCHES, OPTIM, RECIPES, model};

/// What the device of a session is told from outside, and tells.
struct Sites {
    device: CudaDevice,
    /// Lists of commands pass through here; so each kind has one place where a flag lets a NaN in.
    flags: BTreeMap<&'static str, Buf>,
    /// For commands one by one: the kind whose next command leaves a NaN behind.
    armed: Option<&'static str>,
}

/// A GPU on which the first command of a kind can be made to leave a NaN behind, in every mode.
struct Spoiled(Arc<Mutex<Sites>>, BTreeMap<Buf, BufSpec>);

impl Sites {
    /// A buffer of NaN as large as another.
    fn nan(&mut self, like: Buf) -> Result<Buf, DeviceError> {
        let spec = self.device.spec(like)?.clone();
        self.device.alloc(spec)
    }

    /// The commands with a way in for a NaN behind the first of each kind.
    fn opened(&mut self, cmds: Vec<Cmd>) -> Result<Vec<Cmd>, DeviceError> {
        let mut opened = Vec::new();
        for cmd in cmds {
            let (name, site) = (cmd.name(), output(&cmd));
            opened.push(cmd);
            let Some(dst) = site.filter(|_| !self.flags.contains_key(name)) else { continue };
            let flag = self.device.alloc(BufSpec::new("armed", qeffect_core::dtype::Dtype::U32, 1, 1))?;
            self.device.issue(&Cmd::Fill { dst: flag, value: 0.0 })?;
            self.flags.insert(name, flag);
            opened.push(Cmd::CopyIf { flag, src: self.nan(dst)?, dst });
        }
        Ok(opened)
    }

    fn arm(&mut self, name: Option<&'static str>) {
        self.armed = name;
        for (site, flag) in &self.flags {
            let value = u32::from(name == Some(*site));
            self.device.write(*flag, &value.to_le_bytes()).unwrap();
        }
    }
}

impl Device for Spoiled {
    fn name(&self) -> &str {
        "spoiled"
    }
    fn caps(&self) -> Caps {
        // Unfused, so that each kind of command is there to be spoiled; the bits are those of fused steps.
        Caps { fuses: false, ..self.0.lock().unwrap().device.caps() }
    }
    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let mut sites = self.0.lock().unwrap();
        let buf = sites.device.alloc(spec.clone())?;
        drop(sites);
        self.1.insert(buf, spec);
        Ok(buf)
    }
    fn spec(&self, buf: Buf) -> Result<&BufSpec, DeviceError> {
        self.1.get(&buf).ok_or(DeviceError::UnknownBuffer(buf))
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        let mut sites = self.0.lock().unwrap();
        sites.device.issue(cmd)?;
        match output(cmd) {
            Some(dst) if sites.armed == Some(cmd.name()) => {
                sites.armed = None;
                let src = sites.nan(dst)?;
                sites.device.issue(&Cmd::Copy { src, dst })
            }
            _ => Ok(()),
        }
    }
    fn write(&mut self, buf: Buf, bytes: &[u8]) -> Result<(), DeviceError> {
        self.0.lock().unwrap().device.write(buf, bytes)
    }
    fn read(&mut self, buf: Buf, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.0.lock().unwrap().device.read(buf, bytes)
    }
    fn poison(&mut self, buf: Buf) -> Result<(), DeviceError> {
        self.0.lock().unwrap().device.poison(buf)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        let mut sites = self.0.lock().unwrap();
        let cmds = sites.opened(cmds)?;
        sites.device.instantiate(cmds)
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.0.lock().unwrap().device.launch(graph)
    }
    fn drop_graph(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.0.lock().unwrap().device.drop_graph(graph)
    }
}

fn spoiled() -> (Box<Spoiled>, Arc<Mutex<Sites>>) {
    let device = CudaDevice::new(0).unwrap();
    let sites = Arc::new(Mutex::new(Sites { device, flags: BTreeMap::new(), armed: None }));
    (Box::new(Spoiled(sites.clone(), BTreeMap::new())), sites)
}

#[test]
fn a_nan_anywhere_changes_nothing_under_stop_and_skip() {
    let Some(_turn) = beside_others() else { return };
    let config = model(RECIPES[0]);
    for (capture, gradients) in
        CaptureMode::ALL.into_iter().flat_map(|mode| [Gradients::Copied, Gradients::Coalesced].map(|g| (mode, g)))
    {
        let checked = in_groups(zb_h1::<2, 4>().clone(), gradients);
        let plain = Box::new(CudaDevice::new(0).unwrap());
        let mut clean = session(&config, checked.clone(), (gradients, capture), plain).unwrap();
        for step in 0..3 {
            clean.step(batch(&config, step, MICROBATCHES)).unwrap();
        }
        let after = clean.snapshot().unwrap();
        for policy in [OnNonFinite::Skip, OnNonFinite::Stop] {
            let (device, sites) = spoiled();
            let stages = config.stages(&blocks(&config, 2)).unwrap();
            let session_config = SessionConfig {
                gradients,
                capture,
                on_nonfinite: policy,
                verify: true,
                ..SessionConfig::new(OPTIM, config.tokens())
            };
            let mut session = Session::on_one_device(checked.clone(), stages, session_config, device).unwrap();
            for step in 0..2 {
                session.step(batch(&config, step, MICROBATCHES)).unwrap();
            }
            let before = kept(session.snapshot().unwrap());
            let mut kinds: BTreeSet<&'static str> = KINDS.iter().copied().collect();
            if gradients == Gradients::Coalesced {
                kinds.insert("group_gemm");
            }
            for kind in kinds {
                let what = format!("{capture}, {gradients:?}, {policy}: a NaN from {kind}");
                if capture != CaptureMode::Eager {
                    assert!(sites.lock().unwrap().flags.contains_key(kind), "{what}: there is none");
                }
                sites.lock().unwrap().arm(Some(kind));
                match (session.step(batch(&config, 2, MICROBATCHES)), policy) {
                    (Ok(report), OnNonFinite::Skip) => assert!(report.skipped && report.epoch == 2, "{what}"),
                    (Err(error), OnNonFinite::Stop) if kind == "write_tag" => {
                        assert_eq!(error.code(), Some(Code::KeyMismatch), "{what}: {error}");
                        assert!(error.to_string().contains("not stage 0, microbatch 0 of step"), "{error}");
                    }
                    (Err(Error::NotFinite { .. }), OnNonFinite::Stop) => {}
                    (other, _) => panic!("{what}: {other:?}"),
                }
                assert!(kept(session.snapshot().unwrap()) == before, "{what} changed something");
                sites.lock().unwrap().arm(None);
            }
            // On with the next batch, as if the bad ones had never been.
            session.step(batch(&config, 2, MICROBATCHES)).unwrap();
            assert!(session.snapshot().unwrap() == after, "{capture}, {gradients:?}, {policy}");
        }
    }
}
