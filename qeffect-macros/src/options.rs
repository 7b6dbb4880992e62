//! Where an expansion finds the runtime: `crate = path` in an attribute, else the facade.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::{Path, Token};

/// `crate = path`, the only option of most attributes.
pub struct Options {
    /// The runtime crate.
    pub krate: TokenStream,
}

impl Default for Options {
    fn default() -> Options {
        Options { krate: quote!(::qeffect::runtime) }
    }
}

impl Parse for Options {
    fn parse(input: ParseStream<'_>) -> syn::Result<Options> {
        let mut options = Options::default();
        if input.peek(Token![crate]) {
            options.krate = crate_path(input)?;
        }
        if !input.is_empty() {
            return Err(input.error("the only option is `crate = path`"));
        }
        Ok(options)
    }
}

/// Reads `crate = path` and the comma after it.
pub fn crate_path(input: ParseStream<'_>) -> syn::Result<TokenStream> {
    input.parse::<Token![crate]>()?;
    input.parse::<Token![=]>()?;
    let path = input.call(Path::parse_mod_style)?;
    if input.peek(Token![,]) {
        input.parse::<Token![,]>()?;
    }
    Ok(quote!(#path))
}
