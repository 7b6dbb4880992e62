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
    let h = linear(x);
    linear(h, &w.down)
}

#[stage]
fn too_many(x: Act, w: &Mlp) -> Act {
    gelu(linear(x, &w.up), x)
}

fn main() {}
