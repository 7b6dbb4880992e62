//! An executor whose calls are timed.
//!
//! A device may only queue what an action issues. One that keeps time marks both ends of an action in its queue, and all
//! marks are read once, at the end of the step. For another one each call ends when the device has nothing left to do: then
//! a measured step takes longer than others. It computes the same bits either way.
//!
//! Ranks that share a device take turns: between the two ends of an action nobody else gives the device anything to do.

use std::time::{Duration, Instant};

use qeffect_core::execute::{Execute, Mode, Port};
use qeffect_core::ids::{Microbatch, Stage};
use qeffect_core::ledger::{Action, Rolls, Site, Verdict};
use qeffect_core::measured::Span;
use qeffect_core::plan::Op;
use qeffect_core::token::{Bwd, Fwd, Token};

use crate::capture::replay::{SEND, WAIT, message, node};
use crate::device::{Device, Mark};
use crate::error::{Error, Result};

/// What can wait for its device.
pub(crate) trait Idle {
    /// Returns when all that was issued has been carried out.
    fn idle(&mut self) -> Result<()>;

    /// The device.
    fn device(&mut self) -> &mut dyn Device;
}

/// An end of a span.
#[derive(Clone, Copy)]
enum Point {
    /// Since the start of the step.
    Host(Duration),
    Device(Mark),
}

/// Actions that were done as one, and when.
struct Entry {
    done: Vec<(Op, Stage, Microbatch)>,
    ends: [Point; 2],
}

/// The time of a step, and what has been measured in it.
pub(crate) struct Clock {
    /// The start of the step, the same on all ranks.
    zero: Instant,
    entries: Vec<Entry>,
}

impl Clock {
    pub fn new(zero: Instant) -> Clock {
        Clock { zero, entries: Vec::new() }
    }

    fn now(&self) -> Duration {
        self.zero.elapsed()
    }

    fn add(&mut self, actions: impl IntoIterator<Item = Action>, ends: [Point; 2]) {
        let named = |action| match action {
            Action::Node { op, stage, microbatch } => Some((op, stage, microbatch)),
            _ => None,
        };
        self.entries.push(Entry { done: actions.into_iter().filter_map(named).collect(), ends });
    }

    /// What was measured. The marks of the device are read, and given back to it.
    pub fn finish(self, device: &mut dyn Device) -> Result<Vec<Span>> {
        let ends = self.entries.iter().flat_map(|entry| entry.ends);
        let marks = ends.filter_map(|end| if let Point::Device(mark) = end { Some(mark) } else { None });
        let mut times = device.times(&marks.collect::<Vec<_>>())?.into_iter();
        let mut at = |end| match end {
            Point::Host(at) => at,
            Point::Device(_) => times.next().map_or(Duration::ZERO, |at| at.saturating_duration_since(self.zero)),
        };
        let mut spans = Vec::new();
        for Entry { done, ends } in self.entries {
            let [start, end] = ends.map(&mut at);
            let whole = end.saturating_sub(start);
            let until = |members: usize| start + whole.mul_f64(members as f64 / done.len() as f64);
            // The time of a group is shared evenly among its members: they are computed as one.
            let members = done.iter().enumerate().map(|(member, (op, stage, microbatch))| Span {
                op: *op,
                stage: *stage,
                microbatch: *microbatch,
                start: until(member),
                end: until(member + 1),
            });
            spans.extend(members);
        }
        Ok(spans)
    }
}

/// Runs what `inner` runs.
pub(crate) struct Timed<'c, E> {
    pub inner: E,
    pub clock: &'c mut Clock,
}

