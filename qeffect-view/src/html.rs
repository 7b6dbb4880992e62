//! One self-contained page: zoom, pan, and details of every action; one schedule, or two that are
//! compared.
//!
//! The page needs no network and works from the file system. What is shown is kept in the address
//! (`#pin=0.17` pins action 17 of the first schedule), so a place can be shared.

use serde_json::{Value, json};

use crate::color::{self, Theme};
use crate::scene::{FAMILIES, Scene, describe};
use crate::svg::escape;

const PAGE: &str = include_str!("html/page.html");
const STYLE: &str = include_str!("html/page.css");
const SCRIPT: &str = include_str!("html/page.js");

/// The page of one or more schedules.
pub fn render(scenes: &[&Scene]) -> String {
    let title = scenes.iter().map(|scene| scene.title()).collect::<Vec<_>>().join(" and ");
    let data = json!({ "kinds": kinds(scenes), "scenes": scenes.iter().map(|s| data(s)).collect::<Vec<_>>() });
    // Inside a script element `<` could end it; JSON has another way to write it.
    let data = data.to_string().replace('<', "\\u003c");
    PAGE.replace("{{title}}", &escape(&title))
        .replace("/*{{style}}*/", STYLE)
        .replace("/*{{script}}*/", SCRIPT)
        .replace("{{data}}", &data)
}

/// Names and colours of the kinds that occur.
fn kinds(scenes: &[&Scene]) -> Value {
    let most = scenes.iter().map(|scene| scene.virtual_stages).max().unwrap_or(1);
    let occurs = |kind| scenes.iter().any(|scene| scene.kinds().contains(kind));
    let shades = |kind, theme| {
        let shade = |of: u32, number: u32| {
            let fill = color::fill(kind, number, of, theme);
            json!([fill.hex(), color::text_on(fill).hex()])
        };
        let of = |of: u32| (0..of).map(|number| shade(of, number)).collect::<Vec<_>>();
        (1..=most).map(of).collect::<Vec<_>>()
    };
    let kind = |kind: &_| {
        json!({
            "letter": describe(*kind)[..1],
            "name": describe(*kind)[2..],
            "light": shades(*kind, Theme::Light),
            "dark": shades(*kind, Theme::Dark),
        })
    };
    FAMILIES.iter().filter(|k| occurs(k)).map(kind).collect()
}

/// A scene as columns, which are smaller than objects and faster to read.
fn data(scene: &Scene) -> Value {
    let bars = &scene.bars;
    let list = |value: fn(&crate::Bar) -> Value| bars.iter().map(value).collect::<Vec<_>>();
    json!({
        "title": scene.title(),
        "ranks": scene.ranks,
        "stages": scene.stages,
        "microbatches": scene.microbatches,
        "virtual": scene.virtual_stages,
        "makespan": scene.makespan,
        "bubble": scene.bubble,
        "bubblePercent": (scene.bubble_percent() * 10.0).round() / 10.0,
        "idle": scene.idle,
        "latency": scene.latency,
        "busy": scene.busy,
        "peaks": scene.peaks.iter().map(|p| [p.slots, p.tapes, p.works]).collect::<Vec<_>>(),
        "starts": scene.starts,
        "critical": scene.critical_path(),
        "kind": bars.iter().map(crate::Bar::letter).collect::<String>(),
        "stage": list(|b| b.item.stage.0.into()),
        "microbatch": list(|b| b.item.microbatch.0.into()),
        "number": list(|b| b.virtual_stage.into()),
        "step": list(|b| b.step.into()),
        "start": list(|b| b.start.into()),
        "end": list(|b| b.end.into()),
        "branch": list(|b| b.overlap.map_or(Value::Null, |o| json!([o.number, o.of]))),
        "slot": list(|b| b.slot.into()),
        "needs": list(|b| b.needs.clone().into()),
        "live": list(|b| json!([b.live.slots, b.live.tapes, b.live.works])),
    })
}
