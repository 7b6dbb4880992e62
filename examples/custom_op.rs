//! An op of one's own: squared ReLU, `max(x, 0)²`, with a kernel of its own, used in a stage like any other.
//!
//! An op is a type that carries F and I (and W, for `Op`), and a function of the same name that says what it takes and
//! gives. What F leaves for I is a struct with `#[retained]`.
//!
//! Run: `cargo run --release --example custom_op`

use anyhow::Result as Outcome;
use qeffect::core::recipe::Recipe;
use qeffect::model::*;
use qeffect::runtime::data::Windows;
use qeffect::runtime::optim::OptimConfig;
use qeffect::runtime::session::{Session, SessionConfig};
use qeffect::runtime::stage::Init;
use qeffect::schedules::gpipe;

/// The op.
#[allow(non_camel_case_types)]
pub enum squared_relu {}

/// `max(x, 0)²`, element by element.
pub fn squared_relu(_x: Act) -> Act {
    witness("squared_relu")
}

/// From F to I: the input. It cannot be copied, so I can use it once only.
#[retained]
pub struct SquaredReluTape {
    x: Kept,
}

const FORWARD: Kernel = Kernel {
    name: "squared_relu",
    cpu: |inputs, outputs| {
        let [x] = inputs else { return Err("one input".into()) };
        outputs[0].iter_mut().zip(*x).for_each(|(y, x)| *y = x.max(0.0) * x.max(0.0));
        Ok(())
    },
};

const BACKWARD: Kernel = Kernel {
    name: "squared_relu_grad",
    cpu: |inputs, outputs| {
        let [x, dy] = inputs else { return Err("two inputs".into()) };
        outputs[0].iter_mut().zip(x.iter().zip(*dy)).for_each(|(dx, (x, dy))| *dx = 2.0 * x.max(0.0) * dy);
        Ok(())
    },
};

// No hidden state and no matrices: then F and I have no token, and there is no W.
#[stage]
impl PureOp for squared_relu {
    type Param<'a> = ();
    type Tape = SquaredReluTape;

    fn forward(cx: &mut Cx<'_>, x: Act, (): ()) -> Result<(Act, SquaredReluTape)> {
        let y = <squared_relu as PureOp>::evaluate(cx, x, ())?;
        Ok((y, SquaredReluTape { x: cx.keep(x)? }))
    }

    fn input_grad(cx: &mut Cx<'_>, dy: Act, (): (), tape: SquaredReluTape) -> Result<Act> {
        let dx = cx.lease(dy.rows, dy.cols)?;
        cx.launch(BACKWARD, &[tape.x.act(), dy], &[dx])?;
        tape.release(cx)?;
        Ok(dx)
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, (): ()) -> Result<Act> {
        let y = cx.lease(x.rows, x.cols)?;
        cx.launch(FORWARD, &[x], &[y])?;
        Ok(y)
    }
}

#[derive(Params)]
struct Model {
    #[params(name = "")]
    embedding: Embedding,
    up: Linear,
    down: Linear,
    head: Linear,
}

#[stage]
fn model(w: &Model) -> Loss {
    let x = embedding(&w.embedding);
    let x = add(x, linear(squared_relu(linear(x, &w.up)), &w.down));
    cross_entropy(linear(x, &w.head))
}

const VOCAB: usize = 16;
const HIDDEN: usize = 16;
const SEQ: usize = 16;

fn main() -> Outcome<()> {
    let recipe: Recipe = "bf16".parse()?;
    let params = Model {
        embedding: Embedding::of(VOCAB, SEQ, HIDDEN).init(Init::Normal(0.5)),
        up: Linear::of([HIDDEN, 64]).init(Init::Normal(0.2)),
        down: Linear::of([64, HIDDEN]).init(Init::Normal(0.1)),
        head: Linear::of([HIDDEN, VOCAB]).unbiased().init(Init::Normal(0.1)),
    };
    let stage: Built<model, Model> = Built::new(recipe, [SEQ, HIDDEN], params);
    let optim = OptimConfig { steps: 40, warmup: 4, peak: 1e-2, floor: 1e-3, ..OptimConfig::default() };
    let mut session = Session::new(gpipe::build(1, 2)?, vec![stage], SessionConfig::new(optim, SEQ))?;

    // The token after `t` is `3t + 1`.
    let row = |start: u32| {
        let tokens: Vec<u32> =
            std::iter::successors(Some(start % 16), |t| Some((3 * t + 1) % 16)).take(SEQ + 1).collect();
        Windows { tokens: tokens[..SEQ].to_vec(), targets: tokens[1..].to_vec() }
    };
    let mut losses = Vec::new();
    for step in 0..40 {
        losses.push(session.step(vec![row(step), row(step + 5)])?.loss);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    println!("loss: from {first:.3} to {last:.3}");
    anyhow::ensure!(last < 0.5 * first, "it has not learnt: {first} to {last}");
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_learns() {
        super::main().unwrap();
    }
}
