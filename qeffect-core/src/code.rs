//! The one table of codes: every fault that QEffect reports has a row here and a page
//! `docs/errors/QExxxx.md`.

use core::fmt;

/// The phases of a check, in the order in which they run. The faults of the first phase that fails
/// are reported, all of them; later phases would only echo them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Family {
    /// QE07xx: grammar, names, arithmetic, limits.
    Language,
    /// QE06xx: placement and coverage.
    Placement,
    /// QE01xx: ownership of tapes and works.
    Ownership,
    /// QE02xx: order of state transitions.
    Order,
    /// QE03xx: versions of weights and caches.
    Version,
    /// QE04xx: communication.
    Communication,
    /// QE05xx: resources and contracts.
    Resource,
    /// QE08xx: gradient arena.
    Arena,
    /// QE09xx: binding a plan to a model, recipe and run.
    Bind,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $family:ident, $title:literal;)*) => {
        /// A stable error code, printed as `QE0101`.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u16)]
        pub enum Code {
            $($(#[$doc])* #[doc = $title] $name = $number,)*
        }

        impl Code {
            /// Every code, ascending.
            pub const ALL: &'static [Code] = &[$(Code::$name),*];

            /// One line that names the fault.
            pub const fn title(self) -> &'static str {
                match self { $(Code::$name => $title,)* }
            }

            /// The phase that finds it.
            pub const fn family(self) -> Family {
                match self { $(Code::$name => Family::$family,)* }
            }
        }
    };
}

codes! {
    TapeConsumedTwice = 101, Ownership, "a tape is consumed twice";
    TapeBeforeForward = 102, Ownership, "an input gradient runs before its forward";
    TapeNeverConsumed = 103, Ownership, "a tape is never consumed";
    WorkConsumedTwice = 104, Ownership, "retained work is consumed twice";
    WorkBeforeInputGrad = 105, Ownership, "a weight gradient runs before its input gradient";
    WorkNeverConsumed = 106, Ownership, "retained work is never consumed";
    RecomputeMisplaced = 107, Ownership, "a recomputation does not stand between its forward and its input gradient";
    StaleReference = 108, Ownership, "a reference has an old generation: its slot was reused";
    KeyMismatch = 109, Ownership, "a reference belongs to another microbatch";

    OverlapConflict = 201, Order, "two branches that may run at once write the same state";
    OverlapDependent = 202, Order, "a branch of an overlap depends on another one";
    TokenOutOfOrder = 203, Order, "a state cell is moved without its token, or with a foreign one";

    StaleCache = 301, Version, "a forward reads a stale weight cache";
    CommitWithWork = 302, Version, "commit runs while work, a reduction or a tape is in flight";
    RefreshMisplaced = 303, Version, "refresh does not stand before the first forward of its stage, once";
    ReduceMisplaced = 304, Version, "reduce does not stand after the last gradient of its stage, once";
    CommitMissing = 305, Version, "commit does not stand at the end, once";
    NotQuiescent = 306, Version, "something is in flight where the rank must be quiescent";

    Deadlock = 401, Communication, "ranks wait for each other";
    FifoOrder = 402, Communication, "the two ends of a channel disagree about the order of messages";
    MessageMissing = 403, Communication, "a message is sent and never received, or received and never sent";
    MessageDoubled = 404, Communication, "a message is sent or received twice";
    MessageEarly = 405, Communication, "a message is sent before it exists, or awaited after it is used";
    MessageUnknown = 406, Communication, "a message has no edge, or stands on a rank that is not its end";
    ShardMisplaced = 407, Communication, "a stage computes outside its UNSHARD and RESHARD";

    SlotsExceeded = 501, Resource, "more live microbatches than `slots:` allows";
    TapesExceeded = 502, Resource, "more live tapes than `tapes:` allows";
    WorksExceeded = 503, Resource, "more pending works than `works:` allows";
    ExpectFailed = 504, Resource, "a contract of the schedule does not hold";
    BytesExceeded = 505, Resource, "more bytes than `bytes(..)` allows";
    SlotsExhausted = 506, Resource, "no slot is free";

    WrongRank = 601, Placement, "an action runs on a rank that does not hold its stage";
    ForwardMissing = 602, Placement, "a stage never runs the forward of a microbatch";
    ForwardRepeated = 603, Placement, "a forward runs twice";
    OutOfRange = 604, Placement, "a stage or microbatch does not exist";
    PlacementInvalid = 605, Placement, "a stage is placed on no rank, or a rank holds no stage";
    BackwardInEval = 606, Placement, "a forward-only schedule runs a backward";
    NothingToRun = 607, Placement, "a schedule has no microbatch, stage or rank";

    Syntax = 701, Language, "the schedule cannot be parsed";
    NotInLanguage = 702, Language, "Rust has this, the schedule language has not";
    UnknownName = 703, Language, "a name is not defined here";
    TypeMismatch = 704, Language, "a value has the wrong type";
    Arithmetic = 705, Language, "arithmetic overflows or divides by zero";
    LimitExceeded = 706, Language, "the schedule does not end within the limit";
    Header = 707, Language, "a header field is missing, repeated or out of range";
    WrongArguments = 708, Language, "a call has the wrong number of arguments";
    Instance = 709, Language, "an instance does not fit the parameters";
    Immutable = 710, Language, "a variable that is not `mut` is assigned";

    ArenaDuplicate = 801, Arena, "a gradient contribution is written twice";
    ArenaMissing = 802, Arena, "a gradient is not complete at commit";
    ArenaAliased = 803, Arena, "two gradients share a destination";
    ArenaMismatch = 804, Arena, "a gradient has another shape, type, device or address than its destination";
    ArenaPoisoned = 805, Arena, "the arena holds an aborted write";

    OrderDependent = 901, Bind, "the schedule's order changes the numbers of this recipe";
    RecipeTooStrict = 902, Bind, "the recipe needs a stricter update than the schedule declares";
    StageMismatch = 903, Bind, "the model's stages are not the schedule's";
    BatchMismatch = 904, Bind, "the batch does not fit the schedule";
    GradientsUnsupported = 905, Bind, "the gradient placement does not fit the schedule";
    NonFinite = 906, Bind, "a value is not finite";
    EffectMismatch = 907, Bind, "a stage declares other effects than the schedule was checked for";
}

impl Code {
    /// The code that is printed as `text` (`QE0101`, any case).
    pub fn parse(text: &str) -> Option<Code> {
        let digits = text.strip_prefix("QE").or_else(|| text.strip_prefix("qe"))?;
        let number: u16 = (digits.len() == 4).then(|| digits.parse().ok())??;
        Code::ALL.iter().copied().find(|code| *code as u16 == number)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QE{:04}", *self as u16)
    }
}
