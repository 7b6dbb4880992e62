//! Messages of overlaps: whatever runs at once inside, every channel has the written order.
#![allow(missing_docs)]

mod common;

use std::collections::BTreeMap;

use common::interleavings::{Truth, acts, brute_force, programs};
use common::{Rng, legal, overlapping};
use qeffect_core::action::Kind;
use qeffect_core::check::{Options, check, messages, progress};
use qeffect_core::code::Code;
use qeffect_core::diag::Report;
use qeffect_core::index::Index;
use qeffect_core::lang;
use qeffect_core::plan::{Checked, Node, Op};
use qeffect_core::schedule::Transport::{Edge, RankEdge, Rendezvous};
use qeffect_core::sim::{self, CostModel};
use qeffect_core::text::{read_plan, write_plan};

fn judged(text: &str) -> Result<Checked, Report> {
    let program = lang::read("overlaps.sched", text).0.unwrap();
    check(lang::interpret(&program, &[]).unwrap(), &Options::AT_START)
}

/// Two forwards at once on one edge: the first message of the edge is that of the branch written first.
#[test]
fn sends_leave_after_the_block_and_waits_stand_before_it() {
    let two = |body: &str| {
        let header = "t; ranks: 2; microbatches: 2; stages: 2; place: |s| s; update: step; rank |r| {";
        write_plan(&judged(&format!("{header} {body} for m in 0..2 {{ B(r, m); }} }}")).unwrap().plan)
    };
    let rank_0 = "0RECV_B0,0REFRESH,OVERLAP,BRANCH,0F0,BRANCH,0F1,OVERLAP_END,0SEND_F0,0SEND_F1,0B0,0RECV_B1,0B1,\
                  0REDUCE_GRAD,AGREE,COMMIT";
    let rank_1 = "1RECV_F0,1RECV_F1,1REFRESH,OVERLAP,BRANCH,1F0,BRANCH,1F1,OVERLAP_END,1B0,1SEND_B0,1B1,1SEND_B1,\
                  1REDUCE_GRAD,AGREE,COMMIT";
    let plan = two("overlap { { F(r, 0); } { F(r, 1); } }");
    assert_eq!(plan.lines().collect::<Vec<_>>(), [rank_0, rank_1], "waits before the block are implied");
    let swapped = two("overlap { { F(r, 1); } { F(r, 0); } }");
    assert!(swapped.contains("OVERLAP_END,0SEND_F1,0SEND_F0,"), "{swapped}");
    assert!(swapped.contains("1RECV_F1,1RECV_F0,1REFRESH,OVERLAP,"), "{swapped}");
}

/// On a channel that two boundaries share, an overlap sends and takes in written order.
#[test]
fn a_shared_channel_has_the_written_order_of_the_branches() {
    let judged = |sender: &str, receiver: &str| {
        let header = "t; ranks: 2; microbatches: 2; stages: 4; place: |s| s % 2; update: step; transport: rank_edge;";
        let back = "B(2, 0); B(2, 1); B(0, 0); B(0, 1);";
        judged(&format!(
            "{header} rank |r| {{
                if r == 0 {{ F(0, 0); {sender} F(2, 1); {back} }}
                else {{ F(1, 0); {receiver} F(3, 1); B(3, 0); B(3, 1); B(1, 0); B(1, 1); }}
            }}"
        ))
    };
    let (sends, swapped_sends) = ("overlap { { F(0, 1); } { F(2, 0); } }", "overlap { { F(2, 0); } { F(0, 1); } }");
    let (takes, swapped_takes) = ("F(1, 1); F(3, 0);", "F(3, 0); F(1, 1);");
    let (at_once, swapped_at_once) = ("overlap { { F(1, 1); } { F(3, 0); } }", "overlap { { F(3, 0); } { F(1, 1); } }");
    for (sender, receivers, mistaken) in [
        (sends, [takes, at_once], [swapped_takes, swapped_at_once]),
        (swapped_sends, [swapped_takes, swapped_at_once], [takes, at_once]),
    ] {
        for receiver in receivers {
            let checked = judged(sender, receiver).unwrap_or_else(|report| panic!("{sender} {receiver}: {report}"));
            let (programs, placement) = (programs(&checked.plan, 2), &checked.schedule.placement);
            assert_eq!(messages::check_on(&programs, placement, RankEdge), [], "{}", write_plan(&checked.plan));
            assert_eq!(brute_force(&programs, placement, RankEdge), Truth::Finishes);
        }
        for receiver in mistaken {
            let report = judged(sender, receiver).unwrap_err();
            assert_eq!(report.codes(), [Code::FifoOrder], "{sender} {receiver}");
        }
    }
}

