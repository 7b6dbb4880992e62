//! Where a thing was written, as an opaque number.
//!
//! The checker reports against [`Origin`]s and never learns what they mean. Whoever read the
//! program keeps the table: the macro maps a token to a span, a file reader to line and column.
//! An origin is a run of neighbouring tokens (or cells), so a reader's table has one row per token
//! and origins sort in source order.

/// A run of tokens of the reader: `I(r, m)` as one place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Origin(pub u32);

/// Low bits that hold the length of the run; the others hold the number of its first token.
const LENGTH_BITS: u32 = 8;
const LENGTH_MASK: u32 = (1 << LENGTH_BITS) - 1;

impl Origin {
    /// The place of things that nobody wrote (inserted by lowering).
    pub const NONE: Origin = Origin(u32::MAX);

    /// Most tokens that one source can have.
    pub const MAX_TOKENS: usize = (1 << (32 - LENGTH_BITS)) - 1;

    /// The place of token `n` of a source, `n < MAX_TOKENS`.
    pub const fn token(n: usize) -> Origin {
        if n < Origin::MAX_TOKENS { Origin((n as u32) << LENGTH_BITS) } else { Origin::NONE }
    }

    /// The place from the start of `self` to the end of `last`; very long runs are cut short.
    #[must_use]
    pub const fn to(self, last: Origin) -> Origin {
        if !self.is_some() || !last.is_some() || last.last() < self.first() {
            return self;
        }
        let more = (last.last() - self.first()) as u32;
        Origin(((self.first() as u32) << LENGTH_BITS) | if more < LENGTH_MASK { more } else { LENGTH_MASK - 1 })
    }

    /// Number of the first token.
    pub const fn first(self) -> usize {
        (self.0 >> LENGTH_BITS) as usize
    }

    /// Number of the last token.
    pub const fn last(self) -> usize {
        self.first() + (self.0 & LENGTH_MASK) as usize
    }

    /// Whether somebody wrote this thing.
    pub const fn is_some(self) -> bool {
        self.0 != u32::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_its_ends() {
        let run = Origin::token(7).to(Origin::token(12));
        assert_eq!((run.first(), run.last()), (7, 12));
        assert_eq!(Origin::token(7).to(Origin::token(7)), Origin::token(7));
        assert_eq!(Origin::token(7).to(Origin::token(3)), Origin::token(7));
        assert_eq!(run.to(Origin::token(20)).last(), 20);
    }

    #[test]
    fn runs_sort_in_source_order_and_never_collide_with_none() {
        assert!(Origin::token(7).to(Origin::token(300_000)) < Origin::token(8));
        assert!(Origin::token(7).to(Origin::token(300_000)).is_some());
        assert!(Origin::token(Origin::MAX_TOKENS - 1).is_some());
        assert!(!Origin::token(Origin::MAX_TOKENS).is_some());
        assert_eq!(Origin::NONE.to(Origin::token(3)), Origin::NONE);
    }
}
