//! Health of state cells: counts that are those of every cast, at no cost to any bit, and the cell that is to blame.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::common::batch;
use crate::common::how::{HOW, with_recomputation};
use crate::common::settings::{adamw, small};
use crate::common::tap::Tap;
use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::device::{Buf, Device};
use qeffect_runtime::gpt::GptStage;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{CellHealth, Session, SessionConfig};
use qeffect_runtime::stage::Role;
use qeffect_schedules::{zb_h1, zb_v};

const OPTIM: OptimConfig = adamw(50, 2, 4e-3, 1e-3);

fn floats(device: &mut dyn Device, buf: Buf) -> Vec<f32> {
    let spec = device.spec(buf).unwrap().clone();
    let mut bytes = vec![0; spec.bytes()];
    device.read(buf, &mut bytes).unwrap();
    match spec.dtype {
        Dtype::Bf16 => bytes.chunks_exact(2).map(|x| bf16::from_le_bytes(x.try_into().unwrap()).to_f32()).collect(),
        _ => bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect(),
    }
}

/// Of one cell: casts, numbers, saturated, lost to zero, not finite; the largest.
type Counts = (u64, u64, u64, u64, u64, f32);
/// By rank, bank and cell.
type Seen = Arc<Mutex<BTreeMap<(u32, String, usize), Counts>>>;

/// Counts by decoding: a code is what the format says of it, whoever made it.
fn count(seen: &Seen, rank: u32, cmd: &Cmd, device: &mut dyn Device) {
    let Cmd::Quantise { src, format, scale, amax: Some(cell), .. } = cmd else { return };
    let (x, factor) = (floats(device, *src), floats(device, scale.buf)[scale.index]);
    let bank = device.spec(cell.buf).unwrap().name.clone();
    let largest = format.decode(format.encode(f32::MAX));
    let mut seen = seen.lock().unwrap();
    let (casts, all, saturated, lost, strange, amax) = seen.entry((rank, bank, cell.index)).or_default();
    *casts += 1;
    for x in x {
        *all += 1;
        if !x.is_finite() {
            *strange += 1;
        } else {
            let code = format.decode(format.encode(x * factor)).abs();
            *lost += u64::from(x != 0.0 && code == 0.0);
            *saturated += u64::from(code == largest && (x * factor).abs() > largest);
        }
        *amax = amax.max(x.abs());
    }
}

fn names(cells: &[CellHealth], what: impl Fn(&CellHealth) -> bool) -> Vec<&str> {
    cells.iter().filter(|cell| what(cell)).map(|cell| cell.name.as_str()).collect()
}

#[test]
fn counts_are_those_of_every_cast() {
    for recipe in ["fp8-delayed:history=4", "fp8-delayed:history=4,update=step"] {
        let config = small(recipe);
        let seen = Seen::default();
        let device = |rank: qeffect_core::ids::Rank| {
            let seen = seen.clone();
            let see = move |cmd: &Cmd, device: &mut dyn Device| count(&seen, rank.0, cmd, device);
            Ok(Tap::boxed(Box::new(CpuDevice::new()), see))
        };
        let told = SessionConfig::new(OPTIM, config.tokens());
        let stages = config.stages(&[2, 2]).unwrap();
        let mut session = Session::with_devices(zb_h1::<2, 4>().clone(), stages, told, device).unwrap();
        let (mut saturated, mut underflowed) = (0, 0);
        for step in 0..6 {
            if step == 4 {
                // What the scales do not know of yet.
                let path = "blocks.1.fc1.weight";
                let larger = session.param(path).unwrap().iter().map(|x| 8.0 * x).collect();
                session.set_params(BTreeMap::from([(path.to_owned(), larger)])).unwrap();
            }
            seen.lock().unwrap().clear();
            let (report, cells) = session.step_health(batch(&config, step, 4)).unwrap();
            assert!(!report.skipped);
            let mut wanted = std::mem::take(&mut *seen.lock().unwrap());
            let mut index = BTreeMap::new();
            for cell in &cells {
                // One stage per rank.
                let at: &mut usize = index.entry((cell.stage, cell.role)).or_default();
                let key = (cell.stage.0, format!("{} amax history", cell.role.name()), *at);
                *at += 1;
                let found = (cell.casts, cell.elements, cell.saturated, cell.underflowed, cell.not_finite, cell.amax);
                assert_eq!(wanted.remove(&key), Some(found), "{recipe}, step {step}: {}", cell.name);
                assert!(!cell.frozen && cell.scale > 0.0 && cell.scale.is_finite());
                saturated += cell.saturated;
                underflowed += cell.underflowed;
            }
            assert!(wanted.is_empty(), "{recipe}, step {step}: casts that no cell tells of: {wanted:?}");
            assert!(cells.is_sorted_by_key(|cell| cell.stage));
        }
        assert!(saturated > 0 && underflowed > 0, "{recipe}: {saturated} and {underflowed} tell nothing");
    }
}

