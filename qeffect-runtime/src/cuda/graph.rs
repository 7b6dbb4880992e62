//! Graphs: lists of commands in lanes, captured once.

use std::sync::Arc;

use qeffect_kernels::graph::{Capture, Graph};
use qeffect_kernels::{CudaContext, CudaEvent, CudaStream, DriverError, Error};

use super::lanes::{Placed, cost, place};
use super::unit::{Unit, units};
use super::{CudaDevice, Lane, failed};
use crate::cmd::Cmd;
use crate::cmd::effects::{Access, order};
use crate::device::{BufSpec, DeviceError, GraphId};

/// The graphs of a device, and the streams they are captured in and launched into.
pub(super) struct Graphs {
    made: Vec<Option<Graph>>,
    /// Lanes of a capture; graphs are launched into the first.
    lanes: Vec<Arc<CudaStream>>,
    /// One per lane, for the two ends of a capture; outside of it, the first two hand over to a launch and back.
    events: Vec<CudaEvent>,
    context: Arc<CudaContext>,
}

type Result<T = (), E = DeviceError> = std::result::Result<T, E>;

fn driver(call: &'static str) -> impl Fn(DriverError) -> Error + Copy {
    move |source| Error::Driver { call, source }
}

impl Graphs {
    pub(super) fn new(context: &Arc<CudaContext>, lanes: usize) -> Result<Graphs, Error> {
        let made = driver("making lanes");
        let lanes = (0..lanes).map(|_| context.new_stream().map_err(made)).collect::<Result<Vec<_>, Error>>()?;
        let events = (0..lanes.len().max(2))
            .map(|_| context.new_event(None).map_err(made))
            .collect::<Result<Vec<_>, Error>>()?;
        Ok(Graphs { made: Vec::new(), lanes, events, context: context.clone() })
    }

    pub(super) fn get(&self, graph: GraphId) -> Result<&Graph> {
        self.made.get(graph.index()).and_then(Option::as_ref).ok_or(DeviceError::UnknownGraph(graph))
    }

    pub(super) fn drop(&mut self, graph: GraphId) -> Result {
        self.get(graph)?;
        self.made[graph.index()] = None;
        Ok(())
    }

    /// Launches into the stream of graphs, which waits for `caller`, and has `caller` wait for the end.
    pub(super) fn launch(&self, graph: GraphId, caller: &CudaStream) -> Result {
        let graph = self.get(graph)?;
        let [begin, end] = [&self.events[0], &self.events[1]];
        let stream = &self.lanes[0];
        let handed = driver("handing over to a graph");
        begin
            .record(caller)
            .and_then(|()| stream.wait(begin))
            .map_err(handed)
            .and_then(|()| graph.launch(stream))
            .and_then(|()| end.record(stream).and_then(|()| caller.wait(end)).map_err(handed))
            .map_err(failed("launch"))
    }
}

impl CudaDevice {
    /// Makes a list of commands a graph. Everything that its commands need is made first; nothing is carried out.
    pub(super) fn capture(&mut self, cmds: &[Cmd]) -> Result<GraphId> {
        const CALL: &str = "instantiate";
        let (units, placed) = self.placed(cmds)?;
        for Placed { index, lane, .. } in &placed {
            self.prepare(units[*index].cmd, *lane)?;
        }
        // Units that are waited for record an event each.
        let mut events: Vec<Option<CudaEvent>> = units.iter().map(|_| None).collect();
        for wait in placed.iter().flat_map(|placed| &placed.waits) {
            if events[*wait].is_none() {
                let event = self.graphs.context.new_event(None).map_err(driver("making an event"));
                events[*wait] = Some(event.map_err(failed(CALL))?);
            }
        }
        // What preparation has queued is over before the capture begins.
        self.stream.synchronize().map_err(driver("waiting for a stream")).map_err(failed(CALL))?;
        let graph = self.record(&units, &placed, &events)?;
        graph.upload(&self.stream).map_err(failed(CALL))?;
        self.graphs.made.push(Some(graph));
        Ok(GraphId((self.graphs.made.len() - 1) as u32))
    }

