//! Typed buffers of the cpu device.
//!
//! A command takes its outputs out of the table while it borrows its inputs, so nothing is allocated or copied, and an
//! output that is also an input is found out by its absence.

use std::collections::BTreeSet;

use half::bf16;
use qeffect_core::dtype::Dtype;

use crate::cmd::Scalar;
use crate::device::{Buf, BufSpec, DeviceError};

/// Elements of a buffer, aligned for their type.
#[derive(Debug)]
pub(super) enum Data {
    F64(Vec<f64>),
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    /// Codes, too.
    U8(Vec<u8>),
    U32(Vec<u32>),
    U64(Vec<u64>),
    /// Taken out by the command that writes it.
    Taken,
}

fn filled<T: Clone>(value: T, elements: usize) -> Option<Vec<T>> {
    let mut data = Vec::new();
    data.try_reserve_exact(elements).ok()?;
    data.resize(elements, value);
    Some(data)
}

impl Data {
    /// None where there is no memory for it.
    fn new(dtype: Dtype, elements: usize) -> Option<Data> {
        Some(match dtype {
            Dtype::F64 => Data::F64(filled(0.0, elements)?),
            Dtype::F32 => Data::F32(filled(0.0, elements)?),
            Dtype::Bf16 => Data::Bf16(filled(bf16::ZERO, elements)?),
            Dtype::E4M3 | Dtype::E5M2 | Dtype::U8 => Data::U8(filled(0, elements)?),
            Dtype::U32 => Data::U32(filled(0, elements)?),
            Dtype::U64 => Data::U64(filled(0, elements)?),
        })
    }

    /// Numbers are 1, codes, indices and flags 0.
    fn ones(dtype: Dtype, elements: usize) -> Option<Data> {
        let mut data = Data::new(dtype, elements)?;
        match &mut data {
            Data::F64(x) => x.fill(1.0),
            Data::F32(x) => x.fill(1.0),
            Data::Bf16(x) => x.fill(bf16::ONE),
            Data::U8(_) | Data::U32(_) | Data::U64(_) | Data::Taken => {}
        }
        Some(data)
    }

    fn poison(&mut self) {
        match self {
            Data::F64(x) => x.fill(f64::NAN),
            Data::F32(x) => x.fill(f32::NAN),
            Data::Bf16(x) => x.fill(bf16::NAN),
            Data::U8(x) => x.fill(0x7F), // NaN in both formats
            Data::U32(x) => x.fill(u32::MAX >> 1),
            Data::U64(x) => x.fill(u64::MAX >> 1),
            Data::Taken => {}
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Data::F64(x) => bytemuck::cast_slice(x),
            Data::F32(x) => bytemuck::cast_slice(x),
            Data::Bf16(x) => bytemuck::cast_slice(x),
            Data::U8(x) => x,
            Data::U32(x) => bytemuck::cast_slice(x),
            Data::U64(x) => bytemuck::cast_slice(x),
            Data::Taken => &[],
        }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Data::F64(x) => bytemuck::cast_slice_mut(x),
            Data::F32(x) => bytemuck::cast_slice_mut(x),
            Data::Bf16(x) => bytemuck::cast_slice_mut(x),
            Data::U8(x) => x,
            Data::U32(x) => bytemuck::cast_slice_mut(x),
            Data::U64(x) => bytemuck::cast_slice_mut(x),
            Data::Taken => &mut [],
        }
    }
}

/// A type that buffers hold.
pub(super) trait Store: Copy + 'static {
    /// For messages.
    const NAME: &'static str;
    fn of(data: &Data) -> Option<&[Self]>;
    fn of_mut(data: &mut Data) -> Option<&mut [Self]>;
}

macro_rules! store {
    ($($type:ty: $variant:ident, $name:literal;)*) => {
        $(impl Store for $type {
            const NAME: &'static str = $name;
            fn of(data: &Data) -> Option<&[Self]> {
                if let Data::$variant(x) = data { Some(x) } else { None }
            }
            fn of_mut(data: &mut Data) -> Option<&mut [Self]> {
                if let Data::$variant(x) = data { Some(x) } else { None }
            }
        })*
    };
}

store! {
    f64: F64, "f64";
    f32: F32, "f32";
    bf16: Bf16, "bf16";
    u8: U8, "bytes";
    u32: U32, "u32";
    u64: U64, "u64";
}

#[derive(Debug)]
struct Entry {
    spec: BufSpec,
    data: Data,
}

/// All buffers of a device.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: Vec<Entry>,
}

type Result<T, E = DeviceError> = std::result::Result<T, E>;

fn no_memory(spec: &BufSpec) -> DeviceError {
    let BufSpec { name, dtype, rows, cols } = spec;
    DeviceError::Failed { cmd: "alloc", reason: format!("no memory for `{name}`, {dtype}[{rows}, {cols}]") }
}

impl Table {
    pub(super) fn alloc(&mut self, spec: BufSpec) -> Result<Buf> {
        let elements = spec.rows.checked_mul(spec.cols);
        let Some(mut data) = elements.and_then(|elements| Data::new(spec.dtype, elements)) else {
            return Err(no_memory(&spec));
        };
        data.poison();
        self.entries.push(Entry { spec, data });
        Ok(Buf((self.entries.len() - 1) as u32))
    }

    fn entry(&self, buf: Buf) -> Result<&Entry> {
        self.entries.get(buf.index()).ok_or(DeviceError::UnknownBuffer(buf))
    }

    fn entry_mut(&mut self, buf: Buf) -> Result<&mut Entry> {
        self.entries.get_mut(buf.index()).ok_or(DeviceError::UnknownBuffer(buf))
    }

