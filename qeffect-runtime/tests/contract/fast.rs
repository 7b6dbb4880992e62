//! Fast accumulation: which products are told that they may, and that on cpu it makes no difference.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use crate::common::batch;
use crate::common::settings::small;
use crate::common::tap::Tap;
use qeffect_core::bind::Gradients;
use qeffect_core::dtype::Dtype;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{FastAccumulation, Session, SessionConfig};
use qeffect_schedules::zb_h1;

/// F, I, W.
const KINDS: [(Dtype, Dtype, bool); 3] =
    [(Dtype::E4M3, Dtype::E4M3, false), (Dtype::E5M2, Dtype::E4M3, false), (Dtype::E5M2, Dtype::E4M3, true)];

#[test]
fn each_choice_reaches_the_products_that_it_names() {
    let config = small("fp8-delayed:history=4");
    let optim = OptimConfig { steps: 4, ..OptimConfig::default() };
    let mut first = None;
    for fast_accumulation in FastAccumulation::ALL {
        let seen = Arc::new(Mutex::new(BTreeSet::new()));
        let told = SessionConfig {
            fast_accumulation,
            gradients: Gradients::Direct,
            capture: CaptureMode::Eager,
            ..SessionConfig::new(optim, config.tokens())
        };
        let device = |_| {
            let seen = seen.clone();
            Ok(Tap::boxed(Box::new(CpuDevice::new()), move |cmd, device| {
                let Cmd::Gemm { a, b, out, fast, .. } = cmd else { return };
                let dtype = |buf| device.spec(buf).unwrap().dtype;
                let of_weight = device.spec(*out).unwrap().name.contains("(gradient");
                seen.lock().unwrap().insert((dtype(a.buf), dtype(b.buf), of_weight, *fast));
            }))
        };
        let stages = config.stages(&[2, 2]).unwrap();
        let mut session = Session::with_devices(zb_h1::<2, 4>().clone(), stages, told, device).unwrap();
        for step in 0..2 {
            session.step(batch(&config, step, 4)).unwrap();
        }
        let fast = match fast_accumulation {
            FastAccumulation::None => [false; 3],
            FastAccumulation::Forward => [true, false, false],
            FastAccumulation::All => [true; 3],
        };
        let wanted = KINDS.into_iter().zip(fast).map(|((a, b, of_weight), fast)| (a, b, of_weight, fast));
        assert_eq!(*seen.lock().unwrap(), wanted.collect(), "{fast_accumulation}");
        let after = session.snapshot().unwrap();
        assert!(*first.get_or_insert(after.clone()) == after, "{fast_accumulation}: the cpu has one way to add");
    }
}

#[test]
fn names_are_read_back() {
    for fast in FastAccumulation::ALL {
        assert_eq!(fast.to_string().parse(), Ok(fast));
    }
    let error = "some".parse::<FastAccumulation>().unwrap_err();
    assert_eq!(error, "there is no fast accumulation `some`; one of: none, forward, all");
}
