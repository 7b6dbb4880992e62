//! What the host does in a step that is replayed as one list: batch, tables, the contract's transition, launch and verdict.
//!
//! `cargo bench -p qeffect-runtime --bench launch`. The model is real, and so is the list; but the device drops every launch,
//! so that what remains is the host's part alone. Its time is per step, one thread where one rank is alone.

use std::error::Error;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use qeffect_core::recipe::Recipe;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Device, DeviceError, GraphId};
use qeffect_runtime::gpt::GptConfig;
use qeffect_runtime::optim::{MOST_STEPS, OptimConfig};
use qeffect_runtime::session::{Session, SessionConfig};

/// Takes lists and does not run them.
struct Hollow {
    device: CpuDevice,
}

impl Device for Hollow {
    qeffect_runtime::hand_on!(device: name caps alloc spec issue write read poison instantiate drop_graph);

    fn launch(&mut self, _: GraphId) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn launch(c: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = c.benchmark_group("a replayed step, host");
    group.sample_size(20).measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300));
    for (schedule, ranks, microbatches) in [("gpipe", 1, 8), ("gpipe", 1, 64), ("one_f_one_b", 4, 8)] {
        let recipe: Recipe = "fp8-delayed".parse()?;
        let model = GptConfig { vocab: 64, hidden: 32, heads: 2, ffn: 64, layers: 4, seq: 16, sequences: 1, recipe };
        let entry = qeffect_schedules::by_name(schedule).ok_or("no such schedule")?;
        let checked = entry.checked(ranks, microbatches).map_err(|report| report.to_string())?.into_owned();
        let layers = vec![4 / ranks as usize; ranks as usize];
        let config = SessionConfig {
            capture: CaptureMode::Step,
            ..SessionConfig::new(OptimConfig { steps: MOST_STEPS, ..OptimConfig::default() }, model.tokens())
        };
        let device = Box::new(Hollow { device: CpuDevice::new() });
        let mut session = Session::on_one_device(checked, model.stages(&layers)?, config, device)?;
        let ids = |shift| (0..model.tokens() as u32).map(|id| (id + shift) % 64).collect::<Vec<u32>>();
        let batch: Vec<Windows> =
            (0..microbatches as u32).map(|m| Windows { tokens: ids(m), targets: ids(m + 1) }).collect();
        let batch: std::sync::Arc<[Windows]> = batch.into();
        session.step(batch.clone())?;
        let name = format!("{ranks} ranks, {microbatches} microbatches");
        group.bench_with_input(BenchmarkId::from_parameter(name), &batch, |bencher, batch| {
            bencher.iter(|| session.step(batch.clone()).expect("nothing is computed, so nothing fails"));
        });
    }
    group.finish();
    Ok(())
}

fn benches(c: &mut Criterion) {
    launch(c).expect("the model fits the schedule");
}

criterion_group!(all, benches);
criterion_main!(all);
