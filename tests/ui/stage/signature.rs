use qeffect::model::*;

#[derive(Params)]
struct Mlp {
    up: Linear,
    down: Linear,
    #[params(config)]
    gated: bool,
}

#[stage]
fn nothing(x: Act) {}

#[stage]
fn number(x: Act) -> f32 {
    x
}

#[stage]
fn generic<T>(x: Act, _w: &T) -> Act {
    gelu(x)
}

#[stage]
fn unfinished(x: Act, w: &Mlp) -> Act {
    let h = linear(x, &w.up);
    linear(h, &w.down);
}

fn main() {}
