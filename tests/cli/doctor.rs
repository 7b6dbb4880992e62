//! What `qeffect doctor` says of a machine, and of libraries that are named wrongly.

use serde_json::Value;

use crate::command::{Folder, command, json, out};

/// The answer with one more variable, in both forms, and the exit code.
fn with(variable: &str, value: &str) -> (Value, String, i32) {
    let asked = |args: &[&str]| {
        let output = command(args).env(variable, value).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(errors.is_empty(), "{variable}={value}: {errors}");
        (String::from_utf8(output.stdout).unwrap(), output.status.code().unwrap())
    };
    let ((value, code), (text, again)) = (asked(&["--json", "doctor"]), asked(&["doctor"]));
    assert_eq!(code, again);
    (serde_json::from_str(&value).unwrap(), text, code)
}

fn misses(answer: &Value, library: &str) -> bool {
    answer["missing"].as_array().unwrap().iter().any(|missing| missing == library)
}

/// Whatever the machine has, the answer is complete and the exit code says whether something is missing.
#[test]
fn doctor_says_what_is_there() {
    let (value, code) = json(&["--json", "doctor"]);
    let ok = value["ok"].as_bool().unwrap();
    assert_eq!(code, if ok { 0 } else { 1 });
    assert_eq!(value["missing"].as_array().unwrap().is_empty(), ok);
    let libraries = value["libraries"].as_array().unwrap();
    assert_eq!(libraries.len(), 4);
    for library in libraries {
        let field = if library["found"].as_bool().unwrap() { "path" } else { "advice" };
        assert!(!library[field].as_str().unwrap().is_empty(), "{library}");
    }
    let (text, again) = out(&["doctor"]);
    assert_eq!(again, code);
    assert!(text.contains("cuBLASLt") && text.contains("train on GPUs"), "{text}");
}

#[test]
fn a_variable_that_names_no_library_is_told_with_what_to_do() {
    let folder = Folder::new("doctor");
    let files = [
        folder.file("text.so", "no library\n"),
        folder.file("empty.so", ""),
        folder.path("missing.so"),
        folder.path(""),
    ];
    let libraries = [("QEFFECT_NVRTC", "NVRTC"), ("QEFFECT_CUBLASLT", "cuBLASLt"), ("QEFFECT_NCCL", "NCCL")];
    for (variable, library) in libraries {
        for file in &files {
            let (answer, text, code) = with(variable, file);
            let found = answer["libraries"].as_array().unwrap().iter().find(|found| found["name"] == library).unwrap();
            assert_eq!(found["found"], false, "{variable}={file}");
            let why = found["why"].as_str().unwrap();
            assert!(why.contains(variable) && why.contains(file), "{why}");
            let advice = format!("correct {variable}, or unset it");
            assert_eq!(found["advice"], advice.as_str());
            let lines: Vec<&str> = text.lines().collect();
            let at = lines.iter().position(|line| line.starts_with(&format!("{library}: {variable} names"))).unwrap();
            assert_eq!(lines[at + 1], format!("  help: {advice}"));
            // One GPU needs no NCCL.
            let needed = library != "NCCL" || answer["gpus"].as_array().unwrap().len() > 1;
            assert_eq!(misses(&answer, library), needed, "{answer}");
            assert_eq!(code, if answer["ok"] == true { 0 } else { 1 });
            assert!(!needed || code == 1);
        }
        // Set to nothing is not set.
        assert_eq!(with(variable, "").0, json(&["--json", "doctor"]).0, "{variable}");
    }
}

/// Libraries that load, and are not what their names say.
#[cfg(target_os = "linux")]
mod other_libraries {
    use std::path::Path;
    use std::process::{Command, Output};

    use serde_json::Value;

    use super::{Folder, command, misses, with};

    /// A library of that source.
    fn library(folder: &Folder, name: &str, source: &str) -> String {
        let (source, library) = (folder.file(&format!("{name}.rs"), source), folder.path(name));
        let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
        let flags = ["--edition=2024", "--crate-type=cdylib", "--crate-name=other", "-o", &library, &source];
        let built = Command::new(rustc).args(flags).output().expect("the compiler that built this test");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        library
    }

    /// The loader looks into the folder of that file first.
    fn before(file: &str, args: &[&str]) -> Output {
        let folder = Path::new(file).parent().unwrap();
        command(args).env("LD_LIBRARY_PATH", folder).output().unwrap()
    }

