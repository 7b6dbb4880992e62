//! The items of a schedule: a module and a function of its name.
//!
//! ```text
//! mod zb_h1 { PROGRAM, build(p, m), Instances, trait Declared<P, M>, one impl per instance }
//! fn  zb_h1::<P, M>() -> &'static Checked
//! ```
//!
//! Tables are data and code is calls of templates in core, so an expansion stays small. After a
//! fault the same items come out, with bodies that are never reached.

use proc_macro2::{Literal, TokenStream};
use qeffect_core::origin::Origin;
use qeffect_core::packed;
use qeffect_core::plan::{Checked, Direction, Edge, Peaks, Plan};
use qeffect_core::schedule::{
    Bounds, Bytes, Compare, Costs, Expect, HeaderOrigins, Measure, Schedule, Transport, Update,
};
use quote::{format_ident, quote, quote_spanned};

use crate::names::Names;
use crate::report::{self, tuple};
use crate::shadow;
use crate::tokens::{Front, Source};

/// A declared instance that passed every check.
pub struct Instance {
    /// Values of the parameters.
    pub values: Vec<i64>,
    /// Where they are declared.
    pub origin: Origin,
    /// What the checker returned.
    pub checked: Checked,
}

/// The items of an accepted schedule. `program` is its syntax tree as a constant expression.
pub fn accepted(source: &Source, names: &Names, program: &TokenStream, instances: &[Instance]) -> TokenStream {
    let core = names.core();
    let impls = instances.iter().map(|instance| {
        let values = instance.values.iter().map(|value| number(*value));
        let body = checked(&instance.checked);
        // Where rustc lists the declared instances, it shows them as the user wrote them.
        let (first, last) = source.spans_of(instance.origin);
        let head = quote_spanned!(first=> impl Declared<#({ #values }),*> for);
        let tail = quote_spanned! {last=>
            Instances {
                fn checked() -> &'static Checked {
                    #body
                    &CHECKED
                }
            }
        };
        quote!(#head #tail)
    });
    let args = &names.args;
    let (file, tokens) = report::places(&source.spans);
    let contents = quote! {
        /// The schedule as it was parsed: what `build` interprets.
        pub static PROGRAM: template::Program = {
            use template::embed::*;
            #program
        };

        /// Where it stands, for the faults of `build`.
        static PLACES: template::Places = template::Places { file: #file, tokens: #tokens };

        #(#impls)*
    };
    let build = quote!(template::build(&PROGRAM, &[#(#args),*], &PLACES));
    let declared = instances.iter().map(|instance| {
        let values: Vec<_> = instance.values.iter().map(|value| number(*value)).collect();
        quote!((&[#(#values),*], <Instances as Declared<#({ #values }),*>>::checked))
    });
    let find = quote!(template::find(&[#(#declared),*], &[#(#args),*]));
    let list: Vec<String> = instances.iter().map(|instance| tuple(&instance.values)).collect();
    let items = items(&source.front, names, &list, contents, [build, find]);
    let shadow = instances.iter().map(|instance| shadow::program(&core, source, &instance.checked));
    quote!(#items #(#shadow)*)
}

/// The same items after a fault: every use compiles, nothing can be run.
pub fn refused(front: &Front, names: &Names) -> TokenStream {
    let params = &names.params;
    let (const_params, refused) = (names.const_params(), quote!(template::refused()));
    let contents = quote! {
        #[allow(non_upper_case_globals)]
        impl<#const_params> Declared<#(#params),*> for Instances {
            fn checked() -> &'static Checked {
                #refused
            }
        }
    };
    items(front, names, &[], contents, [refused.clone(), refused])
}

fn items(
    front: &Front,
    names: &Names,
    instances: &[String],
    contents: TokenStream,
    [build, find]: [TokenStream; 2],
) -> TokenStream {
    let Names { krate, schedule, params, args } = names;
    let Front { attributes, visibility, .. } = front;
    let const_params = names.const_params();
    // What rustc names in an error about an undeclared instance stands where the user wrote the name.
    let here = schedule.span();
    let instances_type = quote_spanned!(here=> pub enum Instances {});
    let declaration = quote_spanned! {here=>
        pub trait Declared<#const_params> {
            /// The checked schedule of this instance.
            fn checked() -> &'static Checked;
        }
    };
    let bound = quote_spanned!(here=> #schedule::Instances: #schedule::Declared<#(#params),*>);
    let texts = Texts::new(names, instances);
    let Texts { message, label, declared, declare, at_start, about, call, build: about_build, .. } = &texts;
    quote! {
        #attributes
        #[doc = ""]
        #[doc = #about]
        #[allow(dead_code, non_snake_case, unreachable_pub)]
        #visibility mod #schedule {
            use #krate::__private::core::template;
            use template::{Checked, Report};

            /// Where the declared instances are looked up.
            #[derive(Clone, Copy, Debug)]
            #instances_type

            /// The values of the parameters for which the compiler has checked this schedule.
            #[diagnostic::on_unimplemented(
                message = #message,
                label = #label,
                note = #declared,
                note = #declare,
                note = #at_start
            )]
            #[allow(non_upper_case_globals)]
            #declaration

            #[doc = #about_build]
            ///
            /// # Errors
            /// All faults of the first failing phase, if the checker refuses these values.
            pub fn build(#(#args: template::Value),*) -> template::Result<Checked, Report> {
                #build
            }

            /// The instance for these values, if it is declared.
            #[allow(unused_variables)]
            pub fn find(#(#args: template::Value),*) -> template::Option<&'static Checked> {
                #find
            }

            #contents
        }

        #attributes
        #[doc = ""]
        #[doc = #call]
        #[allow(dead_code, non_snake_case, non_upper_case_globals)]
        #visibility fn #schedule<#const_params>() -> &'static #krate::__private::core::template::Checked
        where
            #bound,
        {
            <#schedule::Instances as #schedule::Declared<#(#params),*>>::checked()
        }
    }
}

/// The sentences of the items' documentation and of the error for an undeclared instance.
struct Texts {
    message: String,
    label: String,
    declared: String,
    declare: String,
    at_start: String,
    about: String,
    call: String,
    build: String,
}

impl Texts {
    fn new(names: &Names, instances: &[String]) -> Texts {
        let name = names.text();
        let params: Vec<String> = names.params.iter().map(ToString::to_string).collect();
        let holes: Vec<String> = params.iter().map(|param| format!("{{{param}}}")).collect();
        let (params, holes) = (params.join(", "), holes.join(", "));
        let args: Vec<String> = names.args.iter().map(ToString::to_string).collect();
        let args = args.join(", ");
        let known = if instances.is_empty() { "none".to_owned() } else { instances.join(", ") };
        let all: Vec<String> = instances.iter().cloned().chain([format!("({holes})")]).collect();
        Texts {
            message: format!("`{name}::<{holes}>` is not declared, so the compiler has not checked it"),
            label: "this instance is not declared".to_owned(),
            declared: format!("declared instances of `{name}`: {known}"),
            declare: format!("to have it checked now, declare it: `{name}<{params}> for {}`", all.join(", ")),
            at_start: format!("to have it checked at start, call `{name}::build({holes})`"),
            about: format!("Declared instances: {known}."),
            call: format!("The checked schedule of a declared instance: {known}."),
            build: format!("Interprets and checks the schedule for any values: `{name}::build({args})`."),
        }
    }
}

/// Statics that hold a checked schedule; the last one is `CHECKED`.
fn checked(checked: &Checked) -> TokenStream {
    let Checked { schedule, plan, order_dependent, notes, proved: _ } = checked;
    let (item_table, schedule) = self::schedule(schedule);
    let (node_table, plan) = self::plan(plan);
    let notes = notes.iter().map(|note| quote!(Cow::Borrowed(#note)));
    quote! {
        use template::data::*;
        #item_table
        #node_table
        static CHECKED: Checked = Checked {
            schedule: #schedule,
            plan: #plan,
            order_dependent: #order_dependent,
            notes: Cow::Borrowed(&[#(#notes),*]),
            proved: Proved::AtCompileTime,
        };
    }
}

fn schedule(schedule: &Schedule) -> (TokenStream, TokenStream) {
    let Schedule {
        name,
        params,
        ranks,
        stages,
        microbatches,
        placement,
        items,
        starts,
        bounds,
        expects,
        transport,
        update,
        eval,
        coalesce,
        bytes,
        origins: HeaderOrigins { name: o_name, place: o_place, microbatches: o_micro, bounds: o_bounds },
    } = schedule;
    let count = items.len();
    let packed = Literal::byte_string(&packed::pack_items(items));
    let table = quote!(static ITEMS: [Item; #count] = items(#packed););

    let name = name.as_ref();
    let params = params.iter().map(|(name, value)| {
        let (name, value) = (name.as_ref(), number(*value));
        quote!((Cow::Borrowed(#name), #value))
    });
    let placement = placement.iter().map(|rank| word(rank.0)).map(|rank| quote!(Rank(#rank)));
    let starts = starts.iter().map(|start| word(*start));
    let bounds = bounds.iter().map(|Bounds { slots, tapes, works }| {
        let (slots, tapes, works) = (option(*slots), option(*tapes), option(*works));
        quote!(Bounds { slots: #slots, tapes: #tapes, works: #works })
    });
    let expects = expects.iter().map(expect);
    let transport = match transport {
        Transport::Edge => quote!(Edge),
        Transport::RankEdge => quote!(RankEdge),
        Transport::Rendezvous => quote!(Rendezvous),
    };
    let update = match update {
        Update::None => quote!(None),
        Update::Step => quote!(Step),
        Update::Microbatch => quote!(Microbatch),
    };
    let bytes = match bytes {
        Some(Bytes { tape, work, input, budget, origin }) => {
            let [tape, work, input, budget] =
                [tape, work, input, budget].map(|sizes| sizes.iter().map(|n| Literal::u64_unsuffixed(*n)));
            let origin = word(origin.0);
            quote!(Some(Bytes {
                tape: Cow::Borrowed(&[#(#tape),*]),
                work: Cow::Borrowed(&[#(#work),*]),
                input: Cow::Borrowed(&[#(#input),*]),
                budget: Cow::Borrowed(&[#(#budget),*]),
                origin: Origin(#origin),
            }))
        }
        None => quote!(None),
    };
    let (ranks, stages, microbatches, coalesce) = (word(*ranks), word(*stages), word(*microbatches), word(*coalesce));
    let (o_name, o_place, o_micro) = (word(o_name.0), word(o_place.0), word(o_micro.0));
    let o_bounds = o_bounds.iter().map(|origin| word(origin.0));
    let value = quote!(Schedule {
        name: Cow::Borrowed(#name),
        params: Cow::Borrowed(&[#(#params),*]),
        ranks: #ranks,
        stages: #stages,
        microbatches: #microbatches,
        placement: Cow::Borrowed(&[#(#placement),*]),
        items: Cow::Borrowed(&ITEMS),
        starts: Cow::Borrowed(&[#(#starts),*]),
        bounds: Cow::Borrowed(&[#(#bounds),*]),
        expects: Cow::Borrowed(&[#(#expects),*]),
        transport: Transport::#transport,
        update: Update::#update,
        eval: #eval,
        coalesce: #coalesce,
        bytes: #bytes,
        origins: HeaderOrigins {
            name: Origin(#o_name),
            place: Origin(#o_place),
            microbatches: Origin(#o_micro),
            bounds: [#(Origin(#o_bounds)),*],
        },
    });
    (table, value)
}

fn expect(expect: &Expect) -> TokenStream {
    let Expect { measure, compare, bound, origin } = expect;
    let costs = |Costs { f, i, w }: &Costs| {
        let (f, i, w) = (number(*f), number(*i), number(*w));
        quote!(Costs { f: #f, i: #i, w: #w })
    };
    let measure = match measure {
        Measure::Bubble(of) => {
            let of = costs(of);
            quote!(Bubble(#of))
        }
        Measure::Idle(of) => {
            let of = costs(of);
            quote!(Idle(#of))
        }
        Measure::Peak => quote!(Peak),
    };
    let compare = match compare {
        Compare::AtMost => quote!(AtMost),
        Compare::Below => quote!(Below),
        Compare::Equal => quote!(Equal),
        Compare::AtLeast => quote!(AtLeast),
        Compare::Above => quote!(Above),
    };
    let (bound, origin) = (number(*bound), word(origin.0));
    quote!(Expect { measure: Measure::#measure, compare: Compare::#compare, bound: #bound, origin: Origin(#origin) })
}

fn plan(plan: &Plan) -> (TokenStream, TokenStream) {
    let Plan { nodes, starts, edges, peaks } = plan;
    let count = nodes.len();
    let packed = Literal::byte_string(&packed::pack_nodes(nodes));
    let table = quote!(static NODES: [Node; #count] = nodes(#packed););
    let starts = starts.iter().map(|start| word(*start));
    let edges = edges.iter().map(|Edge { direction, from, to, from_rank, to_rank, buffers }| {
        let direction = match direction {
            Direction::Forward => format_ident!("Forward"),
            Direction::Backward => format_ident!("Backward"),
        };
        let (from, to, buffers) = (word(from.0), word(to.0), word(*buffers));
        let (from_rank, to_rank) = (word(from_rank.0), word(to_rank.0));
        quote!(edge(Direction::#direction, #from, #to, #from_rank, #to_rank, #buffers))
    });
    let peaks = peaks.iter().map(|Peaks { slots, tapes, works }| {
        let (slots, tapes, works) = (word(*slots), word(*tapes), word(*works));
        quote!(Peaks { slots: #slots, tapes: #tapes, works: #works })
    });
    let value = quote!(Plan {
        nodes: Cow::Borrowed(&NODES),
        starts: Cow::Borrowed(&[#(#starts),*]),
        edges: Cow::Borrowed(&[#(#edges),*]),
        peaks: Cow::Borrowed(&[#(#peaks),*]),
    });
    (table, value)
}

fn word(value: u32) -> Literal {
    Literal::u32_unsuffixed(value)
}

/// A number that may be negative.
fn number(value: i64) -> TokenStream {
    match value {
        i64::MIN => quote!(template::Value::MIN),
        value if value < 0 => {
            let positive = Literal::i64_unsuffixed(-value);
            quote!(-#positive)
        }
        value => {
            let literal = Literal::i64_unsuffixed(value);
            quote!(#literal)
        }
    }
}

fn option(value: Option<u32>) -> TokenStream {
    match value {
        Some(value) => quote!(Some(#value)),
        None => quote!(None),
    }
}
