//! Device memory: views of it, and buffers that own it.

use core::marker::PhantomData;
use core::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use half::bf16;

use crate::error::{Error, Result};
use crate::quiet;

mod sealed {
    pub trait Sealed {}
}

/// A type of elements on the device: the same bytes as on the host, valid for every pattern of bits.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// Its bytes, in the low ones of a word.
    fn bits(self) -> u64;
}

macro_rules! elements {
    ($($type:ty: $bits:expr;)*) => {
        $(
            impl sealed::Sealed for $type {}
            impl Element for $type {
                fn bits(self) -> u64 {
                    let bits: fn($type) -> u64 = $bits;
                    bits(self)
                }
            }
        )*
    };
}
elements! {
    u8: u64::from;
    u16: u64::from;
    u32: u64::from;
    u64: |x| x;
    i32: |x| u64::from(x.cast_unsigned());
    f32: |x| u64::from(x.to_bits());
    f64: f64::to_bits;
    bf16: |x| u64::from(x.to_bits());
}

/// A view of device memory: an address and a number of elements.
///
/// It is made by a promise ([`Span::new`]), and may then be used without further ones.
#[derive(Debug)]
pub struct Span<T> {
    address: sys::CUdeviceptr,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for Span<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Span<T> {}

impl<T> PartialEq for Span<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.address, self.len) == (other.address, other.len)
    }
}

impl<T: Element> Span<T> {
    /// A view of `len` elements at `address`.
    ///
    /// # Safety
    ///
    /// The memory is on the device that the view is used with, is aligned for `T`, and stays allocated until everything
    /// that was launched or captured with the view, or a part of it, has run for the last time. Whoever launches orders
    /// accesses that conflict.
    pub const unsafe fn new(address: u64, len: usize) -> Span<T> {
        Span { address, len, element: PhantomData }
    }

    /// The address.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Where the address itself is kept, for launches.
    pub(crate) const fn address_of(&self) -> *const u64 {
        &raw const self.address
    }

    /// The number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of bytes.
    pub const fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// A part of it; none where the range does not lie inside.
    pub fn part(&self, range: Range<usize>) -> Option<Span<T>> {
        let inside = range.start <= range.end && range.end <= self.len;
        let address = self.address + (range.start * size_of::<T>()) as u64;
        inside.then(|| Span { address, len: range.end - range.start, element: PhantomData })
    }

    /// One element of it; none where there is no such element.
    pub fn element(&self, index: usize) -> Option<Span<T>> {
        self.part(index..index.checked_add(1)?)
    }
}

impl Span<u8> {
    /// The same memory as elements of another type; none where it is not aligned for it, or ends within an element.
    pub fn cast<T: Element>(&self) -> Option<Span<T>> {
        let size = size_of::<T>();
        let fits = self.len.is_multiple_of(size) && self.address.is_multiple_of(size as u64);
        fits.then(|| Span { address: self.address, len: self.len / size, element: PhantomData })
    }
}

/// Device memory that is freed when the buffer is dropped.
///
/// It is taken and given back without an order among streams, so neither happens while work is in flight or captured.
#[derive(Debug)]
pub struct Buffer<T: Element> {
    span: Span<T>,
    context: Arc<CudaContext>,
}

fn fault(call: &'static str) -> impl Fn(cudarc::driver::DriverError) -> Error {
    move |source| Error::Driver { call, source }
}

impl<T: Element> Buffer<T> {
    /// Memory for `len` elements, every byte 0xFF: floats are NaN.
    pub fn poisoned(context: &Arc<CudaContext>, len: usize) -> Result<Buffer<T>> {
        let fault = fault("allocation of device memory");
        let _alone = quiet::alone();
        context.bind_to_thread().map_err(&fault)?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the context is current; the memory is freed once, when the buffer is dropped.
        let address = unsafe { result::malloc_sync(bytes) }.map_err(&fault)?;
        let buffer = Buffer { span: Span { address, len, element: PhantomData }, context: context.clone() };
        // SAFETY: that many bytes were just allocated.
        unsafe { result::memset_d8_sync(address, 0xFF, bytes) }.map_err(&fault)?;
        // The call above does not wait, and streams here do not wait for it.
        context.synchronize().map_err(&fault)?;
        Ok(buffer)
    }

    /// Memory that holds the given elements.
    pub fn from_host(context: &Arc<CudaContext>, elements: &[T]) -> Result<Buffer<T>> {
        let mut buffer = Buffer::poisoned(context, elements.len())?;
        buffer.write(elements)?;
        Ok(buffer)
    }

    /// Copies elements in, after everything that runs on the device, and waits until they are there.
    pub fn write(&mut self, elements: &[T]) -> Result {
        if elements.len() != self.span.len {
            let (expected, found) = (self.span.len, elements.len());
            return Err(Error::Length { kernel: "copy to the device", operand: "elements", expected, found });
        }
        self.write_at(0, elements)
    }

