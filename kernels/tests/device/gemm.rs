//! Matrix products: bit for bit where sums are exact, within bounds of float64 elsewhere.

use half::bf16;
use qeffect_core::fp8::Fp8;
use qeffect_kernels::cache::Cache;
use qeffect_kernels::gemm::{
    Algorithms, BLOCK, BlockScale, Matrix, Operands, Output, Product, Products, Scaling, Type, WORKSPACE,
};
use qeffect_kernels::graph::Capture;
use qeffect_kernels::launch::cast::{Codes, Outputs, Transposed};
use qeffect_kernels::launch::scale::Spread;
use qeffect_kernels::{Buffer, arch::Arch};

use crate::bench::{Bench, EXACT, FAST, Side, integers, operands, reference, sizes};
use crate::rig::{BF16, bf16_bits, bits, close, floats, numbers, rig, within};

fn transposed(x: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns).map(|i| x[i % rows * columns + i / rows]).collect()
}

#[test]
fn exact_sums_equal_the_host_bit_for_bit() {
    let Some(rig) = rig() else { return };
    let mut bench = Bench::new(rig);
    let one = rig.upload(&[1.0f32]);
    let pairs =
        [(Type::E4M3, Type::E4M3), (Type::E5M2, Type::E4M3), (Type::E4M3, Type::E5M2), (Type::Bf16, Type::Bf16)];
    for (rows, columns, depth) in [(16, 16, 16), (8, 48, 64), (256, 512, 256), (100, 272, 1024)] {
        for (left_type, right_type) in pairs {
            let left = Side::new(rig, left_type, &integers(1, rows * depth));
            let right = Side::new(rig, right_type, &integers(2, columns * depth));
            let bias: Vec<bf16> = integers(3, columns).iter().map(|x| bf16::from_f32(*x)).collect();
            let bias_buffer = rig.upload(&bias);
            let want = reference(rows, columns, depth, &left.values, &right.values);
            let scale = left_type.is_fp8().then(|| one.span());
            for (fast, with_bias) in [(false, false), (true, true)] {
                let fast = fast && left_type.is_fp8();
                let product =
                    Product { fast, bias: with_bias, ..Product::fp8(rows, columns, depth, left_type, right_type) };
                let plan = bench.plan(product);
                let out = rig.poisoned::<bf16>(rows * columns);
                let operands = Operands {
                    bias: with_bias.then(|| bias_buffer.span()),
                    ..operands(&left, &right, [scale, scale], Matrix::Bf16(out.span()))
                };
                bench.run(&plan, &operands);
                let with = |i: usize| want[i] + if with_bias { bias[i % columns].to_f64() } else { 0.0 };
                let want: Vec<bf16> = (0..want.len()).map(|i| bf16::from_f64(with(i))).collect();
                assert_eq!(bf16_bits(&out.read().unwrap()), bf16_bits(&want), "{product}");
            }

            let product = Product::weight_gradient(rows, columns, depth, left_type, right_type);
            let plan = bench.plan(product);
            let start = integers(4, rows * columns);
            let out = rig.upload(&start);
            let mut operands =
                Operands { accumulate: true, ..operands(&left, &right, [scale, scale], Matrix::F32(out.span())) };
            bench.run(&plan, &operands);
            let sums: Vec<f32> = want.iter().zip(&start).map(|(sum, start)| *sum as f32 + start).collect();
            assert_eq!(bits(&out.read().unwrap()), bits(&sums), "{product}");
            operands.accumulate = false;
            bench.run(&plan, &operands);
            let sums: Vec<f32> = want.iter().map(|sum| *sum as f32).collect();
            assert_eq!(bits(&out.read().unwrap()), bits(&sums), "{product}");
        }
        // bf16 operands stored the other way round.
        let (a, b) = (integers(1, rows * depth), integers(2, columns * depth));
        let want: Vec<f32> = reference(rows, columns, depth, &a, &b).iter().map(|sum| *sum as f32).collect();
        for (left_transposed, right_transposed) in [(true, false), (false, true), (true, true)] {
            let flip = |x: &[f32], rows, flip| if flip { transposed(x, rows, depth) } else { x.to_vec() };
            let left = Side::new(rig, Type::Bf16, &flip(&a, rows, left_transposed));
            let right = Side::new(rig, Type::Bf16, &flip(&b, columns, right_transposed));
            let base = Product::weight_gradient(rows, columns, depth, Type::Bf16, Type::Bf16);
            let plan = bench.plan(Product { left_transposed, right_transposed, ..base });
            let out = rig.poisoned::<f32>(rows * columns);
            let operands = operands(&left, &right, [None, None], Matrix::F32(out.span()));
            bench.run(&plan, &operands);
            assert_eq!(bits(&out.read().unwrap()), bits(&want), "{left_transposed} {right_transposed}");
        }
    }
}

