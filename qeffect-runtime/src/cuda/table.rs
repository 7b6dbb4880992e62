//! Buffers of the cuda device: parts of large allocations that stay where they are as long as the device lives.

use std::collections::HashMap;
use std::sync::Arc;

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_kernels::launch::optimizer::Rows;
use qeffect_kernels::memory::{self, Element};
use qeffect_kernels::{Buffer, CudaContext, CudaStream, Span};

use super::failed;
use super::layout::Layout;
use crate::cmd::Scalar;
use crate::device::{Buf, BufSpec, DeviceError};

/// A type that buffers hold.
pub(super) trait Stored: Element {
    /// For messages.
    const NAME: &'static str;
    /// Whether a buffer of that type holds it.
    fn fits(dtype: Dtype) -> bool;
}

macro_rules! stored {
    ($($type:ty: $($dtype:ident)|+, $name:literal;)*) => {
        $(impl Stored for $type {
            const NAME: &'static str = $name;
            fn fits(dtype: Dtype) -> bool {
                matches!(dtype, $(Dtype::$dtype)|+)
            }
        })*
    };
}
stored! {
    bf16: Bf16, "bf16";
    f32: F32, "f32";
    u8: E4M3 | E5M2 | U8, "bytes";
    u32: U32, "u32";
    u64: U64, "u64";
}

/// All buffers of a device.
#[derive(Debug)]
pub(super) struct Table {
    context: Arc<CudaContext>,
    entries: Vec<(BufSpec, Span<u8>)>,
    blocks: Vec<Buffer<u8>>,
    layout: Layout,
    /// Of gradients of embeddings: a word per row, which is 0 only if the row is zero, and the elements per row.
    sparse: HashMap<Buf, (Buffer<u32>, usize)>,
}

type Result<T, E = DeviceError> = std::result::Result<T, E>;

impl Table {
    pub(super) fn new(context: &Arc<CudaContext>) -> Table {
        Table {
            context: context.clone(),
            entries: Vec::new(),
            blocks: Vec::new(),
            layout: Layout::default(),
            sparse: HashMap::new(),
        }
    }

    /// Makes a buffer; its content is left to [`Table::poison`].
    pub(super) fn alloc(&mut self, spec: BufSpec) -> Result<Buf> {
        const CMD: &str = "alloc";
        if spec.dtype == Dtype::F64 {
            let reason = format!("`{}` would hold f64, which this device does not compute in", spec.name);
            return Err(DeviceError::Failed { cmd: CMD, reason });
        }
        let bytes = spec.bytes();
        let slot = self.layout.next(bytes);
        if let Some(size) = slot.fresh {
            let block = Buffer::poisoned(&self.context, size).map_err(|error| {
                let reason = format!("no {size} bytes for `{}`: {error}", spec.name);
                DeviceError::Failed { cmd: CMD, reason }
            })?;
            self.blocks.push(block);
        }
        let span = self.blocks.get(slot.block).and_then(|block| block.span().part(slot.at..slot.at + bytes));
        let span = span.ok_or(DeviceError::Failed { cmd: CMD, reason: "a buffer does not lie in its block".into() })?;
        self.layout.take(slot, bytes);
        self.entries.push((spec, span));
        Ok(Buf((self.entries.len() - 1) as u32))
    }

    /// Where buffers lie.
    pub(super) const fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(super) fn spec(&self, buf: Buf) -> Result<&BufSpec> {
        self.entries.get(buf.index()).map(|(spec, _)| spec).ok_or(DeviceError::UnknownBuffer(buf))
    }

    pub(super) fn bytes_of(&self, buf: Buf) -> Result<Span<u8>> {
        self.entries.get(buf.index()).map(|(_, span)| *span).ok_or(DeviceError::UnknownBuffer(buf))
    }

    /// A buffer as elements of its type.
    pub(super) fn get<T: Stored>(&self, cmd: &'static str, buf: Buf) -> Result<Span<T>> {
        let spec = self.spec(buf)?;
        match (T::fits(spec.dtype), self.bytes_of(buf)?.cast()) {
            (true, Some(span)) => Ok(span),
            _ => Err(self.not(cmd, buf, T::NAME)),
        }
    }

