//! Text forms: the strict grammar, and round trips.

use super::{is_lowered, read_csv, read_plan, write_comms, write_csv, write_plan};
use crate::check::{Options, check, messages};
use crate::code::Code::{self, *};
use crate::diag::Diagnostic;
use crate::ids::{Microbatch, Rank, Stage};
use crate::lang::{interpret, read};
use crate::plan::{NONE, Node, Op};
use crate::schedule::{Schedule, Transport};

const ZB_H1: &str = "0F0,0F1,0I0,0W0,0I1,0W1\r\n1F0,1I0,1F1,1I1,1W0,1W1\r\n";

fn csv(text: &str) -> Schedule {
    let (schedule, map) = read_csv("t", "t.csv", text);
    schedule.unwrap_or_else(|report| panic!("{}", map.locate(report)))
}

/// The items of a schedule without their places.
fn what(schedule: &Schedule) -> Vec<String> {
    schedule.items.iter().map(|i| format!("{:?} {} {}", i.kind, i.stage, i.microbatch)).collect()
}

#[test]
fn a_schedule_is_read_with_its_placement() {
    let schedule = csv(ZB_H1);
    assert_eq!((schedule.ranks, schedule.stages, schedule.microbatches), (2, 2, 2));
    assert_eq!(*schedule.placement, [Rank(0), Rank(1)]);
    assert_eq!(schedule.rank(Rank(1)).len(), 6);
    assert!(!schedule.eval);
    assert_eq!(write_csv(&schedule).unwrap(), ZB_H1);
    assert!(check(schedule, &Options::AT_START).is_ok());
    assert!(csv("0F0\n1F0\n").eval);
}

#[test]
fn blanks_idle_cells_and_line_ends_mean_nothing() {
    // case B16
    let plain = csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1");
    for text in [
        ZB_H1,
        "0F0, 0F1 ,0I0,0W0,,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n",
        "0F0,0F1,0I0,0W0,0I1,0W1\r\n,,1F0,1I0,\t1F1,1I1,1W0,1W1,,,\r\n\r\n",
    ] {
        let schedule = csv(text);
        assert_eq!(what(&schedule), what(&plain), "{text:?}");
        assert_eq!(schedule.starts, plain.starts);
    }
    assert_eq!(what(&csv("0F0,0B0")), ["Forward 0 0", "FullBackward 0 0"]);
}

/// A file that has some actions of one microbatch more is complete after the fewer edits: without them, or with the rest.
#[test]
fn of_a_last_microbatch_that_is_less_than_half_there_the_actions_are_refused() {
    const STAGES: usize = 3;
    for chosen in 0u32..1 << (2 * STAGES) {
        let rows = (0..STAGES).map(|stage| {
            let more = |bit: usize, letter: &str| match chosen >> (2 * stage + bit) & 1 {
                1 => format!("{stage}{letter}2,"),
                _ => String::new(),
            };
            format!("{stage}F0,{stage}F1,{}{stage}B0,{stage}B1,{}\n", more(0, "F"), more(1, "B"))
        });
        let (read, _) = read_csv("t", "t.csv", &rows.collect::<String>());
        let (take_out, complete) = (chosen.count_ones(), 2 * STAGES as u32 - chosen.count_ones());
        if (1..complete).contains(&take_out) {
            let refused = read.expect_err("to take out is shorter");
            assert_eq!(refused.codes(), vec![OutOfRange; take_out as usize], "{chosen:b}");
        } else {
            assert_eq!(read.expect("every action may be meant").microbatches, if chosen == 0 { 2 } else { 3 });
        }
    }
    let shifted = "0F0,0F1,0B0,0B1\n1F1,1B0,1F2,1B1\n";
    let (refused, map) = read_csv("t", "t.csv", shifted);
    let told = map.locate(refused.expect_err("rank 1 is one microbatch late")).to_string();
    for part in
        ["1F2 names microbatch 2, of which the file has 1 of 4 forwards and backwards", "1F0 is missing", "t.csv:2:9"]
    {
        assert!(told.contains(part), "{told}");
    }
    // Forwards alone, half of the last ones; and no microbatch that more than one stage runs.
    assert_eq!(csv("0F0,0F1\n1F0\n").microbatches, 2);
    assert_eq!(csv("0F0\n1F1\n2F2\n").microbatches, 3);
}

