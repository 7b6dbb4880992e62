//! Retained work: what an action leaves for a later one, consumed exactly once, and its layout.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use crate::act::{Act, Fp8, Kept};
use crate::cx::Cx;
use crate::error::Result;

/// Work that an action leaves for a later one, consumed exactly once.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be retained: it has no layout",
    label = "not a retained tensor",
    note = "retained are `Kept`, `Fp8`, `Saved`, structs with `#[retained]`, and `Option`, `Vec` or tuples of these"
)]
pub trait Retained: Sized {
    /// What it holds, under the name that the layout is at.
    fn layout(&self, layout: &mut Layout);

    /// Gives its buffers back unread.
    fn release(self, cx: &mut Cx<'_>) -> Result<()>;
}

/// What a retained value holds.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Layout {
    /// Name and tensor: `blocks.3.fc2.x`. One buffer that is named twice is stored once.
    pub entries: Vec<(String, Act)>,
    path: String,
}

impl Layout {
    /// What `retained` holds.
    pub fn of(retained: &impl Retained) -> Layout {
        let mut layout = Layout::default();
        retained.layout(&mut layout);
        layout
    }

    /// Adds a part under its name.
    pub fn part(&mut self, name: &str, part: &impl Retained) {
        let outer = self.enter(name);
        part.layout(self);
        self.leave(outer);
    }

    /// What follows is under this name, until [`Layout::leave`] with what this gives.
    #[doc(hidden)]
    pub fn enter(&mut self, name: &str) -> usize {
        let outer = self.path.len();
        if outer > 0 {
            self.path.push('.');
        }
        self.path.push_str(name);
        outer
    }

    /// Ends [`Layout::enter`].
    #[doc(hidden)]
    pub fn leave(&mut self, outer: usize) {
        self.path.truncate(outer);
    }

    /// Adds a tensor.
    pub fn kept(&mut self, name: &str, kept: &Kept) {
        self.part(name, kept);
    }

    /// Adds a quantised tensor.
    pub fn fp8(&mut self, name: &str, fp8: &Fp8) {
        self.part(name, fp8);
    }

    /// Bytes of all distinct buffers.
    pub fn bytes(&self) -> usize {
        let distinct: BTreeMap<_, _> = self.entries.iter().map(|(_, act)| (act.buf, act.bytes())).collect();
        distinct.values().sum()
    }
}

/// Never `Clone`: what makes a second implementation of `Clone` for retained work a conflict. Messages of the compiler name it.
#[doc(hidden)]
#[derive(Debug)]
pub struct ConsumedExactlyOnce<'a>(PhantomData<&'a ()>);

impl Retained for Kept {
    fn layout(&self, layout: &mut Layout) {
        layout.entries.push((layout.path.clone(), self.act()));
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        cx.release(self)
    }
}

impl Retained for Fp8 {
    fn layout(&self, layout: &mut Layout) {
        self.codes.layout(layout);
        self.other.layout(layout);
        self.grouped.layout(layout);
        self.scale_inv.layout(layout);
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        cx.release_fp8(self)
    }
}

impl<T: Retained> Retained for Option<T> {
    fn layout(&self, layout: &mut Layout) {
        self.iter().for_each(|part| part.layout(layout));
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        self.into_iter().try_for_each(|part| part.release(cx))
    }
}

impl<T: Retained> Retained for Vec<T> {
    fn layout(&self, layout: &mut Layout) {
        self.iter().enumerate().for_each(|(index, part)| layout.part(&index.to_string(), part));
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        self.into_iter().try_for_each(|part| part.release(cx))
    }
}

/// One of two: what a branch of an `if` retains.
#[must_use = "retained work is consumed exactly once"]
#[derive(PartialEq, Eq, Debug)]
pub enum Either<A, B> {
    /// Of the first branch.
    Then(A),
    /// Of the second.
    Else(B),
}

impl<A: Retained, B: Retained> Retained for Either<A, B> {
    fn layout(&self, layout: &mut Layout) {
        match self {
            Either::Then(part) => part.layout(layout),
            Either::Else(part) => part.layout(layout),
        }
    }

    fn release(self, cx: &mut Cx<'_>) -> Result<()> {
        match self {
            Either::Then(part) => part.release(cx),
            Either::Else(part) => part.release(cx),
        }
    }
}

macro_rules! tuples {
    ($(($($part:ident $at:tt),*);)*) => {$(
        impl<$($part: Retained),*> Retained for ($($part,)*) {
            fn layout(&self, _layout: &mut Layout) {
                $(_layout.part(stringify!($at), &self.$at);)*
            }

            fn release(self, _cx: &mut Cx<'_>) -> Result<()> {
                $(self.$at.release(_cx)?;)*
                Ok(())
            }
        }
    )*};
}

tuples! {
    ();
    (A 0, B 1);
    (A 0, B 1, C 2);
    (A 0, B 1, C 2, D 3);
}
