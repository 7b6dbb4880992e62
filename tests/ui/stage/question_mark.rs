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
    let h = linear(x, &w.up)?;
    linear(h, &w.down)
}

fn main() {}
