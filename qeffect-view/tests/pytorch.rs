//! Every schedule that PyTorch ships, as it exports it (`scripts/pytorch_schedules.py`): read,
//! checked, and equal to ours where both exist.

use std::path::PathBuf;

use qeffect_core::check::{Options, check, messages};
use qeffect_core::code::Code;
use qeffect_core::diag::Report;
use qeffect_core::ids::Rank;
use qeffect_core::plan::Checked;
use qeffect_core::schedule::Costs;
use qeffect_core::schedule::{Schedule, Transport};
use qeffect_core::sim::CostModel;
use qeffect_core::text::{read_csv, read_plan, write_comms, write_csv, write_plan};
use qeffect_view::Scene;
use qeffect_view::report::plain;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/pytorch")
}

/// Names of all golden files with that ending, without it.
fn names(ending: &str) -> Vec<String> {
    let files = std::fs::read_dir(folder()).expect("the golden files are there");
    let mut names: Vec<String> = files
        .filter_map(|file| file.ok()?.file_name().to_str()?.strip_suffix(ending).map(str::to_owned))
        .filter(|name| !name.contains('.'))
        .collect();
    names.sort();
    names
}

fn text(file: &str) -> String {
    std::fs::read_to_string(folder().join(file)).expect("the golden file is there")
}

fn read(name: &str) -> (Result<Checked, Report>, String) {
    let (schedule, map) = read_csv(name, &format!("{name}.csv"), &text(&format!("{name}.csv")));
    let checked = schedule.and_then(|schedule| check(schedule, &Options::AT_START));
    let drawn = checked.as_ref().err().map_or(String::new(), |report| plain(report, &map));
    (checked, drawn)
}

fn accepted(name: &str) -> Checked {
    let (checked, drawn) = read(name);
    checked.unwrap_or_else(|_| panic!("{drawn}"))
}

/// The actions of each rank, without bookkeeping.
fn actions(schedule: &Schedule) -> Vec<Vec<String>> {
    let of = |rank| schedule.rank(Rank(rank)).iter().filter(|i| i.kind.is_compute()).map(|i| i.to_string()).collect();
    (0..schedule.ranks).map(of).collect()
}

#[test]
fn every_export_passes_the_checker_but_one() {
    let names = names(".csv");
    assert!(names.len() >= 17, "{names:?}");
    for name in names {
        let (checked, drawn) = read(&name);
        if name.starts_with("1f1b") {
            // Its last rank runs every forward one microbatch too late: F1 to F(M), never F0.
            let codes = checked.expect_err("PyTorch's export of 1F1B is wrong").codes();
            assert_eq!(codes, [Code::OutOfRange], "{drawn}");
            let [late, first] = if name == "1f1b_P2_M4" { ["1F4", "1F0"] } else { ["3F8", "3F0"] };
            assert!(drawn.contains(&format!("{late} names microbatch")), "{drawn}");
            assert!(drawn.contains(&format!("{first} is missing")), "{drawn}");
            assert!(drawn.contains(&format!("{name}.csv:")), "{drawn}");
            continue;
        }
        let checked = checked.unwrap_or_else(|_| panic!("{drawn}"));
        // Written again, it reads the same.
        let again = write_csv(&checked.schedule).expect("it came from this format");
        let (back, _) = read_csv(&name, "again.csv", &again);
        assert_eq!(actions(&back.expect("what is written reads")), actions(&checked.schedule));
    }
}

#[test]
fn every_lowered_export_has_right_communication() {
    let names = names(".comms.csv");
    assert!(names.len() >= 13, "{names:?}");
    for name in names {
        let file = format!("{name}.comms.csv");
        let (raw, map) = read_plan(&name, &file, &text(&file));
        let raw = raw.unwrap_or_else(|report| panic!("{}", plain(&report, &map)));
        let placement = raw.schedule.placement.clone();
        let checked = check(raw.schedule, &Options::AT_START).unwrap_or_else(|r| panic!("{}", plain(&r, &map)));
        let faults = messages::check(&raw.nodes, &placement);
        assert!(faults.is_empty(), "{}", plain(&Report::from_faults(faults), &map));
        // Both files of a schedule hold the same actions.
        assert_eq!(actions(&checked.schedule), actions(&accepted(&name).schedule), "{name}");
        // Our own lowering of it reads back and passes the same check.
        let (ours, map) = read_plan(&name, "ours.csv", &write_plan(&checked.plan));
        let ours = ours.unwrap_or_else(|report| panic!("{}", plain(&report, &map)));
        let faults = messages::check(&ours.nodes, &placement);
        assert!(faults.is_empty(), "{}", plain(&Report::from_faults(faults), &map));
    }
}