#[test]
fn any_numbers_are_within_bounds_of_float64_and_adding_is_adding() {
    let Some(rig) = rig() else { return };
    let mut bench = Bench::new(rig);
    let (rows, columns, depth) = (256, 1024, 256);
    let left = Side::new(rig, Type::E5M2, &numbers(1, rows * depth).iter().map(|x| x * 300.0).collect::<Vec<_>>());
    let right = Side::new(rig, Type::E4M3, &numbers(2, columns * depth).iter().map(|x| x * 9.0).collect::<Vec<_>>());
    let scales = [0.37f32, 1.9e-3];
    let (left_scale, right_scale) = (rig.upload(&scales[..1]), rig.upload(&scales[1..]));
    let product = Product::weight_gradient(rows, columns, depth, left.of, right.of);
    let alone = bench.adds(product, &left, &right, [&left_scale, &right_scale]);
    let factor = f64::from(scales[0]) * f64::from(scales[1]);
    let want: Vec<f64> =
        reference(rows, columns, depth, &left.values, &right.values).iter().map(|sum| sum * factor).collect();
    // Tensor cores truncate inside a block of terms: fewer than 24 bits, still far below the operands' own 3 and 2.
    close("product", alone.iter().copied(), &want, 1e-3);
    let sizes = sizes(rows, columns, depth, &left.values, &right.values);
    within("product", alone, &want, |i| EXACT * factor * sizes[i]);
}

#[test]
fn products_with_block_scales_are_within_bounds_of_float64_and_adding_is_adding() {
    let Some(rig) = rig() else { return };
    if rig.kernels.arch() != Arch::SM_90A {
        return println!("skipped: block scales are Hopper's alone");
    }
    let mut bench = Bench::new(rig);
    let (rows, columns, depth) = (256, 1024, 512);
    let left = Side::new(rig, Type::E5M2, &numbers(1, rows * depth).iter().map(|x| x * 300.0).collect::<Vec<_>>());
    let right = Side::new(rig, Type::E4M3, &numbers(2, columns * depth).iter().map(|x| x * 9.0).collect::<Vec<_>>());
    for kinds in [[BlockScale::Vector, BlockScale::Vector], [BlockScale::Vector, BlockScale::Square]] {
        let [to_left, to_right] = kinds;
        // No powers of two.
        let factors = |kind: BlockScale, rows: usize, seed: u64| -> Vec<f32> {
            numbers(seed, kind.len(rows, depth)).iter().map(|x| x.abs() * 1e-2 + 1e-3).collect()
        };
        let (left_factors, right_factors) = (factors(to_left, rows, 4), factors(to_right, columns, 5));
        let (left_scale, right_scale) = (rig.upload(&left_factors), rig.upload(&right_factors));
        let product = Product {
            scaling: Scaling::Blocks { left: to_left, right: to_right },
            ..Product::weight_gradient(rows, columns, depth, left.of, right.of)
        };
        let alone = bench.adds(product, &left, &right, [&left_scale, &right_scale]);
        // Every code times the factor of its block.
        let scaled = |kind: BlockScale, side: &Side, factors: &[f32], rows: usize| -> Vec<f64> {
            let factor = |i: usize| factors[kind.index(rows, depth, i / depth, i % depth / BLOCK)];
            side.values.iter().enumerate().map(|(i, x)| f64::from(*x) * f64::from(factor(i))).collect()
        };
        let a = scaled(to_left, &left, &left_factors, rows);
        let b = scaled(to_right, &right, &right_factors, columns);
        let (mut want, mut sizes) = (Vec::new(), Vec::new());
        for i in 0..rows * columns {
            let (a, b) = (&a[i / columns * depth..][..depth], &b[i % columns * depth..][..depth]);
            let terms = || a.iter().zip(b).map(|(a, b)| a * b);
            want.push(terms().sum::<f64>());
            sizes.push(terms().map(f64::abs).sum::<f64>());
        }
        close("product", alone.iter().copied(), &want, 1e-3);
        within("product", alone, &want, |i| EXACT * sizes[i]);
    }
}

