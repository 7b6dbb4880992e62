//! Random programs: nothing panics, text round-trips, arithmetic equals an independent evaluator.

use proptest::prelude::*;

use crate::diag::Report;
use crate::lang::token::{PUNCTS, Token, TokenKind};
use crate::lang::{Program, constant, environment, interpret, lex, parse, print, read};
use crate::origin::Origin;

/// Makes choices from a stream of bytes; an empty stream makes the smallest program.
struct Choices<'a> {
    bytes: &'a [u8],
    names: Vec<(String, Kind)>,
    fresh: u32,
    in_closure: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Int,
    Mut,
    Bool,
    Helper(usize),
}

impl Choices<'_> {
    fn pick(&mut self, n: usize) -> usize {
        match self.bytes.split_first() {
            Some((first, rest)) => {
                self.bytes = rest;
                usize::from(*first) % n
            }
            None => 0,
        }
    }

    fn known(&mut self, want: impl Fn(Kind) -> bool) -> Option<(String, Kind)> {
        // Inner names hide outer ones of the same text.
        let found: Vec<_> = (0..self.names.len())
            .filter(|n| {
                want(self.names[*n].1) && !self.names[n + 1..].iter().any(|(name, _)| *name == self.names[*n].0)
            })
            .collect();
        if found.is_empty() {
            return None;
        }
        let n = self.pick(found.len());
        Some(self.names[found[n]].clone())
    }

    fn name(&mut self, kind: Kind) -> String {
        let name = match self.pick(12) {
            0 => "m".to_owned(),
            1 if !matches!(kind, Kind::Helper(_)) => "F".to_owned(),
            2 => "overlap".to_owned(),
            3 if !matches!(kind, Kind::Helper(_)) => "min".to_owned(),
            4 => "rank".to_owned(),
            _ => {
                self.fresh += 1;
                format!("x{}", self.fresh)
            }
        };
        self.names.push((name.clone(), kind));
        name
    }

    fn int(&mut self, depth: usize) -> String {
        if depth == 0 {
            return self.leaf();
        }
        let d = depth - 1;
        match self.pick(14) {
            0 => self.leaf(),
            1 => format!("{} + {}", self.int(d), self.product(d)),
            2 => format!("{} - {}", self.int(d), self.product(d)),
            3 => format!("{} * {}", self.operand(d), self.operand(d)),
            4 => format!("{} / {}", self.operand(d), self.operand(d)),
            5 => format!("{} % {}", self.operand(d), self.operand(d)),
            6 => format!("-{}", self.operand(d)),
            7 => format!("min({}, {})", self.int(d), self.int(d)),
            8 => format!("max({}, {})", self.int(d), self.int(d)),
            9 => format!("abs({})", self.int(d)),
            10 => format!("({}).rem_euclid({})", self.int(d), self.int(d)),
            11 => format!("(if {} {{ {} }} else {{ {} }})", self.bool(d), self.int(d), self.int(d)),
            12 => {
                let before = self.names.len();
                let (value, name) = (self.int(d), self.name(Kind::Int));
                let text = format!("({{ let {name} = {value}; {} }})", self.int(d));
                self.names.truncate(before);
                text
            }
            _ => match self.known(|k| matches!(k, Kind::Helper(_))) {
                Some((name, Kind::Helper(arity))) => {
                    let args: Vec<_> = (0..arity).map(|_| self.int(d)).collect();
                    format!("{name}({})", args.join(", "))
                }
                _ => self.leaf(),
            },
        }
    }

    fn product(&mut self, depth: usize) -> String {
        format!("{} * {}", self.operand(depth), self.operand(depth))
    }

    fn operand(&mut self, depth: usize) -> String {
        if depth == 0 { self.leaf() } else { format!("({})", self.int(depth)) }
    }

    fn leaf(&mut self) -> String {
        let closure = self.in_closure;
        match self.pick(3) {
            0 => self.pick(200).to_string(),
            _ => {
                self.known(|k| k == Kind::Int || (k == Kind::Mut && !closure)).map_or("7".to_owned(), |(name, _)| name)
            }
        }
    }

    fn bool(&mut self, depth: usize) -> String {
        if depth == 0 {
            return self.known(|k| k == Kind::Bool).map_or("true".to_owned(), |(name, _)| name);
        }
        let d = depth - 1;
        let op = ["==", "!=", "<", "<=", ">", ">="][self.pick(6)];
        match self.pick(5) {
            0 => format!("!({})", self.bool(d)),
            1 => format!("({}) && {}", self.bool(d), self.compare(op, d)),
            2 => format!("{} || ({})", self.compare(op, d), self.bool(d)),
            3 => format!("({}) == ({})", self.bool(d), self.bool(d)),
            _ => self.compare(op, d),
        }
    }

    fn compare(&mut self, op: &str, depth: usize) -> String {
        format!("{} {op} {}", self.int(depth), self.int(depth))
    }

    fn block(&mut self, depth: usize) -> String {
        let before = self.names.len();
        let count = self.pick(4);
        let stmts: Vec<_> = (0..count).map(|_| self.stmt(depth)).collect();
        self.names.truncate(before);
        format!("{{ {} }}", stmts.join("\n"))
    }

    fn action(&mut self) -> String {
        match self.pick(9) {
            n @ 0..5 => format!("{}({}, {});", ["F", "I", "W", "B", "R"][n], self.int(1), self.int(2)),
            5 => format!("W({}, [{}, {}]);", self.int(0), self.int(1), self.int(0)),
            6 => format!("refresh({});", self.int(1)),
            7 => format!("reduce({});", self.int(1)),
            _ => "commit;".to_owned(),
        }
    }

    fn stmt(&mut self, depth: usize) -> String {
        if depth == 0 {
            return self.action();
        }
        let d = depth - 1;
        match self.pick(12) {
            0..3 => self.action(),
            3 => {
                let value = self.int(2);
                format!("let {} = {value};", self.name(Kind::Int))
            }
            4 => {
                let value = self.int(1);
                format!("let mut {} = {value};", self.name(Kind::Mut))
            }
            5 => {
                let value = self.bool(2);
                format!("let {} = {value};", self.name(Kind::Bool))
            }
            6 => match self.known(|k| k == Kind::Mut) {
                Some((name, _)) => {
                    let op = ["", "+", "-", "*", "/", "%"][self.pick(6)];
                    format!("{name} {op}= {};", self.int(2))
                }
                None => self.action(),
            },
            7 => {
                let mut text = format!("if {} {}", self.bool(2), self.block(d));
                match self.pick(3) {
                    0 => {}
                    1 => text += &format!(" else {}", self.block(d)),
                    _ => text += &format!(" else if {} {}", self.bool(1), self.block(d)),
                }
                text
            }
            8 => {
                let (a, b, step) = (self.int(1), self.int(1), self.int(0));
                let dots = ["..", "..="][self.pick(2)];
                let range = match self.pick(5) {
                    0 => format!("{a}{dots}{b}"),
                    1 => format!("({a}{dots}{b}).rev()"),
                    2 => format!("({a}{dots}{b}).step_by({step})"),
                    3 => format!("({a}{dots}{b}).rev().step_by({step})"),
                    _ => format!("({a}{dots}{b}).step_by({step}).rev()"),
                };
                let before = self.names.len();
                let name = self.name(Kind::Int);
                let text = format!("for {name} in {range} {}", self.block(d));
                self.names.truncate(before);
                text
            }
            9 => format!("while {} {}", self.bool(1), self.block(d)),
            10 => format!("overlap {{ {} {} }}", self.block(d), self.block(d)),
            _ => {
                let before = self.names.len();
                let arity = self.pick(3);
                let params: Vec<_> = (0..arity).map(|n| format!("p{n}")).collect();
                self.names.extend(params.iter().map(|p| (p.clone(), Kind::Int)));
                let outer = std::mem::replace(&mut self.in_closure, true);
                // Something in the body fixes every parameter's type.
                let body = params.iter().fold(self.int(2), |body, p| format!("{body} + {p} * 0"));
                self.in_closure = outer;
                self.names.truncate(before);
                format!("let {} = |{}| {body};", self.name(Kind::Helper(arity)), params.join(", "))
            }
        }
    }
}

