//! The op set: everything a device can be asked to do.
//!
//! A command names buffers and numbers that are fixed for a run. What changes from step to step (batch, learning rate,
//! scales, flags) lies in buffers, so a list of commands can be recorded once and replayed.
//!
//! No command reads what its outputs held, unless it says so, and none may read a buffer that it writes. Matrices are
//! row-major without gaps. "Activation" means the recipe's activation type, "master" the type of its master weights.

use core::ops::Range;

use qeffect_core::fp8::Fp8 as Format;
use qeffect_core::scaling::ScaleRule;

use crate::cmd::fused::Fused;
use crate::device::Buf;
pub use crate::kernels::attention::AttentionShape;
pub use crate::kernels::cast::HEALTH_WORDS;
pub use crate::kernels::dropout::DropoutRate;
#[cfg(doc)]
use crate::kernels::dropout::dropout;
#[cfg(doc)]
use crate::kernels::optimizer::NORM_PIECE;
pub use crate::kernels::rotary::RotaryShape;
#[cfg(doc)]
use crate::kernels::rotary::rotary_table;

pub mod effects;
pub mod fused;
mod name;
mod operands;

pub use operands::{AdamWConfig, Beside, CpuKernel, DropoutKey, GroupOperand, Kernel, Operand, Scalar, SlotTag};

