//! The macro works through a re-export under another name, without the crate in sight.

mod training {
    pub mod kit {
        pub use qeffect::schedule as pipeline;
    }
}

mod user {
    crate::training::kit::pipeline! {
        /// Two stages.
        pub two<M> for 3, 4;

        ranks: 2;
        microbatches: M;
        stages: 2;
        place: |s| s;

        rank |r| {
            for m in 0..M { F(r, m); B(r, m); }
        }
    }
}

fn main() {
    assert_eq!(user::two::<3>().schedule.microbatches, 3);
    assert_eq!(user::two::find(4).map(|checked| checked.schedule.ranks), Some(2));
    assert!(user::two::find(5).is_none());
}
