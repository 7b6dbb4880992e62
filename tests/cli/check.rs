//! What is read, and how faults are told.

use crate::command::{Folder, fails, json, out};

#[test]
fn check_draws_faults_with_their_places() {
    let export = "tests/golden/pytorch/1f1b_P2_M4.csv";
    let (text, code) = out(&["schedule", "check", "tests/golden/pytorch/gpipe_P2_M4.csv", export]);
    assert_eq!(code, 1);
    assert!(
        text.contains("gpipe_P2_M4.csv: accepted (compute-only CSV: 2 ranks, 2 stages, 4 microbatches, 16 actions)")
    );
    assert!(text.contains("[QE0604]") && text.contains(&format!("--> {export}:2:25")), "{text}");
    assert!(text.contains("`qeffect explain QE0604` tells more"));
    let (value, code) = json(&["--json", "schedule", "check", export]);
    assert_eq!(code, 1);
    let fault = &value[0]["diagnostics"][0];
    assert_eq!(
        (&fault["code"], &fault["place"]["line"], &fault["place"]["column"]),
        (&"QE0604".into(), &2.into(), &25.into())
    );
    let (_, code) = out(&["schedule", "check", "tests/golden/pytorch/zb_v_P4_M8_V2.comms.csv"]);
    assert_eq!(code, 0);
}

#[test]
fn programs_are_read_with_their_parameters() {
    let folder = Folder::new("programs");
    let text = "pub mine<P, M, X> for (2, 4, 1);\nranks: P; microbatches: M; stages: P; place: |s| s;\nrank |r| {\n    for m in 0..M { F(r, m); }\n    for m in 0..X * M { B(r, m); }\n}\n";
    let file = folder.file("mine.sched", text);
    let (text, code) = out(&["schedule", "check", &file]);
    assert_eq!((code, text.contains("2 ranks, 2 stages, 4 microbatches")), (0, true), "{text}");
    let (text, code) = out(&["schedule", "check", &file, "-p", "3", "-m", "2", "--set", "X=1"]);
    assert_eq!((code, text.contains("3 ranks, 3 stages, 2 microbatches")), (0, true), "{text}");
    let (text, code) = out(&["schedule", "check", &file, "--set", "X=0"]);
    assert_eq!((code, text.contains("[QE0103]")), (1, true), "{text}");
    assert!(text.contains("mine.sched:4:"), "{text}");
    assert!(fails(&["schedule", "check", &file, "--set", "Y=0"], 2).contains("no parameter `Y`"));
    let undeclared = folder.file(
        "bare.sched",
        "bare<P>; ranks: P; microbatches: 1; stages: P; place: |s| s; rank |r| { F(r, 0); B(r, 0); }",
    );
    assert!(fails(&["schedule", "show", &undeclared], 2).contains("give -p N"));
}

#[test]
fn faults_of_a_file_are_told_in_its_words() {
    let folder = Folder::new("words");
    let early = "0F0,0F1,0B0,0REDUCE_GRAD,0B1\n";
    for text in [early.to_owned(), early.replace("0F0,", "0UNSHARD,0F0,")] {
        let (refused, code) = out(&["schedule", "check", &folder.file("early.csv", &text)]);
        assert_eq!(code, 1, "{refused}");
        assert!(refused.contains("0REDUCE_GRAD runs before 0B1, which still adds to the gradient"), "{refused}");
        assert!(refused.contains("move `0REDUCE_GRAD` below the last `I` and `W` of stage 0"), "{refused}");
    }
}

#[test]
fn a_lowered_program_is_judged_on_the_transport_that_is_asked_for() {
    let folder = Folder::new("transport");
    // Both ranks send first: a circle only where a send waits for its receive.
    let crossed = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                   1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    let crossed = folder.file("crossed.csv", crossed);
    let on = |file: &str, transport: &str| out(&["schedule", "check", file, "--transport", transport]);
    for transport in ["edge", "rank_edge"] {
        assert_eq!(on(&crossed, transport).1, 0, "{transport}");
    }
    let (said, code) = on(&crossed, "rendezvous");
    assert_eq!(code, 1);
    assert!(said.contains("QE0401") && said.contains("ranks 0 and 1 wait for each other"), "{said}");
    for transport in ["edge", "rank_edge", "rendezvous"] {
        assert_eq!(on("one_f_one_b", transport).1, 0, "{transport}");
    }
    // In a V two boundaries join the same two ranks: one queue for both cannot serve either order.
    assert_eq!((on("zb_v", "edge").1, on("zb_v", "rendezvous").1), (0, 0));
    let (said, code) = on("zb_v", "rank_edge");
    assert!(code == 1 && said.contains("QE0402"), "{said}");
    let said = fails(&["schedule", "check", "zb_v", "--transport", "pigeon"], 2);
    assert!(said.contains("rank_edge") && said.contains("rendezvous"), "{said}");
}
