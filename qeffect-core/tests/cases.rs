//! Faults that users of other systems have met, as schedules: refused with the code and the names that
//! one needs to mend them. The ids are those of `docs/cases.md`.
#![allow(missing_docs)]

use qeffect_core::check::{Options, check, messages, progress};
use qeffect_core::code::Code;
use qeffect_core::diag::Report;
use qeffect_core::ids::Rank;
use qeffect_core::index::Index;
use qeffect_core::lang;
use qeffect_core::plan::{Checked, Node, Op};
use qeffect_core::schedule::Transport;
use qeffect_core::sim::{self, CostModel};
use qeffect_core::text::read_plan;

/// Reads, interprets and checks a schedule over (P, M), given header fields and the body of `rank |r|`.
fn judge(ranks: i64, microbatches: i64, fields: &str, body: &str) -> Result<Checked, Report> {
    let place = if fields.contains("place:") { "" } else { "stages: P; place: |s| s;" };
    let text = format!("case<P, M>; ranks: P; microbatches: M; {place} {fields} rank |r| {{ {body} }}");
    let program = lang::read("case.sched", &text).0?;
    check(lang::interpret(&program, &[ranks, microbatches])?, &Options::AT_START)
}

/// Headlines of the report, all of one code.
fn refused(code: Code, verdict: Result<Checked, Report>) -> Vec<String> {
    let report = verdict.expect_err("refused");
    assert!(report.codes().iter().all(|c| *c == code), "{report}");
    report.diagnostics.into_iter().map(|d| d.message).collect()
}

const V_SHAPE: &str = "stages: 2 * P; place: |s| min(s, 2 * P - 1 - s);";

// case B14: weight gradients deferred, and nobody takes them.
#[test]
fn b14_a_work_that_nobody_takes() {
    let messages = refused(Code::WorkNeverConsumed, judge(1, 1, "", "F(0, 0); I(0, 0);"));
    assert_eq!(messages, ["the work of I(0, 0) is never consumed"]);
    let report = judge(2, 4, "", "for m in 0..M { F(r, m); } for m in 0..M { I(r, m); if m > 0 { W(r, m); } }");
    let report = report.unwrap_err();
    assert_eq!(report.codes(), [Code::WorkNeverConsumed]);
    assert!(report.to_string().contains("no W of stage 0 for microbatch 0"), "{report}");
}

// case B17: a weight gradient before its input gradient; a second one is another fault.
#[test]
fn b17_a_weight_gradient_finds_nothing() {
    let messages = refused(Code::WorkBeforeInputGrad, judge(1, 1, "", "F(0, 0); W(0, 0); I(0, 0);"));
    assert_eq!(messages, ["W(0, 0) runs before I(0, 0), which leaves its work"]);
    let messages = refused(Code::WorkConsumedTwice, judge(1, 1, "", "F(0, 0); I(0, 0); W(0, 0); W(0, 0);"));
    assert_eq!(messages, ["W(0, 0) consumes work that is already consumed"]);
}

// case B28: two stages per rank on one channel per pair of ranks; one channel per boundary is fine.
#[test]
fn b28_one_channel_for_two_boundaries() {
    let body = "if r == 0 { F(0, 0); F(0, 1); for m in 0..M { F(3, m); B(3, m); B(0, m); } }
                else { for m in 0..M { F(1, m); F(2, m); B(2, m); B(1, m); } }";
    judge(2, 2, V_SHAPE, body).unwrap();
    let messages = refused(Code::FifoOrder, judge(2, 2, &format!("{V_SHAPE} transport: rank_edge;"), body));
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert!(messages[0].contains("ranks 0 and 1 order their channel differently"), "{messages:?}");
    // A real circle is refused on every transport, and says who waits for whom.
    let body = "if r == 0 { for m in 0..M { F(0, m); B(0, m); } }
                else { for m in 0..M { F(1, m); } for m in 0..M { B(1, m); } }";
    for transport in ["", "transport: rank_edge;"] {
        assert_eq!(refused(Code::Deadlock, judge(2, 2, transport, body)), ["ranks 0 and 1 wait for each other"]);
    }
}

/// Every receive right before its message is waited for.
fn received_late(nodes: &[Node]) -> Vec<Node> {
    let mut late = Vec::new();
    for node in nodes {
        let post = match node.op {
            Op::PostForward | Op::PostBackward => continue,
            Op::WaitForward => Some(Op::PostForward),
            Op::WaitBackward => Some(Op::PostBackward),
            _ => None,
        };
        let same =
            |other: &&Node| Some(other.op) == post && (other.stage, other.microbatch) == (node.stage, node.microbatch);
        late.extend(nodes.iter().find(same));
        late.push(*node);
    }
    late
}

