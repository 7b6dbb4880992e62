//! Recipes: how numbers are stored and scaled, and what that asks of a schedule.
//!
//! Text form: a name, and for `fp8-delayed` options after a colon, in any order:
//! `fp8-delayed:history=16,margin=0,algo=max,update=step,loss-scale=2^14,head=bf16`.
//! Nothing is guessed: an unknown name or option is an error that lists the right ones.

use core::fmt;
use core::str::FromStr;

use crate::dtype::Dtype;
use crate::fp8::{Fp8, power_of_two};
use crate::scaling::ScaleRule;
use crate::schedule::Update;

/// Largest magnitude of a margin.
pub const MARGIN_LIMIT: i32 = 64;
/// Longest amax history.
pub const HISTORY_LIMIT: u32 = 65_536;
/// Largest magnitude of the exponent of a loss scale.
pub const LOSS_SCALE_LIMIT: i32 = 64;

/// How the numbers of a layer are stored and scaled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Recipe {
    /// Everything in f64: for finite differences.
    F64,
    /// Everything in f32: for goldens.
    F32,
    /// Activations in bf16, fp32 master weights and gradients.
    Bf16,
    /// As bf16, with the matrix products in FP8 under delayed scaling.
    Fp8Delayed(Delayed),
}

/// Which amax of the window sets the scale.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum AmaxAlgo {
    /// The largest.
    #[default]
    Max,
    /// The newest.
    MostRecent,
}

/// In which format the head's matrix products run.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Head {
    /// As every other product.
    #[default]
    Fp8,
    /// In bf16.
    Bf16,
}

/// Settings of delayed scaling: E4M3 forward, E5M2 for gradients.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Delayed {
    /// Length of the amax history, at least 1.
    pub history: u32,
    /// amax is mapped to the format's maximum times 2^-margin.
    pub margin: i32,
    /// Which amax of the window sets the scale.
    pub algo: AmaxAlgo,
    /// When scales move: [`Update::Microbatch`] or [`Update::Step`].
    pub update: Update,
    /// The loss is multiplied by 2^this, so that small gradients survive E5M2; undone exactly.
    pub loss_scale_log2: i32,
    /// Format of the head.
    pub head: Head,
}

impl Default for Delayed {
    fn default() -> Self {
        Delayed {
            history: 16,
            margin: 0,
            algo: AmaxAlgo::Max,
            update: Update::Microbatch,
            loss_scale_log2: 14,
            head: Head::Fp8,
        }
    }
}

impl Delayed {
    /// The rule for cells of a format.
    pub const fn rule(&self, format: Fp8) -> ScaleRule {
        ScaleRule::new(format, self.margin, self.algo)
    }

    /// Checks every setting against its range.
    pub fn validate(&self) -> Result<(), RecipeError> {
        let option = |name, value: &dyn fmt::Display, expected: String| RecipeError::Value {
            option: name,
            found: value.to_string(),
            expected,
        };
        if !(1..=HISTORY_LIMIT).contains(&self.history) {
            return Err(option("history", &self.history, format!("1 to {HISTORY_LIMIT}")));
        }
        if self.margin.abs() > MARGIN_LIMIT {
            return Err(option("margin", &self.margin, format!("-{MARGIN_LIMIT} to {MARGIN_LIMIT}")));
        }
        if self.update == Update::None {
            return Err(option("update", &"none", "microbatch or step".into()));
        }
        if self.loss_scale_log2.abs() > LOSS_SCALE_LIMIT {
            return Err(option(
                "loss-scale",
                &format_args!("2^{}", self.loss_scale_log2),
                format!("2^-{LOSS_SCALE_LIMIT} to 2^{LOSS_SCALE_LIMIT}"),
            ));
        }
        Ok(())
    }
}

impl Recipe {
    /// The names that a recipe's text may begin with.
    pub const NAMES: [&'static str; 4] = ["f64", "f32", "bf16", "fp8-delayed"];

    /// Delayed scaling with the default settings.
    pub const fn fp8_delayed() -> Recipe {
        Recipe::Fp8Delayed(Delayed {
            history: 16,
            margin: 0,
            algo: AmaxAlgo::Max,
            update: Update::Microbatch,
            loss_scale_log2: 14,
            head: Head::Fp8,
        })
    }

    /// Its name, without options.
    pub const fn name(&self) -> &'static str {
        match self {
            Recipe::F64 => "f64",
            Recipe::F32 => "f32",
            Recipe::Bf16 => "bf16",
            Recipe::Fp8Delayed(_) => "fp8-delayed",
        }
    }

    /// Type of activations, of their gradients, and of everything that crosses ranks.
    pub const fn activation(&self) -> Dtype {
        match self {
            Recipe::F64 => Dtype::F64,
            Recipe::F32 => Dtype::F32,
            Recipe::Bf16 | Recipe::Fp8Delayed(_) => Dtype::Bf16,
        }
    }

