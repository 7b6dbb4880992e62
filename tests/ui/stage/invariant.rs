use qeffect::model::*;

#[derive(Params)]
struct Mlp {
    up: Linear,
    down: Linear,
    #[params(config)]
    gated: bool,
}

#[stage]
fn mlp(x: Act, w: &Mlp, layers: &Vec<Linear>) -> Act {
    let h = linear(x, &w.up);
    let mut y = gelu(h);
    for layer in layers {
        y = add(linear(y, layer), h);
    }
    y
}

#[stage]
fn overwritten(x: Act, layers: &Vec<Embedding>) -> Act {
    let mut y = gelu(x);
    for layer in layers {
        y = embedding(layer);
    }
    y
}

fn main() {}