impl<E: Execute<Error = Error> + Idle> Timed<'_, E> {
    /// The device has nothing to do where it keeps no time: the end before waited for it.
    fn start(&mut self) -> Result<Point> {
        Ok(self.inner.device().mark()?.map_or_else(|| Point::Host(self.clock.now()), Point::Device))
    }

    fn end(&mut self) -> Result<Point> {
        match self.inner.device().mark()? {
            Some(mark) => Ok(Point::Device(mark)),
            None => {
                self.inner.idle()?;
                Ok(Point::Host(self.clock.now()))
            }
        }
    }

    /// What may wait for other ranks.
    fn span<T>(&mut self, action: Action, run: impl FnOnce(&mut E) -> Result<T>) -> Result<T> {
        self.timed([action], run)
    }

    /// What waits for nobody.
    fn alone<T>(
        &mut self,
        actions: impl IntoIterator<Item = Action>,
        run: impl FnOnce(&mut E) -> Result<T>,
    ) -> Result<T> {
        let _turn = self.inner.device().hold();
        self.timed(actions, run)
    }

    fn timed<T>(
        &mut self,
        actions: impl IntoIterator<Item = Action>,
        run: impl FnOnce(&mut E) -> Result<T>,
    ) -> Result<T> {
        let start = self.start()?;
        let result = run(&mut self.inner);
        // Also after a fault: whatever was marked is given back.
        let end = self.end();
        if let Ok(end) = end {
            self.clock.add(actions, [start, end]);
        }
        result.and_then(|value| end.map(|_| value))
    }

    fn action<T>(&mut self, op: Op, at: Site, run: impl FnOnce(&mut E) -> Result<T>) -> Result<T> {
        self.alone([node(op, at.stage(), at.microbatch())], run)
    }
}

const NO_STAGE: Stage = Stage(0);
const NO_MICROBATCH: Microbatch = Microbatch(0);

