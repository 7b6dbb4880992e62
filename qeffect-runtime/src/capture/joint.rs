//! One list of commands for all ranks of a device: messages become copies.

use std::collections::{BTreeMap, VecDeque};

use qeffect_core::code::Code;
use qeffect_core::ids::Microbatch;

use super::record::{Entry, Far, Trace};
use crate::act::Act;
use crate::cmd::Cmd;
use crate::device::{Buf, BufSpec, Device};
use crate::error::{Error, Result};
use crate::shard::Exchange;

/// Messages of one edge.
#[derive(Default)]
struct Ring {
    /// Sent and not yet awaited: a receive buffer for each tensor.
    sent: VecDeque<(Microbatch, Vec<Buf>)>,
    free: Vec<Vec<Buf>>,
}

/// Merges the steps of all ranks, by rank, into one list that does what they do together. Every command stands after
/// what it reads: a wait after its send, everything after agree behind what every rank gave to it.
///
/// A send copies its tensors into receive buffers and a wait copies them out, since neither the buffer of the sender nor
/// that of the receiver is theirs for the whole way. Receive buffers are made here.
///
/// # Errors
///
/// Ranks that wait for each other, or for another message than the one that comes; neither happens in a checked plan.
pub(crate) fn merge(device: &mut dyn Device, traces: Vec<Trace>) -> Result<Vec<Cmd>> {
    let mut ranks: Vec<VecDeque<Entry>> = Vec::with_capacity(traces.len());
    for trace in traces {
        ranks.push(trace.parts.into_iter().flat_map(|part| part.entries).collect());
    }
    let mut rings: BTreeMap<u32, Ring> = BTreeMap::new();
    let mut cmds = Vec::new();
    while ranks.iter().any(|entries| !entries.is_empty()) {
        let mut moved = false;
        for entries in &mut ranks {
            while let Some(entry) = entries.front() {
                match entry {
                    Entry::Cmd(cmd) => cmds.push(cmd.clone()),
                    Entry::Send { port, acts } => {
                        let ring = rings.entry(port.edge).or_default();
                        let bufs = match ring.free.pop() {
                            Some(bufs) => bufs,
                            None => {
                                acts.iter().map(|act| receive_buffer(device, port.edge, *act)).collect::<Result<_>>()?
                            }
                        };
                        let copies = acts.iter().zip(&bufs).map(|(act, buf)| Cmd::Copy { src: act.buf, dst: *buf });
                        cmds.extend(copies);
                        ring.sent.push_back((port.microbatch, bufs));
                    }
                    Entry::Wait { port, acts } => {
                        let ring = rings.entry(port.edge).or_default();
                        let Some((microbatch, bufs)) = ring.sent.pop_front() else { break };
                        if microbatch != port.microbatch {
                            let expected = port.microbatch;
                            let message = format!("edge {} brings microbatch {microbatch}, not {expected}", port.edge);
                            return Err(Error::Contract { code: Code::FifoOrder, message });
                        }
                        let copies = acts.iter().zip(&bufs).map(|(act, buf)| Cmd::Copy { src: *buf, dst: act.buf });
                        cmds.extend(copies);
                        ring.free.push(bufs);
                    }
                    Entry::Post { .. } | Entry::Release { .. } => {}
                    Entry::Tie(_) | Entry::Agree(_) => break,
                }
                entries.pop_front();
                moved = true;
            }
        }
        let tying: Vec<&[Far]> = ranks.iter().filter_map(|entries| far_ends(entries.front()?)).collect();
        if tying.len() == ranks.len() {
            let ends: Vec<Far> = tying.into_iter().flatten().copied().collect();
            let pairs = ends.iter().flat_map(|to| ends.iter().map(move |from| (from, to)));
            let pairs = pairs.filter(|(from, to)| from.partner() == to.slot);
            cmds.extend(pairs.map(|(from, to)| Cmd::Copy { src: from.grad, dst: to.other }));
            ranks.iter_mut().for_each(|entries| drop(entries.pop_front()));
            moved = true;
        }
        let agreeing: Vec<&Exchange> = ranks.iter().filter_map(|entries| exchange(entries.front()?)).collect();
        if agreeing.len() == ranks.len() {
            cmds.extend(exchanges(&agreeing));
            ranks.iter_mut().for_each(|entries| drop(entries.pop_front()));
            moved = true;
        }
        if !moved {
            let message = "the ranks of a captured step wait for each other".into();
            return Err(Error::Contract { code: Code::Deadlock, message });
        }
    }
    Ok(cmds)
}

