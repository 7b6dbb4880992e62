//! Scales, histories, weight caches and gradient slots of one linear layer, number by number.

use crate::one_layer::{Bench, STAGE, TOKENS, WIDTH, constant, pattern};
use qeffect_core::code::Code;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_runtime::device::Caps;
use qeffect_runtime::error::Error;
use qeffect_runtime::shard::Named;
use qeffect_runtime::stage::Layout;

/// `value` in the first row only: as dy, with x = 1, it makes a weight gradient of `value` everywhere.
fn first_row(value: f64) -> Vec<f64> {
    (0..TOKENS * WIDTH).map(|i| if i < WIDTH { value } else { 0.0 }).collect()
}

/// `dyᵀ · x` of what the codes of two scales stand for.
fn weight_gradient(dy: &[f64], dy_scale: f32, x: &[f64], x_scale: f32) -> Vec<f32> {
    let code = |format: Format, x: f64, scale: f32| f64::from(format.decode(format.encode(x as f32 * scale)));
    let factor = (1.0 / dy_scale) * (1.0 / x_scale);
    (0..WIDTH * WIDTH)
        .map(|i| {
            let (row, column) = (i / WIDTH, i % WIDTH);
            let term = |t: usize| {
                code(Format::E5M2, dy[t * WIDTH + row], dy_scale) * code(Format::E4M3, x[t * WIDTH + column], x_scale)
            };
            (0..TOKENS).map(term).sum::<f64>() as f32 * factor
        })
        .collect()
}

// case B04: retained bytes are read with the factor they were made with, whatever the scale is by now.
#[test]
fn a_retained_tensor_carries_its_own_factor() {
    for caps in [Caps::default(), Caps { fp8_needs_transposes: true, ..Caps::default() }] {
        for order in [[0, 1], [1, 0]] {
            let mut bench = Bench::with("fp8-delayed:history=4,loss-scale=2^0", 2, caps, false);
            let x = [pattern(1.0), pattern(8.0)];
            let dy = [pattern(2.0), pattern(0.5)];
            bench.begin();
            let (_, first) = bench.forward(0, &x[0]);
            let (_, second) = bench.forward(1, &x[1]);
            assert_eq!(bench.scale("input"), 56.0);
            for (tape, want) in [(&first, 1.0), (&second, 1.0 / 448.0)] {
                let layout = Layout::of(tape);
                let factor = layout.entries[layout.entries.len() - 1].1;
                assert_eq!((factor.rows, factor.cols), (1, 1));
                assert_eq!(bench.shard.reals(factor).unwrap(), [f64::from(want as f32)]);
            }
            let (_, first) = bench.input_grad(0, &dy[0], first);
            let (_, second) = bench.input_grad(1, &dy[1], second);
            let mut works = [Some(first), Some(second)];
            for m in order {
                let work = works[m as usize].take().unwrap();
                bench.weight_grad(m, work).unwrap();
            }
            bench.settle();
            let grads =
                [weight_gradient(&dy[0], 1.0, &x[0], 1.0), weight_gradient(&dy[1], 57344.0 / 2.0, &x[1], 448.0)];
            let want: Vec<f32> = grads[0].iter().zip(&grads[1]).map(|(a, b)| (a + b) * 0.5).collect();
            assert!(want.iter().any(|x| *x != 0.0));
            assert_eq!(bench.floats("layer.weight/gradient"), want);
        }
    }
}

