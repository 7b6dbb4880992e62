//! Coalesced weight gradients: the regions in which the factors of a group's microbatches lie side by side.
//!
//! A group is `coalesce` neighbouring microbatches, the last one may be short. For each weight, the inputs of its members
//! share one region, leased from the group's first F to its W, and so do the gradients of its outputs, from the first I
//! on. W then is one product over all tokens of the group:
//!
//! | layout | region | member i |
//! |---|---|---|
//! | [`Lines::Rows`] | `[members · stride, cols]` | rows from i · stride on |
//! | [`Lines::Columns`] | `[cols, members · stride]` | columns from i · stride on |
//!
//! `stride` is the number of tokens, or the next multiple of [`BLOCK`] where members have factors of their own and a device
//! scales blocks of that many codes along the tokens: codes of two members then never share a block. What lies between
//! members is zero bytes.

use std::collections::BTreeMap;

use qeffect_core::arena::Write;

use crate::act::{Act, Kept};
use crate::cmd::GroupOperand;
use crate::cx::Cx;
use crate::error::{Error, Result};
use crate::stage::{Layout, ParamId, Retained, Role};

/// Codes along the tokens that share a scale, on devices that scale blocks.
pub const BLOCK: usize = 128;

/// How a region stores tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Lines {
    /// A token is a row.
    Rows,
    /// A token is a column: what products in FP8 take without a transpose.
    Columns,
}

/// Which microbatches make a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Partition {
    pub coalesce: u32,
    pub microbatches: u32,
}

impl Partition {
    /// The group of a microbatch, its position there, and the number of members.
    pub fn locate(&self, microbatch: u32) -> (u32, u32, u32) {
        let n = self.coalesce.max(1);
        let (group, position) = (microbatch / n, microbatch % n);
        (group, position, n.min(self.microbatches.saturating_sub(group * n)))
    }
}

/// What a region is for: an input or an output gradient of a weight, of a group.
pub(crate) type Key = (ParamId, Role, u32);

#[derive(Debug)]
struct Region {
    act: Act,
    joined: u32,
}

/// A product that waits for the rest of its group.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub write: Write,
    pub position: u32,
    pub dy: Grouped,
    pub x: Grouped,
}

/// Regions and products of a stage that are incomplete.
#[derive(Debug)]
pub(crate) struct Groups {
    pub partition: Partition,
    regions: BTreeMap<Key, Region>,
    waiting: BTreeMap<(ParamId, u32), Vec<Waiting>>,
}

impl Groups {
    pub fn new(partition: Partition) -> Groups {
        Groups { partition, regions: BTreeMap::new(), waiting: BTreeMap::new() }
    }

    /// Forgets everything: a step begins, or is aborted. Leases are the pool's to take back.
    pub fn clear(&mut self) {
        self.regions.clear();
        self.waiting.clear();
    }

    /// The region that other members have leased already. After its last member has joined it is forgotten here.
    pub fn join(&mut self, key: Key, members: u32) -> Option<Act> {
        let region = self.regions.get_mut(&key)?;
        region.joined += 1;
        let (act, joined) = (region.act, region.joined);
        if joined == members {
            self.regions.remove(&key);
        }
        Some(act)
    }

    /// The group's first member has leased its region.
    pub fn found(&mut self, key: Key, members: u32, act: Act) {
        if members > 1 {
            self.regions.insert(key, Region { act, joined: 1 });
        }
    }

    /// Adds a product of a parameter and group. When it is the group's last: all of them, in microbatch order.
    pub fn add(&mut self, key: (ParamId, u32), members: u32, product: Waiting) -> Option<Vec<Waiting>> {
        let waiting = self.waiting.entry(key).or_default();
        waiting.push(product);
        if waiting.len() < members as usize {
            return None;
        }
        let mut all = self.waiting.remove(&key)?;
        all.sort_by_key(|product| product.position);
        Some(all)
    }
}

/// One member's part of a region: one share of it, and the factor of its codes.
#[must_use = "a retained tensor holds its buffers until it is released"]
#[derive(PartialEq, Eq, Debug)]
pub struct Grouped {
    pub(crate) region: Kept,
    pub(crate) scale_inv: Option<Kept>,
    pub(crate) lines: Lines,
    /// Tokens of the member.
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// From one member to the next, in tokens.
    pub(crate) stride: usize,
    pub(crate) position: u32,
}

impl Grouped {
    /// Tokens of this member.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Elements per token.
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// The region, to read.
    pub const fn region(&self) -> Act {
        self.region.act()
    }

    /// Where the first element of this member lies in its region.
    pub(crate) const fn first(&self) -> usize {
        let tokens = self.position as usize * self.stride;
        match self.lines {
            Lines::Rows => tokens * self.cols,
            Lines::Columns => tokens,
        }
    }
}

impl Retained for Grouped {
    fn layout(&self, layout: &mut Layout) {
        layout.kept("region", &self.region);
        self.scale_inv.iter().for_each(|factor| layout.kept("scale_inv", factor));
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        cx.release(self.region)?;
        self.scale_inv.map_or(Ok(()), |factor| cx.release(factor))
    }
}

/// The operand of a whole group: the parts of one region, in order. `shared`: scales move between steps only, so the
/// members' factors are the same number, and the first one stands for all.
pub(crate) fn operand<'a>(
    parts: impl Iterator<Item = &'a Grouped>,
    tokens_first: bool,
    shared: bool,
) -> Result<GroupOperand> {
    let parts: Vec<&Grouped> = parts.collect();
    let torn = || Error::Config("the members of a group do not lie in one region".into());
    let first = *parts.first().ok_or_else(torn)?;
    let same = |(at, part): (usize, &&Grouped)| {
        let shape = |part: &Grouped| (part.region.act(), part.lines, part.rows, part.cols, part.stride);
        shape(part) == shape(first) && part.position as usize == at
    };
    if !parts.iter().enumerate().all(same) {
        return Err(torn());
    }
    let factors = parts.iter().filter_map(|part| part.scale_inv.as_ref().map(|factor| factor.act().buf));
    let scale_inv = if shared { factors.take(1).collect() } else { factors.collect() };
    // The product takes tokens × cols, or with the tokens as columns of the first operand cols × tokens.
    let transposed = tokens_first == (first.lines == Lines::Columns);
    Ok(GroupOperand { buf: first.region.act().buf, scale_inv, transposed })
}
