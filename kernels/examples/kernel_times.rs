//! Times of kernels at the sizes of a training step, with the bandwidth that they reach.
//!
//! Each kernel is captured many times into a graph, over sets of buffers that together exceed the second cache; the median
//! of replays, over the number of launches, is its time. `cargo run --release -p qeffect-kernels --example kernel_times`.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, sys};
use half::bf16;
use qeffect_core::fp8::Fp8;
use qeffect_core::recipe::AmaxAlgo;
use qeffect_core::scaling::ScaleRule;
use qeffect_kernels::cache::Cache;
use qeffect_kernels::compile::Compiler;
use qeffect_kernels::gemm::{BlockScale, Matrix, Operands, Output, Product, Products, Scaling, Type, WORKSPACE};
use qeffect_kernels::launch::attention::AttentionShape;
use qeffect_kernels::launch::cast::{
    Codes, ColumnScratch, ColumnSums, Normalised, Outputs, TILE, Transposed, partial_sums,
};
use qeffect_kernels::launch::norm::{DownColumns, NormGradient, Residual, Statistics};
use qeffect_kernels::launch::optimizer::{AdamW, Gradient, NORM_PIECE, Parameter, Settled};
use qeffect_kernels::memory::Element;
use qeffect_kernels::{Buffer, Kernels, Result, Span, module};

type Fault = Box<dyn std::error::Error>;

/// Sets of buffers that launches take in turn.
const SETS: usize = 16;
const LAUNCHES: usize = 64;
const REPLAYS: usize = 15;

struct Bench {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    kernels: Kernels,
}

impl Bench {
    fn zeros<T: Element>(&self, len: usize) -> Result<Vec<Buffer<T>>> {
        (0..SETS).map(|_| Buffer::from_host(&self.context, &vec![T::default(); len])).collect()
    }

    fn random(&self, len: usize) -> Result<Vec<Buffer<bf16>>> {
        let mut state = 0x2545_F491_4F6C_DD1Du64;
        (0..SETS)
            .map(|_| {
                let values: Vec<bf16> = (0..len)
                    .map(|_| {
                        state ^= state << 13;
                        state ^= state >> 7;
                        state ^= state << 17;
                        bf16::from_f32((state >> 40) as f32 / 8_388_608.0 - 1.0)
                    })
                    .collect();
                Buffer::from_host(&self.context, &values)
            })
            .collect()
    }

    /// Prints the time of one launch, and bytes over time.
    fn time(
        &self,
        name: &str,
        bytes: usize,
        launches: usize,
        launch: impl Fn(&CudaStream, usize) -> Result,
    ) -> core::result::Result<(), Fault> {
        (0..SETS).try_for_each(|set| launch(&self.stream, set))?; // warm
        self.stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        let captured = (0..launches).try_for_each(|index| launch(&self.stream, index % SETS));
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        captured?;
        let graph = graph?.ok_or("an empty graph")?;
        let event = || self.context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let mut times = Vec::new();
        for _ in 0..REPLAYS {
            let (start, end) = (event()?, event()?);
            start.record(&self.stream)?;
            graph.launch()?;
            end.record(&self.stream)?;
            times.push(f64::from(start.elapsed_ms(&end)?) * 1e3 / launches as f64);
        }
        times.sort_by(f64::total_cmp);
        let median = times[REPLAYS / 2];
        println!("{name:<44} {median:>9.2} µs {:>8.2} TB/s", bytes as f64 / median * 1e-6);
        Ok(())
    }

