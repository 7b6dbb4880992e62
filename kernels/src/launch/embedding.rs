//! Embeddings.

use cudarc::driver::CudaStream;
use half::bf16;

use crate::error::Result;
use crate::memory::Span;
use crate::module::{Argument, Kernels, dimension, expect, expect_if, optional, rows_of};

const THREADS: usize = 128;

/// Sizes of a rotation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RotaryShape {
    /// Tokens of a sequence: row t has the position `t mod length`.
    pub length: usize,
    /// Heads that are turned: the first ones of a row.
    pub heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Elements of a row.
    pub width: usize,
}

impl Kernels {
    /// `y[t] = table[ids[t]] + positions[t mod length]`, rounded once; without `positions` the first alone. `length` is the
    /// number of rows of `positions`. An id beyond the table raises the flag, and its row is left as it was.
    pub fn embedding_forward(
        &self,
        stream: &CudaStream,
        ids: Span<u32>,
        hidden: usize,
        table: Span<f32>,
        positions: Option<Span<f32>>,
        y: Span<bf16>,
        flag: Option<Span<u32>>,
    ) -> Result {
        let kernel = "embedding_forward";
        let columns = dimension(kernel, "hidden", hidden)?;
        let vocabulary = rows_of(kernel, "table", table.len(), hidden)?;
        let length = match positions {
            Some(positions) => rows_of(kernel, "positions", positions.len(), hidden)?,
            None => 1, // not read
        };
        expect(kernel, "ids", ids, ids.len())?;
        expect(kernel, "table", table, table.len())?;
        if let Some(positions) = positions {
            expect(kernel, "positions", positions, positions.len())?;
        }
        expect(kernel, "y", y, ids.len() * hidden)?;
        expect_if(kernel, "flag", flag, 1)?;
        let (positions, flag) = (optional(positions), optional(flag));
        let arguments: [&dyn Argument; 8] = [&ids, &table, &positions, &y, &flag, &vocabulary, &length, &columns];
        self.launch(stream, kernel, [ids.len(), 1], THREADS, 0, &arguments)
    }

    /// Makes the rows of a matrix zero that `touched` has a word other than 0 for, and those words 0.
    pub fn clear_rows(&self, stream: &CudaStream, hidden: usize, touched: Span<u32>, out: Span<f32>) -> Result {
        let kernel = "clear_rows";
        let columns = dimension(kernel, "hidden", hidden)?;
        let rows = rows_of(kernel, "out", out.len(), hidden)?;
        expect(kernel, "touched", touched, rows as usize)?;
        expect(kernel, "out", out, out.len())?;
        let arguments: [&dyn Argument; 4] = [&out, &touched, &rows, &columns];
        self.launch(stream, kernel, [(rows as usize).div_ceil(4), 1], THREADS, 0, &arguments)
    }

    /// Gradient of the rows of tokens that occur, rows of `dy` ascending; other rows of `out` are left alone. `order` holds
    /// the rows sorted by token, then ascending. With `accumulate`, sums are added to what `out` holds. `touched`: a word per
    /// row of `out`, which becomes 1 where the token occurs.
    pub fn token_gradient(
        &self,
        stream: &CudaStream,
        ids: Span<u32>,
        order: Span<u32>,
        hidden: usize,
        dy: Span<bf16>,
        accumulate: bool,
        out: Span<f32>,
        touched: Option<Span<u32>>,
    ) -> Result {
        let kernel = "token_gradient";
        let columns = dimension(kernel, "hidden", hidden)?;
        let vocabulary = rows_of(kernel, "out", out.len(), hidden)?;
        let rows = dimension(kernel, "rows", ids.len())?;
        expect(kernel, "order", order, ids.len())?;
        expect(kernel, "dy", dy, ids.len() * hidden)?;
        expect(kernel, "out", out, out.len())?;
        expect_if(kernel, "touched", touched, vocabulary as usize)?;
        let (accumulate, touched) = (i32::from(accumulate), optional(touched));
        let arguments: [&dyn Argument; 9] =
            [&ids, &order, &dy, &out, &touched, &accumulate, &rows, &vocabulary, &columns];
        self.launch(stream, kernel, [ids.len(), 1], THREADS, 0, &arguments)
    }

    /// Gradient of the position table: sequences ascending. With `accumulate`, sums are added to what `out` holds.
    pub fn position_gradient(
        &self,
        stream: &CudaStream,
        hidden: usize,
        dy: Span<bf16>,
        accumulate: bool,
        out: Span<f32>,
    ) -> Result {
        let kernel = "position_gradient";
        let columns = dimension(kernel, "hidden", hidden)?;
        let length = rows_of(kernel, "out", out.len(), hidden)?;
        let sequences = rows_of(kernel, "dy", dy.len(), out.len())?;
        expect(kernel, "dy", dy, dy.len())?;
        expect(kernel, "out", out, out.len())?;
        let accumulate = i32::from(accumulate);
        let arguments: [&dyn Argument; 6] = [&dy, &out, &accumulate, &sequences, &length, &columns];
        self.launch(stream, kernel, [length as usize, 1], THREADS, 0, &arguments)
    }

    /// Turns the first heads of each row by the angles of their position, or back, which is the gradient; the rest of a row
    /// is copied. `table` has cosines, then sines, of half a head for each position. `out` may be `x`.
    pub fn rotary(
        &self,
        stream: &CudaStream,
        x: Span<bf16>,
        table: Span<f32>,
        out: Span<bf16>,
        back: bool,
        shape: &RotaryShape,
    ) -> Result {
        let kernel = "rotary";
        let RotaryShape { length, heads, head_dim, width } = *shape;
        let (positions, count) = (dimension(kernel, "length", length)?, dimension(kernel, "heads", heads)?);
        let (dim, columns) = (dimension(kernel, "head_dim", head_dim)?, dimension(kernel, "width", width)?);
        if !head_dim.is_multiple_of(2) {
            let rule = "it must be even";
            return Err(crate::Error::Dimension { kernel, dimension: "head_dim", found: head_dim, rule });
        }
        if heads * head_dim > width {
            let rule = "a row holds every head that is turned";
            return Err(crate::Error::Dimension { kernel, dimension: "width", found: width, rule });
        }
        let rows = rows_of(kernel, "x", x.len(), width)? as usize;
        expect(kernel, "x", x, x.len())?;
        expect(kernel, "out", out, x.len())?;
        expect(kernel, "table", table, length * head_dim)?;
        let back = i32::from(back);
        let arguments: [&dyn Argument; 8] = [&x, &table, &out, &back, &positions, &count, &dim, &columns];
        self.launch(stream, kernel, [rows, 1], THREADS, 0, &arguments)
    }
}