    fn text(bytes: Vec<u8>) -> String {
        let text = String::from_utf8(bytes).unwrap();
        assert!(!text.contains("panicked") && !text.contains("Missing symbol"), "{text}");
        text
    }

    fn entry<'a>(answer: &'a Value, library: &str) -> &'a Value {
        answer["libraries"].as_array().unwrap().iter().find(|found| found["name"] == library).unwrap()
    }

    #[test]
    fn a_variable_that_names_another_library_is_told_so() {
        let folder = Folder::new("other-named");
        let empty = library(&folder, "libempty.so", "");
        for (variable, name, function) in [
            ("QEFFECT_NVRTC", "NVRTC", "nvrtcVersion"),
            ("QEFFECT_CUBLASLT", "cuBLASLt", "cublasLtGetVersion"),
            ("QEFFECT_NCCL", "NCCL", "ncclGetVersion"),
        ] {
            let (answer, said, code) = with(variable, &empty);
            let found = entry(&answer, name);
            assert_eq!(found["found"], false, "{answer}");
            let why = format!("{variable} names {empty}, which is not usable: it lacks the function `{function}`");
            assert_eq!(found["why"], why.as_str());
            assert_eq!(found["advice"], format!("correct {variable}, or unset it").as_str());
            assert!(said.contains(&format!("{name}: {why}\n")), "{said}");
            let needed = name != "NCCL" || answer["gpus"].as_array().unwrap().len() > 1;
            assert_eq!(misses(&answer, name), needed, "{answer}");
            assert!(!needed || code == 1);
        }
        // The function is what counts.
        let source = "#[unsafe(no_mangle)] pub extern \"C\" fn ncclGetVersion() {}";
        let like = library(&folder, "liblike.so", source);
        let (answer, ..) = with("QEFFECT_NCCL", &like);
        assert_eq!(entry(&answer, "NCCL")["path"], like.as_str());
    }

    /// What is not the driver is found, told as unusable, and nothing of it is called.
    #[test]
    fn an_empty_driver_is_no_driver() {
        let folder = Folder::new("other-driver");
        // Under both names, so that no other one comes behind it.
        let file = library(&folder, "libcuda.so.1", "");
        std::fs::copy(&file, folder.path("libcuda.so")).unwrap();
        let output = before(&file, &["--json", "doctor"]);
        assert_eq!((output.status.code(), text(output.stderr)), (Some(1), String::new()));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = entry(&answer, "CUDA driver");
        assert_eq!(found["found"], false, "{answer}");
        let why = found["why"].as_str().unwrap();
        assert!(why.contains(&file) && why.contains("lacks the function `cuDriverGetVersion`"), "{why}");
        assert!(found["advice"].as_str().unwrap().contains("LD_LIBRARY_PATH"), "{found}");
        assert!(misses(&answer, "CUDA driver") && answer["gpus"].as_array().unwrap().is_empty(), "{answer}");
        let output = before(&file, &["doctor"]);
        assert_eq!((output.status.code(), text(output.stderr)), (Some(1), String::new()));
        let said = text(output.stdout);
        assert!(said.contains(&format!("CUDA driver: {file} is not usable: it lacks")), "{said}");
        assert!(said.contains("not ready to train on GPUs: missing CUDA driver"), "{said}");
        let output = before(&file, &["train", "--device", "cuda:0"]);
        assert_eq!(output.status.code(), Some(4), "a run that has failed");
        let said = text(output.stderr);
        assert!(said.contains("it lacks the function `cuDriverGetVersion`") && said.contains("help: "), "{said}");
    }

    /// A driver that tells its version and has nothing else, and one that the version call of which fails.
    #[test]
    fn a_driver_that_lacks_functions_is_no_panic() {
        let version = |body: &str| {
            format!(
                "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn cuDriverGetVersion(to: *mut i32) -> i32 {{ {body} }}"
            )
        };
        for (name, body, why) in [
            ("new", "unsafe { *to = 13000 }; 0", "lacks the function `cuCtxGetCurrent` and "),
            ("old", "unsafe { *to = 12040 }; 0", "supports CUDA 12.4, which is too old"),
            ("failing", "999", "fails with status 999"),
        ] {
            let folder = Folder::new(&format!("driver-{name}"));
            let file = library(&folder, "libcuda.so.1", &version(body));
            std::fs::copy(&file, folder.path("libcuda.so")).unwrap();
            let output = before(&file, &["--json", "doctor"]);
            assert_eq!((output.status.code(), text(output.stderr)), (Some(1), String::new()));
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(entry(&answer, "CUDA driver")["path"], file.as_str());
            let missing = answer["missing"].as_array().unwrap();
            let told = missing.iter().any(|missing| missing.as_str().unwrap().contains(why));
            assert!(told, "{name}: {answer}");
            let said = text(before(&file, &["doctor"]).stdout);
            assert!(said.contains(why), "{name}: {said}");
            let output = before(&file, &["train", "--device", "cuda:0"]);
            assert_eq!(output.status.code(), Some(4));
            let said = text(output.stderr);
            assert!(said.contains(why) && said.contains("help: "), "{name}: {said}");
        }
    }
}