// A coalesced weight gradient: microbatches of 128 tokens side by side, each with its own scales.
#[test]
fn block_scales_apply_to_their_own_microbatch() {
    let Some(rig) = rig() else { return };
    let mut bench = Bench::new(rig);
    let (rows, columns, depth) = (256, 384, 512);
    let blocks = depth / 128;
    let left = Side::new(rig, Type::E5M2, &integers(1, rows * depth));
    let right = Side::new(rig, Type::E4M3, &integers(2, columns * depth));
    // Powers of two, so that sums stay exact.
    let scale_of = |side: i32, block: usize| 2f32.powi(side * (block as i32 % 3) - 1);
    let (sides, factors) = ([BlockScale::Vector, BlockScale::Square], [1, -2]);
    let scales = |scale: BlockScale, side_rows: usize, factor: i32| {
        let mut scales = vec![f32::NAN; scale.len(side_rows, depth)];
        for row in 0..side_rows {
            for block in 0..blocks {
                scales[scale.index(side_rows, depth, row, block)] = scale_of(factor, block);
            }
        }
        rig.upload(&scales)
    };
    for (left_kind, right_kind) in [(0, 0), (0, 1), (1, 0)] {
        let (left_kind, right_kind) = (sides[left_kind], sides[right_kind]);
        let product = Product {
            scaling: Scaling::Blocks { left: left_kind, right: right_kind },
            ..Product::weight_gradient(rows, columns, depth, left.of, right.of)
        };
        let planned = bench.products.plan(&rig.stream, product);
        if rig.kernels.arch() != Arch::SM_90A {
            assert!(planned.is_err(), "only Hopper has these");
            continue;
        }
        let plan = planned.unwrap();
        let (left_scale, right_scale) = (scales(left_kind, rows, factors[0]), scales(right_kind, columns, factors[1]));
        let out = rig.poisoned::<f32>(rows * columns);
        let operands =
            operands(&left, &right, [Some(left_scale.span()), Some(right_scale.span())], Matrix::F32(out.span()));
        bench.run(&plan, &operands);
        let want: Vec<f32> = (0..rows * columns)
            .map(|i| {
                let sum: f64 = (0..depth)
                    .map(|k| {
                        let factor = scale_of(factors[0], k / 128) * scale_of(factors[1], k / 128);
                        f64::from(left.values[i / columns * depth + k])
                            * f64::from(right.values[i % columns * depth + k])
                            * f64::from(factor)
                    })
                    .sum();
                sum as f32
            })
            .collect();
        assert_eq!(bits(&out.read().unwrap()), bits(&want), "{product}");
    }
}

