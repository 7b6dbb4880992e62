//! Messages about a file speak its language: `0F1` and `0REDUCE_GRAD`, not `F(0, 1)` and `reduce(0)`.

use crate::diag::{Diagnostic, Report};

/// A report about a CSV in the words of the file: `0REDUCE_GRAD` for `reduce(0)`, `0F1` for `F(0, 1)`.
/// Checks name actions as programs of `schedule!` do.
#[must_use]
pub fn spelt(mut report: Report) -> Report {
    for Diagnostic { message, role, labels, notes, help, .. } in &mut report.diagnostics {
        let labels = labels.iter_mut().map(|label| &mut label.text);
        for text in [message, role].into_iter().chain(labels).chain(notes).chain(help) {
            *text = spell(text);
        }
    }
    report
}

fn spell(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(open) = rest.find('(') {
        let (before, inside) = (&rest[..open], &rest[open + 1..]);
        let start = before.trim_end_matches(|c: char| c.is_ascii_alphanumeric() || c == '_').len();
        match cell(&before[start..], inside) {
            Some((cell, used)) => {
                out.push_str(&before[..start]);
                out.push_str(&cell);
                rest = &inside[used..];
            }
            None => {
                out.push_str(&rest[..=open]);
                rest = inside;
            }
        }
    }
    out.push_str(rest);
    for (ours, theirs) in [("`refresh`", "`REFRESH`"), ("`reduce`", "`REDUCE_GRAD`"), ("`commit;`", "`COMMIT`")] {
        out = out.replace(ours, theirs);
    }
    out
}

/// The cell of an action, and how much of the text behind its bracket belongs to it.
fn cell(word: &str, inside: &str) -> Option<(String, usize)> {
    let (arguments, _) = inside.split_once(')')?;
    let numbers: Vec<&str> = arguments.split(", ").collect();
    if numbers.iter().any(|number| number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit())) {
        return None;
    }
    let cell = match (word, &numbers[..]) {
        ("F" | "I" | "W" | "B" | "R", [stage, microbatch]) => format!("{stage}{word}{microbatch}"),
        ("refresh", [stage]) => format!("{stage}REFRESH"),
        ("reduce", [stage]) => format!("{stage}REDUCE_GRAD"),
        _ => return None,
    };
    Some((cell, arguments.len() + 1))
}

#[cfg(test)]
mod tests {
    use super::spell;

    #[test]
    fn actions_are_spelt_as_in_files() {
        for (ours, theirs) in [
            ("reduce(0) runs before W(0, 12), which still adds", "0REDUCE_GRAD runs before 0W12, which still adds"),
            ("move `reduce(1)` below the last `I` and `W`", "move `1REDUCE_GRAD` below the last `I` and `W`"),
            ("rank 0 writes `reduce` for stage 1", "rank 0 writes `REDUCE_GRAD` for stage 1"),
            ("(F(1, 2)) and refresh(3)", "(1F2) and 3REFRESH"),
            ("FF(1, 2), F(1), F(s, m), F(1, 2, F(, é(F(0, 0)", "FF(1, 2), F(1), F(s, m), F(1, 2, F(, é(0F0"),
            ("`commit;` is the last action", "`COMMIT` is the last action"),
            ("", ""),
        ] {
            assert_eq!(spell(ours), theirs);
        }
    }
}