    /// A list in units, and the lanes that they go to.
    fn placed<'a>(&self, cmds: &'a [Cmd]) -> Result<(Vec<Unit<'a>>, Vec<Placed>)> {
        let units = units(cmds, &|buf| self.table.spec(buf).ok().map(BufSpec::elements));
        let costs = units.iter().map(|unit| cost(unit, |buf| self.table.spec(buf))).collect::<Result<Vec<f64>>>()?;
        let effects: Vec<Vec<Access>> = units.iter().map(|unit| unit.effects.clone()).collect();
        let placed = place(&order(&effects), &costs, self.graphs.lanes.len());
        Ok((units, placed))
    }

    fn record(&self, units: &[Unit<'_>], placed: &[Placed], events: &[Option<CudaEvent>]) -> Result<Graph> {
        const CALL: &str = "instantiate";
        let lanes = &self.graphs.lanes;
        let capture = Capture::begin(lanes, &self.graphs.events).map_err(failed(CALL))?;
        for Placed { index, lane, waits } in placed {
            let stream = &lanes[*lane];
            for event in waits.iter().filter_map(|wait| events[*wait].as_ref()) {
                stream.wait(event).map_err(driver("joining lanes")).map_err(failed(CALL))?;
            }
            let (table, plans, kernels) = (&self.table, &self.plans, &self.gpu.kernels);
            let Unit { cmd, piece, .. } = units[*index];
            Lane { table, kernels, plans, stream, scratch: &self.scratch[*lane] }.issue(cmd, piece)?;
            if let Some(event) = &events[*index] {
                event.record(stream).map_err(driver("joining lanes")).map_err(failed(CALL))?;
            }
        }
        capture.end(&self.graphs.events).map_err(failed(CALL))
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use qeffect_core::dtype::Dtype;
    use qeffect_kernels::probe;

    use super::*;
    use crate::cmd::Operand;
    use crate::device::Device;

    /// Case B23: nothing is asked of the library while a list is captured, a product that was not planned is refused, and its
    /// streams take work and captures after that.
    #[test]
    fn a_product_without_a_plan_is_refused_inside_a_capture() {
        if !probe::gpus().is_ok_and(|gpus| gpus.iter().any(|gpu| gpu.arch().is_some())) {
            return println!("skipped: no GPU");
        }
        let mut device = CudaDevice::with_lanes(0, 2).unwrap();
        let [m, n, k] = [24, 40, 104];
        let mut matrix = |name: &str, rows: usize, cols: usize| {
            let buf = device.alloc(BufSpec::new(name, Dtype::Bf16, rows, cols)).unwrap();
            device.write(buf, bytemuck::cast_slice(&vec![bf16::ONE; rows * cols])).unwrap();
            buf
        };
        let (a, b, out) = (matrix("a", m, k), matrix("b", k, n), matrix("out", m, n));
        let operand = |buf| Operand { buf, scale_inv: None, transposed: false };
        let (a, b) = (operand(a), operand(b));
        let cmds = [Cmd::Gemm { m, n, k, a, b, bias: None, out, accumulate: false, fast: false }];
        let asked = |device: &CudaDevice| device.gpu.products().asked();
        {
            let before = asked(&device);
            let (units, placed) = device.placed(&cmds).unwrap();
            let error = device.record(&units, &placed, &[None]).unwrap_err().to_string();
            assert!(error.contains("was not planned"), "{error}");
            assert_eq!(asked(&device), before);
        }
        let graph = device.instantiate(cmds.to_vec()).unwrap();
        {
            let before = asked(&device);
            let (units, placed) = device.placed(&cmds).unwrap();
            device.record(&units, &placed, &[None]).unwrap();
            assert_eq!(asked(&device), before);
        }
        device.launch(graph).unwrap();
        let mut found = vec![bf16::ZERO; m * n];
        device.read(out, bytemuck::cast_slice_mut(&mut found)).unwrap();
        assert!(found.iter().all(|x| x.to_f32() == k as f32), "{found:?}");
    }
}
