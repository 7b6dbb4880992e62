//! Rust has it, the schedule language has not.

qeffect::schedule! {
    pub imported<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M as usize { F(r, m); }
        loop { I(r, 0); }
        match r { 0 => {} }
        println!("rank {r}");
        let half = M as f32 * 0.5;
        W(r, std::cmp::min(r, M));
    }
}

fn main() {}
