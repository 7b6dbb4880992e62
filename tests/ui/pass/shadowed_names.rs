//! The expansion reaches nothing through names that the user can redefine.

#![deny(warnings, missing_docs)]
#![allow(non_camel_case_types, dead_code)]

mod core {}
mod std {}
mod alloc {}
struct Option;
struct Result;
struct Vec;
struct Cow;
struct Some;
struct None;
struct Ok;
struct Err;
struct Box;
struct Checked;
struct Report;
struct Token;
struct i64;
struct u32;
struct str;
const M: usize = 3;
const P: &::core::primitive::str = "P";
const SLOTS: usize = 1;

macro_rules! vec {
    () => {};
}
macro_rules! panic {
    () => {};
}

qeffect::schedule! {
    /// A schedule among shadowed names.
    pub shadowed<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); I(r, m); W(r, m); }
    }
}

fn main() {
    vec!();
    panic!();
    assert!(shadowed::<4, 8>().schedule.microbatches == 8);
    assert!(shadowed::find(2, 4).is_some());
    assert!(shadowed::build(1, M as _).is_ok());
}