#[cfg(target_os = "linux")]
mod libraries {
    use std::process::{Command, Output};

    use super::Folder;

    /// `scripts/cuda_libraries.sh`, told that the environment's packages lie in `site`.
    fn script(folder: &Folder, site: &str) -> Output {
        let python = folder.path("python");
        // Written by a process of its own: a file that some process still has open for writing is not started.
        let write = "printf '#!/bin/sh\\necho \"%s\"\\n' \"$1\" > \"$0\"; chmod +x \"$0\"";
        assert!(Command::new("sh").args(["-c", write, &python, site]).status().unwrap().success());
        run(folder, &python)
    }

    fn run(folder: &Folder, python: &str) -> Output {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/cuda_libraries.sh");
        let mut command = Command::new("sh");
        command.arg(script).env("PYTHON", python).env("XDG_CACHE_HOME", folder.path("cache"));
        command.output().unwrap()
    }

    fn text(bytes: &[u8]) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    fn wheel(folder: &Folder, file: &str) {
        let path = folder.0.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "a library").unwrap();
    }

    #[test]
    fn wheels_of_a_python_environment_become_assignments() {
        let folder = Folder::new("with a blank");
        let (site, links) = (folder.path("site"), folder.path("cache/qeffect/libraries"));
        for file in ["cu13/lib/libnvrtc.so.13", "cu13/lib/libcublasLt.so.13", "nccl/lib/libnccl.so.2"] {
            wheel(&folder, &format!("site/nvidia/{file}"));
        }
        let output = script(&folder, &site);
        assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
        let said = text(&output.stdout);
        let folders = format!("{site}/nvidia/cu13/lib:{site}/nvidia/nccl/lib:{links}");
        assert_eq!(said, format!("export LD_LIBRARY_PATH='{folders}'${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\n"));
        let link = std::fs::read_link(format!("{links}/libnccl.so")).unwrap();
        assert_eq!(link.display().to_string(), format!("{site}/nvidia/nccl/lib/libnccl.so.2"));
        // As a shell takes it; what was there stays behind.
        for (before, after) in [("", folders.clone()), ("/before", format!("{folders}:/before"))] {
            let mut shell = Command::new("sh");
            shell.args(["-c", "eval \"$1\"; printf %s \"$LD_LIBRARY_PATH\"", "sh", &said]);
            let output = shell.env("LD_LIBRARY_PATH", before).output().unwrap();
            assert_eq!(text(&output.stdout), after);
        }
    }

    #[test]
    fn wheels_that_are_missing_are_named_beside_the_assignments() {
        let folder = Folder::new("wheels");
        wheel(&folder, "site/nvidia/cublas/lib/libcublasLt.so.13");
        let site = folder.path("site");
        let output = script(&folder, &site);
        assert!(output.status.success());
        let said = text(&output.stdout);
        assert!(said.starts_with(&format!("export LD_LIBRARY_PATH='{site}/nvidia/cublas/lib'$")), "{said}");
        let missing: Vec<String> = text(&output.stderr).lines().map(str::to_owned).collect();
        let line = |name| format!("cuda_libraries.sh: no {name} below {site}/nvidia");
        assert_eq!(missing, [line("libnvrtc.so.13"), line("libnccl.so.2")]);
        // Nothing at all, and no Python: nothing to evaluate.
        let output = script(&folder, &folder.path("nowhere"));
        assert!(output.status.success() && output.stdout.is_empty());
        assert_eq!(text(&output.stderr).lines().count(), 3);
        let output = run(&folder, "/nowhere/python");
        assert!(!output.status.success() && output.stdout.is_empty());
    }
}
