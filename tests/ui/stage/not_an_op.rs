use qeffect::model::*;

#[derive(Params)]
struct Mlp {
    up: Linear,
    down: Linear,
}

fn double(x: Act) -> Act {
    x
}

#[stage]
fn mlp(x: Act, w: &Mlp) -> Act {
    let h = double(linear(x, &w.up));
    linear(h, &w.down)
}

#[allow(non_camel_case_types)]
struct halve {}

fn halve(x: Act) -> Act {
    x
}

#[stage]
fn half(x: Act) -> Act {
    gelu(halve(x))
}

fn main() {}
