//! Causal attention.

use core::ffi::c_void;

use bytemuck::NoUninit;
use cudarc::driver::CudaStream;
use half::bf16;

use crate::error::{Error, Result};
use crate::memory::Span;
use crate::module::{Argument, Kernels, dimension, expect, plain_arguments};

/// Threads of a block.
const THREADS: usize = 128;
/// Rows of a tile, and of a block.
const ROWS: usize = 64;
/// Bytes that hold log-sum-exp and δ of two tiles' queries, each twice.
const STATISTICS: usize = 2 * 2 * 2 * ROWS * size_of::<f32>();
/// The head dimensions that kernels exist for; others are padded up to one.
const PADDED: [usize; 2] = [64, 128];
/// The largest head dimension.
pub const LARGEST_HEAD: usize = 128;

/// Sizes of attention; rows are sequence after sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AttentionShape {
    /// Sequences.
    pub sequences: usize,
    /// Tokens of each.
    pub length: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values: a divisor of `heads`, or as many.
    pub kv_heads: usize,
    /// Elements of a query, key or value: at most [`LARGEST_HEAD`].
    pub head_dim: usize,
}

/// As the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Shape {
    length: i32,
    heads: i32,
    kv_heads: i32,
    users: i32,
    dim: i32,
    scale: f32,
}
plain_arguments!(Shape);

impl AttentionShape {
    /// Elements of a row of the output.
    pub const fn hidden(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of `qkv`.
    pub const fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Rows.
    pub const fn tokens(&self) -> usize {
        self.sequences * self.length
    }

    /// Elements of `lse` and `delta`.
    pub const fn statistics(&self) -> usize {
        self.sequences * self.heads * self.length
    }

    fn argument(&self, kernel: &'static str) -> Result<Shape> {
        if self.head_dim > LARGEST_HEAD {
            let rule = "it is at most 128";
            return Err(Error::Dimension { kernel, dimension: "head_dim", found: self.head_dim, rule });
        }
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let rule = "it divides the number of heads";
            return Err(Error::Dimension { kernel, dimension: "kv_heads", found: self.kv_heads, rule });
        }
        Ok(Shape {
            length: dimension(kernel, "length", self.length)?,
            heads: dimension(kernel, "heads", self.heads)?,
            kv_heads: dimension(kernel, "kv_heads", self.kv_heads)?,
            users: dimension(kernel, "heads", self.heads / self.kv_heads)?,
            dim: dimension(kernel, "head_dim", self.head_dim)?,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
        })
    }

    /// Which of the padded sizes it takes.
    fn padded(&self) -> usize {
        PADDED.iter().position(|padded| self.head_dim <= *padded).unwrap_or(PADDED.len() - 1)
    }

    /// A block per 64 rows of each sequence and head.
    fn grid(&self, heads: usize) -> [usize; 2] {
        [self.length.div_ceil(ROWS), self.sequences * heads]
    }

    /// Bytes of shared memory for a number of tiles that stay, and twice two tiles of the other side.
    fn shared(&self, stay: usize) -> usize {
        (stay + 4) * ROWS * PADDED[self.padded()] * 2
    }
}

impl Kernels {
    /// `out = softmax(q kᵀ / √head_dim, causal) v`, and the log-sum-exp of each row of scores.
    pub fn attention_forward(
        &self,
        stream: &CudaStream,
        shape: &AttentionShape,
        qkv: Span<bf16>,
        out: Span<bf16>,
        lse: Span<f32>,
    ) -> Result {
        let kernel = ["attention_forward_64", "attention_forward_128"][shape.padded()];
        let argument = shape.argument(kernel)?;
        expect(kernel, "qkv", qkv, shape.tokens() * shape.width())?;
        expect(kernel, "out", out, shape.tokens() * shape.hidden())?;
        expect(kernel, "lse", lse, shape.statistics())?;
        let arguments: [&dyn Argument; 4] = [&qkv, &out, &lse, &argument];
        self.launch(stream, kernel, shape.grid(shape.heads), THREADS, shape.shared(1), &arguments)
    }

    /// Gradients of queries, keys and values; `delta` is scratch of the size of `lse`.
    pub fn attention_backward(
        &self,
        stream: &CudaStream,
        shape: &AttentionShape,
        qkv: Span<bf16>,
        dout: Span<bf16>,
        lse: Span<f32>,
        dqkv: Span<bf16>,
        delta: Span<f32>,
    ) -> Result {
        let kernel = ["attention_delta_64", "attention_delta_128"][shape.padded()];
        let argument = shape.argument(kernel)?;
        expect(kernel, "qkv", qkv, shape.tokens() * shape.width())?;
        expect(kernel, "dout", dout, shape.tokens() * shape.hidden())?;
        expect(kernel, "lse", lse, shape.statistics())?;
        expect(kernel, "dqkv", dqkv, qkv.len())?;
        expect(kernel, "delta", delta, shape.statistics())?;
        let arguments: [&dyn Argument; 5] = [&qkv, &dout, &lse, &delta, &argument];
        self.launch(stream, kernel, shape.grid(shape.heads), THREADS, shape.shared(2), &arguments)?;
        let kernel = ["attention_gradients_64", "attention_gradients_128"][shape.padded()];
        let queries = dimension(kernel, "heads", shape.sequences * shape.heads)?;
        let arguments: [&dyn Argument; 7] = [&qkv, &dout, &lse, &dqkv, &delta, &argument, &queries];
        let shared = shape.shared(2) + STATISTICS;
        self.launch(stream, kernel, shape.grid(shape.heads + shape.kv_heads), THREADS, shared, &arguments)
    }
}