    fn activations(&self, rows: usize, hidden: usize, ffn: usize, heads: usize) -> core::result::Result<(), Fault> {
        println!("{rows} rows, hidden {hidden}, ffn {ffn}, {heads} heads");
        let (k, wide) = (&self.kernels, rows * ffn);
        let (x, dy, values) = (self.random(wide)?, self.random(wide)?, self.zeros::<bf16>(wide)?);
        let (codes, transposed) = (self.zeros::<u8>(wide)?, self.zeros::<u8>(wide)?);
        let numbers = self.zeros::<f32>(16)?;
        let (scale, flags) = (Buffer::from_host(&self.context, &[1.0f32])?, self.zeros::<u32>(1)?);
        let partial = self.zeros::<f32>(partial_sums(rows, ffn).max(3 * partial_sums(rows, hidden)))?;
        let finished = self.zeros::<u32>(ffn.div_ceil(TILE))?;
        let scratch = |set: usize| ColumnScratch { partial: partial[set].span(), finished: finished[set].span() };
        let sums = self.zeros::<f32>(ffn)?;
        let (gamma, beta) = (self.zeros::<f32>(hidden)?, self.zeros::<f32>(hidden)?);
        let (mean, rstd) = (self.zeros::<f32>(rows)?, self.zeros::<f32>(rows)?);
        let part = |buffer: &Buffer<bf16>, len| buffer.span().part(0..len).expect("inside");
        let outputs = |set: usize, len: usize, columns: Option<usize>| Outputs {
            values: None,
            codes: Some(Codes {
                codes: codes[set].span().part(0..len).expect("inside"),
                transposed: transposed[set].span().part(0..len).map(Transposed::Alone),
                scale: scale.span(),
                scale_inv: numbers[set].span().element(0).expect("inside"),
                amax: numbers[set].span().element(4),
            }),
            column_sums: columns.map(|columns| ColumnSums {
                out: sums[set].span().part(0..columns).expect("inside"),
                scratch: scratch(set),
            }),
            flag: Some(flags[set].span()),
        };
        for columns in [hidden, ffn] {
            let (shape, len) = ((rows, columns), rows * columns);
            self.time(&format!("cast + transpose + amax, {columns} columns"), len * 4, LAUNCHES, |stream, set| {
                k.cast(stream, Fp8::E4M3, part(&x[set], len), shape, &outputs(set, len, None))
            })?;
            self.time(&format!("the same with column sums, {columns} columns"), len * 4, LAUNCHES, |stream, set| {
                k.cast(stream, Fp8::E5M2, part(&x[set], len), shape, &outputs(set, len, Some(columns)))
            })?;
        }
        let shape = (rows, ffn);
        self.time("gelu + cast", wide * 4, LAUNCHES, |stream, set| {
            k.cast_gelu(stream, x[set].span(), shape, &outputs(set, wide, None))
        })?;
        self.time("gelu backward + cast + column sums", wide * 6, LAUNCHES, |stream, set| {
            k.cast_gelu_backward(stream, x[set].span(), dy[set].span(), shape, &outputs(set, wide, Some(ffn)))
        })?;
        let (shape, len) = ((rows, hidden), rows * hidden);
        let statistics = |set: usize| Statistics { mean: Some(mean[set].span()), rstd: rstd[set].span() };
        self.time("residual + norm statistics", len * 6, LAUNCHES, |stream, set| {
            let residual = Residual { other: part(&dy[set], len), total: part(&values[set], len) };
            k.layer_norm_forward(stream, part(&x[set], len), shape, Some(residual), statistics(set), None)
        })?;
        self.time("norm + cast", len * 4, LAUNCHES, |stream, set| {
            let x = Normalised {
                x: part(&x[set], len),
                mean: Some(mean[set].span()),
                rstd: rstd[set].span(),
                gamma: gamma[set].span(),
                beta: Some(beta[set].span()),
            };
            k.cast_norm(stream, &x, shape, &outputs(set, len, None))
        })?;
        let gradient = |x, dy, set: usize| NormGradient {
            x,
            dy,
            gamma: gamma[set].span(),
            statistics: statistics(set),
            residual: Some(dy),
        };
        self.time("norm backward + residual", len * 8, LAUNCHES, |stream, set| {
            let (x, dy, dx) = (part(&x[set], len), part(&dy[set], len), part(&values[set], len));
            k.layer_norm_backward(stream, &gradient(x, dy, set), shape, dx)
        })?;
        self.time("the same + cast", len * 10, LAUNCHES, |stream, set| {
            let (x, dy, dx) = (part(&x[set], len), part(&dy[set], len), part(&values[set], len));
            let outputs = outputs(set, len, None);
            k.layer_norm_backward_cast(stream, &gradient(x, dy, set), shape, dx, Fp8::E5M2, &outputs)
        })?;
        self.time("norm gradients", len * 4, LAUNCHES, |stream, set| {
            let (x, dy) = (part(&x[set], len), part(&dy[set], len));
            let (dgamma, dbeta) = (gamma[set].span(), beta[set].span());
            let down = DownColumns { dgamma, dbeta: Some(dbeta), sums: None, lines: None };
            k.layer_norm_gradients(stream, x, dy, shape, statistics(set), &down, scratch(set))
        })?;
        self.time("add", len * 6, LAUNCHES, |stream, set| {
            k.add(stream, part(&x[set], len), part(&dy[set], len), part(&values[set], len))
        })?;
        let shape = AttentionShape { sequences: 1, length: rows, heads, kv_heads: heads, head_dim: hidden / heads };
        let (qkv, dqkv) = (self.random(3 * len)?, self.zeros::<bf16>(3 * len)?);
        let (lse, delta) = (self.zeros::<f32>(shape.statistics())?, self.zeros::<f32>(shape.statistics())?);
        self.time("attention forward", len * 8, LAUNCHES, |stream, set| {
            k.attention_forward(stream, &shape, qkv[set].span(), part(&values[set], len), lse[set].span())
        })?;
        self.time("attention backward", len * 14, LAUNCHES, |stream, set| {
            let (dout, lse, delta) = (part(&dy[set], len), lse[set].span(), delta[set].span());
            k.attention_backward(stream, &shape, qkv[set].span(), dout, lse, dqkv[set].span(), delta)
        })?;
        let rule = ScaleRule::new(Fp8::E4M3, 0, AmaxAlgo::Max);
        let (scales, history) = (self.zeros::<f32>(8)?, self.zeros::<f32>(8 * 16)?);
        self.time("roll of 8 cells, history 16", 1, LAUNCHES, |stream, set| {
            k.roll_scales(
                stream,
                &rule,
                0..scales[set].span().len(),
                scales[set].span(),
                history[set].span(),
                None,
                None,
            )
        })
    }

