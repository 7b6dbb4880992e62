//! Documents against `docs/schedule.schema.json`, judged by nothing but the schema: what is written fits it, and what
//! does not fit it is not read.

use qeffect_core::check::{Options, check};
use qeffect_view::json::{read_schedule, write_schedule};
use regex::Regex;
use serde_json::{Value, json};

/// Keywords that say nothing about a document.
const REMARKS: &[&str] = &["$schema", "$defs", "title", "description", "default"];

/// A judge for the keywords of JSON Schema (2020-12) that our schema uses; another one ends the test.
struct Judge {
    schema: Value,
}

impl Judge {
    fn new() -> Judge {
        let text = include_str!("../../docs/schedule.schema.json");
        Judge { schema: serde_json::from_str(text).expect("valid JSON") }
    }

    /// Where the document does not fit, as a JSON pointer and the keyword.
    fn verdict(&self, document: &Value) -> Result<(), String> {
        self.fits(&self.schema, document, "")
    }

    fn fits(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        let rules = schema.as_object().expect("a schema is an object");
        let empty = Vec::new();
        let elements = value.as_array().unwrap_or(&empty);
        let list = |rule: &Value| rule.as_array().expect("a list").clone();
        let fields = value.as_object();
        for (keyword, rule) in rules {
            let holds = match keyword.as_str() {
                remark if REMARKS.contains(&remark) => true,
                "$ref" => {
                    let pointer = rule.as_str().and_then(|r| r.strip_prefix('#')).expect("a place in the schema");
                    self.fits(self.schema.pointer(pointer).expect("it is there"), value, at)?;
                    true
                }
                "type" => match rule.as_str().expect("one type") {
                    "object" => value.is_object(),
                    "array" => value.is_array(),
                    "string" => value.is_string(),
                    "boolean" => value.is_boolean(),
                    "integer" => value.is_i64() || value.is_u64(),
                    other => panic!("type `{other}`"),
                },
                "const" => value == rule,
                "enum" => list(rule).contains(value),
                "anyOf" => list(rule).iter().any(|rule| self.fits(rule, value, at).is_ok()),
                "required" => {
                    fields.is_none_or(|f| list(rule).iter().all(|name| f.contains_key(name.as_str().expect("a name"))))
                }
                "properties" => {
                    for (name, value) in fields.into_iter().flatten() {
                        rule.get(name).map_or(Ok(()), |rule| self.fits(rule, value, &format!("{at}/{name}")))?;
                    }
                    true
                }
                "additionalProperties" => {
                    assert_eq!(rule, &json!(false));
                    fields.is_none_or(|fields| fields.keys().all(|name| rules["properties"].get(name).is_some()))
                }
                "prefixItems" => {
                    for (n, (rule, value)) in list(rule).iter().zip(elements).enumerate() {
                        self.fits(rule, value, &format!("{at}/{n}"))?;
                    }
                    true
                }
                "items" => {
                    assert!(!rules.contains_key("prefixItems"), "both are not judged");
                    for (n, value) in elements.iter().enumerate() {
                        self.fits(rule, value, &format!("{at}/{n}"))?;
                    }
                    true
                }
                "minItems" => !value.is_array() || elements.len() as u64 >= rule.as_u64().expect("a count"),
                "maxItems" => !value.is_array() || elements.len() as u64 <= rule.as_u64().expect("a count"),
                "minimum" => value.as_f64().is_none_or(|value| value >= rule.as_f64().expect("a number")),
                "maximum" => value.as_f64().is_none_or(|value| value <= rule.as_f64().expect("a number")),
                "pattern" => {
                    let pattern = Regex::new(rule.as_str().expect("a pattern")).expect("of ours");
                    value.as_str().is_none_or(|text| pattern.is_match(text))
                }
                other => panic!("the schema uses `{other}`, which this test does not judge"),
            };
            if !holds {
                return Err(format!("{at} {keyword}"));
            }
        }
        Ok(())
    }
}

#[test]
fn every_schedule_of_the_library_fits_the_schema() {
    let judge = Judge::new();
    let mut seen = 0;
    for entry in qeffect_schedules::library().iter().chain(qeffect_schedules::further()) {
        for (ranks, microbatches) in [(1, 1), (2, 4), (3, 7), (4, 8)] {
            let Ok(checked) = entry.checked(ranks, microbatches) else { continue };
            let document = serde_json::from_str(&write_schedule(&checked.schedule)).expect("valid JSON");
            assert_eq!(judge.verdict(&document), Ok(()), "{} {ranks} {microbatches}", entry.name);
            seen += 1;
        }
    }
    assert!(seen >= 40, "{seen}");
}

