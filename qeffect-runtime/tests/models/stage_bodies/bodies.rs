// Written by `scripts/stage_bodies.py`: random bodies, as stages and as programs over a tape.

use super::*;

#[stage(crate = qeffect_runtime)]
fn body0(x: Act, w: &Parts) -> Act {
    let mut v1 = x;
    for layer in &w.layers { v1 = add(gelu(linear(v1, layer)), v1); }
    let v2 = linear(add(gelu(v1), linear(v1, &w.l1)), &w.l0);
    let v2 = if w.no { add(gelu(v2), x) } else { add(v2, silu(x)) };
    let v1 = add(linear(v2, &w.l2), silu(linear(x, &w.l3)));
    let v3 = layer_norm(layer_norm(gelu(v1), &w.n1), &w.n0);
    let v4 = silu(linear(linear(v3, &w.l5), &w.l4));
    gelu(layer_norm(v4, &w.n2))
}

fn body0_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let mut v1 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v1, &format!("layers.{layer}")); let a = g.gelu(a); v1 = g.add(a, v1); }
    let v2 = { let a = { let a = { let a = v1; g.gelu(a) }; let b = { let a = v1; g.linear(a, "l1") }; g.add(a, b) }; g.linear(a, "l0") };
    let v2 = if w.no { let a = g.gelu(v2); g.add(a, x) } else { let b = g.silu(x); g.add(v2, b) };
    let v1 = { let a = { let a = v2; g.linear(a, "l2") }; let b = { let a = { let a = x; g.linear(a, "l3") }; g.silu(a) }; g.add(a, b) };
    let v3 = { let a = { let a = { let a = v1; g.gelu(a) }; g.norm(a, "n1") }; g.norm(a, "n0") };
    let v4 = { let a = { let a = { let a = v3; g.linear(a, "l5") }; g.linear(a, "l4") }; g.silu(a) };
    { let a = { let a = v4; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body1(x: Act, w: &Parts) -> Act {
    let v1 = add(gelu(gelu(x)), gelu(add(x, x)));
    let (v2, v3) = (gelu(gelu(linear(v1, &w.l0))), linear(add(add(x, x), v1), &w.l1));
    let v4 = linear(linear(linear(v2, &w.l4), &w.l3), &w.l2);
    let v1 = linear(v3, &w.l5);
    let v4 = gelu(add(layer_norm(v4, &w.n0), silu(x)));
    let v5 = gelu(silu(layer_norm(x, &w.n1)));
    let v2 = silu(add(layer_norm(v1, &w.n2), v5));
    let mut v6 = v2;
    for layer in &w.layers { v6 = add(gelu(linear(v6, layer)), v6); }
    gelu(add(add(add(add(x, v4), x), v4), v6))
}

fn body1_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let v1 = { let a = { let a = { let a = x; g.gelu(a) }; g.gelu(a) }; let b = { let a = { let a = x; let b = x; g.add(a, b) }; g.gelu(a) }; g.add(a, b) };
    let (v2, v3) = ({ let a = { let a = { let a = v1; g.linear(a, "l0") }; g.gelu(a) }; g.gelu(a) }, { let a = { let a = { let a = x; let b = x; g.add(a, b) }; let b = v1; g.add(a, b) }; g.linear(a, "l1") });
    let v4 = { let a = { let a = { let a = v2; g.linear(a, "l4") }; g.linear(a, "l3") }; g.linear(a, "l2") };
    let v1 = { let a = v3; g.linear(a, "l5") };
    let v4 = { let a = { let a = { let a = v4; g.norm(a, "n0") }; let b = { let a = x; g.silu(a) }; g.add(a, b) }; g.gelu(a) };
    let v5 = { let a = { let a = { let a = x; g.norm(a, "n1") }; g.silu(a) }; g.gelu(a) };
    let v2 = { let a = { let a = { let a = v1; g.norm(a, "n2") }; let b = v5; g.add(a, b) }; g.silu(a) };
    let mut v6 = v2;
    for layer in 0..w.layers.len() { let a = g.linear(v6, &format!("layers.{layer}")); let a = g.gelu(a); v6 = g.add(a, v6); }
    { let a = { let a = { let a = { let a = { let a = x; g.add(a, v4) }; g.add(a, x) }; g.add(a, v4) }; g.add(a, v6) }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body2(x: Act, w: &Parts) -> Act {
    let x = gelu(layer_norm(layer_norm(x, &w.n1), &w.n0));
    let v1 = if w.no { add(gelu(x), x) } else { add(x, silu(x)) };
    let v2 = gelu(add(add(v1, v1), add(x, v1)));
    let v3 = add(silu(linear(v2, &w.l0)), add(linear(v1, &w.l1), silu(v1)));
    let v4 = gelu(add(add(v3, v1), add(v2, x)));
    let v2 = add(gelu(v4), v1);
    let mut v5 = v1;
    for layer in &w.layers { v5 = add(gelu(linear(v5, layer)), v5); }
    gelu(layer_norm(linear(linear(linear(linear(add(v2, v5), &w.l2), &w.l3), &w.l4), &w.l5), &w.n2))
}

fn body2_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let x = { let a = { let a = { let a = x; g.norm(a, "n1") }; g.norm(a, "n0") }; g.gelu(a) };
    let v1 = if w.no { let a = g.gelu(x); g.add(a, x) } else { let b = g.silu(x); g.add(x, b) };
    let v2 = { let a = { let a = { let a = v1; let b = v1; g.add(a, b) }; let b = { let a = x; let b = v1; g.add(a, b) }; g.add(a, b) }; g.gelu(a) };
    let v3 = { let a = { let a = { let a = v2; g.linear(a, "l0") }; g.silu(a) }; let b = { let a = { let a = v1; g.linear(a, "l1") }; let b = { let a = v1; g.silu(a) }; g.add(a, b) }; g.add(a, b) };
    let v4 = { let a = { let a = { let a = v3; let b = v1; g.add(a, b) }; let b = { let a = v2; let b = x; g.add(a, b) }; g.add(a, b) }; g.gelu(a) };
    let v2 = { let a = { let a = v4; g.gelu(a) }; let b = v1; g.add(a, b) };
    let mut v5 = v1;
    for layer in 0..w.layers.len() { let a = g.linear(v5, &format!("layers.{layer}")); let a = g.gelu(a); v5 = g.add(a, v5); }
    { let a = { let a = { let a = { let a = { let a = { let a = { let a = v2; g.add(a, v5) }; g.linear(a, "l2") }; g.linear(a, "l3") }; g.linear(a, "l4") }; g.linear(a, "l5") }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body3(x: Act, w: &Parts) -> Act {
    let v1 = if w.no { add(gelu(x), x) } else { add(x, silu(x)) };
    let (v2, v3) = (gelu(gelu(gelu(x))), gelu(add(layer_norm(v1, &w.n0), linear(v1, &w.l0))));
    let mut v4 = v2;
    for layer in &w.layers { v4 = add(gelu(linear(v4, layer)), v4); }
    gelu(layer_norm(layer_norm(linear(linear(linear(linear(linear(add(v3, v4), &w.l1), &w.l2), &w.l3), &w.l4), &w.l5), &w.n1), &w.n2))
}

fn body3_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let v1 = if w.no { let a = g.gelu(x); g.add(a, x) } else { let b = g.silu(x); g.add(x, b) };
    let (v2, v3) = ({ let a = { let a = { let a = x; g.gelu(a) }; g.gelu(a) }; g.gelu(a) }, { let a = { let a = { let a = v1; g.norm(a, "n0") }; let b = { let a = v1; g.linear(a, "l0") }; g.add(a, b) }; g.gelu(a) });
    let mut v4 = v2;
    for layer in 0..w.layers.len() { let a = g.linear(v4, &format!("layers.{layer}")); let a = g.gelu(a); v4 = g.add(a, v4); }
    { let a = { let a = { let a = { let a = { let a = { let a = { let a = { let a = { let a = v3; g.add(a, v4) }; g.linear(a, "l1") }; g.linear(a, "l2") }; g.linear(a, "l3") }; g.linear(a, "l4") }; g.linear(a, "l5") }; g.norm(a, "n1") }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body4(x: Act, w: &Parts) -> Act {
    let (v1, v2) = (add(linear(gelu(x), &w.l0), gelu(x)), gelu(silu(silu(x))));
    let v3 = layer_norm(linear(silu(x), &w.l1), &w.n0);
    let (v4, v5) = (silu(gelu(add(v2, v1))), linear(gelu(linear(v3, &w.l3)), &w.l2));
    let v6 = if w.yes { add(gelu(v4), v5) } else { add(v4, silu(v5)) };
    let mut v7 = v6;
    for layer in &w.layers { v7 = add(gelu(linear(v7, layer)), v7); }
    gelu(layer_norm(layer_norm(linear(linear(add(v1, v7), &w.l4), &w.l5), &w.n1), &w.n2))
}

fn body4_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let (v1, v2) = ({ let a = { let a = { let a = x; g.gelu(a) }; g.linear(a, "l0") }; let b = { let a = x; g.gelu(a) }; g.add(a, b) }, { let a = { let a = { let a = x; g.silu(a) }; g.silu(a) }; g.gelu(a) });
    let v3 = { let a = { let a = { let a = x; g.silu(a) }; g.linear(a, "l1") }; g.norm(a, "n0") };
    let (v4, v5) = ({ let a = { let a = { let a = v2; let b = v1; g.add(a, b) }; g.gelu(a) }; g.silu(a) }, { let a = { let a = { let a = v3; g.linear(a, "l3") }; g.gelu(a) }; g.linear(a, "l2") });
    let v6 = if w.yes { let a = g.gelu(v4); g.add(a, v5) } else { let b = g.silu(v5); g.add(v4, b) };
    let mut v7 = v6;
    for layer in 0..w.layers.len() { let a = g.linear(v7, &format!("layers.{layer}")); let a = g.gelu(a); v7 = g.add(a, v7); }
    { let a = { let a = { let a = { let a = { let a = { let a = v1; g.add(a, v7) }; g.linear(a, "l4") }; g.linear(a, "l5") }; g.norm(a, "n1") }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body5(x: Act, w: &Parts) -> Act {
    let v1 = layer_norm(silu(linear(x, &w.l0)), &w.n0);
    let v1 = gelu(linear(v1, &w.l1));
    let v2 = layer_norm(layer_norm(add(v1, x), &w.n2), &w.n1);
    let mut v3 = x;
    for layer in &w.layers { v3 = add(gelu(linear(v3, layer)), v3); }
    gelu(linear(linear(linear(linear(add(v2, v3), &w.l2), &w.l3), &w.l4), &w.l5))
}

fn body5_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let v1 = { let a = { let a = { let a = x; g.linear(a, "l0") }; g.silu(a) }; g.norm(a, "n0") };
    let v1 = { let a = { let a = v1; g.linear(a, "l1") }; g.gelu(a) };
    let v2 = { let a = { let a = { let a = v1; let b = x; g.add(a, b) }; g.norm(a, "n2") }; g.norm(a, "n1") };
    let mut v3 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v3, &format!("layers.{layer}")); let a = g.gelu(a); v3 = g.add(a, v3); }
    { let a = { let a = { let a = { let a = { let a = { let a = v2; g.add(a, v3) }; g.linear(a, "l2") }; g.linear(a, "l3") }; g.linear(a, "l4") }; g.linear(a, "l5") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body6(x: Act, w: &Parts) -> Act {
    let x = linear(silu(add(x, x)), &w.l0);
    let x = linear(linear(add(x, x), &w.l2), &w.l1);
    let x = add(add(layer_norm(x, &w.n0), add(x, x)), gelu(gelu(x)));
    let x = gelu(layer_norm(x, &w.n1));
    let x = if w.no { add(gelu(x), x) } else { add(x, silu(x)) };
    let mut v1 = x;
    for layer in &w.layers { v1 = add(gelu(linear(v1, layer)), v1); }
    let x = layer_norm(v1, &w.n2);
    let v2 = linear(x, &w.l3);
    gelu(linear(linear(v2, &w.l4), &w.l5))
}

fn body6_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let x = { let a = { let a = { let a = x; let b = x; g.add(a, b) }; g.silu(a) }; g.linear(a, "l0") };
    let x = { let a = { let a = { let a = x; let b = x; g.add(a, b) }; g.linear(a, "l2") }; g.linear(a, "l1") };
    let x = { let a = { let a = { let a = x; g.norm(a, "n0") }; let b = { let a = x; let b = x; g.add(a, b) }; g.add(a, b) }; let b = { let a = { let a = x; g.gelu(a) }; g.gelu(a) }; g.add(a, b) };
    let x = { let a = { let a = x; g.norm(a, "n1") }; g.gelu(a) };
    let x = if w.no { let a = g.gelu(x); g.add(a, x) } else { let b = g.silu(x); g.add(x, b) };
    let mut v1 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v1, &format!("layers.{layer}")); let a = g.gelu(a); v1 = g.add(a, v1); }
    let x = { let a = v1; g.norm(a, "n2") };
    let v2 = { let a = x; g.linear(a, "l3") };
    { let a = { let a = { let a = v2; g.linear(a, "l4") }; g.linear(a, "l5") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body7(x: Act, w: &Parts) -> Act {
    let mut v1 = x;
    for layer in &w.layers { v1 = add(gelu(linear(v1, layer)), v1); }
    let v2 = layer_norm(linear(linear(x, &w.l1), &w.l0), &w.n0);
    let v3 = add(linear(linear(v2, &w.l3), &w.l2), linear(silu(v1), &w.l4));
    let v4 = if w.no { add(gelu(x), v3) } else { add(x, silu(v3)) };
    let (v5, v6) = (linear(v3, &w.l5), silu(silu(silu(v4))));
    let v1 = layer_norm(gelu(gelu(v6)), &w.n1);
    let v3 = if w.no { add(gelu(v5), v1) } else { add(v5, silu(v1)) };
    gelu(layer_norm(add(v2, v3), &w.n2))
}

fn body7_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let mut v1 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v1, &format!("layers.{layer}")); let a = g.gelu(a); v1 = g.add(a, v1); }
    let v2 = { let a = { let a = { let a = x; g.linear(a, "l1") }; g.linear(a, "l0") }; g.norm(a, "n0") };
    let v3 = { let a = { let a = { let a = v2; g.linear(a, "l3") }; g.linear(a, "l2") }; let b = { let a = { let a = v1; g.silu(a) }; g.linear(a, "l4") }; g.add(a, b) };
    let v4 = if w.no { let a = g.gelu(x); g.add(a, v3) } else { let b = g.silu(v3); g.add(x, b) };
    let (v5, v6) = ({ let a = v3; g.linear(a, "l5") }, { let a = { let a = { let a = v4; g.silu(a) }; g.silu(a) }; g.silu(a) });
    let v1 = { let a = { let a = { let a = v6; g.gelu(a) }; g.gelu(a) }; g.norm(a, "n1") };
    let v3 = if w.no { let a = g.gelu(v5); g.add(a, v1) } else { let b = g.silu(v1); g.add(v5, b) };
    { let a = { let a = { let a = v2; g.add(a, v3) }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body8(x: Act, w: &Parts) -> Act {
    let v1 = layer_norm(add(layer_norm(x, &w.n1), linear(x, &w.l0)), &w.n0);
    let mut v2 = v1;
    for layer in &w.layers { v2 = add(gelu(linear(v2, layer)), v2); }
    let v3 = linear(linear(gelu(v2), &w.l2), &w.l1);
    let v4 = linear(linear(v3, &w.l4), &w.l3);
    let v4 = gelu(linear(silu(v4), &w.l5));
    gelu(layer_norm(add(v2, v4), &w.n2))
}

fn body8_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let v1 = { let a = { let a = { let a = x; g.norm(a, "n1") }; let b = { let a = x; g.linear(a, "l0") }; g.add(a, b) }; g.norm(a, "n0") };
    let mut v2 = v1;
    for layer in 0..w.layers.len() { let a = g.linear(v2, &format!("layers.{layer}")); let a = g.gelu(a); v2 = g.add(a, v2); }
    let v3 = { let a = { let a = { let a = v2; g.gelu(a) }; g.linear(a, "l2") }; g.linear(a, "l1") };
    let v4 = { let a = { let a = v3; g.linear(a, "l4") }; g.linear(a, "l3") };
    let v4 = { let a = { let a = { let a = v4; g.silu(a) }; g.linear(a, "l5") }; g.gelu(a) };
    { let a = { let a = { let a = v2; g.add(a, v4) }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body9(x: Act, w: &Parts) -> Act {
    let v1 = layer_norm(linear(silu(x), &w.l0), &w.n0);
    let x = linear(add(v1, linear(x, &w.l2)), &w.l1);
    let x = linear(silu(linear(x, &w.l4)), &w.l3);
    let mut v2 = v1;
    for layer in &w.layers { v2 = add(gelu(linear(v2, layer)), v2); }
    let v3 = linear(add(add(v2, x), silu(x)), &w.l5);
    gelu(layer_norm(layer_norm(add(add(add(x, x), x), v3), &w.n1), &w.n2))
}

fn body9_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let v1 = { let a = { let a = { let a = x; g.silu(a) }; g.linear(a, "l0") }; g.norm(a, "n0") };
    let x = { let a = { let a = v1; let b = { let a = x; g.linear(a, "l2") }; g.add(a, b) }; g.linear(a, "l1") };
    let x = { let a = { let a = { let a = x; g.linear(a, "l4") }; g.silu(a) }; g.linear(a, "l3") };
    let mut v2 = v1;
    for layer in 0..w.layers.len() { let a = g.linear(v2, &format!("layers.{layer}")); let a = g.gelu(a); v2 = g.add(a, v2); }
    let v3 = { let a = { let a = { let a = v2; let b = x; g.add(a, b) }; let b = { let a = x; g.silu(a) }; g.add(a, b) }; g.linear(a, "l5") };
    { let a = { let a = { let a = { let a = { let a = { let a = x; g.add(a, x) }; g.add(a, x) }; g.add(a, v3) }; g.norm(a, "n1") }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body10(x: Act, w: &Parts) -> Act {
    let mut v1 = x;
    for layer in &w.layers { v1 = add(gelu(linear(v1, layer)), v1); }
    let x = gelu(layer_norm(layer_norm(v1, &w.n1), &w.n0));
    let v1 = layer_norm(linear(silu(x), &w.l0), &w.n2);
    let (v2, v3) = (silu(gelu(linear(v1, &w.l1))), linear(add(add(x, x), silu(x)), &w.l2));
    let v4 = gelu(linear(linear(v3, &w.l4), &w.l3));
    let v5 = gelu(v1);
    let v6 = silu(linear(add(v2, v5), &w.l5));
    let v5 = add(add(silu(v4), v6), v6);
    gelu(v5)
}

fn body10_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let mut v1 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v1, &format!("layers.{layer}")); let a = g.gelu(a); v1 = g.add(a, v1); }
    let x = { let a = { let a = { let a = v1; g.norm(a, "n1") }; g.norm(a, "n0") }; g.gelu(a) };
    let v1 = { let a = { let a = { let a = x; g.silu(a) }; g.linear(a, "l0") }; g.norm(a, "n2") };
    let (v2, v3) = ({ let a = { let a = { let a = v1; g.linear(a, "l1") }; g.gelu(a) }; g.silu(a) }, { let a = { let a = { let a = x; let b = x; g.add(a, b) }; let b = { let a = x; g.silu(a) }; g.add(a, b) }; g.linear(a, "l2") });
    let v4 = { let a = { let a = { let a = v3; g.linear(a, "l4") }; g.linear(a, "l3") }; g.gelu(a) };
    let v5 = { let a = v1; g.gelu(a) };
    let v6 = { let a = { let a = { let a = v2; let b = v5; g.add(a, b) }; g.linear(a, "l5") }; g.silu(a) };
    let v5 = { let a = { let a = { let a = v4; g.silu(a) }; let b = v6; g.add(a, b) }; let b = v6; g.add(a, b) };
    { let a = v5; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body11(x: Act, w: &Parts) -> Act {
    let v1 = linear(linear(x, &w.l1), &w.l0);
    let x = if w.no { add(gelu(x), v1) } else { add(x, silu(v1)) };
    let mut v2 = x;
    for layer in &w.layers { v2 = add(gelu(linear(v2, layer)), v2); }
    let v3 = linear(gelu(add(v2, v2)), &w.l2);
    gelu(layer_norm(layer_norm(layer_norm(linear(linear(linear(add(add(add(v2, v2), v1), v3), &w.l3), &w.l4), &w.l5), &w.n0), &w.n1), &w.n2))
}

fn body11_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let v1 = { let a = { let a = x; g.linear(a, "l1") }; g.linear(a, "l0") };
    let x = if w.no { let a = g.gelu(x); g.add(a, v1) } else { let b = g.silu(v1); g.add(x, b) };
    let mut v2 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v2, &format!("layers.{layer}")); let a = g.gelu(a); v2 = g.add(a, v2); }
    let v3 = { let a = { let a = { let a = v2; let b = v2; g.add(a, b) }; g.gelu(a) }; g.linear(a, "l2") };
    { let a = { let a = { let a = { let a = { let a = { let a = { let a = { let a = { let a = { let a = v2; g.add(a, v2) }; g.add(a, v1) }; g.add(a, v3) }; g.linear(a, "l3") }; g.linear(a, "l4") }; g.linear(a, "l5") }; g.norm(a, "n0") }; g.norm(a, "n1") }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body12(x: Act, w: &Parts) -> Act {
    let mut v1 = x;
    for layer in &w.layers { v1 = add(gelu(linear(v1, layer)), v1); }
    let v2 = add(linear(linear(v1, &w.l1), &w.l0), x);
    let v3 = if w.no { add(gelu(v2), x) } else { add(v2, silu(x)) };
    let (v4, v5) = (linear(gelu(layer_norm(v3, &w.n0)), &w.l2), linear(layer_norm(v1, &w.n1), &w.l3));
    let (v6, v7) = (linear(linear(v2, &w.l5), &w.l4), layer_norm(gelu(v5), &w.n2));
    gelu(add(add(v6, v4), v7))
}

fn body12_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let mut v1 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v1, &format!("layers.{layer}")); let a = g.gelu(a); v1 = g.add(a, v1); }
    let v2 = { let a = { let a = { let a = v1; g.linear(a, "l1") }; g.linear(a, "l0") }; let b = x; g.add(a, b) };
    let v3 = if w.no { let a = g.gelu(v2); g.add(a, x) } else { let b = g.silu(x); g.add(v2, b) };
    let (v4, v5) = ({ let a = { let a = { let a = v3; g.norm(a, "n0") }; g.gelu(a) }; g.linear(a, "l2") }, { let a = { let a = v1; g.norm(a, "n1") }; g.linear(a, "l3") });
    let (v6, v7) = ({ let a = { let a = v2; g.linear(a, "l5") }; g.linear(a, "l4") }, { let a = { let a = v5; g.gelu(a) }; g.norm(a, "n2") });
    { let a = { let a = { let a = v6; g.add(a, v4) }; g.add(a, v7) }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body13(x: Act, w: &Parts) -> Act {
    let mut v1 = x;
    for layer in &w.layers { v1 = add(gelu(linear(v1, layer)), v1); }
    gelu(layer_norm(layer_norm(layer_norm(linear(linear(linear(linear(linear(linear(v1, &w.l0), &w.l1), &w.l2), &w.l3), &w.l4), &w.l5), &w.n0), &w.n1), &w.n2))
}

fn body13_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let mut v1 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v1, &format!("layers.{layer}")); let a = g.gelu(a); v1 = g.add(a, v1); }
    { let a = { let a = { let a = { let a = { let a = { let a = { let a = { let a = { let a = { let a = v1; g.linear(a, "l0") }; g.linear(a, "l1") }; g.linear(a, "l2") }; g.linear(a, "l3") }; g.linear(a, "l4") }; g.linear(a, "l5") }; g.norm(a, "n0") }; g.norm(a, "n1") }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body14(x: Act, w: &Parts) -> Act {
    let mut v1 = x;
    for layer in &w.layers { v1 = add(gelu(linear(v1, layer)), v1); }
    let (v2, v3) = (layer_norm(linear(silu(x), &w.l0), &w.n0), linear(linear(layer_norm(v1, &w.n1), &w.l2), &w.l1));
    let v4 = add(linear(silu(v2), &w.l3), add(add(v3, v3), gelu(x)));
    let x = add(linear(layer_norm(v4, &w.n2), &w.l4), v4);
    let v1 = linear(x, &w.l5);
    let v2 = if w.no { add(gelu(v1), v3) } else { add(v1, silu(v3)) };
    let v5 = add(v2, add(x, v4));
    gelu(add(add(v2, v4), v5))
}

fn body14_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let mut v1 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v1, &format!("layers.{layer}")); let a = g.gelu(a); v1 = g.add(a, v1); }
    let (v2, v3) = ({ let a = { let a = { let a = x; g.silu(a) }; g.linear(a, "l0") }; g.norm(a, "n0") }, { let a = { let a = { let a = v1; g.norm(a, "n1") }; g.linear(a, "l2") }; g.linear(a, "l1") });
    let v4 = { let a = { let a = { let a = v2; g.silu(a) }; g.linear(a, "l3") }; let b = { let a = { let a = v3; let b = v3; g.add(a, b) }; let b = { let a = x; g.gelu(a) }; g.add(a, b) }; g.add(a, b) };
    let x = { let a = { let a = { let a = v4; g.norm(a, "n2") }; g.linear(a, "l4") }; let b = v4; g.add(a, b) };
    let v1 = { let a = x; g.linear(a, "l5") };
    let v2 = if w.no { let a = g.gelu(v1); g.add(a, v3) } else { let b = g.silu(v3); g.add(v1, b) };
    let v5 = { let a = v2; let b = { let a = x; let b = v4; g.add(a, b) }; g.add(a, b) };
    { let a = { let a = { let a = v2; g.add(a, v4) }; g.add(a, v5) }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body15(x: Act, w: &Parts) -> Act {
    let x = linear(linear(x, &w.l1), &w.l0);
    let v1 = gelu(silu(x));
    let mut v2 = v1;
    for layer in &w.layers { v2 = add(gelu(linear(v2, layer)), v2); }
    let (v3, v4) = (add(add(silu(v2), layer_norm(v2, &w.n0)), add(linear(v1, &w.l2), gelu(v1))), layer_norm(layer_norm(add(v2, v2), &w.n2), &w.n1));
    let v1 = if w.no { add(gelu(v1), v2) } else { add(v1, silu(v2)) };
    let v2 = linear(silu(v3), &w.l3);
    let (v5, v6) = (add(linear(v2, &w.l4), add(silu(v1), v4)), add(linear(add(x, v3), &w.l5), add(gelu(v3), v2)));
    let (v7, v8) = (silu(v3), gelu(v5));
    gelu(add(add(add(v2, v8), v6), v7))
}

fn body15_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let x = { let a = { let a = x; g.linear(a, "l1") }; g.linear(a, "l0") };
    let v1 = { let a = { let a = x; g.silu(a) }; g.gelu(a) };
    let mut v2 = v1;
    for layer in 0..w.layers.len() { let a = g.linear(v2, &format!("layers.{layer}")); let a = g.gelu(a); v2 = g.add(a, v2); }
    let (v3, v4) = ({ let a = { let a = { let a = v2; g.silu(a) }; let b = { let a = v2; g.norm(a, "n0") }; g.add(a, b) }; let b = { let a = { let a = v1; g.linear(a, "l2") }; let b = { let a = v1; g.gelu(a) }; g.add(a, b) }; g.add(a, b) }, { let a = { let a = { let a = v2; let b = v2; g.add(a, b) }; g.norm(a, "n2") }; g.norm(a, "n1") });
    let v1 = if w.no { let a = g.gelu(v1); g.add(a, v2) } else { let b = g.silu(v2); g.add(v1, b) };
    let v2 = { let a = { let a = v3; g.silu(a) }; g.linear(a, "l3") };
    let (v5, v6) = ({ let a = { let a = v2; g.linear(a, "l4") }; let b = { let a = { let a = v1; g.silu(a) }; let b = v4; g.add(a, b) }; g.add(a, b) }, { let a = { let a = { let a = x; let b = v3; g.add(a, b) }; g.linear(a, "l5") }; let b = { let a = { let a = v3; g.gelu(a) }; let b = v2; g.add(a, b) }; g.add(a, b) });
    let (v7, v8) = ({ let a = v3; g.silu(a) }, { let a = v5; g.gelu(a) });
    { let a = { let a = { let a = { let a = v2; g.add(a, v8) }; g.add(a, v6) }; g.add(a, v7) }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body16(x: Act, w: &Parts) -> Act {
    let v1 = linear(add(linear(x, &w.l1), add(x, x)), &w.l0);
    let v2 = add(v1, x);
    let (v3, v4) = (layer_norm(linear(linear(v2, &w.l3), &w.l2), &w.n0), linear(add(add(x, x), add(v1, v1)), &w.l4));
    let v5 = layer_norm(add(linear(v3, &w.l5), silu(v4)), &w.n1);
    let (v6, v7) = (silu(add(silu(v5), silu(x))), silu(layer_norm(v5, &w.n2)));
    let mut v8 = v1;
    for layer in &w.layers { v8 = add(gelu(linear(v8, layer)), v8); }
    gelu(add(add(add(v7, v6), v2), v8))
}

fn body16_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let v1 = { let a = { let a = { let a = x; g.linear(a, "l1") }; let b = { let a = x; let b = x; g.add(a, b) }; g.add(a, b) }; g.linear(a, "l0") };
    let v2 = { let a = v1; let b = x; g.add(a, b) };
    let (v3, v4) = ({ let a = { let a = { let a = v2; g.linear(a, "l3") }; g.linear(a, "l2") }; g.norm(a, "n0") }, { let a = { let a = { let a = x; let b = x; g.add(a, b) }; let b = { let a = v1; let b = v1; g.add(a, b) }; g.add(a, b) }; g.linear(a, "l4") });
    let v5 = { let a = { let a = { let a = v3; g.linear(a, "l5") }; let b = { let a = v4; g.silu(a) }; g.add(a, b) }; g.norm(a, "n1") };
    let (v6, v7) = ({ let a = { let a = { let a = v5; g.silu(a) }; let b = { let a = x; g.silu(a) }; g.add(a, b) }; g.silu(a) }, { let a = { let a = v5; g.norm(a, "n2") }; g.silu(a) });
    let mut v8 = v1;
    for layer in 0..w.layers.len() { let a = g.linear(v8, &format!("layers.{layer}")); let a = g.gelu(a); v8 = g.add(a, v8); }
    { let a = { let a = { let a = { let a = v7; g.add(a, v6) }; g.add(a, v2) }; g.add(a, v8) }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body17(x: Act, w: &Parts) -> Act {
    let mut v1 = x;
    for layer in &w.layers { v1 = add(gelu(linear(v1, layer)), v1); }
    let v2 = gelu(v1);
    let x = linear(linear(linear(v2, &w.l2), &w.l1), &w.l0);
    let v3 = layer_norm(linear(linear(x, &w.l4), &w.l3), &w.n0);
    gelu(layer_norm(layer_norm(linear(v3, &w.l5), &w.n1), &w.n2))
}

fn body17_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let mut v1 = x;
    for layer in 0..w.layers.len() { let a = g.linear(v1, &format!("layers.{layer}")); let a = g.gelu(a); v1 = g.add(a, v1); }
    let v2 = { let a = v1; g.gelu(a) };
    let x = { let a = { let a = { let a = v2; g.linear(a, "l2") }; g.linear(a, "l1") }; g.linear(a, "l0") };
    let v3 = { let a = { let a = { let a = x; g.linear(a, "l4") }; g.linear(a, "l3") }; g.norm(a, "n0") };
    { let a = { let a = { let a = { let a = v3; g.linear(a, "l5") }; g.norm(a, "n1") }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body18(x: Act, w: &Parts) -> Act {
    let x = add(add(add(x, x), linear(x, &w.l0)), add(add(x, x), layer_norm(x, &w.n0)));
    let v1 = silu(x);
    let (v2, v3) = (add(linear(v1, &w.l1), linear(linear(x, &w.l3), &w.l2)), silu(silu(add(x, x))));
    let v4 = linear(add(silu(v1), linear(v3, &w.l5)), &w.l4);
    let v3 = if w.no { add(gelu(v1), v3) } else { add(v1, silu(v3)) };
    let v5 = gelu(layer_norm(gelu(v3), &w.n1));
    let v6 = if w.no { add(gelu(v2), v4) } else { add(v2, silu(v4)) };
    let mut v7 = v2;
    for layer in &w.layers { v7 = add(gelu(linear(v7, layer)), v7); }
    gelu(layer_norm(add(add(add(add(v7, v5), v7), v1), v6), &w.n2))
}

fn body18_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let x = { let a = { let a = { let a = x; let b = x; g.add(a, b) }; let b = { let a = x; g.linear(a, "l0") }; g.add(a, b) }; let b = { let a = { let a = x; let b = x; g.add(a, b) }; let b = { let a = x; g.norm(a, "n0") }; g.add(a, b) }; g.add(a, b) };
    let v1 = { let a = x; g.silu(a) };
    let (v2, v3) = ({ let a = { let a = v1; g.linear(a, "l1") }; let b = { let a = { let a = x; g.linear(a, "l3") }; g.linear(a, "l2") }; g.add(a, b) }, { let a = { let a = { let a = x; let b = x; g.add(a, b) }; g.silu(a) }; g.silu(a) });
    let v4 = { let a = { let a = { let a = v1; g.silu(a) }; let b = { let a = v3; g.linear(a, "l5") }; g.add(a, b) }; g.linear(a, "l4") };
    let v3 = if w.no { let a = g.gelu(v1); g.add(a, v3) } else { let b = g.silu(v3); g.add(v1, b) };
    let v5 = { let a = { let a = { let a = v3; g.gelu(a) }; g.norm(a, "n1") }; g.gelu(a) };
    let v6 = if w.no { let a = g.gelu(v2); g.add(a, v4) } else { let b = g.silu(v4); g.add(v2, b) };
    let mut v7 = v2;
    for layer in 0..w.layers.len() { let a = g.linear(v7, &format!("layers.{layer}")); let a = g.gelu(a); v7 = g.add(a, v7); }
    { let a = { let a = { let a = { let a = { let a = { let a = v7; g.add(a, v5) }; g.add(a, v7) }; g.add(a, v1) }; g.add(a, v6) }; g.norm(a, "n2") }; g.gelu(a) }
}

#[stage(crate = qeffect_runtime)]
fn body19(x: Act, w: &Parts) -> Act {
    let v1 = add(add(add(x, x), add(x, x)), silu(silu(x)));
    let (v2, v3) = (linear(linear(linear(v1, &w.l2), &w.l1), &w.l0), gelu(layer_norm(add(v1, v1), &w.n0)));
    let (v4, v5) = (layer_norm(gelu(layer_norm(v2, &w.n2)), &w.n1), linear(gelu(linear(v3, &w.l4)), &w.l3));
    let x = silu(linear(v4, &w.l5));
    let v2 = silu(silu(silu(x)));
    let v1 = if w.yes { add(gelu(v2), v5) } else { add(v2, silu(v5)) };
    let v5 = if w.no { add(gelu(v4), v1) } else { add(v4, silu(v1)) };
    let mut v6 = v5;
    for layer in &w.layers { v6 = add(gelu(linear(v6, layer)), v6); }
    gelu(add(v3, v6))
}

fn body19_on_tape(g: &mut Tape, w: &Parts, x: Node) -> Node {
    let _ = w;
    let v1 = { let a = { let a = { let a = x; let b = x; g.add(a, b) }; let b = { let a = x; let b = x; g.add(a, b) }; g.add(a, b) }; let b = { let a = { let a = x; g.silu(a) }; g.silu(a) }; g.add(a, b) };
    let (v2, v3) = ({ let a = { let a = { let a = v1; g.linear(a, "l2") }; g.linear(a, "l1") }; g.linear(a, "l0") }, { let a = { let a = { let a = v1; let b = v1; g.add(a, b) }; g.norm(a, "n0") }; g.gelu(a) });
    let (v4, v5) = ({ let a = { let a = { let a = v2; g.norm(a, "n2") }; g.gelu(a) }; g.norm(a, "n1") }, { let a = { let a = { let a = v3; g.linear(a, "l4") }; g.gelu(a) }; g.linear(a, "l3") });
    let x = { let a = { let a = v4; g.linear(a, "l5") }; g.silu(a) };
    let v2 = { let a = { let a = { let a = x; g.silu(a) }; g.silu(a) }; g.silu(a) };
    let v1 = if w.yes { let a = g.gelu(v2); g.add(a, v5) } else { let b = g.silu(v5); g.add(v2, b) };
    let v5 = if w.no { let a = g.gelu(v4); g.add(a, v1) } else { let b = g.silu(v1); g.add(v4, b) };
    let mut v6 = v5;
    for layer in 0..w.layers.len() { let a = g.linear(v6, &format!("layers.{layer}")); let a = g.gelu(a); v6 = g.add(a, v6); }
    { let a = { let a = v3; g.add(a, v6) }; g.gelu(a) }
}

#[test]
fn all() {
    compare::<body0>("body0", body0_on_tape);
    compare::<body1>("body1", body1_on_tape);
    compare::<body2>("body2", body2_on_tape);
    compare::<body3>("body3", body3_on_tape);
    compare::<body4>("body4", body4_on_tape);
    compare::<body5>("body5", body5_on_tape);
    compare::<body6>("body6", body6_on_tape);
    compare::<body7>("body7", body7_on_tape);
    compare::<body8>("body8", body8_on_tape);
    compare::<body9>("body9", body9_on_tape);
    compare::<body10>("body10", body10_on_tape);
    compare::<body11>("body11", body11_on_tape);
    compare::<body12>("body12", body12_on_tape);
    compare::<body13>("body13", body13_on_tape);
    compare::<body14>("body14", body14_on_tape);
    compare::<body15>("body15", body15_on_tape);
    compare::<body16>("body16", body16_on_tape);
    compare::<body17>("body17", body17_on_tape);
    compare::<body18>("body18", body18_on_tape);
    compare::<body19>("body19", body19_on_tape);
}
