//! A placement of gradients as users name it: `copied`, `direct`, `coalesced`, `coalesced:4`.

use core::fmt;
use core::num::NonZeroU32;
use core::str::FromStr;

use super::Gradients;
use crate::diag::Report;
use crate::plan::Checked;

/// What a user asks for; [`GradientChoice::apply`] makes the schedule fit it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct GradientChoice {
    /// The placement.
    pub gradients: Gradients,
    /// Microbatches of a group, where gradients are coalesced. `None`: the groups of the schedule, or if it has none, all
    /// microbatches in one.
    pub group: Option<NonZeroU32>,
}

impl GradientChoice {
    /// The schedule, coalesced as this choice wants it. Other placements take it as it is.
    ///
    /// # Errors
    ///
    /// What a check of the coalesced schedule finds.
    pub fn apply(&self, checked: Checked) -> Result<Checked, Report> {
        let schedule = &checked.schedule;
        let n = match (self.gradients, self.group) {
            (Gradients::Coalesced, Some(group)) => group.get(),
            (Gradients::Coalesced, None) if schedule.coalesce <= 1 => schedule.microbatches.max(2),
            _ => return Ok(checked),
        };
        checked.coalesced(n)
    }
}

impl fmt::Display for GradientChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.gradients.name())?;
        match (self.gradients, self.group) {
            (Gradients::Coalesced, Some(group)) => write!(f, ":{group}"),
            _ => Ok(()),
        }
    }
}

impl FromStr for GradientChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<GradientChoice, String> {
        let (name, group) = match text.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (text, None),
        };
        let known = [Gradients::Copied, Gradients::Direct, Gradients::Coalesced];
        let Some(gradients) = known.into_iter().find(|gradients| gradients.name() == name) else {
            return Err(format!("`{name}` is no placement of gradients: copied, direct, coalesced or coalesced:N"));
        };
        let group = match (gradients, group) {
            (_, None) => None,
            (Gradients::Coalesced, Some(group)) => {
                let number = group.parse::<NonZeroU32>().ok().filter(|n| n.get() > 1);
                Some(number.ok_or_else(|| format!("a group has 2 microbatches or more, not `{group}`"))?)
            }
            (_, Some(_)) => return Err(format!("`{name}` has no groups")),
        };
        Ok(GradientChoice { gradients, group })
    }
}
