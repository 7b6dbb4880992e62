use qeffect::model::*;

#[derive(Params)]
struct Mlp {
    up: Linear,
}

#[stage]
fn mlp(x: Act, w: &Mlp) -> Act {
    linear(x.relu(), &w.up)
}

#[stage]
fn widen(x: Act, w: &Mlp) -> Act {
    let h = x.widen(2);
    linear(h, &w.up)
}

fn main() {}
