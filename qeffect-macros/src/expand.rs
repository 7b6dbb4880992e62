//! The pipeline of `schedule!`: read, parse, and per declared instance interpret and check; then
//! the items, or the errors and the same items without bodies.

use proc_macro2::{Span, TokenStream, TokenTree};
use qeffect_core::check::{self, Options};
use qeffect_core::lang;
use qeffect_core::lang::ast::Program;
use quote::quote;

use crate::emit::{self, Instance};
use crate::names::Names;
use crate::report::{self, Found};
use crate::tokens::Source;

/// Expands one invocation: the path of the wrapper's crate, then the program.
pub fn expand(input: TokenStream) -> TokenStream {
    let mut trees = input.into_iter();
    let Some(krate) = trees.next() else { return TokenStream::new() };
    let source = Source::read(trees.collect());
    if source.tokens.len() >= qeffect_core::origin::Origin::MAX_TOKENS {
        return report::compile_error((Span::call_site(), Span::call_site()), "this schedule is too long");
    }
    let names = Names::read(krate_path(krate), &source);
    let parsed = lang::parse(&source.tokens);
    let (program, instances, found) = match parsed.into_result() {
        Ok(program) => {
            let (instances, found) = judge(&program);
            (Some(program), instances, found)
        }
        Err(report) => (None, Vec::new(), vec![Found { instance: None, report }]),
    };
    let errors = report::errors(&source, &found);
    let items = match (names, program) {
        (Some(names), Some(program)) if found.is_empty() => {
            emit::accepted(&source, &names, &constant(&program), &instances)
        }
        (Some(names), _) => emit::refused(&source.front, &names),
        (None, _) => TokenStream::new(),
    };
    quote!(#errors #items)
}

/// Interprets and checks every declared instance.
fn judge(program: &Program) -> (Vec<Instance>, Vec<Found>) {
    let (mut accepted, mut found) = (Vec::new(), Vec::new());
    for instance in program.instances.iter() {
        let values = instance.values.to_vec();
        let verdict = lang::interpret(program, &values).and_then(|schedule| {
            check::check(schedule, &Options::COMPILE_TIME).map_err(|mut report| {
                lang::annotate(&mut report, program, &values);
                report
            })
        });
        match verdict {
            Ok(checked) => accepted.push(Instance { values, origin: instance.origin, checked }),
            Err(report) => found.push(Found { instance: Some(values), report }),
        }
    }
    (accepted, found)
}

/// The program as a constant expression over `lang`'s names.
fn constant(program: &Program) -> TokenStream {
    lang::constant(program).parse().expect("a constant expression is Rust")
}

fn krate_path(krate: TokenTree) -> TokenStream {
    krate.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expands a program as the wrapper would.
    fn expand_text(program: &str) -> TokenStream {
        let program: TokenStream = program.parse().expect("Rust tokens");
        expand(quote!(qeffect #program))
    }

    /// The messages of all `compile_error!`s.
    fn messages(output: TokenStream) -> Vec<String> {
        let trees: Vec<TokenTree> = output.into_iter().collect();
        let is_error = |tree: &TokenTree| matches!(tree, TokenTree::Ident(ident) if ident == "compile_error");
        let text = |tree: Option<&TokenTree>| match tree {
            Some(TokenTree::Group(group)) => group.stream().to_string(),
            other => panic!("compile_error without text: {other:?}"),
        };
        (0..trees.len()).filter(|n| is_error(&trees[*n])).map(|n| text(trees.get(n + 2))).collect()
    }

    fn one_f_one_b(instances: &str) -> String {
        format!(
            "/// 1F1B.\npub one_f_one_b<P, M> for {instances};
            ranks: P; microbatches: M; stages: P; place: |s| s;
            rank |r| {{
                let warm = min(P - 1 - r, M);
                for m in 0..warm {{ F(r, m); }}
                for m in 0..M {{ if m + warm < M {{ F(r, m + warm); }} I(r, m); W(r, m); }}
            }}"
        )
    }

    fn broken(instances: &str, body: &str) -> String {
        format!(
            "pub(crate) broken<P, M> for {instances};
            ranks: P; microbatches: M; stages: P; place: |s| s;
            rank |r| {{ {body} }}"
        )
    }

    fn count(output: TokenStream) -> usize {
        let inner = |tree: TokenTree| match tree {
            TokenTree::Group(group) => 2 + count(group.stream()),
            _ => 1,
        };
        output.into_iter().map(inner).sum()
    }

    #[test]
    fn an_accepted_schedule_becomes_a_module_and_a_function() {
        let output = expand_text(&one_f_one_b("(2, 4), (4, 8)"));
        let text = output.to_string();
        assert!(messages(output).is_empty());
        assert!(text.contains("pub mod one_f_one_b") && text.contains("pub fn one_f_one_b"), "{text}");
        assert_eq!(text.matches("impl Declared").count(), 2);
        // The shadow program: one function per rank of each instance.
        assert_eq!(text.matches("fn rank_").count(), 2 + 4);
        assert_eq!(text.matches("weight_grad (").count(), 2 * 4 + 4 * 8);
    }

    #[test]
    fn expansion_is_deterministic() {
        let program = one_f_one_b("(2, 4), (4, 8)");
        assert_eq!(expand_text(&program).to_string(), expand_text(&program).to_string());
    }

    #[test]
    fn tables_are_single_literals() {
        let (small, large) = (expand_text(&one_f_one_b("(2, 64)")), expand_text(&one_f_one_b("(8, 1000)")));
        // 24,000 actions are too many for a shadow program, and all of them are in two literals.
        assert!(!large.to_string().contains("fn rank_"));
        assert!(count(large) < count(small), "the tables grow with the schedule");
    }

    #[test]
    fn one_fault_in_several_instances_is_one_error() {
        let body = "for m in 0..M { F(r, m); B(r, m); if m == 1 { B(r, m); } }";
        let found = messages(expand_text(&broken("(1, 2), (2, 4), (1, 8)", body)));
        assert_eq!(found.len(), 1, "{found:#?}");
        assert!(found[0].contains("[QE0101]"), "{found:?}");
        assert!(found[0].contains("instance P = 1, M = 2; here r = 0, m = 1; also in (2, 4), (1, 8)"), "{found:?}");
    }

    #[test]
    fn only_the_first_failing_phase_is_reported() {
        // (1, 1) has a tape that is lost, (1, 2) also runs a microbatch that does not exist.
        let body = "for m in 0..1 { F(r, m); } if M == 2 { F(r, 5); }";
        let found = messages(expand_text(&broken("(1, 1), (1, 2)", body)));
        assert!(!found.is_empty() && found.iter().all(|message| message.contains("[QE06")), "{found:#?}");
    }

    #[test]
    fn after_a_fault_the_same_items_are_there() {
        for program in [broken("(1, 2)", "for m in 0..M { F(r, m); }"), broken("(1, 2)", "let = ; F(r);")] {
            let output = expand_text(&program);
            let text = output.to_string();
            assert!(!messages(output).is_empty());
            for item in ["pub (crate) mod broken", "pub (crate) fn broken", "pub fn build", "pub fn find"] {
                assert!(text.contains(item), "{item} is missing: {text}");
            }
        }
        // Not even a name: the errors alone.
        let output = expand_text("<P, M> for (1, 2);");
        assert!(!messages(output.clone()).is_empty());
        assert!(!output.to_string().contains("mod "));
    }

    #[test]
    fn nothing_at_all_is_an_error_of_the_language() {
        assert_eq!(messages(expand_text("")).len(), 1);
    }
}