impl<E: Execute<Error = Error> + Idle> Execute for Timed<'_, E> {
    type Tape = E::Tape;
    type Work = E::Work;
    type Error = Error;

    fn begin(&mut self, step: u64, mode: Mode) -> Result<()> {
        self.inner.begin(step, mode)?;
        self.inner.idle()
    }

    fn forward(&mut self, at: Site, token: Token<Fwd>) -> Result<(E::Tape, Token<Fwd>)> {
        self.action(Op::Forward, at, |inner| inner.forward(at, token))
    }

    fn evaluate(&mut self, at: Site) -> Result<()> {
        self.action(Op::Forward, at, |inner| inner.evaluate(at))
    }

    fn recompute(&mut self, at: Site, tape: E::Tape) -> Result<E::Tape> {
        self.action(Op::Recompute, at, |inner| inner.recompute(at, tape))
    }

    fn input_grad(&mut self, at: Site, tape: E::Tape, token: Token<Bwd>) -> Result<(E::Work, Token<Bwd>)> {
        self.action(Op::InputGrad, at, |inner| inner.input_grad(at, tape, token))
    }

    fn weight_grad(&mut self, works: std::vec::Drain<'_, (Site, E::Work)>) -> Result<()> {
        let named = |(at, _): &(Site, E::Work)| node(Op::WeightGrad, at.stage(), at.microbatch());
        let members: Vec<Action> = works.as_slice().iter().map(named).collect();
        self.alone(members, |inner| inner.weight_grad(works))
    }

    fn full_backward(&mut self, at: Site, tape: E::Tape, token: Token<Bwd>) -> Result<Token<Bwd>> {
        self.action(Op::FullBackward, at, |inner| inner.full_backward(at, tape, token))
    }

    fn send(&mut self, port: Port) -> Result<()> {
        self.span(message(SEND, port), |inner| inner.send(port))
    }

    fn post(&mut self, port: Port) -> Result<()> {
        self.inner.post(port)
    }

    fn wait(&mut self, port: Port) -> Result<()> {
        self.span(message(WAIT, port), |inner| inner.wait(port))
    }

    fn refresh(&mut self, stage: Stage) -> Result<()> {
        self.alone([node(Op::Refresh, stage, NO_MICROBATCH)], |inner| inner.refresh(stage))
    }

    fn reduce(&mut self, stage: Stage) -> Result<()> {
        self.alone([node(Op::Reduce, stage, NO_MICROBATCH)], |inner| inner.reduce(stage))
    }

    fn rolls(&self, stage: Stage) -> Rolls {
        self.inner.rolls(stage)
    }

    fn agree(&mut self) -> Result<()> {
        self.span(node(Op::Agree, NO_STAGE, NO_MICROBATCH), E::agree)
    }

    fn commit(&mut self) -> Result<()> {
        self.alone([node(Op::Commit, NO_STAGE, NO_MICROBATCH)], E::commit)
    }

    fn verdict(&mut self) -> Result<Verdict> {
        self.inner.verdict()
    }

    fn abort(&mut self) {
        self.inner.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::cpu::CpuDevice;
    use crate::data::Windows;
    use crate::device::{Caps, DeviceError, GraphId};
    use crate::gpt::GptConfig;
    use crate::optim::OptimConfig;
    use crate::session::{Session, SessionConfig};

    /// A device whose time is the number of its commands: a millisecond each. It says how often it was waited for.
    struct Ticks {
        device: CpuDevice,
        zero: Instant,
        marks: Vec<u64>,
        reads: Arc<Mutex<Vec<usize>>>,
        launches: Arc<Mutex<usize>>,
    }

    impl Ticks {
        fn at(&self, mark: Mark) -> Duration {
            Duration::from_millis(self.marks[mark.0 as usize])
        }
    }

    impl Device for Ticks {
        crate::hand_on!(device: alloc spec issue write read poison instantiate drop_graph);

        fn name(&self) -> &str {
            "ticks"
        }
        fn caps(&self) -> Caps {
            Caps { parallel: true, ..self.device.caps() }
        }
        fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
            *self.launches.lock().unwrap() += 1;
            self.device.launch(graph)
        }
        fn mark(&mut self) -> Result<Option<Mark>, DeviceError> {
            self.marks.push(self.device.issued());
            Ok(Some(Mark((self.marks.len() - 1) as u32)))
        }
        fn times(&mut self, marks: &[Mark]) -> Result<Vec<Instant>, DeviceError> {
            self.reads.lock().unwrap().push(marks.len());
            Ok(marks.iter().map(|mark| self.zero + self.at(*mark)).collect())
        }
    }

    /// Two ranks on one device: what lies between the ends of an action is what it issued, and nothing of the other rank.
    #[test]
    fn an_action_is_timed_by_the_device_and_alone() {
        let recipe = "fp8-delayed:history=4".parse().unwrap();
        let config = GptConfig { vocab: 32, hidden: 16, heads: 2, ffn: 32, layers: 2, seq: 8, sequences: 2, recipe };
        let (reads, launches) = (Arc::default(), Arc::default());
        let ticks = Ticks {
            device: CpuDevice::new(),
            zero: Instant::now() + Duration::from_secs(60),
            marks: Vec::new(),
            reads: Arc::clone(&reads),
            launches: Arc::clone(&launches),
        };
        let told = SessionConfig::new(OptimConfig { steps: 4, ..OptimConfig::default() }, config.tokens());
        let checked = qeffect_schedules::zb_h1::<2, 4>().clone();
        let stages = config.stages(&[1, 1]).unwrap();
        let mut session = Session::on_one_device(checked, stages, told, Box::new(ticks)).unwrap();
        let windows = Windows { tokens: vec![1; config.tokens()], targets: vec![2; config.tokens()] };
        let mut first = None;
        for step in 0..2 {
            session.step(vec![windows.clone(); 4]).unwrap();
            assert_eq!(std::mem::take(&mut *launches.lock().unwrap()), 1, "step {step}: one list for all ranks");
            let (_, ranks) = session.step_measured(vec![windows.clone(); 4]).unwrap();
            assert!(*launches.lock().unwrap() > 24, "a list for each action, of which 24 compute");
            *launches.lock().unwrap() = 0;
            let computing = [Op::Forward, Op::InputGrad, Op::WeightGrad];
            for (rank, spans) in ranks.iter().enumerate() {
                for op in computing {
                    let mut times = spans.iter().filter(|span| span.op == op).map(|span| span.end - span.start);
                    let time = times.next().unwrap();
                    assert!(time >= Duration::from_millis(4), "rank {rank}: {op:?} takes {time:?}");
                    assert!(times.all(|other| other == time), "rank {rank}: every {op:?} issues as many commands");
                }
            }
            let computed = ranks.iter().flatten().filter(|span| computing.contains(&span.op));
            let mut times: Vec<(Duration, Duration)> = computed.map(|span| (span.start, span.end)).collect();
            times.sort_unstable();
            assert!(times.windows(2).all(|pair| pair[0].1 <= pair[1].0), "one at a time");
            let busy: Duration = times.iter().map(|(start, end)| *end - *start).sum();
            assert_eq!(*first.get_or_insert(busy), busy, "whatever the ranks did meanwhile");
        }
        assert_eq!(reads.lock().unwrap().len(), 4, "once per rank and step");
    }
}
