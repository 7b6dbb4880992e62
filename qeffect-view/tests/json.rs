//! JSON in and out: what is written reads back, and every malformed file is refused with its place.

mod common;

use common::{LOOPED, OVERLAPPED, ZB_H1, checked};
use qeffect_core::check::{Options, check};
use qeffect_core::code::Code::{self, *};
use qeffect_core::origin::Origin;
use qeffect_core::schedule::{HeaderOrigins, Schedule};
use qeffect_core::sim::CostModel;
use qeffect_view::json::{read_schedule, write_schedule};
use qeffect_view::report::plain;
use qeffect_view::{Scene, terminal};

const COALESCED: &str = "
    pub coalesced<P, M>;
    ranks: P; microbatches: M; stages: P; place: |s| s; slots: |_| M; tapes: |r| M;
    coalesce: 3; update: step; transport: rank_edge;
    expect peak <= M; expect bubble(4, 5, 3) >= 0; expect idle(1, 1, 1) < 1000;
    rank |r| {
        refresh(r);
        for m in 0..M { F(r, m); }
        for m in 0..M { B(r, m); }
        reduce(r); commit;
    }
";

const EVAL: &str = "
    pub forwards<P, M>; eval;
    ranks: P; microbatches: M; stages: P; place: |s| s;
    rank |r| { for m in 0..M { F(r, m); } }
";

/// The schedule without the places where things stood.
fn bare(mut schedule: Schedule) -> Schedule {
    schedule.items =
        schedule.items.iter().map(|item| qeffect_core::action::Item { origin: Origin::NONE, ..*item }).collect();
    schedule.expects =
        schedule.expects.iter().map(|e| qeffect_core::schedule::Expect { origin: Origin::NONE, ..e.clone() }).collect();
    schedule.origins = HeaderOrigins::NONE;
    schedule
}

fn read(text: &str) -> Schedule {
    let (schedule, map) = read_schedule("t.json", text);
    schedule.unwrap_or_else(|report| panic!("{}", plain(&report, &map)))
}

#[test]
fn what_is_written_reads_back() {
    for text in [ZB_H1, LOOPED, OVERLAPPED, COALESCED, EVAL] {
        for params in [[1, 1], [2, 3], [4, 8]] {
            let schedule = checked(text, &params).schedule;
            let written = write_schedule(&schedule);
            let back = read(&written);
            assert_eq!(bare(back.clone()), bare(schedule), "{written}");
            assert_eq!(write_schedule(&back), written);
            check(back, &Options::AT_START).expect("it was checked before");
        }
    }
}

#[test]
fn the_form_is_for_readers() {
    let schedule = checked(OVERLAPPED, &[2, 3]).schedule;
    let expected = r#"{
  "format": "qeffect-schedule",
  "version": 1,
  "name": "overlapped",
  "params": [["P",2],["M",3]],
  "microbatches": 3,
  "placement": [0,1],
  "programs": [
    ["0F0", "0F1", {"overlap": [["0F2"], ["0I0", "0W0"]]}, "0R1", "0B1", "0R2", "0B2"],
    ["1F0", {"overlap": [["1F1"], ["1I0", "1W0"]]}, {"overlap": [["1F2"], ["1I1", "1W1"]]}, "1R2", "1B2"]
  ]
}
"#;
    assert_eq!(write_schedule(&schedule), expected);
}

/// A document with one program and what is put after it.
fn document(program: &str, more: &str) -> String {
    format!(
        "{{\"format\": \"qeffect-schedule\", \"version\": 1, \"name\": \"t\", \"microbatches\": 1,\n \"placement\": [0],\n \"programs\": [[{program}]]{more}}}"
    )
}

/// `place` is what is underlined.
fn refused(text: &str, code: Code, place: &str, message: &str) {
    let (result, map) = read_schedule("t.json", text);
    let report = result.expect_err(text);
    let drawn = plain(&report, &map);
    assert_eq!(report.codes(), [code], "{drawn}");
    assert!(drawn.contains(message), "no `{message}` in\n{drawn}");
    let at = map.range(report.diagnostics[0].primary.origin).expect("a fault has a place");
    assert_eq!(&text[at], place, "{drawn}");
}

