use qeffect::model::*;

#[derive(Params)]
struct Unmarked {
    up: Linear,
    width: usize,
}

#[derive(Params)]
enum Choice {
    One(Linear),
}

#[derive(Params)]
struct Misspelt {
    #[params(decays = false)]
    up: Linear,
}

fn main() {}
