//! The pool as a state machine, against a model that keeps all buffers in one list: any sequence of leases, shares, marks,
//! releases and resets, also of tensors that nobody holds.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const KINDS: [(Dtype, usize); 3] = [(Dtype::F32, 4), (Dtype::F32, 8), (Dtype::E4M3, 16)];
const STAGES: u32 = 2;

#[derive(Clone, Debug)]
enum Call {
    Lease(usize),
    Keep(usize),
    Free(usize),
    Mark { at: Vec<usize>, stage: Stage, class: Class },
    Reset,
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let class = prop_oneof![Just(Class::Input), Just(Class::Tape), Just(Class::Work), Just(Class::Work)];
    let mark = (vec(any::<usize>(), 1..4), 0..STAGES, class);
    let call = prop_oneof![
        6 => (0..KINDS.len()).prop_map(Call::Lease),
        1 => any::<usize>().prop_map(Call::Keep),
        6 => any::<usize>().prop_map(Call::Free),
        4 => mark.prop_map(|(at, stage, class)| Call::Mark { at, stage: Stage(stage), class }),
    ];
    vec(prop_oneof![60 => call, 1 => Just(Call::Reset)], 1..250)
}

struct Record {
    act: Act,
    /// Whether it is the work region's.
    work: bool,
    shares: u32,
    kept: Option<(Stage, Class)>,
    /// When it came back.
    since: usize,
}

impl Record {
    fn kind(&self) -> (Dtype, usize) {
        (self.act.dtype, self.act.elements())
    }
}

#[derive(Default)]
struct Model {
    oldest: bool,
    spare: BTreeMap<(Dtype, usize), usize>,
    records: Vec<Record>,
    calls: usize,
    /// The most buffers of a kind that were leased at once: as tapes, as works, and in all.
    most: BTreeMap<(Dtype, usize), [usize; 3]>,
    extents: RegionBytes,
    kept: BTreeMap<(Stage, Class), usize>,
    peak: usize,
}

impl Model {
    /// Of these free buffers, the one that is taken first.
    fn first(&self, among: impl Fn(&Record) -> bool) -> Option<usize> {
        let free = (0..self.records.len()).filter(|at| self.records[*at].shares == 0 && among(&self.records[*at]));
        free.min_by_key(|at| {
            let record = &self.records[*at];
            (if self.oldest { record.since } else { 0 }, record.act.buf)
        })
    }

    /// Which buffer a lease gets; `None`: a new one.
    fn lease(&self, kind: (Dtype, usize)) -> Option<usize> {
        let count =
            |work: bool| self.records.iter().filter(|r| r.shares == 0 && r.kind() == kind && r.work == work).count();
        let (spare, own, other) = (self.spare[&kind], count(false), count(true));
        match () {
            () if own > spare => self.first(|r| r.kind() == kind && !r.work),
            () if own + other > spare => self.first(|r| r.kind() == kind),
            () => None,
        }
    }

    fn mark(&mut self, at: usize, stage: Stage, class: Class) {
        let record = &self.records[at];
        let kind = record.kind();
        if record.shares == 0 || record.kept.is_some_and(|(of, was)| of != stage || was >= class) {
            return;
        }
        let back = (class == Class::Work).then(|| self.first(|r| r.kind() == kind && r.work)).flatten();
        if let Some(back) = back {
            self.records[back].work = false;
        }
        self.records[at].kept = Some((stage, class));
        self.records[at].work |= class == Class::Work;
        self.count();
    }

    fn free(&mut self, at: usize) {
        let record = &mut self.records[at];
        record.shares = 0;
        record.kept = None;
        record.since = self.calls;
        self.calls += 1;
    }

    fn leased(&self) -> impl Iterator<Item = &Record> {
        self.records.iter().filter(|record| record.shares > 0)
    }

