//! Random bodies of stages: the generated split backward against a tape that is recorded as it runs, with arithmetic of its
//! own, in f64.

#[rustfmt::skip]
#[allow(clippy::all)]
mod bodies;
mod streams;

use std::collections::BTreeMap;

use crate::common::settings::alone;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::optim::{NormPlan, OptimConfig};
use qeffect_runtime::prelude::*;
use qeffect_runtime::rng;
use qeffect_runtime::shard::Shard;
use qeffect_runtime::stage::Stage as _;
use qeffect_runtime::value::Edge;

const ROWS: usize = 5;
const COLS: usize = 6;

/// All that a body may use.
#[derive(Params)]
#[params(crate = qeffect_runtime)]
struct Parts {
    l0: Linear,
    l1: Linear,
    l2: Linear,
    l3: Linear,
    l4: Linear,
    l5: Linear,
    n0: LayerNorm,
    n1: LayerNorm,
    n2: LayerNorm,
    layers: Vec<Linear>,
    #[params(config)]
    yes: bool,
    #[params(config)]
    no: bool,
}

fn parts() -> Parts {
    let linear = || Linear::of([COLS, COLS]);
    let norm = || LayerNorm::of(COLS);
    Parts {
        l0: linear(),
        l1: linear(),
        l2: linear(),
        l3: linear(),
        l4: linear(),
        l5: linear(),
        n0: norm(),
        n1: norm(),
        n2: norm(),
        layers: vec![linear(), linear(), linear()],
        yes: true,
        no: false,
    }
}

/// Where a value came from.
enum Made {
    Given,
    Linear(Node, String),
    Norm(Node, String),
    Gelu(Node),
    Silu(Node),
    Add(Node, Node),
}

type Node = usize;

/// A tape that is recorded as it runs. Values are `[ROWS, COLS]`.
struct Tape {
    params: BTreeMap<String, Vec<f64>>,
    values: Vec<Vec<f64>>,
    made: Vec<Made>,
}

fn gelu_at(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
    0.5 * x * (1.0 + inner.tanh())
}

fn gelu_slope(x: f64) -> f64 {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let t = (c * (x + 0.044715 * x * x * x)).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x)
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Mean and 1/√(variance + eps) of a row.
fn statistics(row: &[f64]) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = row.iter().sum::<f64>() / n;
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (variance + 1e-5).sqrt())
}

impl Tape {
    fn push(&mut self, value: Vec<f64>, made: Made) -> Node {
        self.values.push(value);
        self.made.push(made);
        self.values.len() - 1
    }

    fn linear(&mut self, x: Node, path: &str) -> Node {
        let (w, b) = (&self.params[&format!("{path}.weight")], &self.params[&format!("{path}.bias")]);
        let x_at = &self.values[x];
        let at = |i: usize, o: usize| b[o] + (0..COLS).map(|k| x_at[i * COLS + k] * w[o * COLS + k]).sum::<f64>();
        let y = (0..ROWS * COLS).map(|n| at(n / COLS, n % COLS)).collect();
        self.push(y, Made::Linear(x, path.into()))
    }

    fn norm(&mut self, x: Node, path: &str) -> Node {
        let (gain, bias) = (&self.params[&format!("{path}.weight")], &self.params[&format!("{path}.bias")]);
        let mut y = Vec::new();
        for row in self.values[x].chunks(COLS) {
            let (mean, rstd) = statistics(row);
            y.extend(row.iter().zip(gain.iter().zip(bias)).map(|(x, (g, b))| (x - mean) * rstd * g + b));
        }
        self.push(y, Made::Norm(x, path.into()))
    }

    fn gelu(&mut self, x: Node) -> Node {
        let y = self.values[x].iter().map(|x| gelu_at(*x)).collect();
        self.push(y, Made::Gelu(x))
    }

    fn silu(&mut self, x: Node) -> Node {
        let y = self.values[x].iter().map(|x| x * sigmoid(*x)).collect();
        self.push(y, Made::Silu(x))
    }

    fn add(&mut self, a: Node, b: Node) -> Node {
        let y = self.values[a].iter().zip(&self.values[b]).map(|(a, b)| a + b).collect();
        self.push(y, Made::Add(a, b))
    }