/// A valid program in canonical order of its header.
fn program_text(bytes: &[u8]) -> String {
    let mut c = Choices { bytes, names: Vec::new(), fresh: 0, in_closure: false };
    c.names.extend([("P".to_owned(), Kind::Int), ("M".to_owned(), Kind::Int)]);
    let mut text = "/// Random.\nrandom<P, M> for (2, 3), (1, 1);\n".to_owned();
    text += &format!("ranks: {};\nmicrobatches: {};\nstages: {};\n", c.int(1), c.int(1), c.int(1));
    c.names.push(("s".to_owned(), Kind::Int));
    text += &format!("place: |s| {};\n", c.int(2));
    c.names.pop();
    text += &format!("expect idle(1, 2, {}) <= {} if {};\n", c.int(1), c.int(2), c.bool(1));
    c.names.push(("r".to_owned(), Kind::Int));
    text += &format!("rank |r| {}\n", c.block(4));
    text
}

fn parsed(text: &str) -> Program {
    let (tokens, map) = lex("random.sched", text);
    parse(&tokens).into_result().unwrap_or_else(|report| panic!("{text}\n{}", map.locate(report)))
}

/// A tree of arithmetic, apart from the language.
#[derive(Clone, Debug)]
enum Tree {
    Leaf(i64),
    Node(&'static str, Box<Tree>, Box<Tree>),
}

impl Tree {
    /// Fully bracketed, so that the precedences of the parser play no part.
    fn text(&self) -> String {
        match self {
            Tree::Leaf(n) if *n < 0 => format!("(0 - {})", n.unsigned_abs()),
            Tree::Leaf(n) => n.to_string(),
            Tree::Node(op @ ("min" | "max"), a, b) => format!("{op}({}, {})", a.text(), b.text()),
            Tree::Node(op @ ("rem_euclid" | "div_euclid"), a, b) => format!("({}).{op}({})", a.text(), b.text()),
            Tree::Node(op, a, b) => format!("({} {op} {})", a.text(), b.text()),
        }
    }

