use qeffect::model::*;

#[derive(Params)]
struct Mlp {
    up: Linear,
    down: Linear,
    #[params(config)]
    gated: bool,
}

#[stage]
fn mlp(x: Act, w: &Mlp) -> Act {
    let h = linear(x, &w.up);
    let g = gelu(h);
    linear(h, &w.down)
}

#[stage]
fn dropped(x: Act, y: Act, w: &Mlp) -> Act {
    gelu(x);
    linear(x, &w.down)
}

fn main() {}
