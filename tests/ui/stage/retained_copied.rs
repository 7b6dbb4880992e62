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
    rows: (),
}

impl Clone for ByHand {
    fn clone(&self) -> ByHand {
        ByHand { rows: self.rows }
    }
}

#[retained]
struct Copied {
    rows: (),
}

impl Copy for Copied {}

fn main() {}
