use qeffect::model::*;

#[retained]
#[derive(Debug, Clone)]
struct Below {
    x: Kept,
}

#[derive(Clone)]
#[retained]
struct Above {
    x: Kept,
}

#[retained]
struct ByHand {
    x: Kept,
}

impl Clone for ByHand {
    fn clone(&self) -> ByHand {
        unimplemented!()
    }
}

#[retained]
struct Copied {
    rows: (),
}

impl Copy for Copied {}

fn main() {}