#[test]
fn what_is_no_action_is_refused_with_line_and_column() {
    // case B16
    let cases: &[(&str, Code, &str, &str)] = &[
        ("0f0", Syntax, "`f` is no action here", "did you mean `0F0`?"),
        ("F0", Syntax, "`F0` names no stage", "<stage><type><microbatch>"),
        ("0X0", Syntax, "`X` is no action here", "`F`, `I`, `W`, `B`, `R`"),
        ("0F", Syntax, "`0F` names no microbatch", ""),
        ("0F0xyz", Syntax, "`xyz` behind the action `0F0`", ""),
        ("0F-1", Syntax, "`-1` behind the action", ""),
        ("-1F0", Syntax, "names no stage", ""),
        ("0BW1", Syntax, "`BW` is no action here", ""),
        ("0I0W0", Syntax, "`W0` behind the action `0I0`", ""),
        ("0 F0", Syntax, "names no action", ""),
        ("\"0F0\"", Syntax, "names no stage", ""),
        ("()OVERLAP_F_B", Syntax, "needs two actions", "(0F1;1B0)OVERLAP_F_B"),
        ("(0F0;0B0)F", Syntax, "the name `OVERLAP_F_B`", ""),
        ("0SEND_F0", Syntax, "belongs to a lowered program", "with `read_plan`"),
        ("0UNSHARD", Syntax, "belongs to a lowered program", ""),
        ("COMMIT", Syntax, "`COMMIT` belongs to a lowered program", ""),
        ("(0SEND_F0;0RECV_B0)GROUP", Syntax, "`GROUP` belongs to a lowered program", ""),
        ("0REDUCE_GRAD0", Syntax, "`REDUCE_GRAD` has no microbatch", ""),
        ("0F4294967296", OutOfRange, "microbatch 4294967296 does not exist", ""),
        ("0F900", OutOfRange, "0F900 cannot be", ""),
    ];
    for (bad, code, message, help) in cases {
        let (result, map) = read_csv("t", "t.csv", &format!("0F0,0B0\n0F1,  {bad} ,0B1\n"));
        let report = result.unwrap_err();
        assert_eq!(report.codes(), [*code], "{report}");
        let text = map.locate(report).to_string();
        assert!(text.contains(message) && text.contains(help), "{text}");
        assert!(text.contains("--> t.csv:2:7"), "{text}");
    }
    let (result, _) = read_csv("t", "t.csv", "0F0,0B0\n2F0,2B0\n");
    assert_eq!(result.unwrap_err().codes(), [PlacementInvalid]);
    let (result, _) = read_csv("t", "t.csv", "0F0,f\ng,h,0F1");
    assert_eq!(result.unwrap_err().codes(), [Syntax; 3]);
}

#[test]
fn overlaps_survive_and_the_rest_is_refused() {
    let text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\r\n";
    assert_eq!(write_csv(&csv(text)).unwrap(), text);
    let schedule = |body: &str| {
        let text = format!("t; ranks: 1; stages: 1; microbatches: 2; place: |s| s; rank |r| {{ {body} }}");
        interpret(&read("t", &text).0.unwrap(), &[]).unwrap()
    };
    for body in [
        "refresh(0);",
        "reduce(0);",
        "commit;",
        "R(0, 0);",
        "W(0, [0, 1]);",
        "overlap { { F(0, 0); F(0, 1); } { B(0, 0); } }",
        "overlap { { F(0, 0); } { } }",
    ] {
        let report = write_csv(&schedule(body)).unwrap_err();
        assert!(report.to_string().contains("cannot be written as compute-only CSV"), "{report}");
    }
}

