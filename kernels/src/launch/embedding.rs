//! Embeddings.

use cudarc::driver::CudaStream;
use half::bf16;

use crate::error::Result;
use crate::memory::Span;
use crate::module::{Argument, Kernels, dimension, expect, rows_of};

const THREADS: usize = 128;

impl Kernels {
    /// `y[t] = table[ids[t]] + positions[t mod length]`, rounded once; `length` is the number of rows of `positions`. An id
    /// beyond the table raises the flag, and its row is left as it was.
    pub fn embedding_forward(
        &self,
        stream: &CudaStream,
        ids: Span<u32>,
        hidden: usize,
        table: Span<f32>,
        positions: Span<f32>,
        y: Span<bf16>,
        flag: Span<u32>,
    ) -> Result {
        let kernel = "embedding_forward";
        let columns = dimension(kernel, "hidden", hidden)?;
        let vocabulary = rows_of(kernel, "table", table.len(), hidden)?;
        let length = rows_of(kernel, "positions", positions.len(), hidden)?;
        expect(kernel, "ids", ids, ids.len())?;
        expect(kernel, "table", table, table.len())?;
        expect(kernel, "positions", positions, positions.len())?;
        expect(kernel, "y", y, ids.len() * hidden)?;
        expect(kernel, "flag", flag, 1)?;
        let arguments: [&dyn Argument; 8] = [&ids, &table, &positions, &y, &flag, &vocabulary, &length, &columns];
        self.launch(stream, kernel, [ids.len(), 1], THREADS, 0, &arguments)
    }

    /// Gradient of the rows of tokens that occur, rows of `dy` ascending; other rows of `out` are left alone. `order` holds
    /// the rows sorted by token, then ascending. With `accumulate`, sums are added to what `out` holds.
    pub fn token_gradient(
        &self,
        stream: &CudaStream,
        ids: Span<u32>,
        order: Span<u32>,
        hidden: usize,
        dy: Span<bf16>,
        accumulate: bool,
        out: Span<f32>,
    ) -> Result {
        let kernel = "token_gradient";
        let columns = dimension(kernel, "hidden", hidden)?;
        let vocabulary = rows_of(kernel, "out", out.len(), hidden)?;
        let rows = dimension(kernel, "rows", ids.len())?;
        expect(kernel, "order", order, ids.len())?;
        expect(kernel, "dy", dy, ids.len() * hidden)?;
        expect(kernel, "out", out, out.len())?;
        let accumulate = i32::from(accumulate);
        let arguments: [&dyn Argument; 8] = [&ids, &order, &dy, &out, &accumulate, &rows, &vocabulary, &columns];
        self.launch(stream, kernel, [ids.len(), 1], THREADS, 0, &arguments)
    }

    /// Gradient of the position table: sequences ascending.
    pub fn position_gradient(&self, stream: &CudaStream, hidden: usize, dy: Span<bf16>, out: Span<f32>) -> Result {
        let kernel = "position_gradient";
        let columns = dimension(kernel, "hidden", hidden)?;
        let length = rows_of(kernel, "out", out.len(), hidden)?;
        let sequences = rows_of(kernel, "dy", dy.len(), out.len())?;
        expect(kernel, "dy", dy, dy.len())?;
        expect(kernel, "out", out, out.len())?;
        self.launch(stream, kernel, [length as usize, 1], THREADS, 0, &[&dy, &out, &sequences, &length, &columns])
    }

    /// Rotates queries and keys of packed rows [q | k | v] in place, or turns them back: the gradient. `table` has cosines,
    /// then sines, of half a head for each of `length` positions.
    pub fn rotary(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        table: Span<f32>,
        back: bool,
        (length, heads, head_dim): (usize, usize, usize),
    ) -> Result {
        let kernel = "rotary";
        let (positions, count) = (dimension(kernel, "length", length)?, dimension(kernel, "heads", heads)?);
        let dim = dimension(kernel, "head_dim", head_dim)?;
        if !head_dim.is_multiple_of(2) {
            let rule = "it must be even";
            return Err(crate::Error::Dimension { kernel, dimension: "head_dim", found: head_dim, rule });
        }
        let rows = rows_of(kernel, "x", x.len(), 3 * heads * head_dim)? as usize;
        expect(kernel, "x", x, x.len())?;
        expect(kernel, "table", table, length * head_dim)?;
        let back = i32::from(back);
        self.launch(stream, kernel, [rows, 1], THREADS, 0, &[&x, &table, &back, &positions, &count, &dim])
    }
}