    pub(super) fn spec(&self, buf: Buf) -> Result<&BufSpec> {
        Ok(&self.entry(buf)?.spec)
    }

    pub(super) fn data(&self, buf: Buf) -> Result<&Data> {
        Ok(&self.entry(buf)?.data)
    }

    pub(super) fn data_mut(&mut self, buf: Buf) -> Result<&mut Data> {
        Ok(&mut self.entry_mut(buf)?.data)
    }

    pub(super) fn poison(&mut self, buf: Buf) -> Result<()> {
        self.data_mut(buf)?.poison();
        Ok(())
    }

    /// An input.
    pub(super) fn get<T: Store>(&self, cmd: &'static str, buf: Buf) -> Result<&[T]> {
        let entry = self.entry(buf)?;
        match T::of(&entry.data) {
            Some(x) => Ok(x),
            None => Err(refused(cmd, entry, T::NAME)),
        }
    }

    /// Something that is read and written in place.
    pub(super) fn get_mut<T: Store>(&mut self, cmd: &'static str, buf: Buf) -> Result<&mut [T]> {
        let entry = self.entry_mut(buf)?;
        if T::of(&entry.data).is_none() {
            return Err(refused(cmd, entry, T::NAME));
        }
        T::of_mut(&mut entry.data).ok_or(DeviceError::UnknownBuffer(buf))
    }

    /// One element.
    pub(super) fn scalar<T: Store>(&self, cmd: &'static str, scalar: Scalar) -> Result<T> {
        let x = self.get::<T>(cmd, scalar.buf)?;
        x.get(scalar.index).copied().ok_or_else(|| self.short(cmd, scalar.buf, scalar.index + 1))
    }

    /// One element, to write.
    pub(super) fn scalar_mut<T: Store>(&mut self, cmd: &'static str, scalar: Scalar) -> Result<&mut T> {
        self.scalar::<T>(cmd, scalar)?;
        Ok(&mut self.get_mut::<T>(cmd, scalar.buf)?[scalar.index])
    }

    /// Whether a flag is set.
    pub(super) fn flag(&self, cmd: &'static str, buf: Buf) -> Result<bool> {
        Ok(self.scalar::<u32>(cmd, Scalar { buf, index: 0 })? != 0)
    }

    pub(super) fn short(&self, cmd: &'static str, buf: Buf, expected: usize) -> DeviceError {
        match self.entry(buf) {
            Ok(entry) => {
                DeviceError::Elements { cmd, buffer: entry.spec.name.clone(), found: entry.spec.elements(), expected }
            }
            Err(error) => error,
        }
    }

    /// Takes a command's outputs out, runs it, and puts them back whether it succeeded or not.
    pub(super) fn write<const N: usize, R>(
        &mut self,
        cmd: &'static str,
        outputs: [Buf; N],
        run: impl FnOnce(&Table, [&mut Data; N]) -> Result<R>,
    ) -> Result<R> {
        let mut taken: [Data; N] = std::array::from_fn(|_| Data::Taken);
        let mut result = Ok(());
        let mut count = 0;
        for (data, buf) in taken.iter_mut().zip(outputs) {
            match self.entry_mut(buf) {
                Ok(entry) if matches!(entry.data, Data::Taken) => {
                    result = Err(DeviceError::Aliased { cmd, buffer: entry.spec.name.clone() });
                    break;
                }
                Ok(entry) => *data = std::mem::replace(&mut entry.data, Data::Taken),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
            count += 1;
        }
        let result = result.and_then(|()| run(self, taken.each_mut()));
        for (data, buf) in taken.into_iter().zip(outputs).take(count) {
            self.entries[buf.index()].data = data;
        }
        result
    }

    /// Runs something with scratch memory in the place of these buffers: numbers are 1, everything else is 0.
    pub(super) fn on_scratch<R>(&mut self, bufs: &BTreeSet<Buf>, run: impl FnOnce(&mut Table) -> R) -> Result<R> {
        if let Some(unknown) = bufs.iter().find(|buf| buf.index() >= self.entries.len()) {
            return Err(DeviceError::UnknownBuffer(*unknown));
        }
        let scratch = |buf: &Buf| {
            let spec = &self.entries[buf.index()].spec;
            Data::ones(spec.dtype, spec.elements()).ok_or_else(|| no_memory(spec))
        };
        let scratch = bufs.iter().map(scratch).collect::<Result<Vec<_>>>()?;
        let mut kept = Vec::with_capacity(bufs.len());
        for (buf, ones) in bufs.iter().zip(scratch) {
            kept.push(std::mem::replace(&mut self.entries[buf.index()].data, ones));
        }
        let result = run(self);
        for (buf, data) in bufs.iter().zip(kept) {
            self.entries[buf.index()].data = data;
        }
        Ok(result)
    }

    /// An output that was taken out.
    pub(super) fn out<'a, T: Store>(&self, cmd: &'static str, buf: Buf, data: &'a mut Data) -> Result<&'a mut [T]> {
        if T::of(data).is_none() {
            let spec = self.spec(buf)?;
            return Err(DeviceError::Dtype { cmd, buffer: spec.name.clone(), found: spec.dtype, expected: T::NAME });
        }
        T::of_mut(data).ok_or(DeviceError::UnknownBuffer(buf))
    }
}

fn refused(cmd: &'static str, entry: &Entry, expected: &'static str) -> DeviceError {
    let buffer = entry.spec.name.clone();
    match entry.data {
        Data::Taken => DeviceError::Aliased { cmd, buffer },
        _ => DeviceError::Dtype { cmd, buffer, found: entry.spec.dtype, expected },
    }
}