#[test]
fn written_messages_inside_an_overlap_are_refused() {
    let faults = |rank_0: &str| {
        let text = format!("{rank_0},0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n");
        let raw = read_plan("t", "t.plan", &text).0.unwrap();
        let found = messages::check(&raw.nodes, &raw.schedule.placement);
        found.into_iter().map(|fault| (fault.code, fault.message.to_string())).collect::<Vec<_>>()
    };
    assert_eq!(faults("OVERLAP,BRANCH,0F0,BRANCH,0F1,OVERLAP_END,0SEND_F0,0SEND_F1"), []);
    let early =
        |node: &str| (Code::MessageEarly, format!("{node} is sent inside an overlap, whose branches may run at once"));
    let inside = faults("OVERLAP,BRANCH,0F0,0SEND_F0,BRANCH,0F1,0SEND_F1,OVERLAP_END");
    assert_eq!(inside, [early("0SEND_F0"), early("0SEND_F1")]);
}

/// Random overlaps on every transport: nothing of a channel stands in a block, all interleavings finish, text
/// gives the plan back, and playing the lowered program takes as long as the schedule.
#[test]
fn a_block_is_lowered_as_it_is_simulated() {
    let mut accepted: BTreeMap<String, usize> = BTreeMap::new();
    for seed in 0..1500 {
        let mut rng = Rng(seed ^ 0x0B10C);
        let (ranks, virtual_stages) = [(2, 1), (2, 2), (3, 1)][rng.below(3)];
        let microbatches = 2 + rng.below(2);
        let mut schedule = overlapping(&mut rng, &legal(&mut Rng(seed), ranks, virtual_stages, microbatches));
        schedule.transport = [Edge, RankEdge, Rendezvous][rng.below(3)];
        if !schedule.items.iter().any(|item| item.kind == Kind::OverlapBegin) {
            continue;
        }
        let transport = schedule.transport;
        let Ok(checked) = check(schedule, &Options::AT_START) else { continue };
        let schedule = &checked.schedule;
        let (programs, placement) = (programs(&checked.plan, schedule.ranks), &schedule.placement);
        for program in &programs {
            let mut inside = false;
            for node in program {
                inside = node.op == Op::OverlapBegin || (inside && node.op != Op::OverlapEnd);
                let computes = matches!(node.op, Op::Forward | Op::InputGrad | Op::FullBackward);
                assert!(!inside || computes || acts(node, schedule.stages).is_empty(), "seed {seed}: {node:?}");
            }
        }
        assert_eq!(messages::check_on(&programs, placement, transport), [], "seed {seed}, {transport:?}");
        assert_eq!(brute_force(&programs, placement, transport), Truth::Finishes, "seed {seed}, {transport:?}");
        let read = read_plan("t", "t.plan", &write_plan(&checked.plan)).0.unwrap();
        let bare = |programs: &[Vec<Node>]| {
            let node = |node: &Node| (node.op, node.stage, node.microbatch);
            programs.iter().map(|program| program.iter().map(node).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        assert_eq!(bare(&read.nodes), bare(&programs), "seed {seed}");
        if transport != Rendezvous {
            let mut costs = CostModel::unit();
            costs.stages[0].f = 1 + rng.below(4) as i64;
            costs.latency = rng.below(3) as i64;
            let timeline = sim::run(schedule, &Index::new(schedule), &costs).unwrap();
            let clocks = progress::run(&programs, placement, transport, &costs).unwrap();
            let both = [(clocks.bubble(), clocks.idle()), (timeline.bubble(), timeline.idle())];
            assert_eq!(both[0], both[1], "seed {seed}");
        }
        *accepted.entry(format!("{transport:?}")).or_default() += 1;
    }
    assert!(accepted.len() == 3 && accepted.values().all(|n| *n > 40), "{accepted:?}");
}