    /// Type of master weights, their gradients, moments, loss and statistics.
    pub const fn master(&self) -> Dtype {
        match self {
            Recipe::F64 => Dtype::F64,
            _ => Dtype::F32,
        }
    }

    /// Settings of delayed scaling, if it is used.
    pub const fn delayed(&self) -> Option<&Delayed> {
        match self {
            Recipe::Fp8Delayed(delayed) => Some(delayed),
            _ => None,
        }
    }

    /// Which ordered state transitions this recipe needs. A schedule fits if what it declares is
    /// at least as strict.
    pub const fn update(&self) -> Update {
        match self {
            Recipe::Fp8Delayed(delayed) => delayed.update,
            _ => Update::None,
        }
    }

    /// Whether a schedule that declares `declared` is strict enough.
    pub fn fits(&self, declared: Update) -> bool {
        self.update() <= declared
    }

    /// What the loss is multiplied by: a power of two.
    pub const fn loss_scale(&self) -> f32 {
        match self {
            Recipe::Fp8Delayed(delayed) => power_of_two(delayed.loss_scale_log2),
            _ => 1.0,
        }
    }
}

/// A recipe's text that means nothing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum RecipeError {
    /// No recipe has this name.
    Name(String),
    /// The recipe has no such option, or no options at all.
    Option {
        /// The recipe.
        recipe: &'static str,
        /// What was written.
        found: String,
    },
    /// An option is given twice.
    Repeated(&'static str),
    /// An option has a value out of its range.
    Value {
        /// The option.
        option: &'static str,
        /// What was written.
        found: String,
        /// What is allowed.
        expected: String,
    },
}

const OPTIONS: [&str; 6] = ["history", "margin", "algo", "update", "loss-scale", "head"];

impl fmt::Display for RecipeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecipeError::Name(found) => {
                write!(f, "unknown recipe `{found}`; one of: {}", Recipe::NAMES.join(", "))
            }
            RecipeError::Option { recipe, found } if *recipe == "fp8-delayed" => {
                write!(f, "recipe `{recipe}` has no option `{found}`; one of: {}", OPTIONS.join(", "))
            }
            RecipeError::Option { recipe, found } => {
                write!(f, "recipe `{recipe}` takes no options, found `{found}`")
            }
            RecipeError::Repeated(option) => write!(f, "recipe option `{option}` is given twice"),
            RecipeError::Value { option, found, expected } => {
                write!(f, "recipe option `{option}` is {expected}, found `{found}`")
            }
        }
    }
}

impl std::error::Error for RecipeError {}

impl FromStr for Recipe {
    type Err = RecipeError;

    fn from_str(text: &str) -> Result<Recipe, RecipeError> {
        let (name, options) = match text.split_once(':') {
            Some((name, options)) => (name, Some(options)),
            None => (text, None),
        };
        let plain = match name {
            "f64" => Recipe::F64,
            "f32" => Recipe::F32,
            "bf16" => Recipe::Bf16,
            "fp8-delayed" => return delayed(options).map(Recipe::Fp8Delayed),
            _ => return Err(RecipeError::Name(name.into())),
        };
        match options {
            None => Ok(plain),
            Some(found) => Err(RecipeError::Option { recipe: plain.name(), found: found.into() }),
        }
    }
}

fn delayed(options: Option<&str>) -> Result<Delayed, RecipeError> {
    let mut delayed = Delayed::default();
    let mut seen = [false; OPTIONS.len()];
    for option in options.into_iter().flat_map(|options| options.split(',')) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let Some(index) = OPTIONS.iter().position(|known| *known == name) else {
            return Err(RecipeError::Option { recipe: "fp8-delayed", found: name.into() });
        };
        if core::mem::replace(&mut seen[index], true) {
            return Err(RecipeError::Repeated(OPTIONS[index]));
        }
        let wrong = |expected: &str| RecipeError::Value {
            option: OPTIONS[index],
            found: value.into(),
            expected: expected.into(),
        };
        match name {
            "history" => delayed.history = value.parse().map_err(|_| wrong("a number of values"))?,
            "margin" => delayed.margin = value.parse().map_err(|_| wrong("an exponent"))?,
            "algo" => {
                delayed.algo = match value {
                    "max" => AmaxAlgo::Max,
                    "most-recent" => AmaxAlgo::MostRecent,
                    _ => return Err(wrong("max or most-recent")),
                }
            }
            "update" => {
                delayed.update = match value {
                    "microbatch" => Update::Microbatch,
                    "step" => Update::Step,
                    _ => return Err(wrong("microbatch or step")),
                }
            }
            "loss-scale" => {
                let exponent = value.strip_prefix("2^").and_then(|exponent| exponent.parse().ok());
                delayed.loss_scale_log2 = exponent.ok_or_else(|| wrong("a power of two, as in 2^14"))?;
            }
            _ => {
                delayed.head = match value {
                    "fp8" => Head::Fp8,
                    "bf16" => Head::Bf16,
                    _ => return Err(wrong("fp8 or bf16")),
                }
            }
        }
    }
    delayed.validate()?;
    Ok(delayed)
}

