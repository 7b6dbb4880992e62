//! What commands are made of: operands, kernels of users, constants, keys.

#[cfg(doc)]
use super::Cmd;
use crate::device::Buf;

/// One element of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Scalar {
    /// The buffer.
    pub buf: Buf,
    /// Which element.
    pub index: usize,
}

/// An operand of a matrix product.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Operand {
    /// Its elements.
    pub buf: Buf,
    /// For FP8: the factor of these bytes. It was stored when they were made and travels with them.
    pub scale_inv: Option<Buf>,
    /// Whether the product takes the stored matrix transposed.
    pub transposed: bool,
}

/// Where a transposed matrix lies in a buffer that it shares with others, side by side along its lines.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Beside {
    /// Its first element.
    pub first: usize,
    /// Elements from one line to the next.
    pub line: usize,
}

/// One side of a [`Cmd::GroupGemm`]: the same operand of every member, side by side in one buffer along the terms of the
/// sums.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GroupOperand {
    /// All members' elements.
    pub buf: Buf,
    /// For FP8: the factor of each member's codes, or one that all members have, on both sides.
    pub scale_inv: Box<[Buf]>,
    /// Whether the product takes the stored matrix transposed.
    pub transposed: bool,
}

impl GroupOperand {
    /// Factors that both sides of a product of `members` have, if they are codes: one for all where either has one.
    pub(crate) fn factors(a: &GroupOperand, b: &GroupOperand, members: usize) -> usize {
        if a.scale_inv.len().max(b.scale_inv.len()) == 1 { 1 } else { members }
    }
}

/// All inputs to all outputs, or why not.
pub type CpuKernel = fn(&[&[f64]], &mut [&mut [f64]]) -> Result<(), String>;

/// A kernel that an op brings along.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// Its name, for messages and profiles.
    pub name: &'static str,
    /// What it computes on cpu: all inputs, in order, to all outputs, whose lengths are given and whose elements are 0. What
    /// it writes is rounded to the types of the outputs. Sums have an order that depends on lengths only, or runs differ.
    pub cpu: CpuKernel,
}

impl PartialEq for Kernel {
    fn eq(&self, other: &Kernel) -> bool {
        self.name == other.name && std::ptr::fn_addr_eq(self.cpu, other.cpu)
    }
}

/// Constants of AdamW.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator after bias correction.
    pub epsilon: f64,
    /// Decoupled weight decay of this parameter.
    pub weight_decay: f64,
}

/// What a dropout mask belongs to, beside the step, which lies in a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DropoutKey {
    /// Of the run.
    pub seed: u64,
    /// Stands for the path of the layer in the whole model ([`crate::rng::name`]).
    pub site: u64,
    /// The microbatch.
    pub microbatch: u64,
}

/// What the tag of a slot says beside the step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SlotTag {
    /// Stage and microbatch of the F that filled it: one in the upper half, the other in the lower one.
    pub key: u64,
    /// How many had filled it before in the step, and this one.
    pub generation: u64,
}