    /// The same for a part that begins at element `at`.
    pub(crate) fn write_at(&mut self, at: usize, elements: &[T]) -> Result {
        let end = at.saturating_add(elements.len());
        let Some(part) = self.span.part(at..end) else {
            let (expected, found) = (self.span.len, end);
            return Err(Error::Length { kernel: "copy to the device", operand: "elements", expected, found });
        };
        if part.is_empty() {
            return Ok(());
        }
        let fault = fault("copy to the device");
        let _alone = quiet::alone();
        self.context.synchronize().map_err(&fault)?;
        // SAFETY: the context is current, the device memory has the size of the slice.
        unsafe { result::memcpy_htod_sync(part.address, elements) }.map_err(&fault)?;
        // The call above returns when the elements have left the slice, which may be before they arrive.
        self.context.synchronize().map_err(&fault)
    }

    /// Copies all elements out, after everything that runs on the device.
    pub fn read(&self) -> Result<Vec<T>> {
        let fault = fault("copy from the device");
        let _alone = quiet::alone();
        self.context.synchronize().map_err(&fault)?;
        let mut elements = vec![T::default(); self.span.len];
        // SAFETY: the context is current, the device memory has the size of the slice, any bits are an element.
        unsafe { result::memcpy_dtoh_sync(&mut elements, self.span.address) }.map_err(&fault)?;
        Ok(elements)
    }

    /// A view of it, to be used no longer than the buffer lives.
    pub fn span(&self) -> Span<T> {
        self.span
    }
}

impl<T: Element> Drop for Buffer<T> {
    fn drop(&mut self) {
        let _alone = quiet::alone();
        // An error has nowhere to go; the memory is then gone with its context.
        if self.context.synchronize().is_ok() {
            // SAFETY: the memory was allocated by this buffer, is freed once, and nothing runs that could use it.
            let _ = unsafe { result::free_sync(self.span.address) };
        }
    }
}

/// Sets bytes to zero, in the order of a stream.
pub fn zero<T: Element>(stream: &CudaStream, span: Span<T>) -> Result {
    let fault = fault("zeroing device memory");
    stream.context().bind_to_thread().map_err(&fault)?;
    // SAFETY: the view covers that many bytes.
    unsafe { result::memset_d8_async(span.address, 0, span.bytes(), stream.cu_stream()) }.map_err(&fault)
}

/// Sets every element to `value`, in the order of a stream.
pub fn fill<T: Element>(stream: &CudaStream, span: Span<T>, value: T) -> Result {
    if span.is_empty() {
        return Ok(());
    }
    let fault = fault("filling device memory");
    stream.context().bind_to_thread().map_err(&fault)?;
    let (bits, len, stream) = (value.bits(), span.len, stream.cu_stream());
    let set = |address, low, pitch, width, height| {
        // SAFETY: the callers below stay within the view.
        unsafe { sys::cuMemsetD2D32Async(address, pitch, low, width, height, stream) }.result()
    };
    let done = match size_of::<T>() {
        // SAFETY: the view covers that many elements of one byte.
        1 => unsafe { result::memset_d8_async(span.address, bits as u8, len, stream) },
        // SAFETY: the view covers that many elements of two bytes.
        2 => unsafe { sys::cuMemsetD16Async(span.address, bits as u16, len, stream) }.result(),
        4 => set(span.address, bits as u32, 0, len, 1),
        // Halves of words: as many lines of one element as there are words, eight bytes from one to the next.
        _ => set(span.address, bits as u32, 8, 1, len)
            .and_then(|()| set(span.address + 4, (bits >> 32) as u32, 8, 1, len)),
    };
    done.map_err(&fault)
}

/// Copies elements from one place of the device to another, in the order of a stream.
pub fn copy<T: Element>(stream: &CudaStream, from: Span<T>, to: Span<T>) -> Result {
    if from.len != to.len {
        return Err(Error::Length { kernel: "copy", operand: "to", expected: from.len, found: to.len });
    }
    let fault = fault("copy on the device");
    stream.context().bind_to_thread().map_err(&fault)?;
    // SAFETY: both views cover that many bytes.
    unsafe { result::memcpy_dtod_async(to.address, from.address, from.bytes(), stream.cu_stream()) }.map_err(&fault)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_inside() {
        // SAFETY: never used for memory access.
        let span = unsafe { Span::<f32>::new(0x1000, 10) };
        let part = span.part(2..5).unwrap();
        assert_eq!((part.address(), part.len(), part.bytes()), (0x1008, 3, 12));
        assert_eq!(span.element(9).unwrap().address(), 0x1024);
        assert!(span.part(0..11).is_none() && span.element(10).is_none() && span.element(usize::MAX).is_none());
        #[expect(clippy::reversed_empty_ranges)]
        let reversed = 5..2;
        assert!(span.part(reversed).is_none());
        assert_eq!(span.part(10..10).unwrap().len(), 0);
    }

    #[test]
    fn bytes_are_elements_where_they_fit() {
        // SAFETY: never used for memory access.
        let bytes = unsafe { Span::<u8>::new(0x1004, 12) };
        let words = bytes.cast::<f32>().unwrap();
        assert_eq!((words.address(), words.len()), (0x1004, 3));
        assert!(bytes.cast::<u64>().is_none(), "not aligned, and ends within an element");
        assert!(bytes.part(0..11).unwrap().cast::<u16>().is_none());
    }
}
