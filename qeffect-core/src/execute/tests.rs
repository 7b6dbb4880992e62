//! The driver against an executor that keeps numbers small enough to add by hand.

use std::collections::BTreeMap;

use super::*;
use crate::ids::{Rank, Unit};
use crate::ledger::StageContract;
use crate::tape::TapeKey;

/// `0F1` with slot 1; `0w1` joins the W before it; `>`, `<`, `+`, `-`: send and wait of F, of I.
fn nodes(text: &str) -> Vec<Node> {
    let node = |word: &str| {
        let (op, stage, m) = match word {
            "agree" => (Op::Agree, 0, 0),
            "commit" => (Op::Commit, 0, 0),
            "{" => (Op::OverlapBegin, 0, 0),
            "|" => (Op::OverlapBranch, 0, 0),
            "}" => (Op::OverlapEnd, 0, 0),
            _ if word.starts_with("refresh") => (Op::Refresh, word[7..].parse().unwrap(), 0),
            _ if word.starts_with("reduce") => (Op::Reduce, word[6..].parse().unwrap(), 0),
            _ => {
                let at = word.find(|c: char| !c.is_ascii_digit()).unwrap();
                let op = match &word[at..=at] {
                    "F" => Op::Forward,
                    "I" => Op::InputGrad,
                    "W" => Op::WeightGrad,
                    "w" => Op::WeightGradJoin,
                    "B" => Op::FullBackward,
                    "R" => Op::Recompute,
                    ">" => Op::SendForward,
                    "<" => Op::WaitForward,
                    "+" => Op::SendBackward,
                    "-" => Op::WaitBackward,
                    other => panic!("{other}"),
                };
                (op, word[..at].parse().unwrap(), word[at + 1..].parse().unwrap())
            }
        };
        Node::new(op, stage, m, m, 0)
    };
    text.split_whitespace().map(node).collect()
}

/// Adds `2^m` per weight gradient; counts its own rolls; fails at a given call.
#[derive(Default)]
struct Adder {
    calls: Vec<String>,
    fail_at: Option<usize>,
    rolls: Rolls,
    start: (Rolls, f64),
    no_rolls: bool,
    skip: bool,
    sums: BTreeMap<Stage, f64>,
    adds: u32,
    weight: f64,
    aborts: u32,
    live: i64,
}

/// Counts itself, so that a lost tape shows.
struct Tape(TapeKey);
struct Work(TapeKey);

impl Adder {
    fn call(&mut self, name: impl Into<String>) -> Result<(), String> {
        self.calls.push(name.into());
        if self.fail_at == Some(self.calls.len()) { Err("injected".into()) } else { Ok(()) }
    }
}

impl Execute for Adder {
    type Tape = Tape;
    type Work = Work;
    type Error = String;