#[test]
fn exports_equal_ours_where_both_exist() {
    use qeffect_schedules::{dualpipe_v, gpipe, interleaved_1f1b, interleaved_zb, looped_bfs, zb_v};
    type Build = fn() -> Result<Checked, Report>;
    let cases: &[(&str, Build)] = &[
        ("gpipe_P2_M4", || gpipe::build(2, 4)),
        ("gpipe_P4_M8", || gpipe::build(4, 8)),
        ("interleaved_1f1b_P2_M4_V2", || interleaved_1f1b::build(2, 4, 2)),
        ("interleaved_1f1b_P4_M8_V2", || interleaved_1f1b::build(4, 8, 2)),
        ("interleaved_1f1b_P4_M8_V3", || interleaved_1f1b::build(4, 8, 3)),
        ("interleaved_1f1b_P4_M10_V2", || interleaved_1f1b::build(4, 10, 2)),
        ("interleaved_zb_P2_M4_V2", || interleaved_zb::build(2, 4, 2)),
        ("interleaved_zb_P4_M8_V2", || interleaved_zb::build(4, 8, 2)),
        ("looped_bfs_P2_M4_V2", || looped_bfs::build(2, 4, 2)),
        ("looped_bfs_P4_M8_V2", || looped_bfs::build(4, 8, 2)),
        ("dualpipe_v_P2_M4_V2", || dualpipe_v::build(2, 4)),
        ("dualpipe_v_P4_M8_V2", || dualpipe_v::build(4, 8)),
        ("zb_v_P2_M4_V2", || zb_v::build(2, 4)),
        ("zb_v_P4_M8_V2", || zb_v::build(4, 8)),
        ("zb_v_P4_M4_V2", || zb_v::build(4, 4)),
    ];
    for (name, ours) in cases {
        let (theirs, ours) = (accepted(name).schedule, ours().expect("the library is right").schedule);
        assert_eq!(theirs.placement, ours.placement, "{name}");
        assert_eq!(actions(&theirs), actions(&ours), "{name}");
    }
}

/// Sizes at which every training schedule of the library is written for PyTorch.
const SIZES: &[(i64, i64)] = &[(1, 3), (2, 4), (3, 7), (4, 8), (5, 12)];

#[test]
fn the_library_goes_to_pytorch_and_back() {
    let mut seen = 0;
    for entry in qeffect_schedules::library().iter().chain(qeffect_schedules::further()).filter(|entry| !entry.eval) {
        for (ranks, microbatches) in SIZES.iter().copied() {
            // Not every schedule has every size.
            let Ok(checked) = entry.checked(ranks, microbatches) else { continue };
            let what = format!("{} {ranks} {microbatches}", entry.name);
            let text = write_comms(&checked).unwrap_or_else(|report| panic!("{what}: {report}"));
            let (raw, map) = read_plan(entry.name, "ours.csv", &text);
            let raw = raw.unwrap_or_else(|report| panic!("{what}: {}", plain(&report, &map)));
            // Its sends and receives meet in order, and also run where sends hold nobody up.
            for transport in [Transport::Rendezvous, Transport::Edge] {
                let faults = messages::check_on(&raw.nodes, &raw.schedule.placement, transport);
                assert!(faults.is_empty(), "{what}: {}", plain(&Report::from_faults(faults), &map));
            }
            assert_eq!(raw.schedule.placement, checked.schedule.placement, "{what}");
            let back =
                check(raw.schedule, &Options::AT_START).unwrap_or_else(|r| panic!("{what}: {}", plain(&r, &map)));
            assert_eq!(actions(&back.schedule), actions(&checked.schedule), "{what}");
            assert_eq!(back.plan.nodes.len(), checked.plan.nodes.len(), "{what}");
            seen += 1;
        }
    }
    assert!(seen >= 40, "{seen}");
}

