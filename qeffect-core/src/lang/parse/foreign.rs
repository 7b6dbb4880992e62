//! What Rust has and the schedule language has not: each construct by name, with what to write.

use super::Parser;
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::lang::token::TokenKind;
use crate::origin::Origin;

/// Words that start something Rust has, the name of that thing, and what to write instead.
const WORDS: &[(&str, &str, &str)] = &[
    ("loop", "`loop`", "use `for` or `while`"),
    ("break", "`break`", "put the condition into the `for` range or into `while`"),
    ("continue", "`continue`", "put the rest of the body into `if`"),
    ("return", "`return`", "a rank ends at the end of its block: put the rest into `if`"),
    ("match", "`match`", "use `if` and `else if`"),
    ("fn", "a function", "use a helper closure: `let f = |a, b| a + b;`"),
    ("struct", "a type definition", "every value is an integer or a bool"),
    ("enum", "a type definition", "every value is an integer or a bool"),
    ("union", "a type definition", "every value is an integer or a bool"),
    ("trait", "a trait", "use helper closures"),
    ("impl", "an implementation", "use helper closures"),
    ("type", "a type definition", "every value is an integer or a bool"),
    ("mod", "a module", "write one schedule per `schedule!`"),
    ("use", "an import", "a schedule sees its parameters and its own names only"),
    ("const", "a constant", "use `let`"),
    ("static", "a static", "use `let`"),
    ("unsafe", "`unsafe`", "remove it"),
    ("async", "`async`", "remove it"),
    ("await", "`await`", "remove it"),
    ("move", "a `move` closure", "remove `move`"),
    ("ref", "a reference", "remove it: every value is copied"),
    ("dyn", "a type", "every value is an integer or a bool"),
    ("extern", "an external item", "a schedule sees its parameters and its own names only"),
    ("where", "a `where` clause", "remove it"),
    ("self", "`self`", "use a name of your own"),
    ("Self", "`Self`", "use a name of your own"),
    ("super", "a path", "a schedule sees its parameters and its own names only"),
    ("crate", "a path", "a schedule sees its parameters and its own names only"),
    ("yield", "`yield`", "remove it"),
];

/// Whether a word cannot be a name.
pub(super) fn is_reserved(text: &str) -> bool {
    matches!(text, "let" | "mut" | "if" | "else" | "for" | "in" | "while" | "true" | "false" | "pub" | "as")
        || WORDS.iter().any(|(word, ..)| *word == text && *word != "union")
}

/// The fault of using something that is not in the language.
pub(super) fn not_in_language(origin: Origin, what: &str, help: impl Into<String>) -> Diagnostic {
    Diagnostic::new(Code::NotInLanguage, origin, format!("{what} is not in the schedule language"))
        .role("not in the schedule language")
        .help(help)
}

impl Parser<'_> {
    /// The next token starts something that only Rust has.
    pub(super) fn foreign(&self) -> Option<Diagnostic> {
        let origin = self.here();
        let with_next = self.tokens.get(self.at + 1).map_or(origin, |t| origin.to(t.origin));
        let fault = match self.peek() {
            TokenKind::Ident(text) => {
                let macro_call = matches!(self.peek_at(1), TokenKind::Punct("!"))
                    && matches!(self.peek_at(2), TokenKind::Open(_) | TokenKind::Ident(_));
                if text == "as" {
                    not_in_language(with_next, "a cast", "every number is an `i64`: remove the cast")
                } else if text == "union" {
                    return None;
                } else if let Some((_, what, help)) = WORDS.iter().find(|(word, ..)| word == text) {
                    not_in_language(origin, what, *help)
                } else if macro_call {
                    let what = format!("the macro `{text}!`");
                    let help = match &**text {
                        "assert" | "assert_eq" | "debug_assert" => "state it as a contract in the header: `expect ..`",
                        _ => "a schedule only says which actions run: remove it",
                    };
                    not_in_language(with_next, &what, help)
                } else if matches!(self.peek_at(1), TokenKind::Punct("::")) {
                    not_in_language(with_next, "a path", "a schedule sees its parameters and its own names only")
                } else {
                    return None;
                }
            }
            TokenKind::Other(text) => other(origin, text),
            TokenKind::Punct(text) => {
                let (what, help) = match *text {
                    "?" => ("`?`", "nothing in a schedule fails: remove it"),
                    "&" | "&&" => ("a reference", "remove `&`: every value is copied"),
                    "*" => ("a dereference", "remove `*`: every value is copied"),
                    "|" | "||" => ("a closure as a value", "name it: `let f = |a| a + 1;`"),
                    ".." | "..=" => ("a range as a value", "a range stands in `for`: `for m in a..b`"),
                    "..." => ("`...`", "write `..=` for a range that includes its end"),
                    "::" => ("a path", "a schedule sees its parameters and its own names only"),
                    "#" => ("an attribute", "remove it, or put it above the schedule"),
                    "<<" | ">>" | "^" | "^=" | "&=" | "|=" | "<<=" | ">>=" | "~" => {
                        ("a bit operator", "use `*`, `/`, `%`, `&&` or `||`")
                    }
                    "->" | "=>" | "@" | "$" => return None,
                    _ => return None,
                };
                not_in_language(origin, what, help)
            }
            TokenKind::Open('[') => {
                not_in_language(origin, "a list", "lists stand in `W(s, [m0, m1])` only: count with `for`")
            }
            TokenKind::Int(None) => Diagnostic::new(Code::Arithmetic, origin, "this integer does not fit an `i64`")
                .help(format!("the largest is `{}`", i64::MAX)),
            _ => return None,
        };
        Some(fault)
    }
}

fn other(origin: Origin, text: &str) -> Diagnostic {
    let first = text.chars().next().unwrap_or(' ');
    let quoted = text.contains('"');
    let lifetime = first == '\'' && !text[1..].contains('\'');
    if first.is_ascii_digit() {
        let float = text.contains('.') || (text.contains(['e', 'E']) && !text.starts_with("0x"));
        let suffix = text.find(['i', 'u']).filter(|_| !text.starts_with("0x"));
        return match (float, suffix) {
            (false, Some(at)) => {
                let help = format!("every number is an `i64`: write `{}`", text[..at].trim_end_matches('_'));
                not_in_language(origin, "an integer with a type", help)
            }
            _ if text.ends_with("f32") || text.ends_with("f64") || float => {
                not_in_language(origin, "a floating-point number", "every number is an integer: scale it")
            }
            _ => Diagnostic::new(Code::Syntax, origin, format!("`{text}` is not a number")),
        };
    }
    if quoted {
        not_in_language(origin, "a string", "every value is an integer or a bool")
    } else if lifetime {
        not_in_language(origin, "a label or lifetime", "remove it")
    } else if first == '\'' || text.ends_with('\'') {
        not_in_language(origin, "a character", "every value is an integer or a bool")
    } else {
        Diagnostic::new(Code::Syntax, origin, format!("`{text}` is not part of the schedule language"))
    }
}