#[test]
fn a_step_with_counts_has_the_bits_of_one_without() {
    let config = small("fp8-delayed:history=4");
    let mut first: Option<Vec<Vec<CellHealth>>> = None;
    for how in HOW {
        let session = || -> Session<GptStage> {
            let stages = config.stages(&[1, 1, 1, 1]).unwrap();
            let told = SessionConfig::new(OPTIM, config.tokens());
            how.session(zb_v::<2, 4>().clone(), stages, told, || Box::new(CpuDevice::new())).unwrap()
        };
        let (mut plain, mut counted) = (session(), session());
        let mut told = Vec::new();
        for step in 0..6 {
            let wanted = plain.step(batch(&config, step, 4)).unwrap();
            if [1, 2, 4].contains(&step) {
                let (found, cells) = counted.step_health(batch(&config, step, 4)).unwrap();
                assert_eq!((found.losses, found.grad_norm), (wanted.losses, wanted.grad_norm), "{how:?}");
                told.push(cells);
            } else {
                let found = counted.step(batch(&config, step, 4)).unwrap();
                assert_eq!(found.launches, wanted.launches, "{how:?}: other steps are replayed");
            }
        }
        assert_eq!(counted.snapshot().unwrap(), plain.snapshot().unwrap(), "{how:?}");
        assert_eq!(*first.get_or_insert_with(|| told.clone()), told, "{how:?}");
    }
}

/// Counts are of casts, of which a recomputation makes no new ones.
#[test]
fn what_is_recomputed_is_counted_once() {
    let config = small("fp8-delayed:history=4");
    let cells = |checked: &qeffect_core::plan::Checked| {
        let told = SessionConfig::new(OPTIM, config.tokens());
        let mut session = Session::new(checked.clone(), config.stages(&[1, 1, 1, 1]).unwrap(), told).unwrap();
        session.step(batch(&config, 0, 4)).unwrap();
        session.step_health(batch(&config, 1, 4)).unwrap().1
    };
    let plain = zb_v::<2, 4>();
    assert_eq!(cells(&with_recomputation(plain, |_| true)), cells(plain));
}

#[test]
fn a_weight_that_is_infinite_freezes_its_scale() {
    let config = small("fp8-delayed:history=4");
    let told = SessionConfig { capture: CaptureMode::Step, ..SessionConfig::new(OPTIM, config.tokens()) };
    let mut session = Session::new(zb_h1::<2, 4>().clone(), config.stages(&[2, 2]).unwrap(), told).unwrap();
    let path = "blocks.2.proj.weight"; // the name of its cell, too
    let weight = |cells: &[CellHealth]| cells.iter().find(|cell| cell.name == path).cloned().unwrap();
    session.step(batch(&config, 0, 4)).unwrap();
    let (_, cells) = session.step_health(batch(&config, 1, 4)).unwrap();
    assert_eq!(names(&cells, |cell| cell.frozen || cell.not_finite > 0), [""; 0]);
    let before = weight(&cells);
    let good = session.param(path).unwrap();
    let mut spoiled = good.clone();
    spoiled[5] = f64::INFINITY;
    session.set_params(BTreeMap::from([(path.to_owned(), spoiled)])).unwrap();
    for step in 2..4 {
        let (report, cells) = session.step_health(batch(&config, step, 4)).unwrap();
        assert!(report.skipped, "an infinite amax is nothing to commit");
        assert_eq!(names(&cells, |cell| cell.frozen), [path]);
        let found = weight(&cells);
        assert_eq!((found.role, found.amax, found.not_finite), (Role::Weight, f32::INFINITY, 1));
        assert_eq!(found.scale, before.scale);
        let mut sorted = cells.clone();
        sorted.sort_by(CellHealth::worse_first);
        assert_eq!(sorted[0].name, path, "the worst first");
    }
    // Values that are finite cure it: nothing of the others is left.
    session.set_params(BTreeMap::from([(path.to_owned(), good)])).unwrap();
    let (report, cells) = session.step_health(batch(&config, 4, 4)).unwrap();
    assert!(!report.skipped);
    assert_eq!(names(&cells, |cell| cell.frozen || cell.not_finite > 0), [""; 0]);
}

#[test]
fn a_step_that_is_skipped_names_the_cells_that_met_what_is_not_finite() {
    let config = small("fp8-delayed:history=4");
    let told = SessionConfig::new(OPTIM, config.tokens());
    let mut session = Session::new(zb_h1::<2, 4>().clone(), config.stages(&[2, 2]).unwrap(), told).unwrap();
    session.step(batch(&config, 0, 4)).unwrap();
    let path = "blocks.2.ln1.weight";
    let mut gains = session.param(path).unwrap();
    gains[3] = f64::INFINITY;
    session.set_params(BTreeMap::from([(path.to_owned(), gains)])).unwrap();
    let (report, cells) = session.step_health(batch(&config, 1, 4)).unwrap();
    assert!(report.skipped);
    let met = names(&cells, |cell| cell.role == Role::Input && cell.not_finite > 0);
    assert_eq!(met.first(), Some(&"blocks.2.qkv.input"), "nothing before it: {met:?}");
    assert_eq!(names(&cells, |cell| cell.frozen), [""; 0], "a bad step leaves no history");
}

#[test]
fn a_recipe_without_cells_has_no_health() {
    let config = small("bf16");
    let told = SessionConfig::new(OPTIM, config.tokens());
    let mut session = Session::new(zb_h1::<2, 4>().clone(), config.stages(&[2, 2]).unwrap(), told).unwrap();
    let (report, cells) = session.step_health(batch(&config, 0, 4)).unwrap();
    assert!(!report.skipped && cells.is_empty());
}