/// What we write for PyTorch, kept as files: `scripts/pytorch_schedules.py` loads each of them with PyTorch itself.
/// `BLESS=1` writes them.
#[test]
fn what_pytorch_was_shown_to_load_is_what_we_write() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/pytorch_comms");
    for (name, ranks, microbatches) in [
        ("gpipe", 2, 4),
        ("one_f_one_b", 4, 8),
        ("interleaved_1f1b", 2, 4),
        ("zb_h1", 4, 8),
        ("zb_v", 2, 4),
        ("v_half", 4, 8),
        ("dualpipe_v", 2, 4),
        ("kimi_k2", 2, 4),
    ] {
        let entry = qeffect_schedules::by_name(name).expect("a name of the library");
        let checked = entry.checked(ranks, microbatches).expect("the library is right");
        let text = write_comms(&checked).expect("PyTorch has words for it");
        let path = folder.join(format!("{name}_P{ranks}_M{microbatches}.csv"));
        if std::env::var_os("BLESS").is_some() {
            std::fs::create_dir_all(&folder).expect("writable");
            std::fs::write(&path, &text).expect("writable");
        }
        assert_eq!(std::fs::read_to_string(&path).expect("the golden file is there"), text, "{name}");
    }
}

/// Bubbles and peaks that are known of these schedules.
#[test]
fn exports_have_the_bubbles_and_peaks_that_theory_gives() {
    let scene = |name: &str, f, i, w| Scene::new(&accepted(name), &CostModel::uniform(Costs { f, i, w }));
    let peaks = |scene: &Scene| scene.peaks.iter().map(|p| p.slots).collect::<Vec<_>>();
    for (f, i, w) in [(1, 1, 1), (4, 5, 3), (10, 12, 7)] {
        let gpipe = scene("gpipe_P4_M8", f, i, w);
        assert_eq!((gpipe.bubble, peaks(&gpipe)), (3 * (f + i + w), vec![8; 4]));
        let bfs = scene("looped_bfs_P4_M8_V2", f, i, w);
        assert_eq!((bfs.bubble, peaks(&bfs)), (3 * (f + i + w), vec![16; 4]));
        let interleaved = scene("interleaved_1f1b_P4_M8_V2", f, i, w);
        assert_eq!((interleaved.bubble, peaks(&interleaved)), (3 * (f + i + w), vec![11, 9, 7, 5]));
        let zero = scene("interleaved_zb_P4_M8_V2", f, i, w);
        assert_eq!((zero.bubble, peaks(&zero)), (3 * (f + i - w), vec![8; 4]));
    }
    let zb_v = scene("zb_v_P4_M8_V2", 1, 1, 1);
    assert_eq!((zb_v.bubble, zb_v.idle, peaks(&zb_v)), (3, 0, vec![8; 4]));
    let dual = scene("dualpipe_v_P4_M8_V2", 1, 1, 1);
    assert_eq!((dual.makespan, dual.bubble, dual.idle, peaks(&dual)), (54, 6, 6, vec![9; 4]));
}

