//! The pictures under `docs/pictures` are what the library draws today.
//!
//! `QEFFECT_BLESS=1 cargo test -p qeffect-view --test gallery` draws them anew, one for each training
//! schedule of the library at P = 4, M = 8.

use std::path::PathBuf;

use qeffect_core::sim::CostModel;
use qeffect_schedules::{further, library};
use qeffect_view::{Scene, svg};

#[test]
fn pictures_are_up_to_date() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../docs/pictures");
    let bless = std::env::var_os("QEFFECT_BLESS").is_some();
    for entry in library().iter().chain(further()).filter(|entry| !entry.eval) {
        let checked = entry.checked(4, 8).expect("the library is right");
        let picture = svg::render(&Scene::new(&checked, &CostModel::unit()), &svg::Options::default());
        let file = folder.join(format!("{}.svg", entry.name));
        if bless {
            std::fs::create_dir_all(&folder).expect("a folder for pictures");
            std::fs::write(&file, &picture).expect("written");
        }
        let kept = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(kept == picture, "{} is missing or out of date: run with QEFFECT_BLESS=1", file.display());
    }
}
