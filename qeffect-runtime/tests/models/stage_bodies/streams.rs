//! Stages that several activations enter and leave: the split backward against the tape, and the same bits wherever the model
//! is cut, so that both cross between stages of one rank, between ranks, and through recomputation.

use std::collections::BTreeMap;

use crate::common::how::{HOW, How};
use qeffect_core::check::{Options, check};
use qeffect_core::lang;
use qeffect_core::plan::Checked;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::shard::Named;
use qeffect_runtime::stage::{Init, Stage};

use super::*;

#[stage(crate = qeffect_runtime)]
fn two(h: Act, r: Act, w: &Parts) -> (Act, Act) {
    let r = add(r, linear(h, &w.l0));
    let h = gelu(linear(layer_norm(r, &w.n0), &w.l1));
    let mut a = h;
    let mut b = r;
    for layer in &w.layers {
        let (c, d) = (gelu(linear(b, layer)), add(a, b));
        a = c;
        b = d;
    }
    let (h, r) = if w.no { (add(h, silu(a)), b) } else { (b, add(a, h)) };
    let h = layer_norm(linear(linear(linear(linear(h, &w.l2), &w.l3), &w.l4), &w.l5), &w.n1);
    (layer_norm(h, &w.n2), r)
}

fn two_on_tape(g: &mut Tape, w: &Parts) -> Vec<Node> {
    let (h, r) = (0, 1);
    let t = g.linear(h, "l0");
    let r = g.add(r, t);
    let t = g.norm(r, "n0");
    let t = g.linear(t, "l1");
    let h = g.gelu(t);
    let (mut a, mut b) = (h, r);
    for layer in 0..w.layers.len() {
        let c = g.linear(b, &format!("layers.{layer}"));
        let c = g.gelu(c);
        let d = g.add(a, b);
        (a, b) = (c, d);
    }
    let r = g.add(a, h);
    let mut h = b;
    for path in ["l2", "l3", "l4", "l5"] {
        h = g.linear(h, path);
    }
    let h = g.norm(h, "n1");
    vec![g.norm(h, "n2"), r]
}

/// One of the two is given back as it came, and is read twice on the way.
#[stage(crate = qeffect_runtime)]
fn passed(h: Act, r: Act, w: &Parts) -> (Act, Act, Act) {
    let mut a = add(linear(h, &w.l0), r);
    for layer in &w.layers {
        a = gelu(linear(a, layer));
    }
    let a = layer_norm(linear(linear(a, &w.l1), &w.l2), &w.n0);
    let b = layer_norm(linear(linear(linear(r, &w.l3), &w.l4), &w.l5), &w.n1);
    (r, layer_norm(add(a, b), &w.n2), b)
}

fn passed_on_tape(g: &mut Tape, w: &Parts) -> Vec<Node> {
    let (h, r) = (0, 1);
    let t = g.linear(h, "l0");
    let mut a = g.add(t, r);
    for layer in 0..w.layers.len() {
        a = g.linear(a, &format!("layers.{layer}"));
        a = g.gelu(a);
    }
    for path in ["l1", "l2"] {
        a = g.linear(a, path);
    }
    let a = g.norm(a, "n0");
    let mut b = r;
    for path in ["l3", "l4", "l5"] {
        b = g.linear(b, path);
    }
    let b = g.norm(b, "n1");
    let t = g.add(a, b);
    vec![r, g.norm(t, "n2"), b]
}

#[test]
fn several_activations_in_and_out() {
    compare_all::<two>("two", two_on_tape);
    compare_all::<passed>("passed", passed_on_tape);
}

const VOCAB: usize = 32;
const HIDDEN: usize = 32;
const NARROW: usize = 16;
const TOKENS: usize = 16;
const MICROBATCHES: u32 = 4;

/// The residual stream, and beside it, narrower, what is still to be projected and added.
#[derive(Clone, Params)]
#[params(crate = qeffect_runtime)]
struct Layer {
    down: Linear,
    norm: LayerNorm,
    up: Linear,
}