/// A command.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Cmd {
    /// Every element becomes `value`.
    Fill {
        /// Any type.
        dst: Buf,
        /// The value, rounded to the type.
        value: f32,
    },
    /// `dst = src`, same type and size.
    Copy {
        /// From.
        src: Buf,
        /// To.
        dst: Buf,
    },
    /// `dst[dst_at + i] = src[src_at + i]` for `i < len`, same type. Positions and length count elements; the rest of
    /// `dst` is left alone.
    CopyRange {
        /// From.
        src: Buf,
        /// First element that is read.
        src_at: usize,
        /// To.
        dst: Buf,
        /// First element that is written.
        dst_at: usize,
        /// Number of elements.
        len: usize,
    },
    /// `dst = src`, rounded to the type of `dst`: the working copy of a master parameter.
    Convert {
        /// From.
        src: Buf,
        /// To.
        dst: Buf,
    },
    /// `out[m, n] = a[m, k] · b[k, n] + bias[n]`, or that product, rounded to the type of `out` first, added to what `out`
    /// holds.
    Gemm {
        /// Rows of `out`.
        m: usize,
        /// Columns of `out`.
        n: usize,
        /// Terms of each sum.
        k: usize,
        /// First operand.
        a: Operand,
        /// Second operand.
        b: Operand,
        /// One per column: activation or master.
        bias: Option<Buf>,
        /// Activation or master.
        out: Buf,
        /// Whether the product is added. Then there is no bias, and `out` is a master.
        accumulate: bool,
        /// Whether a device may keep the sums of FP8 products in narrower accumulators, where it has such: faster, and less
        /// exact. On cpu it makes no difference.
        fast: bool,
    },
    /// `out[m, n] = Σ aᵢ[m, k] · bᵢ[k, n]` over the members of a group, or that sum, rounded to the type of `out` first,
    /// added to what `out` holds: the weight gradient of a group of microbatches as one product.
    ///
    /// `a` is one matrix `[m, members · stride]` and `b` one `[members · stride, n]`; member i's terms begin at i · stride,
    /// and terms that belong to no member are not used, or are zero. On cpu each member's product is what [`Cmd::Gemm`]
    /// makes of it, and products are added in order. Another device may add blocks of terms, times the factors of their
    /// member, in ascending order instead: between devices results agree within rounding, on one device bit for bit.
    /// Members that have one factor in common are one product to any device; with factors of their own, to some
    /// ([`Caps::one_factor`](crate::device::Caps)).
    GroupGemm {
        /// Rows of `out`.
        m: usize,
        /// Columns of `out`.
        n: usize,
        /// Terms of a member's sums: its tokens.
        k: usize,
        /// From one member's first term to the next one's, at least `k`.
        stride: usize,
        /// Number of members.
        members: usize,
        /// First operand.
        a: GroupOperand,
        /// Second operand.
        b: GroupOperand,
        /// Master, or bf16.
        out: Buf,
        /// Whether the sum is added.
        accumulate: bool,
    },
    /// Cast to FP8 with the scale in force: `codes = encode(src · scale)`, `scale_inv = 1 / scale`.
    Quantise {
        /// Activation or master, `[rows, cols]`.
        src: Buf,
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
        /// The format.
        format: Format,
        /// The scale in force.
        scale: Scalar,
        /// The codes.
        codes: Buf,
        /// The codes transposed, `[cols, rows]`.
        transposed: Option<Buf>,
        /// Where they lie there, if that buffer holds others too; `None`: they are all of it.
        beside: Option<Beside>,
        /// The factor of these codes, one f32.
        scale_inv: Buf,
        /// The largest magnitude of `src` is folded into this staging entry. `None`: nothing is recorded.
        amax: Option<Scalar>,
        /// Set, and never cleared, if `src` holds an infinity or NaN: the cast clips the one and hides the other.
        flag: Option<Buf>,
    },
    /// How a tensor fares under a scale, as [`Cmd::Quantise`] has it: adds to the counts of a cell the elements of `src`,
    /// those that saturate, those that are not zero but become so, and those that are infinite or NaN; the next word becomes
    /// the bits of the largest magnitude, if that is larger, where NaN is passed over; to the last one is added.
    Health {
        /// Activation or master: f32 or bf16.
        src: Buf,
        /// The format.
        format: Format,
        /// The scale in force.
        scale: Scalar,
        /// u64, [`HEALTH_WORDS`] per cell.
        counts: Buf,
        /// Which cell.
        cell: usize,
    },
    /// Rolls those of the given cells whose staged amax is not zero (see `qeffect_core::scaling`), in place.
    Roll {
        /// One scale per cell.
        scales: Buf,
        /// `[H, cells]`, row 0 staged.
        history: Buf,
        /// Which cells; one that ends at `usize::MAX` goes to the last.
        cells: Range<usize>,
        /// The rule of these cells.
        rule: ScaleRule,
        /// If this flag is set, nothing is done.
        unless: Option<Buf>,
    },
    /// `out[t] = table[tokens[t]] + positions[t mod seq]`, rounded once; without positions only the first.
    Embed {
        /// u32, one per row of `out`.
        tokens: Buf,
        /// Master, `[vocabulary, cols]`.
        table: Buf,
        /// Master, `[seq, cols]`.
        positions: Option<Buf>,
        /// Activation.
        out: Buf,
        /// Set if a token is beyond the table, on a device that finds it out while it computes; others refuse then.
        flag: Option<Buf>,
        /// Tokens per sequence.
        seq: usize,
        /// Elements per token.
        cols: usize,
    },
    /// Gradients of [`Cmd::Embed`]: rows are added in ascending order of t; untouched rows are zero, or left alone where
    /// the sums are added to what is there.
    EmbedGrad {
        /// u32.
        tokens: Buf,
        /// u32: all rows, sorted by token, then ascending.
        order: Buf,
        /// Activation.
        dy: Buf,
        /// Master, `[vocabulary, cols]`.
        table_grad: Buf,
        /// Master, `[seq, cols]`.
        positions_grad: Option<Buf>,
        /// Tokens per sequence.
        seq: usize,
        /// Elements per token.
        cols: usize,
        /// Whether the sums are added to what is there.
        accumulate: bool,
    },
    /// `y = (x - mean) · rstd · gain + bias` per row.
    LayerNorm {
        /// Activation.
        x: Buf,
        /// Master, `[cols]`.
        gain: Buf,
        /// Master, `[cols]`.
        bias: Buf,
        /// Activation.
        y: Buf,
        /// Master, one per row.
        mean: Buf,
        /// Master, one per row: 1 / √(variance + 1e-5).
        rstd: Buf,
        /// Elements per row.
        cols: usize,
    },
    /// Gradients of [`Cmd::LayerNorm`].
    LayerNormGrad {
        /// Activation.
        dy: Buf,
        /// Activation.
        x: Buf,
        /// Master.
        gain: Buf,
        /// Master.
        mean: Buf,
        /// Master.
        rstd: Buf,
        /// Activation.
        dx: Buf,
        /// Master, `[cols]`.
        gain_grad: Buf,
        /// Master, `[cols]`.
        bias_grad: Buf,
        /// Elements per row.
        cols: usize,
    },
    /// `y = x · rstd · gain` per row.
    RmsNorm {
        /// Activation.
        x: Buf,
        /// Master, `[cols]`.
        gain: Buf,
        /// Activation.
        y: Buf,
        /// Master, one per row: 1 / √(mean of x² + 1e-5).
        rstd: Buf,
        /// Elements per row.
        cols: usize,
    },
    /// Gradients of [`Cmd::RmsNorm`].
    RmsNormGrad {
        /// Activation.
        dy: Buf,
        /// Activation.
        x: Buf,
        /// Master.
        gain: Buf,
        /// Master.
        rstd: Buf,
        /// Activation.
        dx: Buf,
        /// Master, `[cols]`.
        gain_grad: Buf,
        /// Elements per row.
        cols: usize,
    },
    /// Turns the elements j and j + head_dim / 2 of the first heads of each row by the angle of its position; the rest of a
    /// row is copied.
    Rotary {
        /// Activation, `[rows, shape.width]`.
        x: Buf,
        /// Master, `[shape.length, shape.head_dim]`: [`rotary_table`].
        table: Buf,
        /// Activation.
        out: Buf,
        /// Sizes.
        shape: RotaryShape,
        /// Turns back: the gradient.
        inverse: bool,
    },
    /// `y = x · sigmoid(x)`.
    Silu {
        /// Activation.
        x: Buf,
        /// Activation.
        y: Buf,
    },
    /// `dx = dy · silu'(x)`.
    SiluGrad {
        /// Activation.
        x: Buf,
        /// Activation.
        dy: Buf,
        /// Activation.
        dx: Buf,
    },
    /// `y = silu(gate) · up`.
    Swiglu {
        /// Activation, `[rows, 2 · cols]`: a row holds all gates, then all ups.
        x: Buf,
        /// Activation, `[rows, cols]`.
        y: Buf,
        /// Elements per row of `y`.
        cols: usize,
    },
    /// Gradients of [`Cmd::Swiglu`].
    SwigluGrad {
        /// As forward.
        x: Buf,
        /// Activation, `[rows, cols]`.
        dy: Buf,
        /// Activation, `[rows, 2 · cols]`.
        dx: Buf,
        /// Elements per row of `dy`.
        cols: usize,
    },
    /// `y = x · factor` where the mask keeps an element, else 0; of a gradient, the gradient. The mask is a function of
    /// step, key and element ([`dropout`]); its 64-bit key is `rng::draw` of seed, step, site and microbatch.
    Dropout {
        /// Activation.
        x: Buf,
        /// Activation.
        y: Buf,
        /// u64, one element: the attempt number of the step.
        step: Buf,
        /// The rest of the mask's name.
        key: DropoutKey,
        /// Which share is dropped.
        rate: DropoutRate,
    },
    /// GELU in its tanh form.
    Gelu {
        /// Activation.
        x: Buf,
        /// Activation.
        y: Buf,
    },
    /// `dx = dy · gelu'(x)`.
    GeluGrad {
        /// Activation.
        x: Buf,
        /// Activation.
        dy: Buf,
        /// Activation.
        dx: Buf,
    },
    /// Causal attention over packed rows `[q | k | v]`. Heads may share keys and values in equal groups.
    Attention {
        /// Activation, `[tokens, (heads + 2 · kv_heads) · head_dim]`.
        qkv: Buf,
        /// Activation, `[tokens, hidden]`.
        out: Buf,
        /// Master, `[sequences, heads, length]`: log-sum-exp of each row of scores.
        lse: Buf,
        /// Sizes.
        shape: AttentionShape,
    },
    /// Gradients of [`Cmd::Attention`].
    AttentionGrad {
        /// As forward.
        qkv: Buf,
        /// As forward.
        lse: Buf,
        /// Activation.
        dout: Buf,
        /// Activation.
        dqkv: Buf,
        /// Sizes.
        shape: AttentionShape,
    },
    /// `out = a + b`.
    Add {
        /// Activation.
        a: Buf,
        /// Activation.
        b: Buf,
        /// Activation.
        out: Buf,
    },
    /// `out[j] = Σ x[i, j]`: four rows ascending, sixteen such sums ascending, tiles of 64 rows ascending.
    ColumnSums {
        /// Activation.
        x: Buf,
        /// Master, `[cols]`.
        out: Buf,
        /// Elements per row.
        cols: usize,
    },
    /// Log-sum-exp per row, and the mean cross-entropy over rows.
    CrossEntropy {
        /// Activation, `[rows, vocabulary]`.
        logits: Buf,
        /// u32, one per row.
        targets: Buf,
        /// Master, one per row.
        lse: Buf,
        /// Master: the mean.
        loss: Scalar,
        /// Set if the loss is not finite.
        flag: Option<Buf>,
        /// Columns of `logits`.
        vocabulary: usize,
    },
    /// `dlogits = (softmax(logits) - onehot(targets)) · factor`.
    CrossEntropyGrad {
        /// Activation.
        logits: Buf,
        /// u32.
        targets: Buf,
        /// Master.
        lse: Buf,
        /// Activation.
        dlogits: Buf,
        /// Columns of `logits`.
        vocabulary: usize,
        /// Loss scale divided by the number of rows.
        factor: f32,
    },
    /// `out = (slots[0] + slots[1]) + ..`
    SumSlots {
        /// Master, in microbatch order.
        slots: Box<[Buf]>,
        /// Master.
        out: Buf,
    },
    /// `partials[first + i]` = sum of squares of piece i of `src · factor`, of [`NORM_PIECE`] elements (the last may be
    /// short).
    SumSquares {
        /// Master: a sum over microbatches.
        src: Buf,
        /// Makes it a mean; each element is multiplied once, on loading.
        factor: f32,
        /// Master.
        partials: Buf,
        /// Where the partial sums go; others are left alone.
        first: usize,
    },
    /// `norm = √(Σ partials)`, added by 512 lanes, each every 512th ascending, folded as a tree; `clip = min(1, limit / (norm + 1e-6))`; `flag` is set if the norm is not
    /// finite or any of `flags` is set, and never cleared.
    Settle {
        /// Master: every partial sum of the model, in the order of parameter names.
        partials: Buf,
        /// u32: the flags of all ranks.
        flags: Buf,
        /// Largest norm; infinite: no clipping.
        limit: f32,
        /// Master, one element.
        norm: Buf,
        /// Master, one element.
        clip: Buf,
        /// u32, one element.
        flag: Buf,
    },
    /// One step of AdamW in PyTorch's order of operations, in place; the gradient is multiplied by `factor` first, then by
    /// `clip`.
    AdamW {
        /// Master.
        param: Buf,
        /// Master, or bf16: a sum over microbatches.
        grad: Buf,
        /// Makes it a mean, as in [`Cmd::SumSquares`].
        factor: f32,
        /// Master: first moment.
        moment1: Buf,
        /// Master: second moment.
        moment2: Buf,
        /// Master, one element.
        clip: Buf,
        /// Master, `[steps, 3]`: learning rate, step size (learning rate / (1 - β1^t)), and √(1 - β2^t).
        table: Buf,
        /// u64, one element: good commits so far; the row of `table`.
        counter: Buf,
        /// Constants.
        config: AdamWConfig,
        /// If this flag is set, nothing is done.
        unless: Buf,
    },
    /// A kernel that an op brings along. No output may be an input, and none may stand there twice.
    Launch {
        /// What it computes.
        kernel: Kernel,
        /// Activations or masters.
        inputs: Vec<Buf>,
        /// Activations or masters, written whole.
        outputs: Vec<Buf>,
    },
    /// `counter += 1`, unless the flag is set.
    Advance {
        /// u64, one element.
        counter: Buf,
        /// The flag.
        unless: Buf,
    },
    /// `dst = src` if the flag is set.
    CopyIf {
        /// The flag.
        flag: Buf,
        /// From.
        src: Buf,
        /// To.
        dst: Buf,
    },
    /// Several commands in one pass.
    Fused(Box<Fused>),
    /// `tag = [step, key, generation]`: marks a slot with what lies in it.
    WriteTag {
        /// u64, three elements.
        tag: Buf,
        /// u64, one element: the attempt number of the step.
        step: Buf,
        /// The rest of it.
        value: SlotTag,
    },
    /// Compares the mark of a slot with `[step, expected]`. A difference raises the flag, and the first one, where the report
    /// begins with 0, is kept there: 1, the tag expected, the tag found.
    CheckTag {
        /// u64, three elements.
        tag: Buf,
        /// u64, one element.
        step: Buf,
        /// What should lie there.
        expected: SlotTag,
        /// u32, one element.
        flag: Buf,
        /// u64, seven elements.
        report: Buf,
    },
    /// Sets the flag, and never clears it, if an element of `src` is infinite or NaN.
    CheckFinite {
        /// f32 or f64.
        src: Buf,
        /// u32, one element.
        flag: Buf,
    },
}