/// Nodes without places, slots and edges.
fn bare(nodes: &[Node]) -> Vec<(Op, Stage, Microbatch)> {
    nodes.iter().map(|n| (n.op, n.stage, n.microbatch)).collect()
}

#[test]
fn a_plan_survives_text() {
    let overlapping = "0F0,0F1,(0F2;0I0)OVERLAP_F_B,0W0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n";
    let v_shaped = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n";
    for text in [ZB_H1, overlapping, v_shaped, "0F0,0F1\n1F0,1F1\n"] {
        let checked = check(csv(text), &Options::AT_START).unwrap();
        let written = write_plan(&checked.plan);
        let (raw, map) = read_plan("t", "t.plan", &written);
        let raw = raw.unwrap_or_else(|report| panic!("{}", map.locate(report)));
        for rank in 0..raw.nodes.len() {
            assert_eq!(bare(&raw.nodes[rank]), bare(checked.plan.rank(Rank(rank as u32))), "{written}");
        }
        assert_eq!(raw.schedule.placement, checked.schedule.placement);
        assert_eq!(messages::check(&raw.nodes, &raw.schedule.placement), [], "{written}");
    }
}

#[test]
fn the_lowered_lines_of_pytorch_are_read() {
    let text = "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD\r\n\
                1UNSHARD,1RECV_F0,1F0,1I0,1SEND_B0,1RECV_F1,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1RESHARD\r\n";
    let (raw, map) = read_plan("t", "t.csv", text);
    let raw = raw.unwrap_or_else(|report| panic!("{}", map.locate(report)));
    assert_eq!(messages::check(&raw.nodes, &raw.schedule.placement), []);
    let wait = (Op::WaitBackward, Stage(0), Microbatch(1));
    let nodes = bare(&raw.nodes[0]);
    let at = nodes.iter().position(|n| *n == wait).unwrap();
    assert_eq!(nodes[at + 1], (Op::InputGrad, Stage(0), Microbatch(1)));
    assert!(raw.nodes[0].iter().all(|n| n.slot == NONE && n.origin.is_some()));
    // A written wait stays where it stands, and no second one is added.
    let early = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0WAIT_B0,0RECV_B1,0I0,0W0,0I1,0W1";
    let (raw, _) = read_plan("t", "t.csv", early);
    let ops: Vec<Op> = raw.unwrap().nodes[0].iter().map(|n| n.op).collect();
    assert_eq!(ops.iter().filter(|op| **op == Op::WaitBackward).count(), 2);
    assert_eq!(ops[5..8], [Op::WaitBackward, Op::PostBackward, Op::InputGrad]);
}

#[test]
fn swapped_receives_are_found() {
    let text = "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n";
    let (raw, map) = read_plan("t", "t.csv", text);
    let raw = raw.unwrap();
    let faults: Vec<Diagnostic> = messages::check(&raw.nodes, &raw.schedule.placement);
    assert_eq!(faults[0].code, FifoOrder);
    let place = map.start(faults[0].primary.origin).unwrap();
    assert_eq!(place.line, 2);
    for (bad, message) in
        [("0F0,,0I0", "an empty cell"), ("0SEND_F", "names no microbatch"), ("0REFRESH1", "has no microbatch")]
    {
        let (raw, map) = read_plan("t", "t.csv", bad);
        let text = map.locate(raw.unwrap_err()).to_string();
        assert!(text.contains(message), "{text}");
    }
}