// case B05: the backward state moves once per I, at its end; F, W, reduce and commit leave it alone.
#[test]
fn only_an_input_gradient_moves_the_backward_state() {
    for order in [[1, 0], [0, 1]] {
        let mut bench = Bench::new("fp8-delayed:history=4", 2);
        let state = |bench: &mut Bench| (bench.scale("grad_output"), bench.floats("layer.grad_output/history"));
        bench.begin();
        let start = state(&mut bench);
        assert_eq!(start, (1.0, vec![0.0; 4]));
        let (_, first) = bench.forward(0, &constant(1.0));
        let (_, second) = bench.forward(1, &constant(1.0));
        assert_eq!(state(&mut bench), start);
        let (_, first) = bench.input_grad(0, &constant(1.0), first);
        assert_eq!(state(&mut bench), (57344.0, vec![0.0, 0.0, 0.0, 1.0]));
        let (_, second) = bench.input_grad(1, &constant(2.0), second);
        let moved = state(&mut bench);
        assert_eq!(moved, (28672.0, vec![0.0, 0.0, 1.0, 2.0]));
        let mut works = [Some(first), Some(second)];
        for m in order {
            let work = works[m as usize].take().unwrap();
            bench.weight_grad(m, work).unwrap();
        }
        assert!(bench.settle().commit);
        bench.shard.commit().unwrap();
        assert_eq!(state(&mut bench), moved);
        assert_eq!((bench.fwd.unwrap().rolls(), bench.bwd.unwrap().rolls()), (2, 2));
    }
}

// case B44: an input so small that its scale would be infinite, and a zero that is cast with that scale.
#[test]
fn a_tiny_input_gives_finite_numbers() {
    let mut bench = Bench::new("fp8-delayed:history=4", 2);
    bench.begin();
    let (_, _first) = bench.forward(0, &constant(1e-37));
    assert_eq!(bench.scale("input"), f32::MAX);
    let (y, _second) = bench.forward(1, &constant(0.0));
    assert_eq!(y, constant(0.0));
}

// case B07: the weight's scale moves while its cached bytes stay; their factor stays with them.
#[test]
fn a_moving_weight_scale_does_not_change_what_the_cache_means() {
    let mut bench = Bench::starting_with("fp8-delayed:history=4", 4, Caps::default(), 3.0);
    let x = pattern(448.0); // keeps the input's scale at 1
    bench.begin();
    let scale = bench.scale("weight");
    assert_eq!(scale.to_bits(), 0x4315_5555);
    let mut outputs = Vec::new();
    for m in 0..4 {
        let (y, tape) = bench.forward(m, &x);
        assert_eq!(bench.floats("layer.weight/scale_inv"), [1.0]);
        assert_eq!(bench.scale("input"), 1.0);
        outputs.push(y);
        let (_, work) = bench.input_grad(m, &constant(1.0), tape);
        bench.weight_grad(m, work).unwrap();
    }
    assert!(outputs[0].iter().any(|y| *y != 0.0) && outputs.iter().all(|y| *y == outputs[0]));
    assert!(bench.settle().commit);
    bench.shard.commit().unwrap();
    bench.begin();
    assert_eq!(bench.floats("layer.weight/scale_inv"), [1.0 / scale]);
    let (y, tape) = bench.forward(0, &x);
    let row: f64 = x[..WIDTH].iter().sum();
    assert!((y[0] - 3.0 * row).abs() <= (3.0 * row).abs() / 256.0);
    let (_, work) = bench.input_grad(0, &constant(1.0), tape);
    bench.weight_grad(0, work).unwrap();
}

// case B02: a weight rolls once per step, however many microbatches there are.
#[test]
fn a_weight_history_rolls_once_per_step() {
    for update in ["microbatch", "step"] {
        let mut bench =
            Bench::starting_with(&format!("fp8-delayed:history=4,update={update}"), 6, Caps::default(), 3.0);
        let step = |bench: &mut Bench, next: f64| {
            bench.begin();
            let rolled = bench.floats("layer.weight/history");
            for m in 0..6 {
                let (_, tape) = bench.forward(m, &constant(0.5));
                let (_, work) = bench.input_grad(m, &constant(1.0), tape);
                bench.weight_grad(m, work).unwrap();
            }
            assert!(bench.settle().commit);
            bench.shard.set_param("layer.weight", &[next; WIDTH * WIDTH]).unwrap(); // as the optimizer would
            bench.shard.commit().unwrap();
            rolled
        };
        // With `update = step` the roll is at commit: there, the history lags by one step and the scale does not.
        let histories = [step(&mut bench, 1.0), step(&mut bench, 1.0), step(&mut bench, 1.0)];
        let want = match update {
            "microbatch" => [[0.0, 0.0, 0.0, 3.0], [0.0, 0.0, 3.0, 1.0], [0.0, 3.0, 1.0, 1.0]],
            _ => [[3.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 3.0], [1.0, 0.0, 3.0, 1.0]],
        };
        assert_eq!(histories, want, "{update}");
        assert_eq!(bench.scale("weight").to_bits(), 0x4315_5555);
        // The bytes of each step were made with the same scale in both modes.
        assert_eq!(bench.floats("layer.weight/scale_inv"), [1.0 / f32::from_bits(0x4315_5555)]);
    }
}

