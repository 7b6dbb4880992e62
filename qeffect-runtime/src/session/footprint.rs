//! What a session will take of a GPU, known before anything is allocated.

use core::fmt;

use crate::error::{Error, Result};

/// Bytes of device memory that ranks of a session take of one GPU, without what the driver takes for itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footprint {
    /// Parameters, weight caches, gradients, moments, scales and histories, tokens.
    pub state: usize,
    /// The tape regions of all ranks: activations, and what is kept from F to I.
    pub tapes: usize,
    /// Their work regions: what is kept from I to W.
    pub works: usize,
    /// What messages between ranks lie in.
    pub messages: usize,
    /// Workspaces of lanes, and the unused rest of allocations.
    pub device: usize,
    /// What the first evaluation takes beside that, of every microbatch: nothing, where it computes with what training does.
    pub evaluation: usize,
    /// What the search for algorithms takes at start, beside all of that, and gives back.
    pub search: usize,
}

impl Footprint {
    /// All that training keeps.
    pub const fn bytes(&self) -> usize {
        self.state + self.tapes + self.works + self.messages + self.device
    }

    /// The most at one time: all that training keeps, an evaluation, and the search at start.
    pub const fn peak(&self) -> usize {
        self.bytes() + self.evaluation + self.search
    }

    /// Refuses what does not fit, be it at start or in an evaluation only.
    ///
    /// # Errors
    ///
    /// [`Error::Config`] with the whole table, if fewer bytes are free.
    pub fn fits(&self, free: usize) -> Result<()> {
        if self.peak() <= free {
            return Ok(());
        }
        Err(Error::Config(format!("the run does not fit into {} of free device memory\n{self}", Size(free))))
    }

    /// Of ranks with devices of their own on the same GPU, which search one after the other.
    pub(super) fn beside(self, other: Footprint) -> Footprint {
        Footprint {
            state: self.state + other.state,
            tapes: self.tapes + other.tapes,
            works: self.works + other.works,
            messages: self.messages + other.messages,
            device: self.device + other.device,
            evaluation: self.evaluation + other.evaluation,
            search: self.search.max(other.search),
        }
    }
}

struct Size(usize);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} MB", self.0 as f64 / 1e6)
    }
}

impl fmt::Display for Footprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("parameters, gradients, optimizer", self.state),
            ("activations and tapes", self.tapes),
            ("works", self.works),
            ("messages", self.messages),
            ("workspaces of the device", self.device),
            ("evaluation", self.evaluation),
            ("search for algorithms, at start", self.search),
        ];
        rows.into_iter().try_for_each(|(name, bytes)| writeln!(f, "{name:<34}{:>14}", Size(bytes).to_string()))?;
        write!(f, "{:<34}{:>14}", "together", Size(self.peak()).to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_the_table() {
        let [state, tapes, works, evaluation] = [7_000_000, 1_400_000, 600_000, 300_000];
        let footprint =
            Footprint { state, tapes, works, messages: 500_000, device: 1_000_000, evaluation, search: 200_000 };
        // What stays would fit; an evaluation and the search beside it decide.
        assert_eq!((footprint.bytes(), footprint.peak()), (10_500_000, 11_000_000));
        assert!(footprint.fits(11_000_000).is_ok());
        let error = footprint.fits(10_999_999).unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines[0], "the run does not fit into 11.0 MB of free device memory");
        assert_eq!(lines[1], "parameters, gradients, optimizer          7.0 MB");
        assert_eq!(lines[6], "evaluation                                0.3 MB");
        assert_eq!(lines[7], "search for algorithms, at start           0.2 MB");
        assert_eq!(lines[8], "together                                 11.0 MB");
        // Two of it search one after the other.
        let two = footprint.beside(footprint);
        assert_eq!((two.bytes(), two.peak()), (21_000_000, 21_800_000));
    }
}