#[test]
fn malformed_actions_are_refused_with_their_place() {
    for (action, code, message) in [
        ("\"0X0\"", Syntax, "`0X0` is no action"),
        ("\"0f0\"", Syntax, "`0f0` is no action"),
        ("\"F0\"", Syntax, "`F0` names no stage"),
        ("\"0F\"", Syntax, "`0F` names no microbatch"),
        ("\"0F0x\"", Syntax, "`0x` in `0F0x` is no number"),
        ("\"0F-1\"", Syntax, "is no number"),
        ("\" 0F0\"", Syntax, "is no action"),
        ("\"\"", Syntax, "is no action"),
        ("\"0COMMIT\"", Syntax, "`0COMMIT` takes no stage"),
        ("\"0REFRESH0\"", Syntax, "takes no microbatch"),
        ("\"0F99999999999\"", OutOfRange, "too large"),
        ("17", Syntax, "`17` is no action here"),
        ("null", Syntax, "`null` is no action here"),
        ("[\"0F0\"]", Syntax, "is no action here"),
        ("{}", Syntax, "write either `overlap` or `coalesced`"),
        ("{\"overlap\": [[\"0F0\"]]}", Syntax, "an overlap of 1 branches"),
        ("{\"coalesced\": []}", Syntax, "without members"),
        ("{\"coalesced\": [\"0W0\", \"1W0\"]}", Syntax, "of several stages"),
    ] {
        refused(&document(action, ""), code, action, message);
    }
    refused(
        &document("{\"overlap\": [[\"0F0\"], [{\"overlap\": [[\"0F0\"], []]}]]}", ""),
        Syntax,
        "{\"overlap\": [[\"0F0\"], []]}",
        "an overlap inside an overlap",
    );
    refused(&document("{\"coalesced\": [\"0F0\"]}", ""), Syntax, "\"0F0\"", "`0F0` in a coalesced weight gradient");
    refused(&document("{\"overlapped\": []}", ""), Syntax, "\"overlapped\"", "unknown field `overlapped`");
}

#[test]
fn malformed_headers_are_refused_with_their_place() {
    let good = document("\"0F0\"", "");
    for (from, to, code, place, message) in [
        ("qeffect-schedule", "other", Syntax, "\"other\"", "`other` is another format"),
        ("\"version\": 1", "\"version\": 2", Syntax, "2", "version 2 is not known here"),
        ("\"version\": 1", "\"version\": \"1\"", Syntax, "\"1\"", "invalid type: string"),
        ("\"microbatches\": 1", "\"microbatches\": -1", Syntax, "-1", "invalid value: integer `-1`"),
        ("\"microbatches\": 1", "\"microbatches\": 4294967296", Syntax, "4294967296", "invalid value"),
        ("[0]", "[0.5]", Syntax, "5", "invalid type: floating point"),
        ("\"name\": \"t\", ", "", Syntax, "}", "missing field `name`"),
        ("\"name\": \"t\"", "\"name\": \"t\", \"nom\": 1", Syntax, "\"nom\"", "unknown field `nom`"),
        // The name stands elsewhere too, as a value before it and as another field's value behind it.
        ("\"name\": \"t\"", "\"name\": \"nom\", \"nom\" : \"nom\"", Syntax, "\"nom\"", "unknown field `nom`"),
        ("\"name\": \"t\"", "\"name\": \"t\", \"name\": \"t\"", Syntax, "\"name\"", "duplicate field `name`"),
        ("]]}", "]}", Syntax, "}", "expected `,` or `]`"),
        ("]]}", "]]", Syntax, "]", "EOF"),
        ("]]}", "]]} x", Syntax, "x", "trailing characters"),
        ("]]}", "]], \"bounds\": [{}, {}]}", Header, "[{}, {}]", "bounds for 2 ranks"),
        (
            "]]}",
            "]], \"expects\": [{\"measure\": \"bubble\", \"compare\": \"<\", \"bound\": 1}]}",
            Header,
            "{\"measure\": \"bubble\", \"compare\": \"<\", \"bound\": 1}",
            "at costs",
        ),
        (
            "]]}",
            "]], \"expects\": [{\"measure\": \"peak\", \"compare\": \"~\", \"bound\": 1}]}",
            Syntax,
            "\"~\"",
            "unknown variant `~`",
        ),
        ("]]}", "]], \"transport\": \"pigeon\"}", Syntax, "\"pigeon\"", "unknown variant `pigeon`"),
    ] {
        assert!(good.contains(from));
        refused(&good.replacen(from, to, 1), code, place, message);
    }
    read(&good);
    for text in ["", "[]", "\u{feff}{}", "{\"format\": 1", "\"é"] {
        assert!(read_schedule("t.json", text).0.is_err());
    }
}