// case B10: a commit renews the transposed copy too.
#[test]
fn the_transposed_weight_follows_the_optimizer() {
    for caps in [Caps::default(), Caps { fp8_needs_transposes: true, ..Caps::default() }] {
        let mut bench = Bench::starting_with("fp8-delayed:history=4,margin=1", 1, caps, 1.0);
        for (want, next) in [(16.0, 2.0), (32.0, 2.0)] {
            bench.begin();
            let (y, tape) = bench.forward(0, &constant(1.0));
            let (dx, work) = bench.input_grad(0, &constant(1.0), tape);
            assert_eq!((y, dx), (constant(want), constant(want)));
            bench.weight_grad(0, work).unwrap();
            assert!(bench.settle().commit);
            bench.shard.set_param("layer.weight", &[next; WIDTH * WIDTH]).unwrap();
            bench.shard.commit().unwrap();
        }
        assert_eq!(bench.shard.export().unwrap().contains_key("layer.weight/transposed"), caps.fp8_needs_transposes);
    }
}

fn train_one_step(bench: &mut Bench, gradients: &[f64], order: &[u32]) -> Vec<f32> {
    bench.begin();
    let mut works = Vec::new();
    for (m, gradient) in gradients.iter().enumerate() {
        let (_, tape) = bench.forward(m as u32, &constant(1.0));
        let (_, work) = bench.input_grad(m as u32, &first_row(*gradient), tape);
        works.push(Some(work));
    }
    for m in order {
        let work = works[*m as usize].take().unwrap();
        bench.weight_grad(*m, work).unwrap();
    }
    bench.settle();
    bench.floats("layer.weight/gradient")
}

// case B55, case B13: every microbatch is added once, whichever weight gradient runs first or last.
#[test]
fn every_microbatch_is_added_once_in_any_order() {
    for recipe in ["f32", "bf16"] {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 3, 0]] {
            let mut bench = Bench::new(recipe, 4);
            let gradient = train_one_step(&mut bench, &[1.0, 2.0, 4.0, 8.0], &order);
            assert_eq!(gradient, [15.0 / 4.0; WIDTH * WIDTH]);
        }
    }
}

// case B34: the division by the number of microbatches happens once; so does that by the loss scale.
#[test]
fn gradients_are_scaled_once() {
    for recipe in ["f32", "bf16"] {
        let mut bench = Bench::new(recipe, 4);
        assert_eq!(train_one_step(&mut bench, &[4.0, 8.0, 12.0, 16.0], &[0, 1, 2, 3]), [10.0; WIDTH * WIDTH]);
    }
    // As many numbers, times a loss scale that is undone exactly.
    let mut bench = Bench::new("fp8-delayed:loss-scale=2^10,history=1", 1);
    assert_eq!(train_one_step(&mut bench, &[10.0 * 1024.0], &[0]), [10.0; WIDTH * WIDTH]);
}