fn exchange(entry: &Entry) -> Option<&Exchange> {
    if let Entry::Agree(exchange) = entry { Some(exchange) } else { None }
}

fn far_ends(entry: &Entry) -> Option<&[Far]> {
    if let Entry::Tie(ends) = entry { Some(ends.as_slice()) } else { None }
}

fn receive_buffer(device: &mut dyn Device, edge: u32, act: Act) -> Result<Buf> {
    let Act { dtype, rows, cols, .. } = act;
    Ok(device.alloc(BufSpec::new(format!("receive buffer of edge {edge}"), dtype, rows, cols))?)
}

/// Every rank takes what every other one has.
fn exchanges(ranks: &[&Exchange]) -> Vec<Cmd> {
    let mut cmds = Vec::new();
    for from in ranks {
        for to in ranks.iter().filter(|to| to.rank != from.rank) {
            for range in &from.partials_of_rank {
                let (at, len) = (range.start, range.len());
                cmds.push(Cmd::CopyRange { src: from.partials, src_at: at, dst: to.partials, dst_at: at, len });
            }
            let at = from.rank;
            cmds.push(Cmd::CopyRange { src: from.flags, src_at: at, dst: to.flags, dst_at: at, len: 1 });
        }
    }
    cmds
}

#[cfg(test)]
mod tests {
    use super::super::record::Part;
    use super::*;
    use crate::cpu::CpuDevice;
    use qeffect_core::dtype::Dtype;
    use qeffect_core::execute::Port;
    use qeffect_core::ids::Stage;
    use qeffect_core::ledger::Action;
    use qeffect_core::plan::Direction;

    fn trace(entries: Vec<Entry>) -> Trace {
        Trace { parts: vec![Part { action: Action::Step, entries }] }
    }

    fn port(edge: u32, microbatch: u32) -> Port {
        let microbatch = Microbatch(microbatch);
        Port { edge, direction: Direction::Forward, stage: Stage(0), microbatch, step: 0 }
    }

    fn act(device: &mut CpuDevice, name: &str) -> Act {
        let buf = device.alloc(BufSpec::new(name, Dtype::F32, 1, 1)).unwrap();
        Act { buf, dtype: Dtype::F32, rows: 1, cols: 1 }
    }

    #[test]
    fn a_buffer_that_is_used_anew_after_its_send_does_not_spoil_the_message() {
        let mut device = CpuDevice::new();
        let [x, y, z] = ["x", "y", "z"].map(|name| act(&mut device, name));
        let fill = |act: Act, value| Entry::Cmd(Cmd::Fill { dst: act.buf, value });
        // The receiver comes first in the list of ranks and must wait all the same.
        let receiver = vec![
            Entry::Post { port: port(3, 0) },
            Entry::Wait { port: port(3, 0), acts: vec![y] },
            Entry::Release { edge: 3 },
            Entry::Wait { port: port(3, 1), acts: vec![z] },
        ];
        let sender = vec![
            fill(x, 1.0),
            Entry::Send { port: port(3, 0), acts: vec![x] },
            fill(x, 2.0),
            Entry::Send { port: port(3, 1), acts: vec![x] },
            fill(x, 9.0),
        ];
        let cmds = merge(&mut device, vec![trace(receiver), trace(sender)]).unwrap();
        let graph = device.instantiate(cmds).unwrap();
        device.launch(graph).unwrap();
        for (act, want) in [(y, 1.0f32), (z, 2.0)] {
            let mut bytes = [0; 4];
            device.read(act.buf, &mut bytes).unwrap();
            assert_eq!(f32::from_le_bytes(bytes), want);
        }
    }

    #[test]
    fn ranks_that_wait_for_each_other_or_for_another_message_are_refused() {
        let mut device = CpuDevice::new();
        let x = act(&mut device, "x");
        let wait = |edge, m| Entry::Wait { port: port(edge, m), acts: vec![x] };
        let send = |edge, m| Entry::Send { port: port(edge, m), acts: vec![x] };
        let crossed = vec![trace(vec![wait(0, 0), send(1, 0)]), trace(vec![wait(1, 0), send(0, 0)])];
        let error = merge(&mut device, crossed).unwrap_err();
        assert_eq!(error.to_string(), "the ranks of a captured step wait for each other [QE0401]");
        let swapped = vec![trace(vec![send(0, 1), send(0, 0)]), trace(vec![wait(0, 0)])];
        assert_eq!(merge(&mut device, swapped).unwrap_err().to_string(), "edge 0 brings microbatch 1, not 0 [QE0402]");
    }
}
