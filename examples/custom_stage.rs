//! A model of one's own: a residual MLP over token embeddings, cut into two stages and trained by a ZB-H1 pipeline.
//!
//! Run: `cargo run --release --example custom_stage`

use anyhow::Result;
use qeffect::core::recipe::Recipe;
use qeffect::model::*;
use qeffect::runtime::data::Windows;
use qeffect::runtime::optim::OptimConfig;
use qeffect::runtime::session::{Session, SessionConfig};
use qeffect::runtime::stage::Init;
use qeffect::schedules::zb_h1;

/// One layer. Names of fields are names of parameters: `layers.1.up.weight`.
#[derive(Params)]
struct Mlp {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

/// Written forward only: I and W follow from it when this is compiled.
#[stage]
fn mlp(x: Act, w: &Mlp) -> Act {
    let h = gelu(linear(layer_norm(x, &w.norm), &w.up));
    add(x, linear(h, &w.down))
}

#[derive(Params)]
struct Front {
    #[params(name = "")]
    embedding: Embedding,
    layers: Layers<Mlp>,
}

#[stage]
fn front(w: &Front) -> Act {
    let mut x = embedding(&w.embedding);
    for layer in &w.layers {
        x = mlp(x, layer);
    }
    x
}

#[derive(Params)]
struct Back {
    layers: Layers<Mlp>,
    head: Linear,
}

#[stage]
fn back(x: Act, w: &Back) -> Loss {
    let mut x = x;
    for layer in &w.layers {
        x = mlp(x, layer);
    }
    cross_entropy(linear(x, &w.head))
}

const VOCAB: usize = 32;
const HIDDEN: usize = 32;
const SEQ: usize = 16;
const MICROBATCHES: u32 = 4;

fn layers(first: usize, count: usize) -> Layers<Mlp> {
    let layer = |_| Mlp {
        norm: LayerNorm::of(HIDDEN),
        up: Linear::of([HIDDEN, 4 * HIDDEN]).init(Init::Normal(0.1)),
        down: Linear::of([4 * HIDDEN, HIDDEN]).init(Init::Normal(0.05)),
    };
    Layers::new(first, (0..count).map(layer).collect())
}

fn main() -> Result<()> {
    let recipe: Recipe = "fp8-delayed:history=8".parse()?;
    let boundary = [SEQ, HIDDEN];
    let embedding = Embedding::of(VOCAB, SEQ, HIDDEN).init(Init::Normal(0.5));
    let head = Linear::of([HIDDEN, VOCAB]).unbiased().init(Init::Normal(0.1));
    // The stages of a pipeline are of one type: the first, those inside (none here), the last, the whole model.
    type Part = Cut<Built<front, Front>, Built<mlp, Mlp>, Built<back, Back>, Built<back, Back>>;
    let stages: Vec<Part> = vec![
        Cut::First(Built::new(recipe, boundary, Front { embedding, layers: layers(0, 2) })),
        Cut::Last(Built::new(recipe, boundary, Back { layers: layers(2, 1), head })),
    ];
    let steps = 60;
    let optim = OptimConfig { steps, warmup: 5, peak: 1e-2, floor: 1e-3, ..OptimConfig::default() };
    let config = SessionConfig::new(optim, SEQ);
    let mut session = Session::new(zb_h1::build(2, i64::from(MICROBATCHES))?, stages, config)?;

    // Counting by a stride that the first two tokens show.
    let batch = |step: u64| -> Vec<Windows> {
        let row = |m: u64| {
            let stride = 1 + (step + m) % 5;
            let token = |i: usize| ((step * 7 + m * 3 + stride * i as u64) % VOCAB as u64) as u32;
            Windows { tokens: (0..SEQ).map(token).collect(), targets: (1..=SEQ).map(token).collect() }
        };
        (0..u64::from(MICROBATCHES)).map(row).collect()
    };
    let mut losses = Vec::new();
    for step in 0..steps {
        let report = session.step(batch(step))?;
        losses.push(report.loss);
        if step % 10 == 0 {
            println!("step {step:3}: loss {:.3}", report.loss);
        }
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!("from {first:.3} to {last:.3}");
    anyhow::ensure!(last < first - 0.5, "it has not learnt: {first} to {last}");
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_learns() {
        super::main().unwrap();
    }
}
