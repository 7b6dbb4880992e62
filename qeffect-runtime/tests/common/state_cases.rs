//! What holds of scales, histories, weight caches and gradients of one linear layer on whatever device.

use qeffect_core::fp8::Fp8 as Format;
use qeffect_runtime::device::Device;
use qeffect_runtime::stage::Layout;

use super::one_layer::{Bench, TOKENS, WIDTH, constant, pattern};

/// Makes devices.
pub type Make<'a> = &'a dyn Fn() -> Box<dyn Device>;

/// `value` in the first row only: as dy, with x = 1, it makes a weight gradient of `value` everywhere.
pub fn first_row(value: f64) -> Vec<f64> {
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

/// Case B04: retained bytes are read with the factor they were made with, whatever the scale is by now.
pub fn a_retained_tensor_carries_its_own_factor(device: Make<'_>, tolerance: f32) {
    for order in [[0, 1], [1, 0]] {
        let mut bench = Bench::on(device(), "fp8-delayed:history=4,loss-scale=2^0", 2, false);
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
        let grads = [weight_gradient(&dy[0], 1.0, &x[0], 1.0), weight_gradient(&dy[1], 57344.0 / 2.0, &x[1], 448.0)];
        let want: Vec<f32> = grads[0].iter().zip(&grads[1]).map(|(a, b)| (a + b) * 0.5).collect();
        assert!(want.iter().any(|x| *x != 0.0));
        let found = bench.floats("layer.weight/gradient");
        let near = |(found, want): (&f32, &f32)| (found - want).abs() <= tolerance * want.abs();
        assert!(found.len() == want.len() && found.iter().zip(&want).all(near), "{found:?}, {want:?}");
    }
}

/// Case B05: the backward state moves once per I, at its end; F, W, reduce and commit leave it alone.
pub fn only_an_input_gradient_moves_the_backward_state(device: Make<'_>) {
    for order in [[1, 0], [0, 1]] {
        let mut bench = Bench::on(device(), "fp8-delayed:history=4", 2, false);
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

/// Case B44: an input so small that its scale would be infinite, and a zero that is cast with that scale.
pub fn a_tiny_input_gives_finite_numbers(device: Make<'_>) {
    let mut bench = Bench::on(device(), "fp8-delayed:history=4", 2, false);
    bench.begin();
    let (_, _first) = bench.forward(0, &constant(1e-37));
    assert_eq!(bench.scale("input"), f32::MAX);
    let (y, _second) = bench.forward(1, &constant(0.0));
    assert_eq!(y, constant(0.0));
}

/// Case B07: the weight's scale moves while its cached bytes stay; their factor stays with them.
pub fn a_moving_weight_scale_does_not_change_what_the_cache_means(device: Make<'_>) {
    let mut bench = Bench::starting_with(device(), "fp8-delayed:history=4", 4, 3.0);
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

/// Case B02: a weight rolls once per step, however many microbatches there are.
pub fn a_weight_history_rolls_once_per_step(device: Make<'_>) {
    for update in ["microbatch", "step"] {
        let mut bench = Bench::starting_with(device(), &format!("fp8-delayed:history=4,update={update}"), 6, 3.0);
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

/// Case B10: a commit renews the transposed copy too.
pub fn the_transposed_weight_follows_the_optimizer(device: Make<'_>) {
    let mut bench = Bench::starting_with(device(), "fp8-delayed:history=4,margin=1", 1, 1.0);
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
    let transposes = bench.shard.device().caps().fp8_needs_transposes;
    assert_eq!(bench.shard.export().unwrap().contains_key("layer.weight/transposed"), transposes);
}

/// F, I and W of a step, W in the given order; the gradient.
pub fn train_one_step(bench: &mut Bench, gradients: &[f64], order: &[u32]) -> Vec<f32> {
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

/// Case B55, case B13: every microbatch is added once, whichever weight gradient runs first or last.
pub fn every_microbatch_is_added_once_in_any_order(device: Make<'_>, recipes: &[&str]) {
    for recipe in recipes {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 3, 0]] {
            let mut bench = Bench::on(device(), recipe, 4, false);
            let gradient = train_one_step(&mut bench, &[1.0, 2.0, 4.0, 8.0], &order);
            assert_eq!(gradient, [15.0 / 4.0; WIDTH * WIDTH]);
        }
    }
}

/// Case B34: the division by the number of microbatches happens once; so does that by the loss scale.
pub fn gradients_are_scaled_once(device: Make<'_>, recipes: &[&str]) {
    for recipe in recipes {
        let mut bench = Bench::on(device(), recipe, 4, false);
        assert_eq!(train_one_step(&mut bench, &[4.0, 8.0, 12.0, 16.0], &[0, 1, 2, 3]), [10.0; WIDTH * WIDTH]);
    }
    // As many numbers, times a loss scale that is undone exactly.
    let mut bench = Bench::on(device(), "fp8-delayed:loss-scale=2^10,history=1", 1, false);
    assert_eq!(train_one_step(&mut bench, &[10.0 * 1024.0], &[0]), [10.0; WIDTH * WIDTH]);
}