#[test]
fn the_column_of_a_field_is_that_of_its_name() {
    let text = document("\"0F0\"", "").replacen("\"name\": \"t\"", "\"name\": \"nom\", \"nom\" : 1", 1);
    let (result, map) = read_schedule("t.json", &text);
    let origin = result.expect_err("there is no such field").diagnostics[0].primary.origin;
    assert_eq!(map.range(origin), Some(text.rfind("\"nom\"").map(|at| at..at + 5).expect("it is there")));
}

/// What a file says reaches the terminal as text: no byte of it steers the terminal.
#[test]
fn control_characters_are_printed_as_escapes() {
    let raw = |text: &str| text.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}');
    let named = |name: &str| document("\"0F0\"", ", \"eval\": true").replacen("\"name\": \"t\"", name, 1);
    let schedule = read(&named("\"name\": \"a\\u001b[31mRED\\nx\\u202e\", \"params\": [[\"\\u0007P\", 1]]"));
    let checked = check(schedule, &Options::AT_START).expect("right");
    let scene = Scene::new(&checked, &CostModel::unit());
    assert_eq!(scene.title(), "a\\u{1b}[31mRED\\nx\\u{202e}(\\u{7}P = 1)");
    assert!(!raw(&terminal::render(&scene, &terminal::Options::default())));
    // JSON keeps the name.
    assert_eq!(read(&write_schedule(&checked.schedule)).name, checked.schedule.name);
    for text in [
        named("\"name\": \"t\", \"x\\u001b[31m\": 1"),
        document("\"0F0\\u001b[31m\"", ""),
        document("\"0F0\"", "").replacen("qeffect-schedule", "a\\u001b[31m\\u202e", 1),
        document("\"0F0\"", ", \"transport\": \"\\u001b[31m\""),
    ] {
        let (result, map) = read_schedule("t.json", &text);
        let report = result.expect_err(&text);
        for drawn in [plain(&report, &map), report.to_string(), map.locate(report).to_string()] {
            assert!(!raw(&drawn), "{drawn:?}");
        }
    }
}

#[test]
fn faults_of_the_schedule_are_drawn_in_the_file() {
    let (schedule, map) = read_schedule("t.json", &document("\"0F0\", \"0I0\", \"0I0\", \"0W0\"", ""));
    let report = check(schedule.expect("it is well formed"), &Options::AT_START).expect_err("I twice");
    assert_eq!(report.codes(), [TapeConsumedTwice]);
    let drawn = plain(&report, &map);
    assert!(drawn.contains("t.json:3:30"), "{drawn}");
}

/// The published schema names the fields that are written and read, no more and no less.
#[test]
fn the_schema_names_the_fields() {
    let schema: serde_json::Value =
        serde_json::from_str(include_str!("../../docs/schedule.schema.json")).expect("valid JSON");
    let fields: Vec<&String> = schema["properties"].as_object().expect("an object").keys().collect();
    // A reader that knows no field of a name says so.
    for field in &fields {
        let (result, _) = read_schedule("t.json", &format!("{{\"{field}\": {{}}"));
        let message = result.expect_err("incomplete").to_string();
        assert!(!message.contains("unknown field"), "`{field}` is in the schema and not read");
    }
    let message = read_schedule("t.json", "{\"?\": 1}").0.expect_err("unknown").to_string();
    let known = message.split("expected one of ").nth(1).expect("the list of fields").matches('`').count() / 2;
    assert_eq!(known, fields.len(), "{message}");
}
