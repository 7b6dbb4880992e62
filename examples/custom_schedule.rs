//! A schedule of one's own: written here, proved when this file is compiled, and trained with on real text.
//!
//! ```text
//! cargo run --release --example custom_schedule
//! ```
//!
//! `lazy_w` is 1F1B whose weight gradients wait for half of the microbatches and then
//! catch up two at a time. No library needs it; that the compiler accepts it is the point. Change an action, and
//! see which rule speaks up.

use std::path::Path;

use anyhow::Context;
use qeffect::prelude::{Checked, by_name};
use qeffect::runtime::data::{ByteData, Windows};
use qeffect::runtime::gpt::GptConfig;
use qeffect::runtime::optim::OptimConfig;
use qeffect::runtime::session::{Session, SessionConfig};

qeffect::schedule! {
    /// 1F1B whose weight gradients wait for half of the microbatches.
    pub lazy_w<P, M> for (2, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    // What waits is memory: half of the microbatches beside those in flight.
    slots: |_| P + M / 2;

    rank |r| {
        let warm = min(P - 1 - r, M);
        let wait = M / 2;
        let mut done = 0;
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { F(r, m + warm); }
            I(r, m);
            if m >= wait {
                for n in done..min(done + 2, m + 1) { W(r, n); }
                done = min(done + 2, m + 1);
            }
        }
        for n in done..M { W(r, n); }
    }
}

const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/shakespeare.txt");
const SEED: u64 = 1;

/// The losses of some training steps under a schedule.
fn train(checked: Checked, steps: u64) -> anyhow::Result<Vec<f64>> {
    let recipe = "fp8-delayed".parse()?;
    let model = GptConfig { vocab: 256, hidden: 64, heads: 4, ffn: 256, layers: 2, seq: 32, sequences: 2, recipe };
    let optim = OptimConfig {
        steps,
        warmup: 2,
        peak: 1e-2,
        floor: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.1,
        clip: 1.0,
    };
    let data = ByteData::open(Path::new(TEXT), model.seq)?;
    let microbatches = checked.schedule.microbatches;
    let stages = model.stages(&model.split(checked.schedule.stages as usize)?)?;
    let mut session = Session::new(checked, stages, SessionConfig::new(optim, model.tokens()))?;
    let step = |step| {
        let batch: Vec<Windows> = (0..microbatches).map(|m| data.microbatch(SEED, step, m, model.sequences)).collect();
        Ok(session.step(batch)?.loss)
    };
    (0..steps).map(step).collect()
}

fn main() -> anyhow::Result<()> {
    let proved = lazy_w::<2, 8>();
    println!("lazy_w, 2 ranks, 8 microbatches: proved by the compiler, {} actions", proved.schedule.items.len());
    for (rank, peaks) in proved.plan.peaks.iter().enumerate() {
        println!("rank {rank}: at most {} tapes and {} works at once", peaks.tapes, peaks.works);
    }
    let losses = train(proved.clone(), 20)?;
    for (step, loss) in losses.iter().enumerate().filter(|(step, _)| step % 5 == 0 || step + 1 == losses.len()) {
        println!("step {step:2}: loss {loss:.3}");
    }
    let other = by_name("one_f_one_b").context("the library has 1F1B")?.checked(2, 8)?.into_owned();
    let same = train(other, 20)? == losses;
    println!("the same losses as under 1F1B, to the last bit: {same}");
    anyhow::ensure!(same, "a schedule has changed a number");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text is learned, and the order of the weight gradients changes no bit.
    #[test]
    fn it_trains_on_real_text() {
        let losses = train(lazy_w::<2, 8>().clone(), 12).unwrap();
        assert!(losses[0] > 5.0 && losses[11] < losses[0] - 1.0, "{losses:?}");
        let other = by_name("one_f_one_b").unwrap().checked(2, 8).unwrap().into_owned();
        assert_eq!(train(other, 12).unwrap(), losses);
    }

    #[test]
    fn weight_gradients_wait() {
        let works: Vec<u32> = lazy_w::<2, 8>().plan.peaks.iter().map(|peaks| peaks.works).collect();
        assert!(works.iter().all(|works| *works >= 4), "{works:?}");
    }
}
