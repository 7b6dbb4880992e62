//! Every view shows what the scene says, and is well formed.

mod common;

use std::collections::BTreeSet;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{LOOPED, OVERLAPPED, ZB_H1, checked};
use qeffect_core::schedule::Costs;
use qeffect_core::sim::CostModel;
use qeffect_view::{Scene, html, svg, terminal, trace};

fn scene(text: &str, params: &[i64]) -> Scene {
    Scene::new(&checked(text, params), &CostModel::uniform(Costs { f: 2, i: 2, w: 1 }))
}

#[test]
fn terminal_picture() {
    let scene = Scene::new(&checked(ZB_H1, &[2, 3]), &CostModel::unit());
    let picture = terminal::render(&scene, &terminal::Options { width: 60, ..Default::default() });
    let expected = "\
zb_h1(P = 2, M = 3)

time    0     2     4     6     8
rank 0  F0 F1 ·  I0 W0 F2 I1 W1 I2 W2
rank 1  ·  F0 I0 F1 I1 W0 F2 I2 W1 W2

F forward   I input gradient   W weight gradient   · idle
makespan 10   bubble 1 (10.0 % of the makespan)   idle inside a rank 1
peaks by rank: slots 2 on each, tapes 2 1, works 1 2
";
    assert_eq!(picture, expected);
}

#[test]
fn terminal_steps() {
    let scene = Scene::new(&checked(ZB_H1, &[2, 2]), &CostModel::unit());
    let expected = "        rank 0   rank 1
step 0  0F0      1F0
step 1  0F1      1I0
step 2  0I0      1F1
step 3  0W0      1I1
step 4  0I1      1W0
step 5  0W1      1W1
";
    assert_eq!(terminal::steps(&scene), expected);
}

#[test]
fn a_terminal_picture_is_never_too_wide_and_ascii_is_ascii() {
    for width in [40, 80, 133, 200] {
        for (text, params) in
            [(ZB_H1, [2, 2]), (ZB_H1, [4, 8]), (LOOPED, [4, 16]), (LOOPED, [8, 64]), (OVERLAPPED, [3, 9])]
        {
            let scene = scene(text, &params);
            for ascii in [false, true] {
                let plain = terminal::render(&scene, &terminal::Options { width, ascii, ..Default::default() });
                for line in plain.lines().filter(|l| l.starts_with("rank") || l.starts_with("time")) {
                    assert!(line.chars().count() <= width, "{} columns: {line}", line.chars().count());
                }
                assert!(!ascii || plain.is_ascii());
                let colored =
                    terminal::render(&scene, &terminal::Options { width, ascii, color: true, ..Default::default() });
                assert!(colored.contains("\x1b[48;5;") && !plain.contains('\x1b'));
                for line in strip(&colored).lines().filter(|l| l.starts_with("rank")) {
                    assert!(line.chars().count() <= width);
                }
            }
        }
    }
}

fn strip(text: &str) -> String {
    let mut out = String::new();
    let mut parts = text.split('\x1b');
    out.push_str(parts.next().unwrap_or(""));
    for part in parts {
        out.push_str(part.split_once('m').map_or("", |(_, rest)| rest));
    }
    out
}

#[test]
fn svg_has_one_box_per_action_and_balanced_tags() {
    for (text, params) in [(ZB_H1, [4, 8]), (LOOPED, [2, 4]), (OVERLAPPED, [3, 9])] {
        let scene = scene(text, &params);
        for titles in [false, true] {
            let svg = svg::render(&scene, &svg::Options { titles, ..Default::default() });
            well_formed(&svg);
            let lanes: String =
                svg.split("<g><text").skip(1).map(|lane| lane.split("font-weight").next().unwrap()).collect();
            for bar in &scene.bars {
                assert!(!titles || svg.contains(&format!("<title>{} ", bar.key())));
            }
            let boxes = lanes.matches("height=\"28\"").count()
                + lanes.matches("height=\"14\"").count()
                + lanes.matches("height=\"13\"").count();
            assert_eq!(boxes, scene.bars.len() + scene.ranks as usize, "and one lane per rank");
            assert!(svg.contains(&format!("makespan <tspan font-weight=\"600\">{}</tspan>", scene.makespan)));
            assert!(svg.contains("@media (prefers-color-scheme:dark)"));
        }
    }
}