    fn commit(&self, rows: usize, columns: usize) -> core::result::Result<(), Fault> {
        println!("parameter {rows} × {columns}");
        let len = rows * columns;
        let k = &self.kernels;
        let zeros = |len| Buffer::from_host(&self.context, &vec![0f32; len]);
        let parameters: Vec<[Buffer<f32>; 4]> =
            (0..4).map(|_| Ok([zeros(len)?, zeros(len)?, zeros(len)?, zeros(len)?])).collect::<Result<_>>()?;
        let codes = [Buffer::<u8>::poisoned(&self.context, len)?, Buffer::poisoned(&self.context, len)?];
        let table = Buffer::from_host(&self.context, &[1e-3f32, 1e-2, 0.3])?;
        let (counter, unless) =
            (Buffer::from_host(&self.context, &[0u64])?, Buffer::from_host(&self.context, &[0u32])?);
        let numbers: Vec<Buffer<f32>> =
            (0..4).map(|_| Buffer::from_host(&self.context, &[1.0])).collect::<Result<_>>()?;
        let adam = AdamW {
            table: table.span(),
            counter: counter.span(),
            clip: numbers[0].span(),
            unless: unless.span(),
            factor: 1.0,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        };
        let parameter = |set: usize| {
            let [gradient, weight, first, second] = &parameters[set % 4];
            Parameter {
                gradient: Gradient::F32(gradient.span()),
                weight: weight.span(),
                first: first.span(),
                second: second.span(),
            }
        };
        let outputs = Outputs::codes(Codes {
            codes: codes[0].span(),
            transposed: Some(Transposed::Alone(codes[1].span())),
            scale: numbers[1].span(),
            scale_inv: numbers[2].span(),
            amax: Some(numbers[3].span()),
        });
        self.time("AdamW + cast + transpose + amax", len * 30, 16, |stream, set| {
            k.adamw_cast(stream, &adam, &parameter(set), (rows, columns), &outputs)
        })?;
        self.time("AdamW", len * 28, 16, |stream, set| k.adamw(stream, &adam, &parameter(set), None))?;
        self.time("cast of the master weight", len * 6, 16, |stream, set| {
            k.cast_master(stream, parameter(set).weight, (rows, columns), &outputs)
        })?;
        let partials = zeros(len.div_ceil(NORM_PIECE))?;
        self.time("sums of squares", len * 4, 16, |stream, set| {
            k.sum_squares(stream, parameter(set).gradient, 1.0, partials.span())
        })?;
        self.time("accumulate", len * 12, 4, |stream, _| {
            let [gradient, weight, ..] = &parameters[0];
            k.accumulate(stream, gradient.span(), weight.span())
        })?;
        let settled = Settled { norm: numbers[1].span(), clip: numbers[2].span(), flag: unless.span() };
        let many = zeros(200_000)?;
        self.time("settle over 200,000 partial sums", 800_000, 16, |stream, _| {
            k.settle(stream, many.span(), unless.span(), 1.0, &settled)
        })
    }
}

