//! Values of a session by name: parameters, gradients, and all that outlives a step.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use qeffect_core::version::WeightVersion;

use super::Session;
use crate::error::{Error, Result};
use crate::shard::{Named, Shard};
use crate::stage::Stage;

/// Everything of a session that outlives a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// Masters, gradients, moments, caches, scales and histories, by the names of their layers.
    pub values: BTreeMap<String, Named>,
    /// Epochs of weights and caches, by stage.
    pub versions: Vec<WeightVersion>,
}

impl<S> Session<S>
where
    S: Stage + Send + 'static,
    S::Tape: Send,
    S::Work: Send,
{
    /// Everything that outlives a step.
    ///
    /// # Errors
    ///
    /// QE0306 if a rank is at work; a device that fails; ranks that disagree about what they share.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let parts = self.on_all(|state| {
            state.quiescent()?;
            Ok((state.shard.export()?, state.versions()?))
        })?;
        let mut values = BTreeMap::new();
        let mut versions = BTreeMap::new();
        for (named, stages) in parts {
            for (name, value) in named {
                if values.get(&name).is_some_and(|other| *other != value) {
                    return Err(Error::Broken(format!("ranks disagree about `{name}`")));
                }
                values.insert(name, value);
            }
            versions.extend(stages);
        }
        Ok(Snapshot { values, versions: versions.into_values().collect() })
    }

    /// Gives parameters, or named views of packed ones, their values, by path.
    ///
    /// # Errors
    ///
    /// A path that no rank has, a wrong number of values, or different values for two parameters that are tied. Of two that
    /// are tied one is enough. Nothing was given then; after an error of a device no step runs before values are given anew.
    pub fn set_params(&mut self, mut params: BTreeMap<String, Vec<f64>>) -> Result<()> {
        for [path, echo] in self.ties.iter().map(|tie| &tie.ends) {
            match (params.get(path), params.get(echo)) {
                (Some(one), Some(other)) if one != other => {
                    return Err(Error::Config(format!(
                        "`{path}` and `{echo}` are tied, and are given different values"
                    )));
                }
                (Some(values), None) => drop(params.insert(echo.clone(), values.clone())),
                (None, Some(values)) => drop(params.insert(path.clone(), values.clone())),
                _ => {}
            }
        }
        let wanted = Arc::new(params);
        // All of it is looked at before any of it is written.
        let given: BTreeSet<String> = {
            let wanted = wanted.clone();
            let given = self.on_all(move |state| {
                state.quiescent()?;
                let mut given = Vec::new();
                for (path, values) in wanted.iter() {
                    let held = state.shard.stages().find_map(|(_, stage)| stage.spec().find(path));
                    let Some((_, elements)) = held else { continue };
                    if values.len() != elements.len() {
                        let (expected, found) = (elements.len(), values.len());
                        return Err(Error::Config(format!("`{path}` has {expected} values, {found} were given")));
                    }
                    given.push(path.clone());
                }
                Ok(given)
            })?;
            given.into_iter().flatten().collect()
        };
        if let Some(path) = wanted.keys().find(|path| !given.contains(*path)) {
            return Err(Error::Config(format!("the model has no parameter `{path}`")));
        }
        self.on_all(move |state| {
            state.forget_cache()?;
            for (path, values) in wanted.iter() {
                if state.shard.stages().any(|(_, stage)| stage.spec().find(path).is_some()) {
                    state.shard.set_param(path, values)?;
                }
            }
            state.refill()
        })?;
        Ok(())
    }

    /// The values of a parameter, or of a named view of one.
    ///
    /// # Errors
    ///
    /// A path that no rank has.
    pub fn param(&self, path: &str) -> Result<Vec<f64>> {
        self.find(path, |shard, path| shard.param(path))
    }

    /// The gradient of a parameter, or of a named view of one, in the last step: the mean over the step, not clipped.
    ///
    /// # Errors
    ///
    /// A path that no rank has.
    pub fn gradient(&self, path: &str) -> Result<Vec<f64>> {
        self.find(path, |shard, path| shard.gradient(path))
    }

    fn find(&self, path: &str, read: fn(&mut Shard<S>, &str) -> Result<Vec<f64>>) -> Result<Vec<f64>> {
        let wanted = path.to_owned();
        let found = self.on_all(move |state| {
            let held = state.shard.stages().any(|(_, stage)| stage.spec().find(&wanted).is_some());
            if held { read(&mut state.shard, &wanted).map(Some) } else { Ok(None) }
        })?;
        let unknown = || Error::Config(format!("the model has no parameter `{path}`"));
        found.into_iter().flatten().next().ok_or_else(unknown)
    }
}