impl fmt::Display for Recipe {
    /// The text form; options are written where they differ from the default.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        let Recipe::Fp8Delayed(delayed) = self else { return Ok(()) };
        let default = Delayed::default();
        let mut separator = ':';
        let mut option = |differs: bool, name: &str, value: &dyn fmt::Display| {
            if differs {
                write!(f, "{separator}{name}={value}")?;
                separator = ',';
            }
            Ok(())
        };
        let algo = if delayed.algo == AmaxAlgo::Max { "max" } else { "most-recent" };
        let update = if delayed.update == Update::Step { "step" } else { "microbatch" };
        let head = if delayed.head == Head::Fp8 { "fp8" } else { "bf16" };
        let loss_scale = delayed.loss_scale_log2;
        option(delayed.history != default.history, "history", &delayed.history)?;
        option(delayed.margin != default.margin, "margin", &delayed.margin)?;
        option(delayed.algo != default.algo, "algo", &algo)?;
        option(delayed.update != default.update, "update", &update)?;
        option(loss_scale != default.loss_scale_log2, "loss-scale", &format_args!("2^{loss_scale}"))?;
        option(delayed.head != default.head, "head", &head)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        text.parse::<Recipe>().unwrap_err().to_string()
    }

    #[test]
    fn text_round_trips() {
        for text in [
            "f64",
            "f32",
            "bf16",
            "fp8-delayed",
            "fp8-delayed:history=1024",
            "fp8-delayed:history=4,margin=-1,algo=most-recent,update=step,loss-scale=2^0,head=bf16",
        ] {
            assert_eq!(text.parse::<Recipe>().unwrap().to_string(), text);
        }
        assert_eq!("fp8-delayed".parse(), Ok(Recipe::fp8_delayed()));
        assert_eq!(Recipe::fp8_delayed(), Recipe::Fp8Delayed(Delayed::default()));
        assert_eq!("fp8-delayed:algo=max".parse(), Ok(Recipe::fp8_delayed()));
    }

    // case B53: an unknown recipe is refused, never replaced by a default.
    #[test]
    fn unknown_recipes_are_refused_and_the_right_ones_listed() {
        for text in ["Delayed ", "delay", "", "fp8", "fp8-delayed ", " bf16", "BF16"] {
            assert!(text.parse::<Recipe>().is_err(), "{text:?}");
        }
        assert_eq!(refused("Delayed "), "unknown recipe `Delayed `; one of: f64, f32, bf16, fp8-delayed");
        assert_eq!(refused("bf16:history=4"), "recipe `bf16` takes no options, found `history=4`");
        assert_eq!(
            refused("fp8-delayed:len=4"),
            "recipe `fp8-delayed` has no option `len`; one of: history, margin, algo, update, loss-scale, head"
        );
        assert_eq!(refused("fp8-delayed:margin=1,margin=2"), "recipe option `margin` is given twice");
    }

    #[test]
    fn values_out_of_range_are_refused() {
        assert_eq!(refused("fp8-delayed:history=0"), "recipe option `history` is 1 to 65536, found `0`");
        assert_eq!(refused("fp8-delayed:update=none"), "recipe option `update` is microbatch or step, found `none`");
        assert_eq!(
            refused("fp8-delayed:loss-scale=1000"),
            "recipe option `loss-scale` is a power of two, as in 2^14, found `1000`"
        );
        assert_eq!(refused("fp8-delayed:loss-scale=2^99"), "recipe option `loss-scale` is 2^-64 to 2^64, found `2^99`");
        for text in ["margin=65", "margin=-9999999999", "algo=maximum", "head=e4m3", "history=", "margin"] {
            assert!(format!("fp8-delayed:{text}").parse::<Recipe>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_schedule_must_be_as_strict_as_the_recipe() {
        let step: Recipe = "fp8-delayed:update=step".parse().unwrap();
        for (recipe, fits) in [
            (Recipe::Bf16, [true, true, true]),
            (step, [false, true, true]),
            (Recipe::fp8_delayed(), [false, false, true]),
        ] {
            assert_eq!([Update::None, Update::Step, Update::Microbatch].map(|update| recipe.fits(update)), fits);
        }
    }

    #[test]
    fn the_loss_scale_is_an_exact_power_of_two() {
        assert_eq!(Recipe::fp8_delayed().loss_scale(), 16384.0);
        assert_eq!(Recipe::Bf16.loss_scale(), 1.0);
        assert_eq!("fp8-delayed:loss-scale=2^-3".parse::<Recipe>().unwrap().loss_scale(), 0.125);
    }
}