impl Bench {
    /// Times of matrix products, with the rate that they reach.
    fn products(&self, hidden: usize, ffn: usize, rows: usize, group: usize) -> core::result::Result<(), Fault> {
        println!("products of {rows} rows, {group} microbatches in a group");
        let mut products = Products::open(&self.context, Some(Cache::standard().ok_or("no folder for a cache")?))?;
        let bytes = |len: usize| -> Result<Buffer<u8>> {
            let noise: Vec<u8> = (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 & 0xBF).collect();
            Buffer::from_host(&self.context, &noise)
        };
        let most = 3 * hidden.max(ffn) * hidden.max(rows * group);
        let (left, right) = (bytes(most)?, bytes(most)?);
        let out = Buffer::<f32>::poisoned(&self.context, 3 * hidden.max(ffn) * hidden)?;
        let scales =
            Buffer::from_host(&self.context, &vec![1.0f32; 3 * hidden.max(ffn) * (rows * group).div_ceil(128)])?;
        let workspace = Buffer::<u8>::poisoned(&self.context, WORKSPACE)?;
        // SAFETY: a part of a live buffer, whose alignment is that of an allocation.
        let narrow = unsafe { Span::<bf16>::new(out.span().address(), 2 * out.span().len()) };
        let (e4m3, e5m2) = (Type::E4M3, Type::E5M2);
        let forward = |columns, depth| Product { fast: true, ..Product::fp8(rows, columns, depth, e4m3, e4m3) };
        let input = |columns, depth| Product::fp8(rows, columns, depth, e5m2, e4m3);
        let weight = |columns, depth| Product::weight_gradient(columns, depth, rows, e5m2, e4m3);
        let coalesced = |columns, depth| Product {
            depth: rows * group,
            scaling: Scaling::Blocks { left: BlockScale::Vector, right: BlockScale::Square },
            ..weight(columns, depth)
        };
        for (name, product) in [
            ("qkv forward", forward(3 * hidden, hidden)),
            ("fc1 forward", forward(ffn, hidden)),
            ("fc2 forward", forward(hidden, ffn)),
            ("fc1 input gradient", input(hidden, ffn)),
            ("fc2 input gradient", input(ffn, hidden)),
            ("fc1 weight gradient, a microbatch, added", weight(ffn, hidden)),
            ("fc1 weight gradient, a group", coalesced(ffn, hidden)),
        ] {
            let plan = products.plan(&self.stream, product)?;
            let Product { rows, columns, depth, .. } = product;
            let (left_scales, right_scales) = product.scales();
            let part = |buffer: &Buffer<u8>, len| buffer.span().part(0..len).ok_or("too small a buffer");
            let scale = |len| scales.span().part(0..len);
            let accumulate = product.out == Output::F32 && product.scaling == Scaling::Tensor;
            let operands = Operands {
                left: Matrix::Codes(part(&left, rows * depth)?),
                right: Matrix::Codes(part(&right, columns * depth)?),
                left_scale: scale(left_scales),
                right_scale: scale(right_scales),
                bias: None,
                out: match product.out {
                    Output::Bf16 => Matrix::Bf16(narrow.part(0..rows * columns).ok_or("too small a buffer")?),
                    Output::F32 => Matrix::F32(out.span().part(0..rows * columns).ok_or("too small a buffer")?),
                },
                accumulate,
            };
            let moved = (rows + columns) * depth + rows * columns * product.out.size() * (1 + usize::from(accumulate));
            self.time(name, moved, 16, |stream, _| plan.run(stream, &operands, workspace.span()))?;
        }
        println!("{} algorithms searched for", products.searched());
        Ok(())
    }
}

fn main() -> core::result::Result<(), Fault> {
    let context = module::context(0)?;
    let stream = context.new_stream()?;
    let kernels = Kernels::load(&context, &Compiler::new(Cache::standard()))?;
    let bench = Bench { context, stream, kernels };
    bench.activations(256, 2048, 8192, 16)?;
    bench.activations(256, 4096, 11008, 32)?;
    bench.commit(11008, 4096)?;
    bench.products(4096, 11008, 256, 8)
}
