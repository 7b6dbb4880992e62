//! From one format to another and back, and what differs between two schedules.

use crate::command::{Folder, fails, json, out, with_input};

#[test]
fn conversions_go_round() {
    let folder = Folder::new("conversions");
    let (csv, lowered, json_file) = (folder.path("a.csv"), folder.path("b.csv"), folder.path("c.json"));
    assert_eq!(out(&["schedule", "convert", "zb_h1", "-p", "4", "-m", "8", "-o", &csv]).1, 0);
    assert_eq!(out(&["schedule", "convert", &csv, "--to", "lowered", "-o", &lowered]).1, 0);
    assert_eq!(out(&["schedule", "convert", &lowered, "-o", &json_file]).1, 0);
    for file in [&csv, &lowered, &json_file] {
        let (text, code) = out(&["schedule", "diff", "zb_h1", file]);
        assert_eq!(code, 0, "{text}");
        assert!(text.contains("every rank runs the same actions in the same order"));
    }
    let text = std::fs::read_to_string(&csv).expect("written");
    assert_eq!(
        text.lines().next(),
        Some("0F0,0F1,0F2,0F3,0I0,0W0,0F4,0I1,0W1,0F5,0I2,0W2,0F6,0I3,0W3,0F7,0I4,0W4,0I5,0W5,0I6,0W6,0I7,0W7")
    );
    let (accepted, code) = with_input(&["schedule", "check", "-"], &text);
    assert_eq!((code, accepted.contains("-: accepted (compute-only CSV")), (0, true), "{accepted}");
    let asked = fails(&["schedule", "convert", &csv], 2);
    assert!(asked.contains("--to pytorch, pytorch-comms, lowered or json"), "{asked}");
    // `csv` is another word for `pytorch`.
    assert_eq!(out(&["schedule", "convert", "zb_h1", "-p", "4", "-m", "8", "--to", "csv"]), (text, 0));
}

#[test]
fn programs_for_pytorch_read_back() {
    let folder = Folder::new("pytorch");
    let file = folder.path("dual.csv");
    let size = ["-p", "2", "-m", "4"];
    let convert = ["schedule", "convert", "dualpipe_v", "--to", "pytorch-comms", "-o", &file];
    assert_eq!(out(&[&convert[..], &size].concat()).1, 0);
    let text = std::fs::read_to_string(&file).expect("written");
    assert!(text.starts_with("0UNSHARD,") && text.contains("OVERLAP_F_B") && !text.contains("REFRESH"), "{text}");
    let (text, code) = out(&[&["schedule", "diff", "dualpipe_v", &file][..], &size].concat());
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("every rank runs the same actions in the same order"), "{text}");
    for transport in ["edge", "rendezvous"] {
        assert_eq!(out(&["schedule", "check", &file, "--transport", transport]).1, 0, "{transport}");
    }
    let refused = fails(&["schedule", "convert", "eval", "--to", "pytorch-comms"], 1);
    assert!(refused.contains("QE0701") && refused.contains("without backward"), "{refused}");
}

#[test]
fn a_lowered_program_of_one_rank_is_known_as_one() {
    let folder = Folder::new("one_rank");
    let mut seen = 0;
    for entry in qeffect_schedules::library().iter().chain(qeffect_schedules::further()).filter(|entry| !entry.eval) {
        // Some need a rank for each arm of their shape, or more microbatches.
        if entry.checked(1, 4).is_err() {
            continue;
        }
        let (lowered, back) = (folder.path(&format!("{}.csv", entry.name)), folder.path("back.json"));
        let size = ["-p", "1", "-m", "4"];
        let to_lowered = ["schedule", "convert", entry.name, "--to", "lowered", "-o", &lowered];
        assert_eq!(out(&[&to_lowered[..], &size].concat()).1, 0, "{}", entry.name);
        let (accepted, code) = out(&["schedule", "check", &lowered]);
        assert_eq!((code, accepted.contains("accepted (lowered program")), (0, true), "{}: {accepted}", entry.name);
        assert_eq!(out(&["schedule", "convert", &lowered, "-o", &back]).1, 0, "{}", entry.name);
        let (text, code) = out(&[&["schedule", "diff", entry.name, &back][..], &size].concat());
        assert_eq!(code, 0, "{text}");
        seen += 1;
    }
    assert!(seen >= 10, "{seen}");
    let sharded = folder.file("sharded.csv", "0UNSHARD,0F0,0B0,0RESHARD\n");
    assert_eq!(out(&["schedule", "check", &sharded]).1, 0);
}

#[test]
fn diff_tells_what_changes() {
    let (text, code) = out(&["schedule", "diff", "one_f_one_b", "zb_h1", "-p", "4", "-m", "8"]);
    assert_eq!(code, 1);
    assert!(text.contains("makespan                     33     27      -6"), "{text}");
    let folder = Folder::new("diff");
    let page = folder.path("page.html");
    let (value, _) = json(&["--json", "schedule", "diff", "gpipe", "one_f_one_b", "-o", &page]);
    assert_eq!((&value["same"], &value["metrics"]["peak_slots"]["before"]), (&false.into(), &8.into()));
    assert!(std::fs::read_to_string(&page).expect("written").contains("one_f_one_b(P = 4, M = 8)"));
    // Rank 3 of GPipe runs F1 to F7 before B0, of 1F1B after.
    assert_eq!(value["ranks"][3][0]["removed"][0], "3F1");
    let (text, _) = out(&["schedule", "diff", "gpipe", "zb_v"]);
    assert!(text.contains("stage 4: no rank to rank 3"), "{text}");
}
