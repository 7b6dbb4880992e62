//! The shadow program: an accepted schedule once more, as moves of real tokens, tapes and works.
//!
//! One function per rank, never called. The checker has already decided; rustc's borrow checker
//! is a second witness, of other make, that nothing is used twice.

use proc_macro2::{Ident, Span, TokenStream};
use qeffect_core::action::{Item, Kind};
use qeffect_core::ids::{Rank, Stage};
use qeffect_core::plan::Checked;
use quote::{format_ident, quote, quote_spanned};

use crate::tokens::Source;

/// Schedules with more actions get none: the borrow checker's time is the user's.
pub const LARGEST: usize = 2_000;

/// The shadow program of an accepted schedule; empty for large ones and for forward-only ones,
/// which retain nothing.
pub fn program(core: &TokenStream, source: &Source, checked: &Checked) -> TokenStream {
    let schedule = &checked.schedule;
    if schedule.eval || schedule.items.len() > LARGEST {
        return TokenStream::new();
    }
    let ranks = (0..schedule.ranks).map(Rank).map(|rank| {
        let stages: Vec<Stage> = schedule.stages_of(rank).collect();
        let forward: Vec<Ident> = stages.iter().map(|stage| token('f', *stage)).collect();
        let backward: Vec<Ident> = stages.iter().map(|stage| token('b', *stage)).collect();
        let statements = schedule.rank(rank).iter().map(|item| statement(source, item));
        let name = format_ident!("rank_{}", rank.0, span = Span::mixed_site());
        quote! {
            fn #name(#(#forward: Token<Fwd>, #backward: Token<Bwd>),*) {
                #(#statements)*
                #(keep(#forward); keep(#backward);)*
            }
        }
    });
    quote! {
        #[allow(dead_code, clippy::all, clippy::pedantic, clippy::nursery)]
        const _: () = {
            use #core::template::shadow::*;
            #(#ranks)*
        };
    }
}

/// One action, at the place where the user wrote it.
fn statement(source: &Source, item: &Item) -> TokenStream {
    let here = Span::mixed_site().located_at(source.spans_of(item.origin).0);
    let (f, b) = (token('f', item.stage), token('b', item.stage));
    let (tape, work) = (retained("tape", item), retained("work", item));
    match item.kind {
        Kind::Forward => quote_spanned!(here=> let (#tape, #f) = forward(#f);),
        Kind::InputGrad => quote_spanned!(here=> let (#work, #b) = input_grad(#tape, #b);),
        Kind::WeightGrad | Kind::WeightGradJoin => quote_spanned!(here=> weight_grad(#work);),
        Kind::FullBackward => quote_spanned!(here=> let #b = full_backward(#tape, #b);),
        Kind::Recompute => quote_spanned!(here=> let #tape = recompute(#tape);),
        Kind::Refresh | Kind::Reduce | Kind::Commit | Kind::OverlapBegin | Kind::OverlapBranch | Kind::OverlapEnd => {
            TokenStream::new()
        }
    }
}

/// The token of one state cell of a stage.
fn token(cell: char, stage: Stage) -> Ident {
    Ident::new(&format!("{cell}{stage}"), Span::mixed_site())
}

fn retained(what: &str, item: &Item) -> Ident {
    Ident::new(&format!("{what}_{}_{}", item.stage, item.microbatch), Span::mixed_site())
}