// Casts write three microbatches of different scales side by side, the last two padded; one product gives the sum of what
// each alone gives.
#[test]
fn a_coalesced_gradient_is_the_sum_over_its_microbatches() {
    let Some(rig) = rig() else { return };
    if rig.kernels.arch() != Arch::SM_90A {
        return;
    }
    let mut bench = Bench::new(rig);
    let (columns, inputs, tokens) = (272, 144, [128usize, 64, 100]);
    let starts = [0usize, 128, 256];
    let depth = 384;
    let (left_kind, right_kind) = (BlockScale::Vector, BlockScale::Square);
    let (left, right) = (rig.upload(&vec![0u8; columns * depth]), rig.upload(&vec![0u8; inputs * depth]));
    let left_scales = rig.upload(&vec![f32::NAN; left_kind.len(columns, depth)]);
    let right_scales = rig.upload(&vec![f32::NAN; right_kind.len(inputs, depth)]);
    let (mut left_factors, mut right_factors) = (Vec::new(), Vec::new());
    let mut want = vec![0f64; columns * inputs];
    for (index, (start, tokens)) in starts.into_iter().zip(tokens).enumerate() {
        let seed = 10 * index as u64;
        let (dy, x) = (integers(seed + 1, tokens * columns), integers(seed + 2, tokens * inputs));
        for (values, width, format, scale, region, factors) in [
            (&dy, columns, Fp8::E5M2, 8f32.powi(index as i32), &left, &mut left_factors),
            (&x, inputs, Fp8::E4M3, 0.25f32.powi(index as i32), &right, &mut right_factors),
        ] {
            let narrow: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
            let (source, codes) = (rig.upload(&narrow), rig.poisoned::<u8>(narrow.len()));
            let (scale, scale_inv) = (rig.upload(&[scale]), rig.poisoned::<f32>(1));
            let region = region.span().part(start..region.span().len()).unwrap();
            let outputs = Outputs::codes(Codes {
                codes: codes.span(),
                transposed: Some(Transposed::Beside { region, line: depth }),
                scale: scale.span(),
                scale_inv: scale_inv.span(),
                amax: None,
            });
            rig.kernels.cast(&rig.stream, format, source.span(), (tokens, width), &outputs).unwrap();
            rig.stream.synchronize().unwrap();
            factors.push(scale_inv);
        }
        let (dy, x) = (transposed(&dy, tokens, columns), transposed(&x, tokens, inputs));
        let sums = reference(columns, inputs, tokens, &dy, &x);
        want.iter_mut().zip(sums).for_each(|(want, sum)| *want += sum);
    }
    let spans = |factors: &[Buffer<f32>]| factors.iter().map(Buffer::span).collect::<Vec<_>>();
    let factors = [spans(&left_factors), spans(&right_factors)];
    let to_left = Spread { factors: &factors[0], kind: left_kind, rows: columns, table: left_scales.span() };
    let to_right = Spread { factors: &factors[1], kind: right_kind, rows: inputs, table: right_scales.span() };
    rig.kernels.spread_scales(&rig.stream, [&to_left, &to_right], 1).unwrap();
    let product = Product {
        scaling: Scaling::Blocks { left: left_kind, right: right_kind },
        ..Product::weight_gradient(columns, inputs, depth, Type::E5M2, Type::E4M3)
    };
    let plan = bench.plan(product);
    let out = rig.poisoned::<f32>(columns * inputs);
    let operands = Operands {
        left: Matrix::Codes(left.span()),
        right: Matrix::Codes(right.span()),
        left_scale: Some(left_scales.span()),
        right_scale: Some(right_scales.span()),
        bias: None,
        out: Matrix::F32(out.span()),
        accumulate: false,
    };
    bench.run(&plan, &operands);
    let want: Vec<f32> = want.iter().map(|sum| *sum as f32).collect();
    assert_eq!(bits(&out.read().unwrap()), bits(&want));
}

