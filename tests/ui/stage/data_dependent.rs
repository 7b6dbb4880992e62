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
    if h.rows > 16 { gelu(h) } else { linear(h, &w.down) }
}

#[stage]
fn until(x: Act, w: &Mlp) -> Act {
    let mut x = x;
    while w.gated {
        x = linear(x, &w.up);
    }
    x
}

#[stage]
fn over_rows(x: Act, w: &Mlp) -> Act {
    let mut y = linear(x, &w.up);
    for _row in 0..x.rows {
        y = gelu(y);
    }
    y
}

fn main() {}