/// Numbers of two digits are not left out where those of one digit stand.
#[test]
fn boxes_of_one_kind_and_width_have_labels_of_one_form() {
    let mut seen = BTreeSet::new();
    for width in (240..2000).step_by(40) {
        let scene = scene(LOOPED, &[4, 12]);
        let svg = svg::render(&scene, &svg::Options { width, ..Default::default() });
        for kind in ["F", "B"] {
            let texts: Vec<&str> = (svg.split(&format!("<text class=\"m {kind}")).skip(1))
                .map(|text| text.split_once('>').unwrap().1.split_once('<').unwrap().0)
                .collect();
            let form = |text: &&str| text.contains(kind);
            assert!(texts.is_empty() || texts.len() == 4 * 2 * 12, "{width}: {}", texts.len());
            assert!(texts.iter().all(form) || !texts.iter().any(form), "{width}: {texts:?}");
            seen.insert((!texts.is_empty(), texts.iter().any(form)));
        }
    }
    assert_eq!(seen.len(), 3, "no label, numbers, letters: {seen:?}");
}

#[test]
fn names_cannot_break_out_of_a_picture() {
    let mut scene = scene(ZB_H1, &[2, 2]);
    scene.name = "</script><script>alert(1)</script>&\"".into();
    let svg = svg::render(&scene, &svg::Options::default());
    well_formed(&svg);
    let page = html::render(&[&scene]);
    assert_eq!(page.matches("</script>").count(), 2);
    assert!(!page.contains("<script>alert"));
}

/// Enough of XML to see that tags are closed in order and `&` and `<` are escaped.
fn well_formed(xml: &str) {
    let mut open = Vec::new();
    for part in xml.split('<').skip(1) {
        let (tag, text) = part.split_once('>').expect("a tag ends");
        assert!(
            text.split('&')
                .skip(1)
                .all(|e| e.split(';').next().is_some_and(|n| ["lt", "gt", "amp", "quot"].contains(&n)))
        );
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "closes what is open");
        } else if !tag.ends_with('/') {
            open.push(tag.split_whitespace().next().expect("a tag has a name"));
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
    }
    assert!(open.is_empty());
}

#[test]
fn trace_is_json_and_slices_add_up() {
    let scene = scene(OVERLAPPED, &[3, 9]);
    let trace: serde_json::Value = serde_json::from_str(&trace::render(&[&scene, &scene])).expect("valid JSON");
    let events = trace["traceEvents"].as_array().expect("a list of events");
    let count = |ph: &str| events.iter().filter(|e| e["ph"] == ph).count();
    assert_eq!(count("X"), 2 * scene.bars.len());
    assert_eq!(count("s"), count("f"));
    let crossing = scene.bars.iter().flat_map(|b| b.needs.iter().map(move |n| (b, n)));
    assert_eq!(count("s"), 2 * crossing.filter(|(b, n)| scene.bars[**n as usize].rank != b.rank).count());
    let mut slices: Vec<(u64, u64, i64, i64)> = events
        .iter()
        .filter(|e| e["ph"] == "X")
        .map(|e| {
            (
                e["pid"].as_u64().unwrap(),
                e["tid"].as_u64().unwrap(),
                e["ts"].as_i64().unwrap(),
                e["dur"].as_i64().unwrap(),
            )
        })
        .collect();
    slices.sort_unstable();
    for pair in slices.windows(2) {
        assert!(
            pair[0].1 != pair[1].1 || pair[0].0 != pair[1].0 || pair[0].2 + pair[0].3 <= pair[1].2,
            "slices of a thread overlap"
        );
    }
}

