//! The parameters of a model as plain structs: each field under its own name.
//!
//! A struct is written with its sizes first (`Linear::of(64, 192)`) and registered at a stage when that is built; then it
//! knows where its tensors are. Names are paths in the whole model, `blocks.3.qkv.weight`: they name tensors in
//! checkpoints and decide first values, so cutting the model elsewhere changes nothing.

use crate::stage::{Init, ParamId, StageSpec};

pub use qeffect_macros::Params;

/// Parameters, or a struct of them.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no parameters",
    label = "not a parameter",
    note = "a field that is configuration only is marked by `#[params(config)]`"
)]
pub trait Params {
    /// Registers every parameter and state cell, in the order of the fields.
    fn register(&mut self, registry: &mut Registry<'_>);
}

/// What is wanted of some parameters, where it is not what they would do by themselves.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Policy<'a> {
    init: Option<Init>,
    activation: bool,
    decay: Option<bool>,
    views: &'a [(&'a str, usize)],
}

impl<'a> Policy<'a> {
    /// First values of matrices.
    pub fn init(self, init: Init) -> Policy<'a> {
        Policy { init: Some(init), ..self }
    }

    /// Products in the activation type, not in FP8.
    pub fn activation(self) -> Policy<'a> {
        Policy { activation: true, ..self }
    }

    /// Whether weights decay. By themselves matrices do and vectors do not.
    pub fn decay(self, decay: bool) -> Policy<'a> {
        Policy { decay: Some(decay), ..self }
    }

    /// Names of parts of the rows of a packed parameter, each with its share of them.
    pub fn views(self, views: &'a [(&'a str, usize)]) -> Policy<'a> {
        Policy { views, ..self }
    }

    /// This one, with what an inner one says instead.
    fn then(self, inner: Policy<'a>) -> Policy<'a> {
        Policy {
            init: inner.init.or(self.init),
            activation: inner.activation || self.activation,
            decay: inner.decay.or(self.decay),
            views: if inner.views.is_empty() { self.views } else { inner.views },
        }
    }
}

/// Where parameters are registered: a stage, at a path.
#[derive(Debug)]
pub struct Registry<'a> {
    spec: &'a mut StageSpec,
    path: String,
    policy: Policy<'a>,
}

impl<'a> Registry<'a> {
    /// At the root of the model.
    pub fn new(spec: &'a mut StageSpec) -> Registry<'a> {
        Registry { spec, path: String::new(), policy: Policy::default() }
    }

    /// The stage.
    pub fn spec(&mut self) -> &mut StageSpec {
        self.spec
    }

    /// Where we are: `blocks.3.qkv`.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// First values of a matrix that would begin with `init`.
    pub fn init(&self, init: Init) -> Init {
        self.policy.init.unwrap_or(init)
    }

    /// Whether products may run in FP8.
    pub const fn quantised(&self) -> bool {
        !self.policy.activation
    }

    /// Registers a part under its name; the empty name adds nothing to the path.
    pub fn part(&mut self, name: &str, policy: Policy<'_>, register: impl FnOnce(&mut Registry<'_>)) {
        let path = match (self.path.as_str(), name) {
            (path, "") => path.to_owned(),
            ("", name) => name.to_owned(),
            (path, name) => format!("{path}.{name}"),
        };
        let first = self.spec.params.len();
        let policy = self.policy.then(policy);
        register(&mut Registry { spec: &mut *self.spec, path, policy });
        for index in first..self.spec.params.len() {
            if let Some(decay) = policy.decay {
                self.spec.set_decay(ParamId(index), decay);
            }
            self.view(ParamId(index), policy.views);
        }
    }

    /// Names parts of a parameter's rows, `qkv.weight` as `q.weight`, `k.weight` and `v.weight`. Vectors are cut along their
    /// one row.
    fn view(&mut self, param: ParamId, views: &[(&str, usize)]) {
        let Some(spec) = self.spec.params.get(param.0) else { return };
        let length = if spec.rows == 1 { spec.cols } else { spec.rows };
        let Some((owner, leaf)) = spec.path.rsplit_once('.') else { return };
        let scope = owner.rsplit_once('.').map(|(scope, _)| format!("{scope}.")).unwrap_or_default();
        let paths: Vec<String> = views.iter().map(|(name, _)| format!("{scope}{name}.{leaf}")).collect();
        let shares: usize = views.iter().map(|(_, share)| share).sum();
        let mut before = 0;
        for (path, (_, share)) in paths.into_iter().zip(views) {
            let rows = [before, before + share].map(|shares_before| length * shares_before / shares.max(1));
            self.spec.add_view(path, param, rows[0]..rows[1]);
            before += share;
        }
    }
}

impl<T: Params> Params for Option<T> {
    fn register(&mut self, registry: &mut Registry<'_>) {
        self.iter_mut().for_each(|part| part.register(registry));
    }
}

impl<T: Params> Params for Vec<T> {
    fn register(&mut self, registry: &mut Registry<'_>) {
        for (index, part) in self.iter_mut().enumerate() {
            registry.part(&index.to_string(), Policy::default(), |registry| part.register(registry));
        }
    }
}

/// Some of the layers of a model, numbered as in the whole.
#[derive(Clone, PartialEq, Debug)]
pub struct Layers<T> {
    first: usize,
    layers: Vec<T>,
}

impl<T> Layers<T> {
    /// Layers from number `first` on.
    pub fn new(first: usize, layers: Vec<T>) -> Layers<T> {
        Layers { first, layers }
    }
}

impl<T: Params> Params for Layers<T> {
    fn register(&mut self, registry: &mut Registry<'_>) {
        for (index, layer) in (self.first..).zip(&mut self.layers) {
            registry.part(&index.to_string(), Policy::default(), |registry| layer.register(registry));
        }
    }
}

impl<'a, T> IntoIterator for &'a Layers<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> std::slice::Iter<'a, T> {
        self.layers.iter()
    }
}
