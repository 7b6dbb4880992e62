//! The list of all schedules of this crate, for programs and tests that let a user choose one.

pub mod dualpipe_v;
pub mod eval;
pub mod gpipe;
pub mod interleaved_1f1b;
pub mod interleaved_zb;
pub mod kimi_k2;
pub mod looped_bfs;
pub mod one_f_one_b;
mod v_block;
pub mod v_half;
pub mod v_min;
pub mod zb_h1;
pub mod zb_h2;
pub mod zb_v;

use std::borrow::Cow;

use qeffect_core::diag::Report;
use qeffect_core::plan::Checked;

/// A schedule that can be chosen by name, for any number of ranks and microbatches.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its name, as in `schedule!`.
    pub name: &'static str,
    /// What it is, in a line.
    pub summary: &'static str,
    /// Its parameters: `["P", "M"]`, and `"V"` where the virtual stages are one.
    pub params: &'static [&'static str],
    /// Virtual stages per rank.
    pub virtual_stages: i64,
    /// Whether the second half of the stages comes back up the ranks, as in ZB-V.
    pub v_shaped: bool,
    /// Whether it runs forwards only.
    pub eval: bool,
    /// Interprets and checks it, given ranks and microbatches.
    pub build: fn(i64, i64) -> Result<Checked, Report>,
    /// Finds the instance for these ranks and microbatches that the compiler has checked.
    pub find: fn(i64, i64) -> Option<&'static Checked>,
}

impl Entry {
    /// The instance that the compiler has checked, else one that is checked now.
    ///
    /// # Errors
    ///
    /// All faults of the first failing phase, if the checker refuses these values.
    pub fn checked(&self, ranks: i64, microbatches: i64) -> Result<Cow<'static, Checked>, Report> {
        if let Some(checked) = (self.find)(ranks, microbatches) {
            return Ok(Cow::Borrowed(checked));
        }
        (self.build)(ranks, microbatches).map(Cow::Owned).map_err(|mut report| {
            let least = self.least_microbatches(ranks);
            if (1..least).contains(&microbatches)
                && let Some(first) = report.diagnostics.first_mut()
            {
                let Entry { name, .. } = self;
                first.help = Some(format!("run `{name}` with at least {least} microbatches on {ranks} ranks"));
            }
            report
        })
    }

    /// The fewest microbatches that the schedule is for.
    pub fn least_microbatches(&self, ranks: i64) -> i64 {
        match self.name {
            "dualpipe_v" => ranks.saturating_mul(2).saturating_sub(1).max(1), // both ends of the V are filled
            _ => 1,
        }
    }

    /// The forward-only schedule for a model that was placed by this one.
    pub fn evaluation(&self) -> &'static Entry {
        let fits = |e: &&Entry| e.eval && e.virtual_stages == self.virtual_stages && e.v_shaped == self.v_shaped;
        LIBRARY.iter().find(fits).expect("each placement of the library has a forward-only schedule")
    }
}

/// The schedules that every recipe takes at any number of ranks and microbatches: those for training
/// first, then evaluation.
pub fn library() -> &'static [Entry] {
    LIBRARY
}

/// Further schedules for training, to study and compare: some want a least number of microbatches, a
/// device that overlaps, or a recipe that takes any order.
pub fn further() -> &'static [Entry] {
    FURTHER
}

/// The schedule of that name, of both lists.
pub fn by_name(name: &str) -> Option<&'static Entry> {
    LIBRARY.iter().chain(FURTHER).find(|entry| entry.name == name)
}

const PLAIN: Entry = Entry {
    name: "gpipe",
    summary: "all forwards, then all backwards",
    params: &["P", "M"],
    virtual_stages: 1,
    v_shaped: false,
    eval: false,
    build: gpipe::gpipe::build,
    find: gpipe::gpipe::find,
};