/// A document that uses every field.
fn full() -> Value {
    json!({
        "$schema": "schedule.schema.json", "format": "qeffect-schedule", "version": 1, "name": "t",
        "params": [["M", 2]], "microbatches": 2, "placement": [0],
        "programs": [["0REFRESH", "0F0", {"overlap": [["0F1"], ["0I0"]]}, "0R1", "0I1", {"coalesced": ["0W0", "0W1"]}, "0REDUCE", "COMMIT"]],
        "transport": "rank_edge", "update": "step", "eval": false, "coalesce": 2,
        "bytes": {"tape": [1], "work": [1], "input": [1], "budget": [100]},
        "bounds": [{"slots": 2, "tapes": 2, "works": 2}],
        "expects": [{"measure": "bubble", "costs": [1, 1, 1], "compare": "<=", "bound": 100}, {"measure": "peak", "compare": "<", "bound": 9}]
    })
}

#[test]
fn what_does_not_fit_the_schema_is_not_read() {
    let judge = Judge::new();
    let accepted = |document: &Value| {
        let (schedule, _) = read_schedule("t.json", &document.to_string());
        schedule.and_then(|schedule| check(schedule, &Options::AT_START))
    };
    assert_eq!(judge.verdict(&full()), Ok(()));
    accepted(&full()).expect("the document before it is spoilt");
    for (pointer, value, verdict) in [
        ("/format", json!("other"), "/format const"),
        ("/version", json!(2), "/version const"),
        ("/name", json!(7), "/name type"),
        ("/params/0", json!(["M"]), "/params/0 minItems"),
        ("/params/0/1", json!("2"), "/params/0/1 type"),
        ("/microbatches", json!(0), "/microbatches minimum"),
        ("/microbatches", json!(4_294_967_295_u64), "/microbatches maximum"),
        ("/microbatches", json!(1.5), "/microbatches type"),
        ("/placement", json!([]), "/placement minItems"),
        ("/placement/0", json!(-1), "/placement/0 minimum"),
        ("/programs", json!([]), "/programs minItems"),
        ("/programs/0/1", json!("0f0"), "/programs/0/1 anyOf"),
        ("/programs/0/1", json!("0F0x"), "/programs/0/1 anyOf"),
        ("/programs/0/1", json!(["0F0"]), "/programs/0/1 anyOf"),
        ("/programs/0/2/overlap", json!([["0F1", "0I0"]]), "/programs/0/2 anyOf"),
        ("/programs/0/5/coalesced/1", json!("0I1"), "/programs/0/5 anyOf"),
        ("/transport", json!("pigeon"), "/transport enum"),
        ("/update", json!("day"), "/update enum"),
        ("/eval", json!(0), "/eval type"),
        ("/bytes/tape/0", json!(-1), "/bytes/tape/0 minimum"),
        ("/bytes/budget", json!(100), "/bytes/budget type"),
        ("/bounds/0/slots", json!(-1), "/bounds/0/slots minimum"),
        ("/expects/0/costs", json!([1, 1]), "/expects/0/costs minItems"),
        ("/expects/0/compare", json!("~"), "/expects/0/compare enum"),
        ("/expects/0/measure", json!("luck"), "/expects/0/measure enum"),
    ] {
        let mut document = full();
        *document.pointer_mut(pointer).expect("it is there") = value;
        assert_eq!(judge.verdict(&document), Err(verdict.to_owned()));
        accepted(&document).expect_err(&format!("{pointer}: {document}"));
    }
    for (pointer, field) in [
        ("", "format"),
        ("", "version"),
        ("", "name"),
        ("", "microbatches"),
        ("", "placement"),
        ("", "programs"),
        ("/bytes", "tape"),
        ("/bytes", "work"),
        ("/bytes", "budget"),
        ("/expects/0", "measure"),
        ("/expects/0", "compare"),
        ("/expects/0", "bound"),
    ] {
        let mut document = full();
        let fields = document.pointer_mut(pointer).and_then(Value::as_object_mut).expect("an object");
        fields.remove(field).expect("it is there");
        assert_eq!(judge.verdict(&document), Err(format!("{pointer} required")));
        accepted(&document).expect_err(&format!("without {field}"));
    }
    for pointer in ["", "/bytes", "/bounds/0", "/expects/0", "/programs/0/2", "/programs/0/5"] {
        let mut document = full();
        document.pointer_mut(pointer).and_then(Value::as_object_mut).expect("an object").insert("x".into(), json!(1));
        assert!(judge.verdict(&document).is_err(), "{pointer}");
        accepted(&document).expect_err(pointer);
    }
}