// case B13: a second write of one microbatch's gradient is refused; it neither replaces the first nor is lost.
#[test]
fn a_gradient_that_is_written_twice_is_refused() {
    let mut bench = Bench::with("f32", 1, Caps::default(), true);
    bench.begin();
    let (_, tape) = bench.forward(0, &constant(1.0));
    let (_, work) = bench.input_grad(0, &first_row(0.6), tape);
    match bench.weight_grad(0, work) {
        Err(Error::Contract { code: Code::ArenaDuplicate, message }) => assert!(message.contains("layer.weight")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_missing_gradient_is_refused() {
    let mut bench = Bench::new("f32", 2);
    bench.begin();
    let (_, tape) = bench.forward(0, &constant(1.0));
    let (_, work) = bench.input_grad(0, &first_row(1.0), tape);
    bench.weight_grad(0, work).unwrap();
    match bench.shard.reduce(STAGE) {
        Err(Error::Contract { code: Code::ArenaMissing, message }) => {
            assert!(message.contains("layer.weight") && message.contains("microbatch 1"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

/// Everything that a step may change only if it is good.
fn lasting(bench: &mut Bench) -> Vec<(String, Named)> {
    bench.shard.export().unwrap().into_iter().filter(|(name, _)| !name.ends_with("/gradient")).collect()
}

#[test]
fn a_value_that_is_not_finite_leaves_no_trace() {
    for recipe in ["fp8-delayed:history=4", "fp8-delayed:history=4,update=step", "bf16", "f32"] {
        for hidden in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
            for backward in [false, true] {
                let mut bench = Bench::new(recipe, 2);
                train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
                bench.shard.commit().unwrap();
                let before = lasting(&mut bench);
                bench.begin();
                for m in 0..2 {
                    let (mut x, mut dy) = (constant(1.0), constant(1.0));
                    if m == 0 {
                        if backward { dy[7] = hidden } else { x[7] = hidden }
                    }
                    let (_, tape) = bench.forward(m, &x);
                    let (_, work) = bench.input_grad(m, &dy, tape);
                    bench.weight_grad(m, work).unwrap();
                }
                let verdict = bench.settle();
                assert!(!verdict.commit, "{recipe}: {hidden} is noticed");
                bench.shard.commit().unwrap();
                assert!(lasting(&mut bench) == before, "{recipe}: {hidden} leaves a trace");
                // The next step is none the worse for it.
                train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
                bench.shard.commit().unwrap();
                assert_eq!(bench.shard.commits().unwrap(), 2);
            }
        }
    }
}

#[test]
fn an_aborted_step_leaves_no_trace() {
    let mut bench = Bench::new("fp8-delayed:history=4", 2);
    train_one_step(&mut bench, &[1.0, 2.0], &[0, 1]);
    bench.shard.commit().unwrap();
    let before = lasting(&mut bench);
    bench.begin();
    let (_, tape) = bench.forward(0, &pattern(64.0));
    drop(bench.input_grad(0, &pattern(32.0), tape));
    assert!(bench.shard.pool().quiescent().is_err());
    bench.shard.abort().unwrap();
    bench.shard.pool().quiescent().unwrap();
    assert!(lasting(&mut bench) == before);
}

#[test]
fn with_one_update_per_step_the_largest_amax_of_the_step_counts() {
    let mut bench = Bench::new("fp8-delayed:history=4,update=step", 3);
    bench.begin();
    for (m, amax) in [2.0, 8.0, 1.0].into_iter().enumerate() {
        let (_, tape) = bench.forward(m as u32, &pattern(amax));
        assert_eq!(bench.scale("input"), 1.0, "scales stand still within a step");
        let (_, work) = bench.input_grad(m as u32, &pattern(4.0 * amax), tape);
        bench.weight_grad(m as u32, work).unwrap();
    }
    assert!(bench.settle().commit);
    bench.shard.commit().unwrap();
    assert_eq!((bench.scale("input"), bench.scale("grad_output")), (56.0, 57344.0 / 32.0));
    assert_eq!(bench.floats("layer.input/history"), [0.0, 0.0, 0.0, 8.0]);
}
