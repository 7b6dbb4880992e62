//! What programs mean.

use super::{line, run, with_body};
use crate::ids::Rank;
use crate::lang::{annotate, environment, interpret, parse, print, read};
use crate::schedule::{Compare, Costs, Measure, Transport, Update};

const ZB_H1: &str = "
    /// One-forward-one-backward with weight gradients filling the cool-down.
    pub zb_h1<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    slots: |_| P;
    expect bubble(1, 1, 1) <= P - 1 if M >= P;

    rank |r| {
        let warm = min(P - 1 - r, M);
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { F(r, m + warm); }
            I(r, m);
            if m >= r { W(r, m - r); }
        }
        for m in M - min(r, M)..M { W(r, m); }
    }
";

#[test]
fn zb_h1_unrolls_to_the_published_lines() {
    let schedule = run(ZB_H1, &[2, 2]).unwrap();
    assert_eq!(line(&schedule, 0), "0F0,0F1,0I0,0W0,0I1,0W1");
    assert_eq!(line(&schedule, 1), "1F0,1I0,1F1,1I1,1W0,1W1");
    assert_eq!((schedule.ranks, schedule.stages, schedule.microbatches), (2, 2, 2));
    assert_eq!(*schedule.placement, [Rank(0), Rank(1)]);
    assert!(schedule.bounds.iter().all(|b| b.slots == Some(2) && b.tapes.is_none()));
    assert_eq!(schedule.expects.len(), 1);
    assert_eq!(schedule.expects[0].measure, Measure::Bubble(Costs { f: 1, i: 1, w: 1 }));
    assert_eq!((schedule.expects[0].compare, schedule.expects[0].bound), (Compare::AtMost, 1));
    assert!(run(ZB_H1, &[4, 2]).unwrap().expects.is_empty());
}

#[test]
fn an_item_spans_its_call_and_knows_its_loop_values() {
    let (program, map) = read("zb.sched", ZB_H1);
    let program = program.unwrap();
    let schedule = interpret(&program, &[4, 8]).unwrap();
    let rank = schedule.rank(Rank(1));
    let (index, item) = rank.iter().enumerate().find(|(_, i)| i.to_string() == "I(1, 3)").unwrap();
    let range = map.range(item.origin).unwrap();
    assert_eq!(&ZB_H1[range], "I(r, m)");
    let values = environment(&program, &[4, 8], Rank(1), index as u32);
    let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    assert_eq!(values, [("r", 1), ("warm", 2), ("m", 3)]);
    assert!(environment(&program, &[4, 8], Rank(1), 1000).is_empty());

    let mut fault = crate::diag::Diagnostic::new(crate::code::Code::TapeConsumedTwice, item.origin, "twice");
    fault.primary.item = Some((Rank(1), index as u32));
    let other = rank.iter().position(|i| i.to_string() == "I(1, 2)").unwrap();
    let mut place = fault.primary;
    place.item = Some((Rank(1), other as u32));
    let mut report = crate::diag::Report::from_faults(vec![fault.label(place, "first")]);
    annotate(&mut report, &program, &[4, 8]);
    assert_eq!(report.diagnostics[0].notes, ["instance P = 4, M = 8; here r = 1, m = 3"]);
    assert_eq!(report.diagnostics[0].labels[0].text, "first, with r = 1, m = 2");
}

/// The values of `F(0, ..)` that a body emits.
fn values(body: &str) -> Vec<u32> {
    let schedule = run(&with_body(body), &[1, 8]).unwrap_or_else(|e| panic!("{e}"));
    schedule.items.iter().map(|i| i.microbatch.0).collect()
}

