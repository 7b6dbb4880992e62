//! Cases for the compiler, one file each: what it says is kept beside the file, or it accepts the file and the program runs.
//!
//! The compiler is run as cargo runs it, on the library that these tests are linked with, so nothing is built anew.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs, thread};

/// What a case must do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// Be refused with the text of its `.stderr`.
    Refused,
    /// Compile and run.
    Accepted,
}

/// Runs every case of the folders under `tests/ui`. `BLESS=1` writes texts anew; `CASE=name` runs those whose path has the name.
///
/// # Panics
///
/// If one does not do what it must, with what it does.
pub fn run(folders: &[(&str, Expect)]) {
    let compiler = Compiler::find();
    let wanted = env::var("CASE").unwrap_or_default();
    let cases: Vec<(PathBuf, Expect)> = folders
        .iter()
        .flat_map(|(folder, expect)| files(folder, "rs").into_iter().map(|path| (path, *expect)))
        .collect();
    let cases: Vec<_> = cases.into_iter().filter(|(path, _)| path.to_string_lossy().contains(&wanted)).collect();
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((path, expect)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(failure) = compiler.case(path, *expect) {
                        failures.lock().unwrap().push(format!("{}: {failure}", path.display()));
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    assert!(failures.is_empty(), "{} of {} cases\n\n{}", failures.len(), cases.len(), failures.join("\n\n"));
    assert!(!cases.is_empty(), "no case");
}

/// Files of a folder under `tests/ui`, by name, as paths from the root of the package.
pub fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let folder = Path::new("tests/ui").join(folder);
    let mut files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|found| found == extension));
    files.sort();
    files
}

struct Compiler {
    /// The library, as these tests were linked with it.
    rlib: PathBuf,
    /// Where it and everything that it needs lie.
    dependencies: PathBuf,
    out: PathBuf,
}

impl Compiler {
    fn find() -> Compiler {
        let binary = env::current_exe().unwrap();
        let dependencies = binary.parent().unwrap().to_path_buf();
        // Others are left over from other features or older sources: cargo has just made this one, or knows that nothing
        // has changed since it did.
        let is_library = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with("libqeffect-") && name.ends_with(".rlib")
        };
        let libraries = fs::read_dir(&dependencies).unwrap().map(|entry| entry.unwrap().path()).filter(is_library);
        let rlib = libraries.max_by_key(|path| fs::metadata(path).unwrap().modified().unwrap());
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ui");
        fs::create_dir_all(&out).unwrap();
        Compiler { rlib: rlib.expect("the library lies beside the tests"), dependencies, out }
    }

    fn case(&self, path: &Path, expect: Expect) -> Result<(), String> {
        let output = self.compile(path, expect);
        let said = normal(&String::from_utf8_lossy(&output.stderr));
        match expect {
            Expect::Accepted if !output.status.success() => Err(format!("is refused:\n{said}")),
            Expect::Accepted => {
                let status = Command::new(self.product(path)).status().map_err(|error| error.to_string())?;
                if status.success() { Ok(()) } else { Err(format!("ends with {status}")) }
            }
            Expect::Refused if output.status.success() => Err("is accepted".into()),
            Expect::Refused => {
                let golden = path.with_extension("stderr");
                if env::var("BLESS").is_ok_and(|bless| bless == "1") {
                    return fs::write(&golden, said).map_err(|error| error.to_string());
                }
                let wanted = fs::read_to_string(&golden).unwrap_or_default().replace("\r\n", "\n");
                if wanted == said { Ok(()) } else { Err(format!("the compiler says\n{said}\nand not\n{wanted}")) }
            }
        }
    }

    fn product(&self, path: &Path) -> PathBuf {
        self.out.join(path.file_stem().unwrap())
    }

    fn compile(&self, path: &Path, expect: Expect) -> Output {
        let mut rustc = Command::new(env::var("RUSTC").unwrap_or_else(|_| "rustc".into()));
        rustc.arg(path).args(["--edition", "2024", "--crate-type", "bin", "--color", "never"]);
        rustc.args(["--diagnostic-width", "140", "--allow", "dead_code"]);
        rustc.arg("--extern").arg(format!("qeffect={}", self.rlib.display()));
        rustc.arg("-L").arg(format!("dependency={}", self.dependencies.display()));
        match expect {
            Expect::Refused => rustc.args(["--emit", "metadata", "-o"]).arg(self.product(path).with_extension("rmeta")),
            Expect::Accepted => rustc.args(["-C", "debuginfo=0", "-o"]).arg(self.product(path)),
        };
        rustc.current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("rustc runs")
    }
}

/// Messages without what changes from machine to machine and with every edit elsewhere: the count of errors at their end,
/// the place of the standard library, line numbers in other crates, and which other types implement a trait.
fn normal(text: &str) -> String {
    const ENDS: [&str; 3] = ["error: aborting due to", "For more information about", "Some errors have detailed"];
    // A name that is too long goes to a file, and two notes say so.
    const LONG: [&str; 2] = ["the full name for the type has been written", "consider using `--verbose`"];
    let left_out =
        |line: &&str| ENDS.iter().any(|end| line.starts_with(end)) || LONG.iter().any(|note| line.contains(note));
    let kept: Vec<&str> = text.lines().filter(|line| !left_out(line)).collect();
    let messages = kept.split(|line| line.is_empty()).filter(|message| !message.is_empty());
    let messages: Vec<String> = messages.map(message).collect();
    messages.join("\n\n") + "\n"
}

fn message(lines: &[&str]) -> String {
    let (mut elsewhere, mut list) = (false, None);
    let mut kept: Vec<String> = Vec::new();
    // The widest line number decides how far snippets are indented: that of other crates must not.
    let (mut found, mut wanted) = (0, 1);
    for line in lines {
        let start = line.trim_start();
        let indent = line.len() - start.len();
        if list.is_some_and(|list| indent > list) && !start.starts_with(['|', '=']) {
            continue;
        }
        list = line.contains("= help: the following other types implement trait").then_some(indent);
        elsewhere &= !line.starts_with(char::is_alphabetic); // a note or a help begins
        if start.starts_with("--> ") || start.starts_with("::: ") {
            found = if start.starts_with("--> ") { indent } else { found };
            elsewhere = !start[4..].starts_with("tests/ui/");
            if elsewhere {
                let file = start[4..].split(':').next().unwrap_or_default();
                let file =
                    file.split_once("/library/").map_or_else(|| file.to_owned(), |(_, file)| format!("$RUST/{file}"));
                kept.push(format!("{}{}{file}", &line[..indent], &start[..4]));
                continue;
            }
        } else if let Some((number, code)) = line.split_once(" |").filter(|(number, _)| is_number(number.trim())) {
            if elsewhere {
                kept.push(format!("{} |{code}", " ".repeat(number.len())));
                continue;
            }
            wanted = wanted.max(number.trim().len());
        }
        kept.push((*line).to_owned());
    }
    let extra = " ".repeat(found.saturating_sub(wanted));
    let lines: Vec<&str> = kept.iter().map(|line| line.strip_prefix(&extra).unwrap_or(line).trim_end()).collect();
    lines.join("\n")
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}
