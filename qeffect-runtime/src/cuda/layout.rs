//! Where buffers lie: parts of allocations that are large, so that there are few of them.

/// Where a buffer begins: what products and wide loads ask for, with room to spare.
const ALIGNMENT: usize = 256;
/// Bytes of an allocation that small buffers share.
const BLOCK: usize = 32 << 20;

/// A place for a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Slot {
    /// The allocation.
    pub(super) block: usize,
    /// Its first byte there.
    pub(super) at: usize,
    /// Bytes of that allocation, if it is still to be made.
    pub(super) fresh: Option<usize>,
}

/// The allocations of a device, and what of the last one is taken.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Layout {
    blocks: Vec<usize>,
    used: usize,
    bytes: usize,
}

impl Layout {
    /// Where the next buffer goes, if it has that many bytes.
    pub(super) fn next(&self, bytes: usize) -> Slot {
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        match self.blocks.last() {
            Some(block) if self.used + bytes <= *block => {
                Slot { block: self.blocks.len() - 1, at: self.used, fresh: None }
            }
            _ => Slot { block: self.blocks.len(), at: 0, fresh: Some(bytes.max(BLOCK)) },
        }
    }

    /// The buffer is there.
    pub(super) fn take(&mut self, slot: Slot, bytes: usize) {
        self.blocks.extend(slot.fresh);
        self.used = slot.at + bytes.next_multiple_of(ALIGNMENT);
        self.bytes += bytes;
    }

    /// Bytes of all allocations.
    pub(super) fn allocated(&self) -> usize {
        self.blocks.iter().sum()
    }

    /// Bytes of all buffers.
    pub(super) const fn held(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_buffers_share_an_allocation_and_large_ones_have_their_own() {
        let mut layout = Layout::default();
        let mut take = |bytes| {
            let slot = layout.next(bytes);
            layout.take(slot, bytes);
            ((slot.block, slot.at, slot.fresh), layout.allocated())
        };
        assert_eq!(take(100), ((0, 0, Some(BLOCK)), BLOCK));
        assert_eq!(take(0), ((0, 256, None), BLOCK));
        assert_eq!(take(BLOCK - 256), ((0, 256, None), BLOCK));
        assert_eq!(take(1), ((1, 0, Some(BLOCK)), 2 * BLOCK));
        assert_eq!(take(BLOCK + 1), ((2, 0, Some(BLOCK + 256)), 3 * BLOCK + 256));
        assert_eq!(take(1), ((3, 0, Some(BLOCK)), 4 * BLOCK + 256));
        assert_eq!(layout.held(), 100 + BLOCK - 256 + 1 + BLOCK + 1 + 1);
    }
}
