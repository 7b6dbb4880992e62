use qeffect::model::*;

#[derive(Params)]
struct Mlp {
    up: Linear,
    down: Linear,
    #[params(config)]
    gated: bool,
}

#[stage]
fn add_assign(x: Act, w: &Mlp) -> Act {
    let mut h = linear(x, &w.up);
    h += x;
    h
}

#[stage]
fn field(x: Act, w: &Mlp) -> Act {
    let mut h = linear(x, &w.up);
    h.rows = 3;
    h
}

#[stage]
fn borrow(x: Act, w: &Mlp) -> Act {
    let mut h = linear(x, &w.up);
    gelu(&mut h)
}

#[stage]
fn not_mut(x: Act, w: &Mlp) -> Act {
    let h = linear(x, &w.up);
    h = gelu(h);
    h
}

fn main() {}