#[test]
fn reductions_as_newer_exports_have_them() {
    let text = "0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\n";
    let schedule = csv(text);
    assert_eq!(what(&schedule)[..3], ["Forward 0 0", "FullBackward 0 0", "Reduce 0 0"]);
    let checked = check(schedule, &Options::AT_START).expect("a reduction after the last gradient");
    // Where lowering would put it, it need not be written.
    assert_eq!(write_csv(&checked.schedule).expect("writable"), "0F0,0B0\r\n1F0,1B0\r\n");
    let early = check(csv("0F0,0F1,0B0,0REDUCE_GRAD,0B1"), &Options::AT_START).expect_err("a gradient follows");
    assert_eq!(early.codes(), [ReduceMisplaced]);
}

#[test]
fn a_lowered_text_is_told_by_any_word_of_its_own() {
    for cell in [
        "0UNSHARD",
        "0RESHARD",
        "0REFRESH",
        "1WAIT_F0",
        "1WAIT_B0",
        "0SEND_F0",
        "0RECV_B12",
        "0WAIT_SEND_F0",
        "0JOIN1",
        "AGREE",
        "COMMIT",
        "OVERLAP",
        "(0SEND_F1;0RECV_B0)GROUP",
        " 0UNSHARD ",
    ] {
        assert!(is_lowered(&format!("0F0,{cell},0B0\r\n")), "{cell}");
        assert!(is_lowered(&format!("0F0\r\n{cell}")), "{cell}");
    }
    for text in ["", ZB_H1, "0F0,(0F1;0B0)OVERLAP_F_B,0R1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n", "0F0,0FOO,0SENDING0"] {
        assert!(!is_lowered(text), "{text:?}");
    }
}

#[test]
fn sharding_encloses_what_a_stage_computes() {
    let read = |text: &str| {
        let (raw, map) = read_plan("t", "t.csv", text);
        raw.map(drop).map_err(|report| (report.codes(), map.locate(report).to_string()))
    };
    for good in [
        "0UNSHARD,0F0,0B0,0RESHARD",
        "0UNSHARD,0F0,0B0",
        "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD",
        "0F0,0B0,0REFRESH",
        "0UNSHARD,1UNSHARD,0F0,1F0,0F1,(1F1;1I0)OVERLAP_F_B,1RESHARD,0B0,0RESHARD",
    ] {
        assert_eq!(read(good), Ok(()), "{good}");
    }
    let cases: &[(&str, &str, &str)] = &[
        ("0F0,0UNSHARD,0B0", "`0F0` runs before stage 0 is unsharded", "t.csv:1:1"),
        ("0UNSHARD,0F0,0B0\n1F0,1B0", "`1F0` runs before stage 1 is unsharded", "t.csv:2:1"),
        ("0UNSHARD,0F0,0I0,0RESHARD,0W0", "`0W0` runs after stage 0 is resharded", "t.csv:1:27"),
        ("0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,1F0,0B1", "`1F0` runs before stage 1", "t.csv:1:35"),
        ("0UNSHARD,0F0,1UNSHARD,0RESHARD,(1F0;0B0)OVERLAP_F_B", "`0B0` runs after stage 0", "t.csv:1:32"),
        ("0UNSHARD,0UNSHARD,0F0", "`0UNSHARD` stands where stage 0 is unsharded", "t.csv:1:10"),
        ("0UNSHARD,0F0,0RESHARD,0RESHARD", "`0RESHARD` stands where stage 0 is sharded", "t.csv:1:23"),
        ("0RESHARD,0UNSHARD,0F0", "`0RESHARD` stands where stage 0 is sharded", "t.csv:1:1"),
    ];
    for (bad, message, place) in cases {
        let (codes, text) = read(bad).expect_err(bad);
        assert_eq!(codes, [ShardMisplaced], "{bad}: {text}");
        assert!(text.contains(message) && text.contains(place), "{bad}: {text}");
    }
}