    /// Gradients of the first nodes, which are `given`, and of all parameters, from those of other nodes.
    fn backward(&self, given: usize, dys: &[(Node, Vec<f64>)]) -> (Vec<Vec<f64>>, BTreeMap<String, Vec<f64>>) {
        let mut grads = vec![vec![0.0; ROWS * COLS]; self.values.len()];
        let mut params: BTreeMap<String, Vec<f64>> =
            self.params.iter().map(|(path, values)| (path.clone(), vec![0.0; values.len()])).collect();
        for (node, dy) in dys {
            grads[*node].iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
        }
        for node in (0..self.values.len()).rev() {
            let dy = grads[node].clone();
            let add = |grads: &mut Vec<Vec<f64>>, to: Node, dx: Vec<f64>| {
                grads[to].iter_mut().zip(dx).for_each(|(sum, dx)| *sum += dx);
            };
            match &self.made[node] {
                Made::Given => {}
                Made::Add(a, b) => {
                    add(&mut grads, *a, dy.clone());
                    add(&mut grads, *b, dy);
                }
                Made::Gelu(x) => {
                    let dx = self.values[*x].iter().zip(dy).map(|(x, dy)| gelu_slope(*x) * dy).collect();
                    add(&mut grads, *x, dx);
                }
                Made::Silu(x) => {
                    let slope = |x: f64| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)));
                    let dx = self.values[*x].iter().zip(dy).map(|(x, dy)| slope(*x) * dy).collect();
                    add(&mut grads, *x, dx);
                }
                Made::Linear(x, path) => {
                    let w = &self.params[&format!("{path}.weight")];
                    let mut dx = vec![0.0; ROWS * COLS];
                    for i in 0..ROWS {
                        for o in 0..COLS {
                            let d = dy[i * COLS + o];
                            params.get_mut(&format!("{path}.bias")).unwrap()[o] += d;
                            for k in 0..COLS {
                                dx[i * COLS + k] += d * w[o * COLS + k];
                                params.get_mut(&format!("{path}.weight")).unwrap()[o * COLS + k] +=
                                    d * self.values[*x][i * COLS + k];
                            }
                        }
                    }
                    add(&mut grads, *x, dx);
                }
                Made::Norm(x, path) => {
                    let gain = &self.params[&format!("{path}.weight")];
                    let mut dx = Vec::new();
                    for (row, dy) in self.values[*x].chunks(COLS).zip(dy.chunks(COLS)) {
                        let (mean, rstd) = statistics(row);
                        let unit: Vec<f64> = row.iter().map(|x| (x - mean) * rstd).collect();
                        let scaled: Vec<f64> = dy.iter().zip(gain).map(|(d, g)| d * g).collect();
                        let n = COLS as f64;
                        let flat = scaled.iter().sum::<f64>() / n;
                        let tilt = scaled.iter().zip(&unit).map(|(d, u)| d * u).sum::<f64>() / n;
                        dx.extend(scaled.iter().zip(&unit).map(|(d, u)| rstd * (d - flat - u * tilt)));
                        for c in 0..COLS {
                            params.get_mut(&format!("{path}.weight")).unwrap()[c] += dy[c] * unit[c];
                            params.get_mut(&format!("{path}.bias")).unwrap()[c] += dy[c];
                        }
                    }
                    add(&mut grads, *x, dx);
                }
            }
        }
        grads.truncate(given);
        (grads, params)
    }
}

fn pattern(stream: u64) -> Vec<f64> {
    (0..ROWS * COLS).map(|i| rng::normal(7, stream, i as u64)).collect()
}

fn close(name: &str, what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f64, |largest, x| largest.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs();
        assert!(error <= 1e-12 + 1e-10 * largest, "{name}: {what}[{at}] is {got} and not {want}");
    }
}

/// Runs a body of one activation as a stage of one microbatch, and over the tape.
fn compare<B>(name: &str, on_tape: fn(&mut Tape, &Parts, Node) -> Node)
where
    B: for<'a> Op<Param<'a> = &'a Parts, Input = Act, Output = Act>,
{
    compare_all::<B>(name, |tape, parts| vec![on_tape(tape, parts, 0)]);
}

