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
    linear(gelu(x), w.up)
}

fn main() {}
