//! Where the time of a device goes: a device that times every command of another one.
//!
//! It measures the commands themselves, so it tells something only about devices that carry a command out when it is
//! issued, as the cpu device does. Commands of a launched list are not seen: profile an eager run.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::cmd::Cmd;
use crate::device::{Device, DeviceError};

/// What one kind of command has cost.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cost {
    /// How often it was issued.
    pub count: u64,
    /// Time inside the device.
    pub time: Duration,
    /// Multiplications and additions of matrix products; 0 for other commands.
    pub flops: u64,
}

/// Costs by name of command. Clones share their numbers.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    costs: Arc<Mutex<BTreeMap<&'static str, Cost>>>,
}

impl Profile {
    /// A profile without numbers.
    pub fn new() -> Profile {
        Profile::default()
    }

    /// A device that carries out what `device` does, and adds to this profile.
    pub fn watch(&self, device: Box<dyn Device>) -> Box<dyn Device> {
        Box::new(Watched { device, profile: self.clone() })
    }

    /// The costs so far.
    pub fn costs(&self) -> BTreeMap<&'static str, Cost> {
        self.costs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Starts again from nothing.
    pub fn clear(&self) {
        self.costs.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn add(&self, cmd: &Cmd, time: Duration) {
        let mut costs = self.costs.lock().unwrap_or_else(PoisonError::into_inner);
        let cost = costs.entry(cmd.name()).or_default();
        cost.count += 1;
        cost.time += time;
        if let Cmd::Gemm { m, n, k, .. } = cmd {
            cost.flops += 2 * (*m as u64) * (*n as u64) * (*k as u64);
        }
    }
}

impl fmt::Display for Profile {
    /// A table, the most expensive command first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut costs: Vec<_> = self.costs().into_iter().collect();
        costs.sort_by_key(|(_, cost)| std::cmp::Reverse(cost.time));
        let total: f64 = costs.iter().map(|(_, cost)| cost.time.as_secs_f64()).sum();
        writeln!(f, "{:<20} {:>9} {:>10} {:>7} {:>9}", "command", "count", "ms", "share", "GFLOP/s")?;
        for (name, cost) in costs {
            let seconds = cost.time.as_secs_f64();
            write!(f, "{name:<20} {:>9} {:>10.2} {:>6.1}%", cost.count, seconds * 1e3, 100.0 * seconds / total)?;
            if cost.flops > 0 {
                write!(f, " {:>9.1}", cost.flops as f64 / seconds / 1e9)?;
            }
            writeln!(f)?;
        }
        write!(f, "{:<20} {:>9} {:>10.2}", "all", "", total * 1e3)
    }
}

struct Watched {
    device: Box<dyn Device>,
    profile: Profile,
}

impl Device for Watched {
    crate::hand_on!(device: name caps memory alloc spec write read poison instantiate launch drop_graph);

    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        let start = Instant::now();
        let result = self.device.issue(cmd);
        self.profile.add(cmd, start.elapsed());
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::Operand;
    use crate::cpu::CpuDevice;
    use crate::device::BufSpec;
    use qeffect_core::dtype::Dtype;

    #[test]
    fn commands_are_counted_and_carried_out() {
        let profile = Profile::new();
        let mut device = profile.watch(Box::new(CpuDevice::new()));
        let [a, out] = ["a", "out"].map(|name| device.alloc(BufSpec::new(name, Dtype::F32, 4, 4)).unwrap());
        device.issue(&Cmd::Fill { dst: a, value: 2.0 }).unwrap();
        let operand = Operand { buf: a, scale_inv: None, transposed: true };
        for _ in 0..3 {
            device
                .issue(&Cmd::Gemm {
                    m: 4,
                    n: 4,
                    k: 4,
                    a: operand,
                    b: operand,
                    bias: None,
                    out,
                    accumulate: false,
                    fast: false,
                })
                .unwrap();
        }
        let mut bytes = [0; 64];
        device.read(out, &mut bytes).unwrap();
        assert_eq!(bytemuck::cast_slice::<u8, f32>(&bytes), [16.0; 16]);
        let costs = profile.costs();
        assert_eq!((costs["fill"].count, costs["gemm"].count, costs["gemm"].flops), (1, 3, 3 * 2 * 64));
        assert!(profile.to_string().contains("gemm"));
        profile.clear();
        assert!(profile.costs().is_empty());
    }
}
