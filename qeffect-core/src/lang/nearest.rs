//! The name that was probably meant.

/// The candidate that differs least from `word`, if it is near enough to be a slip.
pub(crate) fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = word.chars().count().max(3) / 3;
    candidates
        .filter(|c| *c != word)
        .map(|c| (distance(word, c), c))
        .filter(|(d, c)| *d <= limit && *d < c.chars().count())
        .min_by_key(|(d, _)| *d)
        .map(|(_, c)| c)
}

/// Edits (insert, delete, replace, swap of neighbours) between two words.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before = Vec::new();
    let mut previous: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replace = previous[j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replace.min(previous[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                let swap: &Vec<usize> = &before;
                best = best.min(swap[j - 2] + 1);
            }
            row.push(best);
        }
        before = core::mem::replace(&mut previous, row);
    }
    previous[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_found_and_strangers_are_not() {
        let names = ["warm", "ranks", "m", "M"];
        assert_eq!(nearest("wram", names.into_iter()), Some("warm"));
        assert_eq!(nearest("rank", names.into_iter()), Some("ranks"));
        assert_eq!(nearest("cooldown", names.into_iter()), None);
        assert_eq!(nearest("q", names.into_iter()), None);
    }
}