#[test]
fn replays_and_other_workspaces_give_the_same_bits() {
    let Some(rig) = rig() else { return };
    let mut bench = Bench::new(rig);
    let (rows, columns, depth) = (256, 2048, 1024);
    let left = Side::new(rig, Type::E4M3, &numbers(1, rows * depth).iter().map(|x| x * 9.0).collect::<Vec<_>>());
    let right = Side::new(rig, Type::E4M3, &numbers(2, columns * depth).iter().map(|x| x * 9.0).collect::<Vec<_>>());
    let (one, out) = (rig.upload(&[1.0f32]), rig.poisoned::<bf16>(rows * columns));
    let plan = bench.plan(Product { fast: true, ..Product::fp8(rows, columns, depth, left.of, right.of) });
    let operands = operands(&left, &right, [Some(one.span()), Some(one.span())], Matrix::Bf16(out.span()));
    bench.run(&plan, &operands);
    let eager = bf16_bits(&out.read().unwrap());
    let want = reference(rows, columns, depth, &left.values, &right.values);
    let sizes = sizes(rows, columns, depth, &left.values, &right.values);
    close("product", floats(&out.read().unwrap()), &want, 1.0 / 256.0);
    within("product", floats(&out.read().unwrap()), &want, |i| BF16 * want[i].abs() + FAST * sizes[i]);
    let other = rig.poisoned::<u8>(WORKSPACE);
    let stream = rig.context.new_stream().unwrap();
    use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    plan.run(&stream, &operands, other.span()).unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().unwrap();
    // Another stream is busy with the same product, in a workspace of its own.
    let (busy, third, beside) =
        (rig.context.new_stream().unwrap(), rig.poisoned::<u8>(WORKSPACE), rig.poisoned::<bf16>(rows * columns));
    let aside = Operands { out: Matrix::Bf16(beside.span()), ..operands };
    for _ in 0..100 {
        for _ in 0..4 {
            plan.run(&busy, &aside, third.span()).unwrap();
        }
        qeffect_kernels::memory::zero(&stream, out.span()).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        assert_eq!(bf16_bits(&out.read().unwrap()), eager);
    }
    busy.synchronize().unwrap();
    assert_eq!(bf16_bits(&beside.read().unwrap()), eager);
}

// case B23
#[test]
fn an_algorithm_is_searched_for_once() {
    let Some(rig) = rig() else { return };
    let folder = tempfile::tempdir().unwrap();
    let open = || Products::open(&rig.context, Some(Cache::at(folder.path()))).unwrap();
    let wanted = [
        Product::fp8(128, 256, 512, Type::E4M3, Type::E4M3),
        Product::weight_gradient(256, 512, 128, Type::E5M2, Type::E4M3),
    ];
    let (mut first, mut second) = (open(), open());
    for product in wanted {
        first.plan(&rig.stream, product).unwrap();
        first.plan(&rig.stream, product).unwrap();
    }
    for product in wanted {
        second.plan(&rig.stream, product).unwrap();
    }
    assert_eq!((first.searched(), second.searched()), (2, 0));
    assert_eq!(first.algorithms().digest(), second.algorithms().digest());

    let mut third = Products::open(&rig.context, None).unwrap();
    third.adopt(Algorithms::from_text(&first.algorithms().to_text()).unwrap()).unwrap();
    third.plan(&rig.stream, wanted[0]).unwrap();
    assert_eq!(third.searched(), 0);
    let foreign = format!("another GPU\n{}", first.algorithms().to_text().split_once('\n').unwrap().1);
    assert!(third.adopt(Algorithms::from_text(&foreign).unwrap()).is_err());
}