    fn begin(&mut self, _step: u64, _mode: Mode) -> Result<(), String> {
        self.start = (self.rolls, self.weight);
        self.sums.clear();
        self.call("begin")
    }
    fn forward(&mut self, at: Site, token: Token<Fwd>) -> Result<(Tape, Token<Fwd>), String> {
        self.rolls.forward += u64::from(!self.no_rolls);
        self.live += 1;
        self.call(format!("F{}", at.microbatch()))?;
        Ok((Tape(at.key), token.rolled()))
    }
    fn evaluate(&mut self, at: Site) -> Result<(), String> {
        self.call(format!("E{}", at.microbatch()))
    }
    fn recompute(&mut self, at: Site, tape: Tape) -> Result<Tape, String> {
        assert_eq!(tape.0, at.key);
        self.call(format!("R{}", at.microbatch()))?;
        Ok(tape)
    }
    fn input_grad(&mut self, at: Site, tape: Tape, token: Token<Bwd>) -> Result<(Work, Token<Bwd>), String> {
        assert_eq!(tape.0, at.key, "the tape of this very action");
        self.rolls.backward += u64::from(!self.no_rolls);
        self.call(format!("I{}", at.microbatch()))?;
        Ok((Work(tape.0), token.rolled()))
    }
    fn weight_grad(&mut self, works: std::vec::Drain<'_, (Site, Work)>) -> Result<(), String> {
        let mut name = String::from("W");
        for (at, work) in works {
            assert_eq!(work.0, at.key);
            name += &at.microbatch().to_string();
            *self.sums.entry(at.stage()).or_default() += f64::from(1 << at.microbatch().0);
            self.adds += 1;
            self.live -= 1;
        }
        self.call(name)
    }
    fn send(&mut self, port: Port) -> Result<(), String> {
        self.call(format!("send{}", port.microbatch))
    }
    fn post(&mut self, port: Port) -> Result<(), String> {
        self.call(format!("post{}", port.microbatch))
    }
    fn wait(&mut self, port: Port) -> Result<(), String> {
        self.call(format!("wait{}", port.microbatch))
    }
    fn refresh(&mut self, _stage: Stage) -> Result<(), String> {
        self.call("refresh")
    }
    fn reduce(&mut self, _stage: Stage) -> Result<(), String> {
        self.call("reduce")
    }
    fn rolls(&self, _stage: Stage) -> Rolls {
        self.rolls
    }
    fn agree(&mut self) -> Result<(), String> {
        self.call("agree")
    }
    fn commit(&mut self) -> Result<(), String> {
        self.call("commit")?;
        if !self.skip {
            self.weight += self.sums.values().sum::<f64>();
        }
        Ok(())
    }
    fn verdict(&mut self) -> Result<Verdict, String> {
        self.call("verdict")?;
        if self.skip {
            self.rolls = self.start.0;
            return Ok(Verdict::Skip);
        }
        Ok(Verdict::Good)
    }
    fn abort(&mut self) {
        (self.rolls, self.weight) = self.start;
        self.aborts += 1;
        self.live = 0;
    }
}

struct Rig {
    ledger: Ledger,
    held: Held<Tape, Work>,
    adder: Adder,
}

impl Rig {
    fn new(microbatches: u32) -> Rig {
        let contract = StageContract { stage: Stage(0), forward_rolls: 1, backward_rolls: 1 };
        let ledger = Ledger::new(Rank(0), &[contract], microbatches, microbatches);
        Rig { ledger, held: Held::default(), adder: Adder::default() }
    }

    fn run(&mut self, text: &str) -> Result<StepOutcome, StepError<String>> {
        self.adder.calls.clear();
        run_rank(&nodes(text), Mode::Train, &mut self.ledger, &mut self.held, &mut self.adder)
    }

    fn evaluate(&mut self, text: &str, microbatches: u32) -> Result<StepOutcome, StepError<String>> {
        self.adder.calls.clear();
        let mode = Mode::Evaluate { microbatches };
        run_rank(&nodes(text), mode, &mut self.ledger, &mut self.held, &mut self.adder)
    }
}

