//! `qeffect explain`: the pages of `docs/errors`, embedded.

use std::process::ExitCode;

use clap::Args;
use qeffect_core::code::Code;
use serde_json::{Value, json};

use super::output::{Failure, Screen, table};

macro_rules! pages {
    ($($number:literal)*) => {
        &[$((concat!("QE", $number), include_str!(concat!("../../docs/errors/QE", $number, ".md")))),*]
    };
}

/// Every page by its code.
const PAGES: &[(&str, &str)] = pages! {
    "0101" "0102" "0103" "0104" "0105" "0106" "0107" "0108" "0109" "0201" "0202" "0203"
    "0301" "0302" "0303" "0304" "0305" "0306" "0401" "0402" "0403" "0404" "0405" "0406" "0407"
    "0501" "0502" "0503" "0504" "0505" "0506" "0601" "0602" "0603" "0604" "0605" "0606"
    "0607" "0701" "0702" "0703" "0704" "0705" "0706" "0707" "0708" "0709" "0710" "0801"
    "0802" "0803" "0804" "0805" "0901" "0902" "0903" "0904" "0905" "0906" "0907"
};

/// Arguments of `explain`.
#[derive(Args)]
#[command(after_help = "Examples:\n  qeffect explain QE0401\n  qeffect explain --list")]
pub struct Explain {
    /// A code, as in `QE0401`, `qe0401` or `401`
    #[arg(required_unless_present = "list")]
    code: Option<String>,
    /// List all codes
    #[arg(long)]
    list: bool,
}

impl Explain {
    /// Explains.
    ///
    /// # Errors
    ///
    /// If there is no such code.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        match &self.code {
            Some(code) if !self.list => {
                let code = parse(code).ok_or_else(|| {
                    Failure::Usage(format!("there is no code `{code}`: `qeffect explain --list` shows all"))
                })?;
                if screen.json {
                    screen.value(&json!({"code": code.to_string(), "title": code.title(), "page": page(code)}))?;
                } else {
                    screen.text(&readable(page(code), screen))?;
                }
            }
            _ if screen.json => {
                let all = Code::ALL.iter().map(|c| json!({"code": c.to_string(), "title": c.title()}));
                screen.value(&Value::Array(all.collect()))?;
            }
            _ => {
                let mut rows = vec![vec!["code".to_owned(), "what is wrong".to_owned()]];
                rows.extend(Code::ALL.iter().map(|code| vec![code.to_string(), code.title().to_owned()]));
                screen.text(&table(screen, &rows))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn parse(text: &str) -> Option<Code> {
    let text = text.trim().trim_start_matches('[').trim_end_matches(']');
    Code::parse(text).or_else(|| Code::parse(&format!("QE{text:0>4}")))
}

fn page(code: Code) -> &'static str {
    let name = code.to_string();
    PAGES.iter().find(|(known, _)| *known == name).map_or("", |(_, page)| page)
}

/// A page for the terminal: headings bold, code indented, links without their targets.
fn readable(page: &str, screen: &Screen) -> String {
    let mut out = String::new();
    let mut code = false;
    for line in page.lines() {
        if line.starts_with("```") {
            code = !code;
        } else if code {
            out.push_str(&format!("    {line}\n"));
        } else if let Some(heading) = line.strip_prefix('#') {
            out.push_str(&format!("{}\n", screen.bold(heading.trim_start_matches('#').trim())));
        } else {
            out.push_str(&format!("{}\n", without_links(line)));
        }
    }
    out.replace("\n    \n", "\n\n")
}

/// `[text](target)` as `text`.
fn without_links(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('[') {
        match after.split_once("](").and_then(|(text, tail)| Some((text, tail.split_once(')')?.1))) {
            Some((text, tail)) if !text.contains('[') => {
                out.push_str(before);
                out.push_str(text);
                rest = tail;
            }
            _ => {
                out.push_str(before);
                out.push('[');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_page() {
        assert_eq!(PAGES.len(), Code::ALL.len());
        for code in Code::ALL {
            assert!(page(*code).starts_with(&format!("# {code}: ")), "{code}");
        }
    }

    #[test]
    fn codes_are_read_as_people_write_them() {
        for text in ["QE0401", "qe0401", "0401", "401", "[QE0401]"] {
            assert_eq!(parse(text), Some(Code::Deadlock), "{text}");
        }
        for text in ["", "QE", "QE9999", "x", "QE04011"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn links_lose_their_targets_only() {
        assert_eq!(
            without_links("see [QE0101](QE0101.md), W(s, [m0, m1]) and [x]"),
            "see QE0101, W(s, [m0, m1]) and [x]"
        );
    }
}
