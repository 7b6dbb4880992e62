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
    let residual = |y: Act| add(h, y);
    residual(linear(gelu(h), &w.down))
}

fn main() {}
