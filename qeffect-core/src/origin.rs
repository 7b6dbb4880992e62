//! Where a thing was written, as an opaque number.
//!
//! The checker reports against [`Origin`]s and never learns what they mean. Whoever read the
//! program keeps the table: the macro maps an origin to a span, a file reader to line and column.

/// An opaque index into the reader's table of places.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Origin(pub u32);

impl Origin {
    /// The place of things that nobody wrote (inserted by lowering).
    pub const NONE: Origin = Origin(u32::MAX);

    /// Whether somebody wrote this thing.
    pub const fn is_some(self) -> bool {
        self.0 != u32::MAX
    }
}