#[test]
fn ranges_walk_as_in_rust() {
    assert_eq!(values("for m in 2..5 { F(0, m); }"), [2, 3, 4]);
    assert_eq!(values("for m in 2..=5 { F(0, m); }"), [2, 3, 4, 5]);
    assert_eq!(values("for m in (2..5).rev() { F(0, m); }"), [4, 3, 2]);
    assert_eq!(values("for m in (0..=M).step_by(3) { F(0, m); }"), (0..=8).step_by(3).collect::<Vec<_>>());
    assert_eq!(values("for m in (0..M).rev().step_by(3) { F(0, m); }"), (0..8).rev().step_by(3).collect::<Vec<_>>());
    assert_eq!(values("for m in (0..M).step_by(3).rev() { F(0, m); }"), (0..8).step_by(3).rev().collect::<Vec<_>>());
    assert_eq!(values("for m in 5..2 { F(0, m); } for m in (5..=4).rev() { F(0, m); }"), []);
    assert_eq!(values("for m in (M - 1)..(M) { F(0, m); }"), [7]);
    assert_eq!(values("for m in (M - 4) / 2..M / 2 { F(0, m); }"), [2, 3]);
    assert_eq!(values("for m in (M - 1).min(3)..5 { F(0, m); }"), [3, 4]);
    assert_eq!(values("for m in 9223372036854775806..=9223372036854775807 { F(0, m - 9223372036854775800); }"), [6, 7]);
}

#[test]
fn control_flow_and_arithmetic_are_those_of_rust() {
    assert_eq!(values("let mut n = 3; while n > 0 { n -= 1; F(0, n); }"), [2, 1, 0]);
    assert_eq!(
        values("F(0, -7 / 2 + 10); F(0, -7 % 3 + 10); F(0, (-7).rem_euclid(3)); F(0, (0 - 7).div_euclid(3) + 10);"),
        [7, 9, 2, 7]
    );
    assert_eq!(values("F(0, 2 + 3 * 4 - 1); F(0, abs(3 - 5).max(1)); F(0, min(4, max(1, 2)));"), [13, 2, 2]);
    assert_eq!(values("if r == 0 && M > 3 || false { F(0, 1); } else if M == 2 { F(0, 2); } else { F(0, 3); }"), [1]);
    assert_eq!(values("let a = if M > 7 { 1 } else if M > 3 { 2 } else { 3 }; F(0, a);"), [1]);
    assert_eq!(values("let a = { let b = 2; b * b }; F(0, a); { let a = 5; F(0, a); } F(0, a)"), [4, 5, 4]);
    assert_eq!(values("let f = |a, b| { let c = a * 10; c + b }; F(0, f(f(0, 1), f(0, 2)));"), [12]);
    assert_eq!(values("let even = |a| a % 2 == 0; for m in 0..4 { if !even(m) { F(0, m); } }"), [1, 3]);
    assert_eq!(values("let both = |a, b| a && b; if both(M > 1, true) { F(0, 1); }"), [1]);
    assert_eq!(values("let min = |a| a + 1; F(0, min(3)); F(0, 3.max(4));"), [4, 4]);
    assert_eq!(values("let x = 1; let x = x + 1; let f = || x * 2; F(0, f());"), [4]);
    assert_eq!(values("let mut x = 8; x += 4; x *= 2; x /= 5; x %= 3; x -= 0; F(0, x);"), [1]);
}

#[test]
fn every_kind_of_item_is_emitted() {
    let body = "refresh(r); F(r, 0); R(r, 0); overlap { { F(r, 1); } { I(r, 0); } } B(r, 1); W(r, [0, 1, 2]); reduce(r); commit;";
    let schedule = run(&with_body(body), &[1, 2]).unwrap();
    let kinds: Vec<_> = schedule.items.iter().map(|i| format!("{:?}", i.kind)).collect();
    assert_eq!(
        kinds.join(" "),
        "Refresh Forward Recompute OverlapBegin OverlapBranch Forward OverlapBranch InputGrad OverlapEnd FullBackward \
         WeightGrad WeightGradJoin WeightGradJoin Reduce Commit"
    );
}