    /// In 128 bits; `None` where an `i64` would overflow or a divisor is 0.
    fn value(&self) -> Option<i128> {
        let Tree::Node(op, a, b) = self else {
            let Tree::Leaf(n) = self else { unreachable!() };
            return Some(i128::from(*n));
        };
        let (a, b) = (a.value()?, b.value()?);
        if b == 0 && matches!(*op, "/" | "%" | "rem_euclid" | "div_euclid") {
            return None;
        }
        // As in Rust, the remainder of what overflows as a quotient overflows too.
        if a == i128::from(i64::MIN) && b == -1 && matches!(*op, "%" | "rem_euclid") {
            return None;
        }
        let floor = |a: i128, b: i128| (a - ((a % b) + b.abs()) % b.abs()) / b;
        let value = match *op {
            "+" => a + b,
            "-" => a - b,
            "*" => a * b,
            "/" => a / b,
            "%" => a - (a / b) * b,
            "min" => {
                if a < b {
                    a
                } else {
                    b
                }
            }
            "max" => {
                if a > b {
                    a
                } else {
                    b
                }
            }
            "div_euclid" => floor(a, b),
            "rem_euclid" => a - floor(a, b) * b,
            other => unreachable!("{other}"),
        };
        i64::try_from(value).is_ok().then_some(value)
    }
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf =
        prop_oneof![4 => -20i64..20, 1 => Just(i64::MAX), 1 => Just(-i64::MAX), 1 => any::<i32>().prop_map(i64::from)];
    leaf.prop_map(Tree::Leaf).prop_recursive(5, 40, 2, |inner| {
        let op = prop::sample::select(vec!["+", "-", "*", "/", "%", "min", "max", "rem_euclid", "div_euclid"]);
        (op, inner.clone(), inner).prop_map(|(op, a, b)| Tree::Node(op, Box::new(a), Box::new(b)))
    })
}

fn token() -> impl Strategy<Value = TokenKind> {
    let words = vec![
        "F",
        "I",
        "W",
        "B",
        "R",
        "P",
        "M",
        "r",
        "m",
        "let",
        "mut",
        "if",
        "else",
        "for",
        "in",
        "while",
        "overlap",
        "commit",
        "refresh",
        "reduce",
        "rank",
        "ranks",
        "stages",
        "microbatches",
        "place",
        "slots",
        "expect",
        "bubble",
        "peak",
        "bytes",
        "tape",
        "eval",
        "update",
        "step",
        "min",
        "loop",
        "match",
        "as",
        "pub",
        "true",
        "rev",
        "step_by",
        "x",
    ];
    prop_oneof![
        6 => prop::sample::select(words).prop_map(|w| TokenKind::Ident(w.into())),
        4 => prop::sample::select(PUNCTS.to_vec()).prop_map(TokenKind::Punct),
        2 => prop::sample::select(vec!['(', '[', '{']).prop_map(TokenKind::Open),
        2 => prop::sample::select(vec![')', ']', '}']).prop_map(TokenKind::Close),
        2 => prop::option::of(0i64..9).prop_map(TokenKind::Int),
        1 => prop::sample::select(vec!["\"s\"", "1.5", "'a", "3u8", "€"]).prop_map(|t| TokenKind::Other(t.into())),
        1 => Just(TokenKind::Doc("doc".into())),
    ]
}

fn judge(tokens: Vec<TokenKind>) {
    let number = |(n, kind)| Token { kind, origin: Origin::token(n) };
    let tokens: Vec<Token> = tokens.into_iter().enumerate().map(number).collect();
    let parsed = parse(&tokens);
    assert_eq!(parsed.program.is_some(), parsed.faults.is_empty());
    if let Some(program) = &parsed.program {
        let _ = interpret(program, &[2, 3]);
        assert!(!print(program).is_empty() && !constant(program).is_empty());
    }
    let _ = Report::from_faults(parsed.faults).to_string();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_token_soup_panics(tokens in prop::collection::vec(token(), 0..120)) {
        judge(tokens);
    }

    #[test]
    fn no_broken_program_panics(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        edits in prop::collection::vec((any::<prop::sample::Index>(), token(), 0..3), 1..4),
    ) {
        let (tokens, _) = lex("random.sched", &program_text(&bytes));
        let mut kinds: Vec<TokenKind> = tokens.into_iter().map(|t| t.kind).collect();
        for (at, kind, edit) in edits {
            let at = at.index(kinds.len());
            match edit {
                0 => kinds[at] = kind,
                1 => kinds.insert(at, kind),
                _ => drop(kinds.remove(at)),
            }
            if kinds.is_empty() {
                break;
            }
        }
        judge(kinds);
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,80}", tail in ".{0,40}") {
        for text in [text.clone(), tail.clone(), format!("t<P>; {text}\n{tail}"), format!("t; rank |r| {{ {text}\n{tail}")] {
            let (result, map) = read("soup.sched", &text);
            if let Err(report) = result {
                prop_assert!(!map.locate(report).to_string().is_empty());
            }
        }
    }