/// What PyTorch's own loader takes although it is wrong: refused, each with its code.
#[test]
fn what_pytorch_accepts_although_it_is_wrong() {
    let cases: &[(&str, &str, Code)] = &[
        ("F twice", "0F0,0F0,0B0", Code::ForwardRepeated),
        ("I twice", "0F0,0I0,0I0,0W0", Code::TapeConsumedTwice),
        ("W twice", "0F0,0I0,0W0,0W0", Code::WorkConsumedTwice),
        ("B twice", "0F0,0B0,0B0", Code::TapeConsumedTwice),
        ("B and I+W for one microbatch, nothing for the other", "0F0,0F1,0B0,0I0,0W0", Code::TapeConsumedTwice),
        ("microbatch out of range", "0F0,0F7,0B0,0B7", Code::OutOfRange),
        ("microbatch missing from a name", "0F0,0F,0B0,0B", Code::Syntax),
        ("junk after an action", "0F0xyz,0B0", Code::Syntax),
        ("two actions in one cell", "0F0,0I0W0", Code::Syntax),
        ("a type that does not exist", "0FOO,0B0", Code::Syntax),
        ("negative microbatch", "0F-1,0B0", Code::Syntax),
        ("a container without parts", "0F0,()OVERLAP_F_B,0B0", Code::Syntax),
        ("a container of another name", "(0F0)F,0B0", Code::Syntax),
        ("parts of an overlap that depend on each other", "(0F0;0B0)OVERLAP_F_B", Code::OverlapDependent),
        ("communication in a compute-only file", "0F0,0SEND_F0,0B0\n1F0,1B0", Code::Syntax),
        ("a cycle of waits", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", Code::Deadlock),
        ("a stage on two ranks", "0F0,0B0\n0F1,0B1,1F0,1B0", Code::WrongRank),
        ("a blank line is a rank without a stage", "0F0,0B0\n\n1F0,1B0", Code::PlacementInvalid),
    ];
    for (what, text, code) in cases {
        let (schedule, map) = read_csv("t", "t.csv", text);
        let report = schedule.and_then(|s| check(s, &Options::AT_START)).expect_err(what);
        assert!(report.codes().contains(code), "{what}: {}", plain(&report, &map));
    }
    let good =
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1";
    let lowered: &[(&str, &str, &str, Code)] = &[
        ("swapped receives", "1RECV_F0,1F0,1RECV_F1,", "1RECV_F1,1RECV_F0,1F0,", Code::FifoOrder),
        ("a receive that is missing", "0RECV_B1,", "", Code::MessageMissing),
        ("a send that is missing", ",1SEND_B1", "", Code::MessageMissing),
        ("a doubled send", "0SEND_F0,", "0SEND_F0,0SEND_F0,", Code::MessageDoubled),
        ("a doubled receive", "1RECV_F0,", "1RECV_F0,1RECV_F0,", Code::MessageDoubled),
        ("a send before its producer", "0F0,0SEND_F0", "0SEND_F0,0F0", Code::MessageEarly),
        ("an idle cell", "0F1,", "0F1,,", Code::Syntax),
    ];
    // With the words of sharding and reduction that PyTorch's own lowering adds.
    let whole = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0I0,0WAIT_SEND_F0,0W0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n\
                 1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0";
    let of_whole: &[(&str, &str, &str, Code)] = &[
        ("a stage that is never unsharded", "1UNSHARD,", "", Code::ShardMisplaced),
        ("a forward before its UNSHARD", "0UNSHARD,0F0", "0F0,0UNSHARD", Code::ShardMisplaced),
        ("a weight gradient after its RESHARD", "0W0,", "0RESHARD,0W0,", Code::ShardMisplaced),
        ("UNSHARD twice", "1UNSHARD,", "1UNSHARD,1UNSHARD,", Code::ShardMisplaced),
        ("a REDUCE_GRAD that is missing", "1REDUCE_GRAD,", "", Code::ReduceMisplaced),
        ("a REDUCE_GRAD before the last gradient", "0W0,0REDUCE_GRAD", "0REDUCE_GRAD,0W0", Code::ReduceMisplaced),
        ("a doubled REDUCE_GRAD", "0REDUCE_GRAD,", "0REDUCE_GRAD,0REDUCE_GRAD,", Code::ReduceMisplaced),
    ];
    let judge = |text: &str| {
        let (raw, map) = read_plan("t", "t.csv", text);
        let report = raw.and_then(|raw| {
            let placement = raw.schedule.placement.clone();
            check(raw.schedule, &Options::AT_START)?;
            let faults = messages::check(&raw.nodes, &placement);
            if faults.is_empty() { Ok(()) } else { Err(Report::from_faults(faults)) }
        });
        report.map_err(|report| (report.codes(), plain(&report, &map)))
    };
    for (good, spoilt) in [(good, lowered), (whole, of_whole)] {
        judge(good).expect("the plan before it is spoilt");
        for (what, from, to, code) in spoilt {
            assert!(good.contains(from), "{what}");
            let (codes, drawn) = judge(&good.replacen(from, to, 1)).expect_err(what);
            assert!(codes.contains(code), "{what}: {drawn}");
        }
    }
}