// Case B23: inside a capture the library is asked for nothing; the capture is given up, and its stream takes work again.
#[test]
fn a_product_without_a_plan_is_refused_inside_a_capture() {
    let Some(rig) = rig() else { return };
    let mut products = Products::open(&rig.context, None).unwrap();
    let (lanes, events) = ([rig.context.new_stream().unwrap()], [rig.context.new_event(None).unwrap()]);
    let product = Product::fp8(48, 80, 112, Type::E4M3, Type::E4M3);
    let capture = Capture::begin(&lanes, &events).unwrap();
    let fault = products.plan(&lanes[0], product).unwrap_err();
    assert!(fault.to_string().contains("none is made inside a capture"), "{fault}");
    drop(capture);
    assert_eq!((products.asked(), products.searched(), products.algorithms().len()), (0, 0, 0));

    let plan = products.plan(&lanes[0], product).unwrap();
    let asked = products.asked();
    assert_eq!(asked, 1);
    let (left, right) =
        (Side::new(rig, Type::E4M3, &integers(1, 48 * 112)), Side::new(rig, Type::E4M3, &integers(2, 80 * 112)));
    let (one, out, workspace) = (rig.upload(&[1.0f32]), rig.poisoned::<bf16>(48 * 80), rig.poisoned::<u8>(WORKSPACE));
    let operands = operands(&left, &right, [Some(one.span()), Some(one.span())], Matrix::Bf16(out.span()));
    plan.run(&lanes[0], &operands, workspace.span()).unwrap(); // loads the kernel, which a capture may not
    lanes[0].synchronize().unwrap();
    let capture = Capture::begin(&lanes, &events).unwrap();
    qeffect_kernels::memory::zero(&lanes[0], out.span()).unwrap();
    plan.run(&lanes[0], &operands, workspace.span()).unwrap();
    let graph = capture.end(&events).unwrap();
    assert_eq!(products.asked(), asked, "a plan asks for nothing");
    graph.launch(&lanes[0]).unwrap();
    lanes[0].synchronize().unwrap();
    let want = reference(48, 80, 112, &left.values, &right.values);
    let want: Vec<bf16> = want.into_iter().map(bf16::from_f64).collect();
    assert_eq!(bf16_bits(&out.read().unwrap()), bf16_bits(&want));
}

// Case B46: tokens are the depth of a weight gradient; and a part of a buffer may begin where no matrix may.
#[test]
fn tokens_and_places_that_do_not_fit_are_refused() {
    let Some(rig) = rig() else { return };
    let mut bench = Bench::new(rig);
    for tokens in [8, 16, 24, 40] {
        let product = Product::weight_gradient(32, 32, tokens, Type::E5M2, Type::E4M3);
        match bench.products.plan(&rig.stream, product) {
            Ok(_) => assert_eq!(tokens, 16),
            Err(fault) => {
                let found = fault.to_string();
                assert!(tokens != 16 && found.contains(&format!("`depth` is {tokens}; FP8 needs a multiple of 16")));
            }
        }
    }
    let plan = bench.plan(Product::weight_gradient(32, 32, 16, Type::E5M2, Type::E4M3));
    let (arena, one) = (rig.poisoned::<u8>(8 + 32 * 16), rig.upload(&[1.0f32]));
    let out = rig.poisoned::<f32>(2 + 32 * 32);
    let codes = |at: usize| Matrix::Codes(arena.span().part(at..at + 32 * 16).unwrap());
    let floats = |at: usize| Matrix::F32(out.span().part(at..at + 32 * 32).unwrap());
    let good = Operands {
        left: codes(0),
        right: codes(0),
        left_scale: Some(one.span()),
        right_scale: Some(one.span()),
        bias: None,
        out: floats(0),
        accumulate: false,
    };
    for operands in
        [Operands { left: codes(8), ..good }, Operands { right: codes(8), ..good }, Operands { out: floats(2), ..good }]
    {
        let fault = plan.run(&rig.stream, &operands, bench.workspace.span()).unwrap_err().to_string();
        assert!(fault.contains("no multiple of 16"), "{fault}");
    }
    assert!(out.read().unwrap().iter().all(|x| x.to_bits() == u32::MAX), "nothing was written");
    plan.run(&rig.stream, &good, bench.workspace.span()).unwrap();
}

