//! What a session will take of a GPU, known before anything is allocated.

use core::fmt;

use qeffect_core::plan::Checked;

use super::{Session, SessionConfig};
use crate::capture::CaptureMode;
use crate::capture::record::Entry;
use crate::cuda::DryRun;
use crate::device::{Device, SharedDevice};
use crate::error::{Error, Result};
use crate::pool::RegionBytes;
use crate::stage::Stage;

/// Bytes of device memory that all ranks of a session take of one GPU, without what the driver takes for itself, and
/// without evaluations, whose logits have buffers of their own.
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
    /// What the search for algorithms takes at start, beside all of that, and gives back.
    pub search: usize,
}

impl Footprint {
    /// All that stays.
    pub const fn bytes(&self) -> usize {
        self.state + self.tapes + self.works + self.messages + self.device
    }

    /// The most at one time: all that stays, and the search at start.
    pub const fn peak(&self) -> usize {
        self.bytes() + self.search
    }

    /// Refuses what does not fit, be it at start only.
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
            ("search for algorithms, at start", self.search),
        ];
        rows.into_iter().try_for_each(|(name, bytes)| writeln!(f, "{name:<34}{:>14}", Size(bytes).to_string()))?;
        write!(f, "{:<34}{:>14}", "together", Size(self.peak()).to_string())
    }
}

impl<S> Session<S>
where
    S: Stage + Send + 'static,
    S::Tape: Send,
    S::Work: Send,
{
    /// What [`Session::on_one_device`] will take of a GPU. One step is written down over buffers that are only counted.
    ///
    /// # Errors
    ///
    /// As [`Session::new`].
    pub fn footprint(checked: Checked, stages: Vec<S>, config: SessionConfig) -> Result<Footprint> {
        let dry = DryRun::new();
        let mut device = SharedDevice::new(Box::new(dry.clone()));
        let handle = device.clone();
        let session = Session::ranks(checked, stages, config, move |_| Ok(Box::new(handle.clone())))?;
        let state = dry.held();
        let traces = session.traces()?;
        let regions: Vec<RegionBytes> = session.on_all(|state| Ok(state.shard.pool().regions()))?;
        let owned = |of: fn(&RegionBytes) -> usize| regions.iter().map(of).sum();
        let (tapes, works) = (owned(|regions| regions.tape.owned), owned(|regions| regions.work.owned));
        let cmds = match config.capture {
            CaptureMode::Step => session.joint_step(&mut device, traces)?,
            _ => {
                let entries = traces.into_iter().flat_map(|trace| trace.parts).flat_map(|part| part.entries);
                entries.filter_map(|entry| if let Entry::Cmd(cmd) = entry { Some(cmd) } else { None }).collect()
            }
        };
        device.instantiate(cmds)?;
        let messages = dry.held() - state - tapes - works;
        Ok(Footprint { state, tapes, works, messages, device: dry.beside(), search: dry.trial() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_the_table() {
        let [state, tapes, works] = [7_000_000, 1_400_000, 600_000];
        let footprint = Footprint { state, tapes, works, messages: 500_000, device: 1_000_000, search: 200_000 };
        // What stays would fit; the search beside it decides.
        assert_eq!((footprint.bytes(), footprint.peak()), (10_500_000, 10_700_000));
        assert!(footprint.fits(10_700_000).is_ok());
        let error = footprint.fits(10_699_999).unwrap_err().to_string();
        let lines: Vec<&str> = error.lines().collect();
        assert_eq!(lines[0], "the run does not fit into 10.7 MB of free device memory");
        assert_eq!(lines[1], "parameters, gradients, optimizer          7.0 MB");
        assert_eq!(lines[6], "search for algorithms, at start           0.2 MB");
        assert_eq!(lines[7], "together                                 10.7 MB");
    }
}
