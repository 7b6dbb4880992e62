//! Text from a trained model: one token at a time, from the logits of a window.

use crate::data::Windows;
use crate::error::{Error, Result};
use crate::rng;

/// How tokens are chosen.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Logits are divided by this; 0: the most likely token, always.
    pub temperature: f64,
    /// Only this many of the most likely tokens are eligible; 0: all.
    pub top_k: usize,
    /// Names the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling { temperature: 0.8, top_k: 40, seed: 1 }
    }
}

impl Sampling {
    /// The token that follows, given its logits; `position` names the draw. Logits that are not numbers are passed over;
    /// `None` if there is no other.
    pub fn choose(&self, logits: &[f64], position: u64) -> Option<u32> {
        let mut ranked: Vec<(u32, f64)> =
            logits.iter().enumerate().map(|(token, x)| (token as u32, *x)).filter(|(_, x)| !x.is_nan()).collect();
        // Stable: of equal logits the smaller token comes first.
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        let best = *ranked.first()?;
        if self.temperature <= 0.0 || !best.1.is_finite() {
            return Some(best.0);
        }
        if self.top_k > 0 {
            ranked.truncate(self.top_k);
        }
        let weights: Vec<f64> = ranked.iter().map(|(_, x)| libm::exp((x - best.1) / self.temperature)).collect();
        let total: f64 = weights.iter().sum();
        let mut left = rng::uniform(rng::draw(&[self.seed, rng::name("sample"), position])) * total;
        for ((token, _), weight) in ranked.iter().zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return Some(*token);
            }
        }
        ranked.last().map(|(token, _)| *token)
    }
}

/// Continues `prompt` by `count` tokens.
///
/// `logits` runs the model on a microbatch of `sequences` windows of `seq` tokens and gives one row of logits per token;
/// only the first sequence carries text. The model sees the last `seq` tokens.
pub fn generate(
    prompt: &[u32],
    count: usize,
    [seq, sequences]: [usize; 2],
    sampling: &Sampling,
    mut logits: impl FnMut(&Windows) -> Result<Vec<f64>>,
) -> Result<Vec<u32>> {
    if prompt.is_empty() || seq == 0 || sequences == 0 {
        return Err(Error::Config("text is continued from at least one token".into()));
    }
    let mut text = prompt.to_vec();
    for _ in 0..count {
        let seen = &text[text.len().saturating_sub(seq)..];
        let mut tokens = vec![0; seq * sequences];
        tokens[..seen.len()].copy_from_slice(seen); // what follows is not seen: attention is causal
        let windows = Windows { targets: vec![0; tokens.len()], tokens };
        let all = logits(&windows)?;
        let vocabulary = all.len() / windows.tokens.len();
        let last = &all[(seen.len() - 1) * vocabulary..][..vocabulary];
        let Some(token) = sampling.choose(last, text.len() as u64) else {
            return Err(Error::Config("the model gives no logit that is a number".into()));
        };
        text.push(token);
    }
    Ok(text)
}

/// Bytes as text: what is not UTF-8 is replaced.
pub fn text(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().map(|token| u8::try_from(*token).unwrap_or(b'?')).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_drawn_in_proportion_to_their_probability() {
        let sampling = Sampling { temperature: 0.5, top_k: 3, seed: 3 };
        let logits = [0.0, 1.0, f64::NAN, 0.5, -3.0];
        let n = 20_000;
        let mut counts = [0f64; 5];
        (0..n).for_each(|i| counts[sampling.choose(&logits, i).unwrap() as usize] += 1.0 / n as f64);
        let weights = [0.0f64, 2.0, 1.0].map(f64::exp); // tokens 0, 1 and 3 at half the temperature
        let total: f64 = weights.iter().sum();
        for (token, weight) in [0, 1, 3].into_iter().zip(weights) {
            assert!((counts[token] - weight / total).abs() < 0.015, "{counts:?}");
        }
        assert_eq!((counts[2], counts[4]), (0.0, 0.0));
    }

    #[test]
    fn no_temperature_takes_the_most_likely() {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(sampling.choose(&[1.0, 3.0, 3.0, f64::NAN], 0), Some(1));
        assert_eq!(sampling.choose(&[f64::NAN], 0), None);
        assert_eq!(Sampling::default().choose(&[0.0, f64::INFINITY], 0), Some(1));
    }

    #[test]
    fn text_is_continued_from_the_last_tokens_of_the_window() {
        // The "model" expects the successor of each token of the first sequence.
        let successor = |windows: &Windows| {
            assert_eq!(windows.tokens.len(), 8);
            Ok(windows.tokens.iter().flat_map(|t| (0..10).map(move |v| f64::from(v == (t + 1) % 10))).collect())
        };
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let text = generate(&[7, 8], 6, [4, 2], &greedy, successor).unwrap();
        assert_eq!(text, [7, 8, 9, 0, 1, 2, 3, 4]);
        assert!(generate(&[], 1, [4, 2], &greedy, successor).is_err());
        assert_eq!(super::text(&[72, 105, 300]), "Hi?");
    }
}