/// What the rules for products are taken from: the library on a Hopper GPU has algorithms for what they admit, and none for what
/// they refuse.
#[test]
fn the_library_offers_what_is_taken_and_nothing_that_is_refused() {
    let Some(rig) = rig() else { return };
    if rig.kernels.arch() != Arch::SM_90A {
        println!("skipped: the rules are those of Hopper GPUs");
        return;
    }
    let plain = Product::fp8(64, 64, 64, Type::E4M3, Type::E4M3);
    let blocks = |left, right| Product {
        scaling: Scaling::Blocks { left, right },
        ..Product::weight_gradient(256, 256, 256, Type::E5M2, Type::E4M3)
    };
    let (vector, square) = (BlockScale::Vector, BlockScale::Square);
    let taken = [
        plain,
        Product { rows: 1, ..plain },
        Product { rows: 8, ..plain },
        Product { rows: 24, ..plain },
        Product { depth: 16, ..plain },
        Product { left: Type::E5M2, ..plain },
        Product { right: Type::E5M2, ..plain },
        Product { fast: true, bias: true, ..plain },
        Product::weight_gradient(64, 64, 16, Type::E5M2, Type::E4M3),
        blocks(vector, vector),
        blocks(square, vector),
        blocks(vector, square),
    ];
    let refused = [
        Product { depth: 1, ..plain },
        Product { depth: 8, ..plain },
        Product { depth: 24, ..plain },
        Product { left: Type::E5M2, right: Type::E5M2, ..plain },
        Product { left_transposed: true, ..plain },
        Product { right_transposed: true, ..plain },
        Product { left_transposed: true, right_transposed: true, ..plain },
        blocks(square, square),
        Product { fast: true, ..blocks(vector, vector) },
    ];
    let mut bench = Bench::new(rig);
    for (products, valid) in [(taken.as_slice(), true), (refused.as_slice(), false)] {
        for product in products {
            assert_eq!(product.validate().is_ok(), valid, "{product}");
            let offered = bench.products.offered(product).unwrap();
            assert_eq!(offered > 0, valid, "{product}: {offered} algorithms");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let Some(rig) = rig() else { return };
    let mut bench = Bench::new(rig);
    let fault = bench.products.plan(&rig.stream, Product::fp8(16, 16, 24, Type::E4M3, Type::E4M3)).unwrap_err();
    assert!(fault.to_string().contains("`depth` is 24"), "{fault}");
    let plan = bench.plan(Product::fp8(16, 16, 16, Type::E4M3, Type::E4M3));
    let (codes, scales, out) = (rig.poisoned::<u8>(256), rig.upload(&[1.0f32; 2]), rig.poisoned::<bf16>(256));
    let good = Operands {
        left: Matrix::Codes(codes.span()),
        right: Matrix::Codes(codes.span()),
        left_scale: scales.span().element(0),
        right_scale: scales.span().element(0),
        bias: None,
        out: Matrix::Bf16(out.span()),
        accumulate: false,
    };
    let reason = |operands: Operands| {
        plan.run(&rig.stream, &operands, bench.workspace.span()).map_err(|fault| fault.to_string()).unwrap_err()
    };
    assert!(plan.run(&rig.stream, &good, bench.workspace.span()).is_ok());
    assert!(reason(Operands { right_scale: scales.span().element(1), ..good }).contains("no multiple of 16"));
    assert!(reason(Operands { right_scale: None, ..good }).contains("`right_scale` has 0 elements, 1 are needed"));
    assert!(
        reason(Operands { out: Matrix::F32(scales.span()), ..good }).contains("`out` has elements of another type")
    );
    assert!(reason(Operands { accumulate: true, ..good }).contains("not accumulated"));
    assert_eq!(plan.product().out, Output::Bf16);
}
