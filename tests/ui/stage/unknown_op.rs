use qeffect::model::*;

#[derive(Params)]
struct Mlp {
    up: Linear,
}

#[stage]
fn mlp(x: Act, w: &Mlp) -> Act {
    relu(linear(x, &w.up))
}

fn main() {}