/// The same for as many activations as the body takes and gives. On the tape, nodes 0, 1 .. are given.
fn compare_all<B>(name: &str, on_tape: impl Fn(&mut Tape, &Parts) -> Vec<Node>)
where
    B: for<'a> Op<Param<'a> = &'a Parts>,
    B::Input: Edge,
    B::Output: Edge,
{
    const STAGE: StageId = StageId(0);
    let stage: Built<B, Parts> = Built::new("f64".parse().unwrap(), [ROWS, COLS], parts());
    let sizes: Vec<(String, usize)> =
        stage.spec().params.iter().map(|param| (param.path.clone(), param.elements())).collect();
    let norm = NormPlan::new(sizes.iter().map(|(path, size)| (path.as_str(), *size))).unwrap();
    let config = alone(1, ROWS, OptimConfig::default(), norm);
    let mut shard = Shard::new(Box::new(CpuDevice::new()), vec![(STAGE, stage)], config).unwrap();
    let mut params = BTreeMap::new();
    for (path, size) in &sizes {
        let stream = rng::name(path);
        let values: Vec<f64> = (0..*size).map(|i| 0.5 * rng::normal(11, stream, i as u64)).collect();
        shard.set_param(path, &values).unwrap();
        params.insert(path.clone(), values);
    }
    shard.prologue().unwrap();

    let given = B::Input::TENSORS;
    let xs: Vec<Vec<f64>> = (0..given as u64).map(|stream| pattern(1 + 2 * stream)).collect();
    let dys: Vec<Vec<f64>> = (0..B::Output::TENSORS as u64).map(|stream| pattern(2 + 2 * stream)).collect();
    let made = xs.iter().map(|_| Made::Given).collect();
    let mut tape = Tape { params, values: xs.clone(), made };
    let results = on_tape(&mut tape, &parts());
    let ends: Vec<(Node, Vec<f64>)> = results.iter().copied().zip(dys.iter().cloned()).collect();
    let (want_dx, want) = tape.backward(given, &ends);

    let zeros = vec![0; ROWS];
    let batch = [Windows { tokens: zeros.clone(), targets: zeros }];
    shard.begin_step(&batch).unwrap();
    shard.refresh(STAGE).unwrap();
    let lease = |shard: &mut Shard<Built<B, Parts>>, values: &[Vec<f64>]| -> Vec<Act> {
        let act = |values: &Vec<f64>| {
            let act = shard.lease(qeffect_core::dtype::Dtype::F64, ROWS, COLS).unwrap();
            shard.write_act(act, bytemuck::cast_slice(values)).unwrap();
            act
        };
        values.iter().map(act).collect()
    };
    let settle = |shard: &mut Shard<Built<B, Parts>>, what: &str, acts: Vec<Act>, want: &[&Vec<f64>]| {
        assert_eq!(acts.len(), want.len());
        for (at, (act, want)) in acts.into_iter().zip(want).enumerate() {
            close(name, &format!("{what}{at}"), &shard.reals(act).unwrap(), want);
            shard.free(act).unwrap();
        }
    };
    let x = lease(&mut shard, &xs);
    let (y, kept, _token) = shard.forward(STAGE, Microbatch(0), &x, Token::first(STAGE)).unwrap();
    x.into_iter().for_each(|x| shard.free(x).unwrap());
    let want_y: Vec<&Vec<f64>> = results.iter().map(|node| &tape.values[*node]).collect();
    settle(&mut shard, "y", y, &want_y);
    let dy = lease(&mut shard, &dys);
    let (dx, work, _token) = shard.input_grad(STAGE, Microbatch(0), &dy, kept, Token::first(STAGE)).unwrap();
    dy.into_iter().for_each(|dy| shard.free(dy).unwrap());
    settle(&mut shard, "dx", dx, &want_dx.iter().collect::<Vec<_>>());
    shard.weight_grad(STAGE, Microbatch(0), work).unwrap();
    // Every share of every tensor was given back.
    shard.pool().quiescent().unwrap();

    shard.reduce(STAGE).unwrap();
    for (path, want) in &want {
        assert!(want.iter().any(|x| *x != 0.0), "{name} does not use `{path}`");
        close(name, path, &shard.gradient(path).unwrap(), want);
    }
}