    #[test]
    fn programs_round_trip_through_text(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let first = parsed(&program_text(&bytes));
        let text = print(&first);
        let second = parsed(&text);
        prop_assert_eq!(&text, &print(&second));
        prop_assert!(first.without_origins() == second.without_origins(), "{}\nprinted:\n{text}", program_text(&bytes));
    }

    #[test]
    fn arithmetic_is_that_of_wide_integers(tree in tree()) {
        // The sign and the magnitude come out as two actions, in 31-bit pieces.
        let body = format!(
            "let v = {}; let lo = v.rem_euclid(2147483648); let mid = v.div_euclid(2147483648); \
             F(lo, if mid < 0 {{ 1 }} else {{ 0 }}); F(abs(mid) % 4294967296, abs(mid) / 4294967296);",
            tree.text()
        );
        let result = super::run(&super::with_body(&body), &[1, 1]);
        match tree.value() {
            None => prop_assert!(result.is_err_and(|text| text.contains("QE0705")), "{}", tree.text()),
            Some(value) => {
                let schedule = result.map_err(TestCaseError::fail)?;
                let [low, high] = &schedule.items[..] else { panic!("two actions") };
                let magnitude = i128::from(high.stage.0) + (i128::from(high.microbatch.0) << 32);
                let high = if low.microbatch.0 == 1 { -magnitude } else { magnitude };
                prop_assert_eq!(i128::from(low.stage.0) + (high << 31), value);
            }
        }
    }

    #[test]
    fn precedence_is_that_of_rust(a in 1i64..9, b in 1i64..9, c in 1i64..9, d in 1i64..9) {
        let body = format!(
            "F(100 + {a} - {b} * {c} / {d} - -{a} % {b}, if {a} < {b} + 1 && {c} * 2 >= {d} || !({a} == {d}) {{ 1 }} else {{ 0 }});"
        );
        let schedule = super::run(&super::with_body(&body), &[1, 1]).map_err(TestCaseError::fail)?;
        let truth = a < b + 1 && c * 2 >= d || a != d;
        prop_assert_eq!(i64::from(schedule.items[0].stage.0), 100 + a - b * c / d - -a % b);
        prop_assert_eq!(schedule.items[0].microbatch.0 == 1, truth);
    }

    #[test]
    fn every_item_has_an_environment(p in 1i64..4, m in 1i64..5) {
        let text = "t<P, M>; ranks: P; microbatches: M; stages: P; place: |s| s;
            rank |r| { for m in 0..M { F(r, m); let k = m + 1; if k % 2 == 0 { B(r, k - 1); } } }";
        let program = parsed(text);
        let schedule = interpret(&program, &[p, m]).unwrap();
        for rank in 0..p as u32 {
            let rank = crate::ids::Rank(rank);
            for (index, item) in schedule.rank(rank).iter().enumerate() {
                let seen = environment(&program, &[p, m], rank, index as u32);
                prop_assert_eq!(&seen[0], &("r".to_owned(), i64::from(rank.0)));
                prop_assert_eq!(&seen[1], &("m".to_owned(), i64::from(item.microbatch.0)));
                prop_assert_eq!(seen.len(), if item.kind == crate::action::Kind::Forward { 2 } else { 3 });
            }
        }
    }
}
