//! Items and nodes as byte strings, for the expansion of `schedule!`.
//!
//! A checked schedule has thousands of nodes. As one literal per table they cost the compiler next
//! to nothing to parse; the `const fn`s here unpack them into the static.
//!
//! Layout: one byte with the width of a number (2 or 4), then per entry its kind, its numbers, and
//! its origin in 4 bytes, little endian. All ones stands for `u32::MAX`, the "none" of slots.

use crate::action::{Item, Kind};
use crate::plan::{Node, Op};

const KINDS: [Kind; 12] = {
    use Kind::*;
    [
        Forward,
        InputGrad,
        WeightGrad,
        FullBackward,
        Recompute,
        WeightGradJoin,
        Refresh,
        Reduce,
        Commit,
        OverlapBegin,
        OverlapBranch,
        OverlapEnd,
    ]
};

const OPS: [Op; 21] = {
    use Op::*;
    [
        Forward,
        InputGrad,
        WeightGrad,
        WeightGradJoin,
        FullBackward,
        Recompute,
        SendForward,
        PostForward,
        WaitForward,
        SendBackward,
        PostBackward,
        WaitBackward,
        Refresh,
        Reduce,
        Agree,
        Commit,
        OverlapBegin,
        OverlapBranch,
        OverlapEnd,
        GroupBegin,
        GroupEnd,
    ]
};

/// Packs the items of a schedule.
pub fn pack_items(items: &[Item]) -> Vec<u8> {
    pack(items.iter().map(|item| (item.kind as u8, [item.stage.0, item.microbatch.0], item.origin.0)))
}

/// Packs the nodes of a plan.
pub fn pack_nodes(nodes: &[Node]) -> Vec<u8> {
    pack(nodes.iter().map(|node| (node.op as u8, [node.stage.0, node.microbatch.0, node.slot], node.origin.0)))
}

fn pack<const K: usize>(entries: impl Iterator<Item = (u8, [u32; K], u32)> + Clone) -> Vec<u8> {
    let narrow = entries.clone().flat_map(|(_, numbers, _)| numbers).all(|n| n < 0xffff || n == u32::MAX);
    let width = if narrow { 2 } else { 4 };
    let mut bytes = vec![width as u8];
    for (kind, numbers, origin) in entries {
        bytes.push(kind);
        for number in numbers {
            bytes.extend_from_slice(&number.to_le_bytes()[..width]);
        }
        bytes.extend_from_slice(&origin.to_le_bytes());
    }
    bytes
}

/// Unpacks the items that [`pack_items`] packed.
///
/// # Panics
/// If `bytes` does not hold exactly `N` items.
pub const fn items<const N: usize>(bytes: &[u8]) -> [Item; N] {
    let width = bytes[0] as usize;
    assert!(bytes.len() == 1 + N * (5 + 2 * width), "a packed table of another length");
    let mut out = [Item::new(Kind::Forward, 0, 0, 0); N];
    let (mut n, mut at) = (0, 1);
    while n < N {
        out[n] = Item::new(
            KINDS[bytes[at] as usize],
            number(bytes, at + 1, width),
            number(bytes, at + 1 + width, width),
            number(bytes, at + 1 + 2 * width, 4),
        );
        at += 5 + 2 * width;
        n += 1;
    }
    out
}

/// Unpacks the nodes that [`pack_nodes`] packed.
///
/// # Panics
/// If `bytes` does not hold exactly `N` nodes.
pub const fn nodes<const N: usize>(bytes: &[u8]) -> [Node; N] {
    let width = bytes[0] as usize;
    assert!(bytes.len() == 1 + N * (5 + 3 * width), "a packed table of another length");
    let mut out = [Node::new(Op::Forward, 0, 0, 0, 0); N];
    let (mut n, mut at) = (0, 1);
    while n < N {
        out[n] = Node::new(
            OPS[bytes[at] as usize],
            number(bytes, at + 1, width),
            number(bytes, at + 1 + width, width),
            number(bytes, at + 1 + 2 * width, width),
            number(bytes, at + 1 + 3 * width, 4),
        );
        at += 5 + 3 * width;
        n += 1;
    }
    out
}

const fn number(bytes: &[u8], at: usize, width: usize) -> u32 {
    let low = bytes[at] as u32 | (bytes[at + 1] as u32) << 8;
    if width == 4 {
        return low | (bytes[at + 2] as u32) << 16 | (bytes[at + 3] as u32) << 24;
    }
    if low == 0xffff { u32::MAX } else { low }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_follow_the_discriminants() {
        for (n, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, n);
        }
        for (n, op) in OPS.into_iter().enumerate() {
            assert_eq!(op as usize, n);
        }
    }

    #[test]
    fn what_is_packed_is_unpacked() {
        for large in [7, 0xfffe, 0xffff, 0x1_0000, u32::MAX - 1, u32::MAX] {
            let written: Vec<Item> = KINDS.into_iter().map(|kind| Item::new(kind, 3, large, 258)).collect();
            assert_eq!(items::<12>(&pack_items(&written)), written[..]);
            let lowered: Vec<Node> = OPS.into_iter().map(|op| Node::new(op, 1, 513, u32::MAX, large)).collect();
            assert_eq!(nodes::<21>(&pack_nodes(&lowered)), lowered[..]);
        }
    }

    #[test]
    fn narrow_numbers_take_two_bytes() {
        assert_eq!(pack_items(&[Item::new(Kind::Commit, 0, 0, u32::MAX)]).len(), 1 + 9);
        assert_eq!(pack_nodes(&[Node::new(Op::Agree, 0, 0, 0x1_0000, 0)]).len(), 1 + 17);
    }
}