// case B28: 4 stages on 2 ranks, in a loop and in a V. Where a send waits for its receiver, receives are planned so that they meet
// it; at the places where they are wanted each rank would take a message that the other one has not come to.
#[test]
fn b28_sends_that_wait_for_their_receivers() {
    let looped =
        "if r == 0 { F(0, 0); F(0, 1); for m in 0..M { F(2, m); if m + 2 < M { F(0, m + 2); } B(2, m); B(0, m); } }
                  else { for m in 0..M { F(1, m); F(3, m); B(3, m); B(1, m); } }";
    let in_v =
        "if r == 0 { F(0, 0); F(0, 1); for m in 0..M { F(3, m); B(3, m); if m + 2 < M { F(0, m + 2); } B(0, m); } }
                else { for m in 0..M { F(1, m); F(2, m); B(2, m); B(1, m); } }";
    for (shape, body) in [("stages: 2 * P; place: |s| s % P;", looped), (V_SHAPE, in_v)] {
        let messages = refused(Code::FifoOrder, judge(2, 4, &format!("{shape} transport: rank_edge;"), body));
        assert!(messages[0].contains("ranks 0 and 1 order their channel differently"), "{messages:?}");
        let checked = judge(2, 4, &format!("{shape} transport: rendezvous;"), body).unwrap();
        let late: Vec<Vec<Node>> = [0, 1].map(|rank| received_late(checked.plan.rank(Rank(rank)))).into();
        let faults = messages::check_on(&late, &checked.schedule.placement, Transport::Rendezvous);
        assert!(!faults.is_empty() && faults.iter().all(|fault| fault.code == Code::FifoOrder), "{faults:?}");
        assert!(faults[0].message.contains("would take"), "{}", faults[0].message);
        // Even where each message finds its receive, the ranks wait for each other in a circle, which is reported.
        let placement = &checked.schedule.placement;
        let stops = progress::run(&late, placement, Transport::Rendezvous, &CostModel::unit()).unwrap_err();
        let circle = progress::deadlocks(&late, &stops, Transport::Rendezvous);
        assert!(!circle.is_empty() && circle.iter().all(|fault| fault.code == Code::Deadlock), "{circle:?}");
        assert_eq!(circle[0].message, "ranks 0 and 1 wait for each other");
        assert_eq!(messages::check_on(&late, &checked.schedule.placement, Transport::Edge), []);
        // One channel per boundary and direction, which is what a schedule gets that declares none: it runs to its end.
        let checked = judge(2, 4, shape, body).unwrap();
        assert_eq!(checked.schedule.transport, Transport::Edge);
        let schedule = &checked.schedule;
        let timeline = sim::run(schedule, &Index::new(schedule), &CostModel::unit()).unwrap();
        assert!(timeline.bubble_rate() < 0.5);
    }
}

const ONE_F_ONE_B: &str = "let warm = min(P - 1 - r, M);
    for m in 0..warm { F(r, m); }
    for m in 0..M { if m + warm < M { F(r, m + warm); } B(r, m); }";

// case B32: fewer microbatches than stages is legal where the program says what to do then.
#[test]
fn b32_fewer_microbatches_than_stages() {
    for m in 1..=5 {
        judge(4, m, "", ONE_F_ONE_B).unwrap();
        judge(4, m, "", "for m in 0..M { F(r, m); } for m in 0..M { B(r, m); }").unwrap();
    }
    assert_eq!(refused(Code::NothingToRun, judge(4, 0, "", ONE_F_ONE_B)), ["the schedule has no microbatch"]);
    // Without the bound on the warm-up, microbatches that do not exist are run.
    let unbounded = ONE_F_ONE_B.replace("min(P - 1 - r, M)", "P - 1 - r");
    let messages = refused(Code::OutOfRange, judge(4, 2, "", &unbounded));
    assert_eq!(messages, ["F(0, 2) names microbatch 2, but there are microbatches 0 to 1"]);
}

// case B41: the reduction of a stage while one of its weight gradients is still to come.
#[test]
fn b41_a_reduction_before_the_last_gradient() {
    let early = "F(r, 0); F(r, 1); B(r, 0); I(r, 1); reduce(r); W(r, 1);";
    let messages = refused(Code::ReduceMisplaced, judge(1, 2, "", early));
    assert_eq!(messages, ["reduce(0) runs before W(0, 1), which still adds to the gradient"]);
    judge(1, 2, "", "F(r, 0); F(r, 1); B(r, 0); I(r, 1); W(r, 1); reduce(r);").unwrap();
}

