use qeffect::model::*;

#[retained]
struct Borrowed<'a> {
    x: &'a Kept,
}

#[retained]
struct Forever {
    x: &'static Kept,
}

#[retained]
struct NoLayout {
    x: Kept,
    name: String,
}

#[retained]
enum Choice {
    One(Kept),
}

fn main() {}