#[test]
fn a_file_that_reduces_some_stage_reduces_all() {
    let text = "0F0,0B0,0REDUCE_GRAD\n1F0,1I0,1W0\n";
    for report in [read_csv("t", "t.csv", text).0.map(drop), read_plan("t", "t.csv", text).0.map(drop)] {
        let report = report.expect_err("stage 1 has no reduction");
        assert_eq!(report.codes(), [ReduceMisplaced]);
        assert!(report.to_string().contains("stage 1 has no `1REDUCE_GRAD`"), "{report}");
    }
    // Stages that have no gradients have none to reduce.
    assert!(read_csv("t", "t.csv", "0F0,0F1\n1F0,1F1\n").0.is_ok());
}

#[test]
fn what_pytorch_loads_has_its_words_and_none_of_ours() {
    let checked = check(csv(ZB_H1), &Options::AT_START).unwrap();
    let text = "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0WAIT_SEND_F0,0W0,0RECV_B1,0I1,0WAIT_SEND_F1,0W1,\
                0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\r\n\
                1RECV_F0,1RECV_F1,1UNSHARD,1F0,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,\
                1RESHARD,1WAIT_SEND_B0,1WAIT_SEND_B1\r\n";
    assert_eq!(write_comms(&checked).unwrap(), text);
    // Two stages per rank, an overlap around the last action of one of them.
    let text = "0F0,0F1,3F0,3B0,3F1,0F2,(3F2;0B0)OVERLAP_F_B,3B1,3B2,0B1,0B2\n1F0,2F0,1F1,2F1,2B0,1B0,1F2,2F2,2B1,2B2,1B1,1B2\n";
    let checked = check(csv(text), &Options::AT_START).unwrap();
    let written = write_comms(&checked).unwrap();
    assert!(written.contains(",(3F2;0B0)OVERLAP_F_B,0WAIT_SEND_F0,"), "{written}");
    let (raw, map) = read_plan("t", "t.csv", &written);
    let raw = raw.unwrap_or_else(|report| panic!("{}", map.locate(report)));
    assert_eq!(messages::check_on(&raw.nodes, &raw.schedule.placement, Transport::Rendezvous), [], "{written}");
    let back = check(raw.schedule, &Options::AT_START).unwrap();
    assert_eq!(write_plan(&back.plan), write_plan(&checked.plan));
}

#[test]
fn what_pytorch_cannot_say_is_refused_with_the_reason() {
    let written = |header: &str, body: &str| {
        let text = format!("t; {header} ranks: 1; stages: 1; microbatches: 2; place: |s| s; rank |r| {{ {body} }}");
        let schedule = interpret(&read("t", &text).0.unwrap(), &[]).unwrap();
        write_comms(&check(schedule, &Options::AT_START).unwrap())
    };
    let cases = [
        ("", "F(0, 0); R(0, 0); B(0, 0); F(0, 1); B(0, 1);", "no recomputation"),
        ("", "F(0, 0); F(0, 1); I(0, 0); I(0, 1); W(0, [0, 1]);", "no coalesced weight gradient"),
        ("", "F(0, 0); overlap { { B(0, 0); } { F(0, 1); } } B(0, 1);", "one forward, then one `I` or `B`"),
        ("", "F(0, 0); I(0, 0); overlap { { F(0, 1); } { W(0, 0); } } B(0, 1);", "one forward, then one `I` or `B`"),
        ("", "F(0, 0); overlap { { F(0, 1); } { I(0, 0); W(0, 0); } } B(0, 1);", "one forward, then one `I` or `B`"),
        ("eval;", "F(0, 0); F(0, 1);", "without backward"),
    ];
    for (header, body, why) in cases {
        let report = written(header, body).expect_err(body);
        assert!(report.codes() == [Syntax] && report.to_string().contains(why), "{body}: {report}");
    }
    // Bookkeeping that is written is no part of the format: it is left out, a reduction keeps its place.
    let explicit = written("", "refresh(0); F(0, 0); B(0, 0); F(0, 1); B(0, 1); reduce(0); commit;").unwrap();
    assert_eq!(explicit, "0UNSHARD,0F0,0B0,0F1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\r\n");
}