// case B50: a model cut for two stages per rank, a schedule that knows one.
#[test]
fn b50_stages_that_never_run() {
    let messages = refused(Code::ForwardMissing, judge(2, 2, V_SHAPE, ONE_F_ONE_B));
    assert_eq!(messages, ["stage 2 never runs a forward"]); // and stage 3: once more at this place
    let both = "for m in 0..M { F(0, m); F(1, m); } for m in 0..M { B(1, m); B(0, m); }";
    let messages = refused(Code::WrongRank, judge(2, 1, "", both));
    assert!(messages.contains(&"F(1, 0) runs on rank 0, but stage 1 lives on rank 1".to_owned()), "{messages:?}");
}

// case B55: every microbatch contributes once, in whatever order the weight gradients run.
#[test]
fn b55_weight_gradients_in_any_order() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 3, 0]] {
        let works: String = order.iter().map(|m| format!("W(r, {m});")).collect();
        let checked = judge(1, 4, "", &format!("for m in 0..M {{ F(r, m); I(r, m); }} {works}")).unwrap();
        assert!(!checked.order_dependent, "W moves no state");
        let contributions = checked.plan.nodes.iter().filter(|node| node.op == Op::WeightGrad).count();
        assert_eq!(contributions, 4);
    }
    let lost = "for m in 0..M { F(r, m); I(r, m); } W(r, 0);";
    let report = judge(1, 4, "", lost).unwrap_err();
    assert!(report.to_string().contains("no W of stage 0 for microbatch 1, 2 and 3"), "{report}");
}

// case B56: gradients are finished once, after the last of a mix of full and split backwards.
#[test]
fn b56_full_and_split_backwards_mixed() {
    let mixed = "for m in 0..M { F(r, m); } B(r, 0); I(r, 1); I(r, 2); W(r, 2); W(r, 1);";
    let checked = judge(1, 3, "", mixed).unwrap();
    let ops: Vec<(Op, u32)> = checked.plan.nodes.iter().map(|node| (node.op, node.microbatch.0)).collect();
    let reduce = ops.iter().position(|(op, _)| *op == Op::Reduce).unwrap();
    assert_eq!(ops[reduce - 1], (Op::WeightGrad, 1));
    assert_eq!(ops.iter().filter(|(op, _)| *op == Op::Reduce).count(), 1);
    let messages = refused(Code::WorkConsumedTwice, judge(1, 1, "", "F(r, 0); B(r, 0); W(r, 0);"));
    assert_eq!(messages, ["W(0, 0) consumes work that is already consumed"]);
}

// case B31: two ranks that both send first. The verdict is that of the declared transport; a message has no size
// in a schedule, so it cannot depend on one.
#[test]
fn b31_both_ranks_send_first() {
    let judge = |rows: &str, transport: Transport| {
        let raw = read_plan("case", "case.csv", rows).0.unwrap();
        check(raw.schedule.clone(), &Options::AT_START).unwrap();
        messages::check_on(&raw.nodes, &raw.schedule.placement, transport)
    };
    let crossed = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                   1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1";
    let faults = judge(crossed, Transport::Rendezvous);
    assert_eq!(faults.iter().map(|fault| fault.code).collect::<Vec<_>>(), [Code::Deadlock]);
    assert_eq!(faults[0].message, "ranks 0 and 1 wait for each other");
    let labels: Vec<&str> = faults[0].labels.iter().map(|label| label.text.as_ref()).collect();
    assert!(
        labels.iter().any(|text| text.contains("rank 0 stops at 0SEND_F1, waiting for 1RECV_F1 of rank 1")),
        "{labels:?}"
    );
    // In one group the two go on together, whichever rank writes it.
    for (from, to) in
        [("0SEND_F1,0RECV_B0", "(0SEND_F1;0RECV_B0)GROUP"), ("1SEND_B0,1RECV_F1", "(1SEND_B0;1RECV_F1)GROUP")]
    {
        assert_eq!(judge(&crossed.replace(from, to), Transport::Rendezvous), []);
    }
    // A send that does not wait closes no circle.
    assert_eq!(judge(crossed, Transport::Edge), []);
    assert_eq!(judge(crossed, Transport::RankEdge), []);
    // And what is lowered for the blocking stream never needs a group.
    judge_schedule_on_rendezvous();
}

fn judge_schedule_on_rendezvous() {
    for (ranks, microbatches) in [(2, 2), (4, 8)] {
        let checked = judge(ranks, microbatches, "transport: rendezvous;", ONE_F_ONE_B).unwrap();
        let nodes: Vec<Vec<Node>> = (0..ranks as u32).map(|rank| checked.plan.rank(Rank(rank)).to_vec()).collect();
        assert_eq!(messages::check_on(&nodes, &checked.schedule.placement, Transport::Rendezvous), []);
    }
}
