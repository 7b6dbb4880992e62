//! A macro of the user's may write schedules: captured fragments are transparent.

macro_rules! fill_drain {
    ($name:ident, $ranks:literal, $microbatches:expr) => {
        qeffect::schedule! {
            $name for ();

            ranks: $ranks;
            microbatches: $microbatches;
            stages: $ranks;
            place: |s| s;

            rank |r| {
                for m in 0..$microbatches { F(r, m); }
                for m in 0..$microbatches { B(r, m); }
            }
        }
    };
}

fill_drain!(small, 2, 2 + 1);

fn main() {
    assert_eq!(small().schedule.microbatches, 3);
}
