//! The declared transport places sends and receives elsewhere in the programs of the ranks, and changes no number.

use crate::common::batch;
use crate::common::settings::{adamw, tiny};
use qeffect_core::check::{Options, check};
use qeffect_core::plan::Op;
use qeffect_core::schedule::Transport;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::by_name;

const MICROBATCHES: u32 = 4;

const OPTIM: OptimConfig = adamw(3, 1, 8e-3, 1e-3);

#[test]
fn a_blocking_stream_in_the_global_order_gives_the_same_bits() {
    let config = tiny("fp8-delayed:history=4,update=microbatch", 4);
    for (name, ranks, blocks) in [("one_f_one_b", 4, &[1, 1, 2, 0][..]), ("zb_v", 2, &[1, 1, 1, 1][..])] {
        let run = |transport: Transport| {
            let built = (by_name(name).unwrap().build)(ranks, i64::from(MICROBATCHES)).unwrap();
            let mut schedule = built.schedule;
            schedule.transport = transport;
            let checked = check(schedule, &Options::AT_START).unwrap();
            let order: Vec<Op> = checked.plan.nodes.iter().map(|node| node.op).collect();
            let stages = config.stages(blocks).unwrap();
            let mut session = Session::new(checked, stages, SessionConfig::new(OPTIM, config.tokens())).unwrap();
            let losses: Vec<Vec<u64>> = (0..3)
                .map(|step| {
                    let report = session.step(batch(&config, step, MICROBATCHES)).unwrap();
                    report.losses.iter().map(|loss| loss.to_bits()).collect()
                })
                .collect();
            (order, losses, session.snapshot().unwrap().values)
        };
        let (edge, rendezvous) = (run(Transport::Edge), run(Transport::Rendezvous));
        assert_ne!(edge.0, rendezvous.0, "{name}: the programs differ");
        assert_eq!((edge.1, edge.2), (rendezvous.1, rendezvous.2), "{name}");
    }
}