/// What a real browser makes of a page, opened with this fragment; `None` where there is no browser. Frames are timers in it: on a
/// busy machine a browser without a screen may come to its end before it has drawn one.
fn dom(page: &str, fragment: &str) -> Option<String> {
    const FRAMES: &str = "<script>requestAnimationFrame = draw => setTimeout(draw, 16);</script>";
    let start = page.find("<head>").expect("a page has a head") + "<head>".len();
    let page = [&page[..start], FRAMES, &page[start..]].concat();
    static PAGES: AtomicUsize = AtomicUsize::new(0);
    let found = ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(|name| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success()));
    let Some(browser) = found else {
        eprintln!("skipped: no Chromium on this machine");
        return None;
    };
    let number = PAGES.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("qeffect-page-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder for the page");
    let file = folder.join("page.html");
    std::fs::write(&file, page).expect("the page is written");
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", folder.join("profile").display()))
        .args(["--virtual-time-budget=2000", "--dump-dom", &format!("file://{}{fragment}", file.display())])
        .output()
        .expect("the browser starts");
    std::fs::remove_dir_all(&folder).ok();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The page runs in a real browser, where one is found.
#[test]
fn page_runs_in_a_browser() {
    let (one, two) = (scene(ZB_H1, &[4, 8]), scene(LOOPED, &[4, 8]));
    let Some(dom) = dom(&html::render(&[&one, &two]), "#pin=1.5&critical") else { return };
    let has = |text: &str| assert!(dom.contains(text), "no `{text}` in the page");
    has(&format!("data-ready=\"{}\"", one.bars.len() + two.bars.len()));
    assert_eq!(dom.matches("<canvas class=\"plot\"").count(), 2);
    // The pinned action's details.
    let pinned = &two.bars[5];
    has(&format!("<strong>{}</strong> forward", pinned.key()));
    has(&format!("<dd>{} to {}</dd>", pinned.start, pinned.end));
    has(&format!("<dd>{}</dd>", pinned.slot.unwrap()));
    has(&format!("<dd>slots {}, tapes {}, works {}</dd>", pinned.live.slots, pinned.live.tapes, pinned.live.works));
    has(&format!("makespan <b>{}</b>", two.makespan));
    has("id=\"do-critical\" title=\"A chain without a gap from start to end (c)\" aria-pressed=\"true\"");
}

/// A wheel zooms, a pointer that hovers shows an action, a button puts schedules side by side.
#[test]
fn wheel_pointer_and_buttons_do_what_the_page_says() {
    const DO: &str = r#"<script>addEventListener("load", () => {
        const canvas = document.querySelector("canvas.plot"), seen = document.documentElement.dataset;
        const at = (x, y) => {
            const box = canvas.getBoundingClientRect();
            return { clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true };
        };
        const tip = () => document.getElementById("tip").textContent;
        canvas.dispatchEvent(new PointerEvent("pointermove", at(66, 40)));
        seen.hovered = tip();
        for (let turn = 0; turn < 3; turn++) canvas.dispatchEvent(new WheelEvent("wheel", { ...at(66, 40), deltaY: -120 }));
        requestAnimationFrame(() => requestAnimationFrame(() => { seen.zoomed = location.hash; }));
        document.getElementById("do-layout").click();
        seen.layout = document.getElementById("do-layout").textContent;
    });</script></body>"#;
    let (one, two) = (scene(ZB_H1, &[4, 8]), scene(LOOPED, &[4, 8]));
    let page = html::render(&[&one, &two]).replace("</body>", DO);
    let Some(dom) = dom(&page, "") else { return };
    let seen = |name: &str| {
        let start = dom.find(&format!("data-{name}=\"")).unwrap_or_else(|| panic!("no {name}")) + name.len() + 7;
        &dom[start..start + dom[start..].find('"').unwrap()]
    };
    assert!(seen("hovered").starts_with("0F0"), "{}", seen("hovered"));
    assert!(seen("zoomed").contains("time="), "{}", seen("zoomed"));
    assert_eq!(seen("layout"), "stacked");
}