    /// From now on rows of a matrix that are zero are known. Never inside a capture.
    pub(super) fn track_rows(
        &mut self,
        stream: &CudaStream,
        cmd: &'static str,
        buf: Buf,
        columns: usize,
    ) -> Result<()> {
        if self.sparse.contains_key(&buf) {
            return Ok(());
        }
        let rows = self.spec(buf)?.elements() / columns.max(1);
        let touched = Buffer::poisoned(&self.context, rows).map_err(failed(cmd))?;
        self.sparse.insert(buf, (touched, columns));
        self.touch(stream, cmd, buf)
    }

    /// Which rows of a matrix may be other than zero, if that is known.
    pub(super) fn rows(&self, buf: Buf) -> Option<Rows> {
        self.sparse.get(&buf).map(|(touched, columns)| Rows { touched: touched.span(), columns: *columns })
    }

    /// A buffer was written by other means than those that keep account of its rows.
    pub(super) fn touch(&self, stream: &CudaStream, cmd: &'static str, buf: Buf) -> Result<()> {
        self.rows(buf).map_or(Ok(()), |rows| memory::fill(stream, rows.touched, 1).map_err(failed(cmd)))
    }

    /// One element.
    pub(super) fn scalar<T: Stored>(&self, cmd: &'static str, scalar: Scalar) -> Result<Span<T>> {
        let span = self.get::<T>(cmd, scalar.buf)?;
        span.element(scalar.index).ok_or_else(|| self.short(cmd, scalar.buf, scalar.index + 1))
    }

    /// Refuses a buffer for its type.
    pub(super) fn not(&self, cmd: &'static str, buf: Buf, expected: &'static str) -> DeviceError {
        match self.spec(buf) {
            Ok(spec) => DeviceError::Dtype { cmd, buffer: spec.name.clone(), found: spec.dtype, expected },
            Err(error) => error,
        }
    }

    /// Refuses a buffer for its size.
    pub(super) fn short(&self, cmd: &'static str, buf: Buf, expected: usize) -> DeviceError {
        match self.spec(buf) {
            Ok(spec) => DeviceError::Elements { cmd, buffer: spec.name.clone(), found: spec.elements(), expected },
            Err(error) => error,
        }
    }

    /// Sets every element to a number, rounded to its type.
    pub(super) fn fill(&self, stream: &CudaStream, cmd: &'static str, buf: Buf, value: f32) -> Result<()> {
        match self.spec(buf)?.dtype {
            Dtype::F32 => memory::fill(stream, self.get::<f32>(cmd, buf)?, value),
            Dtype::Bf16 => memory::fill(stream, self.get::<bf16>(cmd, buf)?, bf16::from_f32(value)),
            Dtype::U32 => memory::fill(stream, self.get::<u32>(cmd, buf)?, value as u32),
            Dtype::U64 => memory::fill(stream, self.get::<u64>(cmd, buf)?, value as u64),
            Dtype::E4M3 | Dtype::E5M2 | Dtype::U8 => memory::fill(stream, self.get::<u8>(cmd, buf)?, value as u8),
            Dtype::F64 => return Err(self.not(cmd, buf, "a type of this device")),
        }
        .map_err(failed(cmd))
    }

    /// Floats become NaN, other types have all bits but the first set.
    pub(super) fn poison(&self, stream: &CudaStream, buf: Buf) -> Result<()> {
        const CMD: &str = "poison";
        self.touch(stream, CMD, buf)?;
        match self.spec(buf)?.dtype {
            Dtype::U32 => memory::fill(stream, self.get::<u32>(CMD, buf)?, u32::MAX >> 1).map_err(failed(CMD)),
            Dtype::U64 => memory::fill(stream, self.get::<u64>(CMD, buf)?, u64::MAX >> 1).map_err(failed(CMD)),
            Dtype::F32 | Dtype::Bf16 => self.fill(stream, CMD, buf, f32::NAN),
            _ => self.fill(stream, CMD, buf, 127.0), // NaN in both formats
        }
    }
}