static LIBRARY: &[Entry] = &[
    PLAIN,
    Entry {
        name: "one_f_one_b",
        summary: "one forward, one backward in turn after a warm-up",
        build: one_f_one_b::one_f_one_b::build,
        find: one_f_one_b::one_f_one_b::find,
        ..PLAIN
    },
    Entry {
        name: "interleaved_1f1b",
        summary: "1F1B over two stages per rank: half the bubble",
        params: &["P", "M", "V"],
        virtual_stages: 2,
        build: |ranks, microbatches| interleaved_1f1b::interleaved_1f1b::build(ranks, microbatches, 2),
        find: |ranks, microbatches| interleaved_1f1b::interleaved_1f1b::find(ranks, microbatches, 2),
        ..PLAIN
    },
    Entry {
        name: "zb_h1",
        summary: "1F1B with deferred weight gradients: a third of the bubble",
        build: zb_h1::zb_h1::build,
        find: zb_h1::zb_h1::find,
        ..PLAIN
    },
    Entry {
        name: "zb_v",
        summary: "two stages per rank in a V, deferred weight gradients: no idle time inside a rank",
        virtual_stages: 2,
        v_shaped: true,
        build: zb_v::zb_v::build,
        find: zb_v::zb_v::find,
        ..PLAIN
    },
    Entry {
        name: "eval",
        summary: "forward only, one stage per rank",
        params: &["P", "M", "V"],
        eval: true,
        build: |ranks, microbatches| eval::eval_loop::build(ranks, microbatches, 1),
        find: |ranks, microbatches| eval::eval_loop::find(ranks, microbatches, 1),
        ..PLAIN
    },
    Entry {
        name: "eval_loop",
        summary: "forward only, two stages per rank in a loop",
        params: &["P", "M", "V"],
        virtual_stages: 2,
        eval: true,
        build: |ranks, microbatches| eval::eval_loop::build(ranks, microbatches, 2),
        find: |ranks, microbatches| eval::eval_loop::find(ranks, microbatches, 2),
        ..PLAIN
    },
    Entry {
        name: "eval_v",
        summary: "forward only, two stages per rank in a V",
        virtual_stages: 2,
        v_shaped: true,
        eval: true,
        build: eval::eval_v::build,
        find: eval::eval_v::find,
        ..PLAIN
    },
];

static FURTHER: &[Entry] = &[
    Entry {
        name: "zb_h2",
        summary: "ZB-H1 with twice the warm-up and memory: no idle time inside a rank",
        build: zb_h2::zb_h2::build,
        find: zb_h2::zb_h2::find,
        ..PLAIN
    },
    Entry {
        name: "interleaved_zb",
        summary: "ZB-H1's idea on two stages per rank",
        params: &["P", "M", "V"],
        virtual_stages: 2,
        build: |ranks, microbatches| interleaved_zb::interleaved_zb::build(ranks, microbatches, 2),
        find: |ranks, microbatches| interleaved_zb::interleaved_zb::find(ranks, microbatches, 2),
        ..PLAIN
    },
    Entry {
        name: "looped_bfs",
        summary: "all microbatches through one stage of a rank before the next: descending backwards",
        params: &["P", "M", "V"],
        virtual_stages: 2,
        build: |ranks, microbatches| looped_bfs::looped_bfs::build(ranks, microbatches, 2),
        find: |ranks, microbatches| looped_bfs::looped_bfs::find(ranks, microbatches, 2),
        ..PLAIN
    },
    Entry {
        name: "dualpipe_v",
        summary: "two stages per rank in a V, forwards beside backwards; M >= 2P",
        virtual_stages: 2,
        v_shaped: true,
        build: dualpipe_v::dualpipe_v::build,
        find: dualpipe_v::dualpipe_v::find,
        ..PLAIN
    },
    Entry {
        name: "v_half",
        summary: "two stages per rank in a V, half of ZB-V's memory",
        virtual_stages: 2,
        v_shaped: true,
        build: v_half::build,
        find: |_, _| None,
        ..PLAIN
    },
    Entry {
        name: "v_min",
        summary: "two stages per rank in a V, a third of ZB-V's memory",
        virtual_stages: 2,
        v_shaped: true,
        build: v_min::build,
        find: |_, _| None,
        ..PLAIN
    },
    Entry {
        name: "kimi_k2",
        summary: "interleaved 1F1B with a forward more in flight, beside each backward",
        params: &["P", "M", "V"],
        virtual_stages: 2,
        build: |ranks, microbatches| kimi_k2::kimi_k2::build(ranks, microbatches, 2),
        find: |ranks, microbatches| kimi_k2::kimi_k2::find(ranks, microbatches, 2),
        ..PLAIN
    },
];