#[stage(crate = qeffect_runtime)]
fn layer(h: Act, r: Act, w: &Layer) -> (Act, Act) {
    let r = add(r, linear(h, &w.down));
    (gelu(linear(layer_norm(r, &w.norm), &w.up)), r)
}

#[derive(Params)]
#[params(crate = qeffect_runtime)]
struct Front {
    #[params(name = "")]
    embedding: Embedding,
    norm: LayerNorm,
    up: Linear,
}

#[stage(crate = qeffect_runtime)]
fn front(w: &Front) -> (Act, Act) {
    let r = embedding(&w.embedding);
    (gelu(linear(layer_norm(r, &w.norm), &w.up)), r)
}

#[derive(Params)]
#[params(crate = qeffect_runtime)]
struct Inner {
    layers: Layers<Layer>,
}

#[stage(crate = qeffect_runtime)]
fn inner(h: Act, r: Act, w: &Inner) -> (Act, Act) {
    let mut h = h;
    let mut r = r;
    for each in &w.layers {
        let (next, sum) = layer(h, r, each);
        h = next;
        r = sum;
    }
    (h, r)
}

#[derive(Params)]
#[params(crate = qeffect_runtime)]
struct Back {
    last: Linear,
    head: Linear,
}

#[stage(crate = qeffect_runtime)]
fn back(h: Act, r: Act, w: &Back) -> Loss {
    cross_entropy(linear(add(r, linear(h, &w.last)), &w.head))
}

#[derive(Params)]
#[params(crate = qeffect_runtime)]
struct Whole {
    #[params(name = "")]
    front: Front,
    #[params(name = "")]
    inner: Inner,
    #[params(name = "")]
    back: Back,
}

#[stage(crate = qeffect_runtime)]
fn whole(w: &Whole) -> Loss {
    let (h, r) = front(&w.front);
    let (h, r) = inner(h, r, &w.inner);
    back(h, r, &w.back)
}

type Part = Cut<Built<front, Front>, Built<inner, Inner>, Built<back, Back>, Built<whole, Whole>>;

/// A model of three layers between its ends; `layers` of each inner stage, or the whole as one.
fn stages(recipe: &str, layers: &[usize]) -> Vec<Part> {
    let recipe = recipe.parse().unwrap();
    let linear = |shape| Linear::of(shape).init(Init::Normal(0.2));
    let front = || Front {
        embedding: Embedding::of(VOCAB, TOKENS, HIDDEN).init(Init::Normal(0.5)),
        norm: LayerNorm::of(HIDDEN),
        up: linear([HIDDEN, NARROW]),
    };
    let inner = |first: usize, count: usize| Inner {
        layers: Layers::new(
            first,
            vec![
                Layer { down: linear([NARROW, HIDDEN]), norm: LayerNorm::of(HIDDEN), up: linear([HIDDEN, NARROW]) };
                count
            ],
        ),
    };
    let back = || Back { last: linear([NARROW, HIDDEN]), head: linear([HIDDEN, VOCAB]).unbiased() };
    if layers.is_empty() {
        let params = Whole { front: front(), inner: inner(0, 3), back: back() };
        return vec![Cut::Whole(Built::new(recipe, [TOKENS, HIDDEN], params))];
    }
    let edge = [[TOKENS, NARROW], [TOKENS, HIDDEN]];
    let mut parts = vec![Cut::First(Built::with_edges(recipe, &[], &edge, front()).unwrap())];
    let mut first = 0;
    for count in layers {
        parts.push(Cut::Middle(Built::with_edges(recipe, &edge, &edge, inner(first, *count)).unwrap()));
        first += count;
    }
    parts.push(Cut::Last(Built::with_edges(recipe, &edge, &[], back()).unwrap()));
    parts
}

fn schedule(text: &str, ranks: i64) -> Checked {
    let (program, _) = lang::read("test.sched", text);
    let schedule = lang::interpret(&program.unwrap(), &[ranks, i64::from(MICROBATCHES)]).unwrap();
    check(schedule, &Options::AT_START).unwrap()
}