fn code(result: Result<StepOutcome, StepError<String>>) -> Code {
    match result {
        Err(StepError::Refused(error)) => error.code,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn every_order_of_weight_gradients_adds_every_microbatch_once() {
    // case B55: gradients 1, 2, 4, 8
    for order in ["0W0 0W1 0W2 0W3", "0W3 0W2 0W1 0W0", "0W2 0W0 0W3 0W1", "0W1 0W2 0W3 0W0", "0W0 0w1 0W2 0w3"] {
        let mut rig = Rig::new(4);
        let head = "refresh0 0F0 0F1 0F2 0F3 0I0 0I1 0I2 0I3";
        let outcome = rig.run(&format!("{head} {order} reduce0 agree commit")).unwrap();
        assert_eq!((rig.adder.weight, rig.adder.adds, rig.adder.live), (15.0, 4, 0), "{order}");
        assert_eq!((outcome.step, outcome.epoch, outcome.verdict), (0, 1, Some(Verdict::Good)));
        assert_eq!(outcome.peaks, Peaks { slots: 4, tapes: 4, works: 4 });
    }
}

#[test]
fn full_and_split_backward_may_mix() {
    // case B56: the gradients are final once, after the last of 1 B and 2 W
    let mut rig = Rig::new(3);
    rig.run("refresh0 0F0 0F1 0F2 0B0 0I1 0I2 0W2 0W1 reduce0 agree commit").unwrap();
    assert_eq!(rig.adder.calls.join(" "), "begin refresh F0 F1 F2 I0 W0 I1 I2 W2 W1 reduce agree commit verdict");
    assert_eq!(rig.adder.weight, 7.0);
    let early = rig.run("refresh0 0F0 0F1 0F2 0B0 0I1 0I2 0W2 reduce0 0W1 agree commit");
    assert_eq!(code(early), Code::ReduceMisplaced); // case B41
    assert_eq!(code(rig.run("refresh0 0F0 0F1 0F2 0B0 0W0")), Code::WorkConsumedTwice);
    assert_eq!(rig.adder.weight, 7.0);
}

#[test]
fn plans_that_break_the_contract_are_refused_before_the_action() {
    for (text, want, calls) in [
        ("refresh0 0F0 0W0 0I0", Code::WorkBeforeInputGrad, "begin refresh F0"), // case B17
        ("refresh0 0I0", Code::TapeBeforeForward, "begin refresh"),
        ("refresh0 0F0 0I0 0I0", Code::TapeConsumedTwice, "begin refresh F0 I0"),
        ("refresh0 0F0 0I0 0W0 0W0", Code::WorkConsumedTwice, "begin refresh F0 I0 W0"),
        ("refresh0 0F0 0I0 agree commit", Code::CommitWithWork, "begin refresh F0 I0"), // case B14
        ("refresh0 0F0 0B0 agree commit", Code::CommitWithWork, "begin refresh F0 I0 W0"), // not reduced
        ("refresh0 0F0 0B0 reduce0 commit", Code::CommitWithWork, "begin refresh F0 I0 W0 reduce"), // not agreed
        ("refresh0 0F0 0B0 reduce0 agree", Code::CommitMissing, "begin refresh F0 I0 W0 reduce agree"),
        ("refresh0 0F0 0B0 reduce0 agree commit 0F0", Code::StaleCache, "begin refresh F0 I0 W0 reduce agree commit"),
        ("0F0", Code::StaleCache, "begin"), // case B08
        ("refresh0 0F0 refresh0", Code::RefreshMisplaced, "begin refresh F0"),
        ("refresh0 0F0 0F0", Code::ForwardRepeated, "begin refresh F0"),
        ("refresh0 0F0 0I0 0w0", Code::WorkBeforeInputGrad, "begin refresh F0 I0"),
        ("refresh0 1F0", Code::WrongRank, "begin refresh"),
        ("refresh0 0>0", Code::MessageEarly, "begin refresh"),
        ("refresh0 0F0 0>0 0>0", Code::MessageDoubled, "begin refresh F0 send0"),
        ("refresh0 0<0 0<0", Code::MessageDoubled, "begin refresh wait0"),
        ("refresh0 0F0 0<0", Code::MessageEarly, "begin refresh F0"),
        ("refresh0 0R0", Code::RecomputeMisplaced, "begin refresh"),
    ] {
        let mut rig = Rig::new(1);
        assert_eq!(code(rig.run(text)), want, "{text}");
        assert_eq!(rig.adder.calls.join(" "), calls, "{text}");
        assert_eq!((rig.adder.aborts, rig.ledger.pool().live()), (1, 0), "{text}");
    }
}

#[test]
fn a_state_that_did_not_move_stops_the_first_step() {
    // case B53: the executor says that it rolled, its state says otherwise
    let mut rig = Rig::new(2);
    rig.adder.no_rolls = true;
    assert_eq!(code(rig.run("refresh0 0F0 0F1 0B0 0B1 reduce0 agree commit")), Code::TokenOutOfOrder);
    assert!(!rig.adder.calls.iter().any(|c| c == "agree" || c == "commit"));
    assert_eq!(rig.adder.weight, 0.0);
}

#[test]
fn a_failure_anywhere_puts_everything_back() {
    let text = "refresh0 0F0 0>0 { | 0F1 | 0-0 0I0 0+0 0W0 } 0R1 0B1 reduce0 agree commit";
    let mut whole = Rig::new(2);
    whole.run(text).unwrap();
    let calls = whole.adder.calls.len();
    assert!(calls > 12);
    for fail_at in 1..=calls {
        let mut rig = Rig::new(2);
        rig.run(text).unwrap();
        let start = (rig.ledger.rolls(Stage(0)), rig.ledger.version(Stage(0)), rig.adder.rolls, rig.adder.weight);
        rig.adder.fail_at = Some(fail_at);
        let error = rig.run(text).unwrap_err();
        assert!(matches!(error, StepError::Failed { .. }), "{error}");
        assert_eq!((rig.adder.calls.len(), rig.adder.aborts), (fail_at, 1));
        let now = (rig.ledger.rolls(Stage(0)), rig.ledger.version(Stage(0)), rig.adder.rolls, rig.adder.weight);
        assert_eq!(now, start, "failed at call {fail_at}: {error}");
        rig.adder.fail_at = None;
        let outcome = rig.run(text).unwrap();
        assert_eq!((outcome.step, outcome.epoch), (2, 2), "the step counter advances, the epoch does not");
        assert_eq!(rig.adder.weight, 6.0);
    }
}

#[test]
fn a_skipped_step_counts_as_an_attempt_only() {
    let text = "refresh0 0F0 0B0 reduce0 agree commit";
    let mut rig = Rig::new(1);
    rig.adder.skip = true;
    let outcome = rig.run(text).unwrap();
    assert_eq!((outcome.step, outcome.epoch, outcome.verdict), (0, 0, Some(Verdict::Skip)));
    assert_eq!((rig.adder.weight, rig.adder.rolls, rig.adder.aborts), (0.0, Rolls::default(), 0));
    assert_eq!(rig.ledger.version(Stage(0)).unwrap().unwrap().cache(), None, "the refresh was put back too");
    rig.adder.skip = false;
    let outcome = rig.run(text).unwrap();
    assert_eq!((outcome.step, outcome.epoch, rig.adder.weight), (1, 1, 1.0));
}

#[test]
fn evaluation_leaves_no_trace() {
    let text = "refresh0 0F0 0B0 reduce0 agree commit";
    let mut rig = Rig::new(1);
    assert_eq!(code(rig.evaluate("0F0", 1)), Code::StaleCache, "no cache was filled yet");
    rig.ledger.fill(Stage(0)).unwrap();
    rig.evaluate("0F0 0F1 0F2", 3).unwrap();
    rig.run(text).unwrap();
    let before = (rig.ledger.rolls(Stage(0)), rig.ledger.version(Stage(0)), rig.ledger.step(), rig.ledger.epoch());
    let outcome = rig.evaluate("0<0 0F0 0>0 0F1", 2).unwrap();
    assert_eq!((outcome.verdict, rig.adder.calls.join(" ")), (None, "begin wait0 E0 send0 E1".into()));
    assert_eq!(code(rig.evaluate("0F0", 2)), Code::ForwardMissing);
    assert_eq!(code(rig.evaluate("0F0 0I0", 1)), Code::TapeBeforeForward, "nothing is retained");
    assert_eq!(code(rig.evaluate("refresh0 0F0", 1)), Code::NotQuiescent, "nothing is rolled");
    let after = (rig.ledger.rolls(Stage(0)), rig.ledger.version(Stage(0)), rig.ledger.step(), rig.ledger.epoch());
    assert_eq!(after, before);
    assert_eq!(rig.run(text).unwrap().epoch, 2);
}

#[test]
fn keys_print_what_they_name() {
    let key = TapeKey::stage(3, Stage(1), Microbatch(2));
    assert_eq!(key.to_string(), "stage 1, microbatch 2, step 3");
    let unit = TapeKey { unit: Unit(4), invocation: 1, ..key };
    assert_eq!(unit.to_string(), "stage 1, microbatch 2, step 3, unit 4, use 1");
}