#[test]
fn the_whole_header_is_read() {
    let text = "
        v<P, M> for (2, 4);
        let V = 2;
        let owner = |s| min(s, V * P - 1 - s);
        ranks: P; microbatches: M; stages: V * P;
        place: |s| owner(s);
        slots: |r| 2 * P - r; tapes: |_| M; works: |_| 0;
        transport: rank_edge; update: step; coalesce: 2;
        bytes(tape = |s| 1024 * M + s, work = |_| 512, budget = |r| 9000 - r);
        eval;
        expect idle(2, 1, 1) == 0;
        expect peak < 100 if false;
        expect peak > P if P > 1;
        rank |_| {}
    ";
    let schedule = run(text, &[2, 4]).unwrap();
    assert_eq!(*schedule.placement, [Rank(0), Rank(1), Rank(1), Rank(0)]);
    assert_eq!(schedule.bounds[1].slots, Some(3));
    assert_eq!((schedule.bounds[0].tapes, schedule.bounds[0].works), (Some(4), Some(0)));
    assert_eq!((schedule.transport, schedule.update, schedule.coalesce), (Transport::RankEdge, Update::Step, 2));
    let bytes = schedule.bytes.unwrap();
    assert_eq!((&bytes.tape[..], &bytes.work[..]), (&[4096, 4097, 4098, 4099][..], &[512; 4][..]));
    assert_eq!((&bytes.budget[..], &bytes.input[..], schedule.eval), (&[9000, 8999][..], &[][..], true));
    assert_eq!(schedule.expects.len(), 2);
    assert_eq!((schedule.expects[1].measure, schedule.expects[1].compare), (Measure::Peak, Compare::Above));
    assert_eq!(*schedule.params, [("P".into(), 2), ("M".into(), 4)]);
}

#[test]
fn one_parameter_and_none() {
    let text =
        "g<M> for 2, (4); ranks: 1; microbatches: M; stages: 1; place: |s| s; rank |r| { for m in 0..M { F(r, m) } }";
    let (program, _) = read("g", text);
    let program = program.unwrap();
    let declared: Vec<_> = program.instances.iter().map(|i| i.values[0]).collect();
    assert_eq!(declared, [2, 4]);
    let text = "g for (); ranks: 1; microbatches: 1; stages: 1; place: |s| s; rank |r| { F(0, 0); }";
    assert_eq!(run(text, &[]).unwrap().items.len(), 1);
}

#[test]
fn the_canonical_text_is_stable() {
    let (program, _) = read("zb", ZB_H1);
    let program = program.unwrap();
    let text = print(&program);
    let expected = "\
/// One-forward-one-backward with weight gradients filling the cool-down.
zb_h1<P, M> for (2, 4), (4, 8);

ranks: P;
microbatches: M;
stages: P;
place: |s| s;
slots: |_| P;
expect bubble(1, 1, 1) <= P - 1 if M >= P;

rank |r| {
    let warm = min(P - 1 - r, M);
    for m in 0..warm {
        F(r, m);
    }
    for m in 0..M {
        if m + warm < M {
            F(r, m + warm);
        }
        I(r, m);
        if m >= r {
            W(r, m - r);
        }
    }
    for m in M - min(r, M)..M {
        W(r, m);
    }
}
";
    assert_eq!(text, expected);
    let (tokens, _) = crate::lang::lex("again", &text);
    assert_eq!(parse(&tokens).program.unwrap().without_origins(), program.without_origins());
}

#[test]
fn a_helper_that_hides_a_function_survives_printing() {
    let text = super::with_body(
        "let min = |a| a + 1; F(0, min(3)); F(0, 3.min(4)); F(0, abs(3 - 5)); let abs = 1; F(0, abs);",
    );
    let (program, _) = read("t", &text);
    let program = program.unwrap();
    let (again, _) = read("t", &print(&program));
    let unrolled = |p| interpret(p, &[1, 8]).unwrap().items.iter().map(|i| i.microbatch.0).collect::<Vec<_>>();
    assert_eq!(unrolled(&program), [4, 3, 2, 1]);
    assert_eq!(unrolled(&again.unwrap()), [4, 3, 2, 1]);
}

#[test]
fn the_order_of_header_fields_means_nothing() {
    let text = "t<P, M>; rank |r| { F(r, K); } place: |s| s; stages: P; let K = M - 1; microbatches: M; ranks: P;";
    assert_eq!(line(&run(text, &[2, 3]).unwrap(), 1), "1F2");
}