    fn bytes<'a>(records: impl Iterator<Item = &'a Record>) -> usize {
        records.map(|record| record.act.bytes()).sum()
    }

    /// The most so far of all that is counted.
    fn count(&mut self) {
        for kind in KINDS {
            let of = |work: bool| self.leased().filter(|r| r.kind() == kind && r.work == work).count();
            let now = [of(false), of(true), of(false) + of(true)];
            let most = self.most.entry(kind).or_default();
            *most = std::array::from_fn(|i| most[i].max(now[i]));
        }
        self.peak = self.peak.max(Model::bytes(self.leased()));
        for work in [false, true] {
            let leased = Model::bytes(self.leased().filter(|r| r.work == work));
            let owned = Model::bytes(self.records.iter().filter(|r| r.work == work));
            let extent = if work { &mut self.extents.work } else { &mut self.extents.tape };
            *extent = Extent { owned, most: extent.most.max(leased) };
        }
        for stage in (0..STAGES).map(Stage) {
            for class in [Class::Input, Class::Tape, Class::Work] {
                let now = Model::bytes(self.leased().filter(|r| r.kept == Some((stage, class))));
                let most = self.kept.entry((stage, class)).or_default();
                *most = now.max(*most);
            }
        }
    }

    fn agrees(&mut self, pool: &Pool) {
        self.count();
        let mut found: Vec<Buf> = pool.buffers().collect();
        found.sort_unstable();
        let mut all: Vec<Buf> = self.records.iter().map(|record| record.act.buf).collect();
        all.sort_unstable();
        assert_eq!(found, all, "every buffer is in one place");
        assert_eq!(pool.regions(), self.extents);
        assert_eq!((pool.bytes(), pool.peak()), (Model::bytes(self.leased()), self.peak));
        assert_eq!(pool.quiescent().is_ok(), self.leased().next().is_none());
        for stage in (0..STAGES).map(Stage) {
            let [input, tape, work] = [Class::Input, Class::Tape, Class::Work].map(|class| self.kept[&(stage, class)]);
            assert_eq!(pool.kept(stage), KeptBytes { input, tape, work });
        }
        for kind in KINDS {
            let owned = |work: bool| self.records.iter().filter(|r| r.kind() == kind && r.work == work).count();
            let ([tapes, works, all], spare) = (self.most[&kind], self.spare[&kind]);
            assert!(
                owned(false) <= tapes + spare && owned(true) <= works,
                "a region owns what it needed, and spare ones"
            );
            let made = owned(false) + owned(true);
            assert!(all <= made && made <= all + spare, "both together own what one pool would");
        }
    }
}

fn play(reuse: Reuse, spare: [usize; 3], calls: &[Call]) {
    let (mut device, mut pool) = (CpuDevice::new(), Pool::new(true, reuse));
    let oldest = reuse != Reuse::Lowest;
    let mut model = Model { oldest, spare: KINDS.into_iter().zip(spare).collect(), ..Model::default() };
    for call in calls {
        // Some buffer that was leased before, if there is any.
        let count = model.records.len();
        let pick = |at: &usize| count.checked_sub(1).map(|_| *at % count);
        match call {
            Call::Lease(kind) => {
                let (dtype, elements) = KINDS[*kind];
                let act = pool.lease(&mut device, dtype, 2, elements / 2).unwrap();
                let at = match model.lease(KINDS[*kind]) {
                    Some(at) => at,
                    None => {
                        assert!(model.records.iter().all(|record| record.act.buf != act.buf), "{act} is new");
                        model.records.push(Record { act, work: false, shares: 0, kept: None, since: 0 });
                        count
                    }
                };
                let record = &mut model.records[at];
                assert_eq!(record.act, act);
                (record.shares, record.work) = (1, false);
            }
            Call::Keep(at) => {
                let Some(at) = pick(at) else { continue };
                let record = &mut model.records[at];
                assert_eq!(pool.keep(record.act).is_ok(), record.shares > 0);
                record.shares += u32::from(record.shares > 0);
            }
            Call::Free(at) => {
                let Some(at) = pick(at) else { continue };
                let record = &mut model.records[at];
                assert_eq!(pool.free(&mut device, record.act).is_ok(), record.shares > 0);
                match record.shares {
                    0 => {}
                    1 => model.free(at),
                    _ => record.shares -= 1,
                }
            }
            Call::Mark { at, stage, class } => {
                let at: Vec<usize> = at.iter().filter_map(pick).collect();
                let acts: Vec<Act> = at.iter().map(|at| model.records[*at].act).collect();
                pool.mark(&layout(&acts), *stage, *class);
                at.into_iter().for_each(|at| model.mark(at, *stage, *class));
            }
            Call::Reset => {
                pool.reset(&mut device).unwrap();
                let mut leased: Vec<usize> = (0..count).filter(|at| model.records[*at].shares > 0).collect();
                leased.sort_by_key(|at| model.records[*at].act.buf);
                leased.into_iter().for_each(|at| model.free(at));
            }
        }
        model.agrees(&pool);
    }
}

proptest! {
    #[test]
    fn few_buffers_are_those_that_the_model_takes(calls in calls()) {
        play(Reuse::Lowest, [0; 3], &calls);
    }

    #[test]
    fn rested_buffers_are_those_that_the_model_takes(calls in calls()) {
        play(Reuse::Oldest { spare: 48 }, [3, 2, 3], &calls); // of 16, 32 and 16 bytes; two at least
    }
}