const ONE: &str = "one<P, M>; ranks: P; microbatches: M; stages: P; place: |s| s;
    rank |r| { for m in 0..M { F(r, m); B(r, m); } }";
/// Two stages per rank, so that both kinds of edges occur.
const V: &str = "v<P, M>; ranks: P; microbatches: M; stages: 2 * P; place: |s| min(s, 2 * P - 1 - s);
    rank |r| {
        let top = 2 * P - 1 - r;
        for m in 0..M { F(r, m); }
        for m in 0..M { F(top, m); }
        for m in 0..M { I(top, m); }
        for m in 0..M { I(r, m); W(top, m); }
        for m in 0..M { W(r, m); }
    }";
/// One stage per rank, every forward run again.
const AGAIN: &str = "again<P, M>; ranks: P; microbatches: M; stages: P; place: |s| s;
    rank |r| { for m in 0..M { F(r, m); } for m in 0..M { R(r, m); I(r, m); } for m in 0..M { W(r, m); } }";

fn batch(step: u64) -> Vec<Windows> {
    let row = |m: u64| {
        let token = |i: usize| (rng::draw(&[5, step, m, i as u64]) % VOCAB as u64) as u32;
        Windows { tokens: (0..TOKENS).map(token).collect(), targets: (1..=TOKENS).map(token).collect() }
    };
    (0..u64::from(MICROBATCHES)).map(row).collect()
}

fn run(checked: &Checked, stages: Vec<Part>, how: How) -> (Vec<u64>, BTreeMap<String, Named>) {
    let optim = OptimConfig { steps: 8, warmup: 1, peak: 1e-2, ..OptimConfig::default() };
    let config = SessionConfig::new(optim, TOKENS);
    let mut session = how.session(checked.clone(), stages, config, || Box::new(CpuDevice::new())).unwrap();
    let losses = (0..6).map(|step| session.step(batch(step)).unwrap().loss.to_bits()).collect();
    (losses, session.snapshot().unwrap().values)
}

#[test]
fn two_streams_cross_between_stages_and_change_no_bit() {
    for recipe in ["bf16", "fp8-delayed:history=4"] {
        let want = run(&schedule(ONE, 1), stages(recipe, &[]), How::EAGER);
        assert!(want.0.windows(2).any(|pair| pair[0] != pair[1]), "it does not train");
        for (text, ranks, layers) in [(V, 2, &[2, 1][..]), (AGAIN, 3, &[3]), (AGAIN, 4, &[1, 2])] {
            let checked = schedule(text, ranks);
            for how in HOW {
                let found = run(&checked, stages(recipe, layers), how);
                assert_eq!(found.0, want.0, "{recipe}, {}, {how:?}", checked.schedule.name);
                assert!(found.1 == want.1, "{recipe}, {}, {how:?}: state", checked.schedule.name);
            }
        }
    }
}

#[test]
fn ends_that_disagree_about_their_tensors_are_refused() {
    let shapes = [[TOKENS, NARROW], [TOKENS, HIDDEN]];
    let swapped = [shapes[1], shapes[0]];
    let mut parts = stages("bf16", &[3]);
    let Cut::Middle(built) = &parts[1] else { unreachable!() };
    assert_eq!(built.spec().input, shapes);
    let recipe = "bf16".parse().unwrap();
    let inner = || Inner { layers: Layers::new(0, Vec::new()) };
    assert!(Built::<inner, Inner>::with_edges(recipe, &shapes[..1], &shapes, inner()).is_err());
    parts[1] = Cut::Middle(Built::with_edges(recipe, &swapped, &shapes, inner()).unwrap());
    let config = SessionConfig::new(OptimConfig::default(), TOKENS);
    let error = Session::new(schedule(AGAIN, 3), parts, config).map(drop).unwrap_err();
    assert_eq!(error.to_string(), "stages 0 and 1 do not exchange the same tensors [QE0903]");
}
