//! Which command of a list runs in which lane, and whom it waits for.
//!
//! Commands are placed one after the other where they can start first, by estimated times; the one on which the longest
//! chain depends goes first among equals. The same list gives the same lanes. A wait that follows from earlier ones, of
//! the same lane or of those it waited for, is left out.

use super::unit::{Piece, Unit};
use crate::cmd::Cmd;
use crate::cmd::fused::Producer;
use crate::device::{Buf, BufSpec, DeviceError};

/// A command in its lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Placed {
    /// Its position in the list.
    pub(super) index: usize,
    /// Its lane.
    pub(super) lane: usize,
    /// Commands of other lanes that it waits for.
    pub(super) waits: Vec<usize>,
}

/// Places commands, given for each those before it that it must follow, and its estimated time. The result is in an order
/// in which it may be issued.
pub(super) fn place(before: &[Vec<usize>], costs: &[f64], lanes: usize) -> Vec<Placed> {
    let count = before.len();
    let lanes = lanes.max(1);
    let mut after = vec![Vec::new(); count];
    for (index, others) in before.iter().enumerate() {
        others.iter().for_each(|other| after[*other].push(index));
    }
    // The longest chain from here to the end: everything a command precedes has a higher index.
    let mut chain = vec![0.0f64; count];
    for index in (0..count).rev() {
        chain[index] = costs[index] + after[index].iter().map(|next| chain[*next]).fold(0.0, f64::max);
    }
    let mut missing: Vec<usize> = before.iter().map(Vec::len).collect();
    let mut ready: Vec<usize> = (0..count).filter(|index| missing[*index] == 0).collect();
    let mut finish = vec![0.0f64; count];
    let mut lane_of = vec![0usize; count];
    let mut free = vec![0.0f64; lanes];
    // Per command and lane, how many commands of that lane are known to be done before it ends.
    let mut known = vec![vec![0usize; lanes]; count];
    let mut place_in_lane = vec![0usize; count];
    let mut last: Vec<Option<usize>> = vec![None; lanes];
    let mut lengths = vec![0usize; lanes];
    let mut placed = Vec::with_capacity(count);
    while !ready.is_empty() {
        let start =
            |index: usize, lane: usize| before[index].iter().map(|other| finish[*other]).fold(free[lane], f64::max);
        let mut best: Option<(f64, f64, bool, usize, usize, usize)> = None;
        for (at, index) in ready.iter().enumerate() {
            // In the lane of what it waits for last, it needs no event.
            let last = before[*index].iter().copied().max_by(|a, b| finish[*a].total_cmp(&finish[*b]));
            let home = last.map(|last| lane_of[last]);
            for lane in 0..lanes {
                let found = (start(*index, lane), -chain[*index], home != Some(lane), *index, lane, at);
                let less = best.is_none_or(|best| {
                    let order = found.0.total_cmp(&best.0).then(found.1.total_cmp(&best.1));
                    order.then((found.2, found.3, found.4).cmp(&(best.2, best.3, best.4))).is_lt()
                });
                if less {
                    best = Some(found);
                }
            }
        }
        let Some((begin, _, _, index, lane, at)) = best else { break };
        ready.swap_remove(at);
        let mut seen = last[lane].map_or_else(|| vec![0; lanes], |last| known[last].clone());
        let mut waits: Vec<usize> = Vec::new();
        let mut others: Vec<usize> = before[index].clone();
        others.sort_unstable_by_key(|other| std::cmp::Reverse(*other)); // the latest first: they imply most
        for other in others {
            if seen[lane_of[other]] <= place_in_lane[other] {
                waits.push(other);
                seen.iter_mut().zip(&known[other]).for_each(|(seen, known)| *seen = (*seen).max(*known));
            }
        }
        finish[index] = begin + costs[index];
        free[lane] = finish[index];
        lane_of[index] = lane;
        place_in_lane[index] = lengths[lane];
        lengths[lane] += 1;
        seen[lane] = lengths[lane];
        known[index] = seen;
        last[lane] = Some(index);
        placed.push(Placed { index, lane, waits });
        for next in &after[index] {
            missing[*next] -= 1;
            if missing[*next] == 0 {
                ready.push(*next);
            }
        }
    }
    placed
}

/// What a command takes on an H200 beside its traffic, in microseconds: launch, latency, chains inside of it. From the
/// times of single kernels at 256 rows.
fn latency(unit: &Unit<'_>) -> f64 {
    match unit.cmd {
        _ if unit.piece == Piece::Vectors => 5.0,
        Cmd::Attention { .. } => 7.0,
        Cmd::AttentionGrad { .. } => 16.0,
        Cmd::LayerNorm { .. } | Cmd::RmsNorm { .. } => 5.0,
        Cmd::LayerNormGrad { .. } | Cmd::RmsNormGrad { .. } => 4.0,
        Cmd::CrossEntropy { .. } => 5.0,
        Cmd::Gemm { .. } | Cmd::GroupGemm { .. } => 4.0,
        Cmd::Quantise { .. } => 3.5,
        Cmd::Fused(fused) => match fused.producer {
            Producer::Stored { .. } => 5.0,
            Producer::LayerNorm { .. } | Producer::RmsNorm { .. } => 8.0, // alone it takes 5, but 8 places better
            Producer::LayerNormGrad { .. } | Producer::RmsNormGrad { .. } => 5.0,
            Producer::Gelu { .. } | Producer::Silu { .. } | Producer::Swiglu { .. } => 7.0,
            Producer::GeluGrad { .. } | Producer::SiluGrad { .. } | Producer::SwigluGrad { .. } => 9.0,
            Producer::CrossEntropyGrad { .. } => 8.0,
            Producer::AdamW { .. } => 2.0,
        },
        _ => 1.5,
    }
}

/// A rough time of a command in microseconds: a constant, and its traffic or its arithmetic.
pub(super) fn cost<'a>(
    unit: &Unit<'_>,
    spec: impl Fn(Buf) -> Result<&'a BufSpec, DeviceError>,
) -> Result<f64, DeviceError> {
    const BYTES: f64 = 3.5e6; // per microsecond
    const FLOPS: f64 = 1.3e9;
    let cmd = unit.cmd;
    let mut bytes = 0;
    // Of an embedding's tables only some rows are touched.
    let rows_of_tokens = matches!(cmd, Cmd::Embed { .. } | Cmd::EmbedGrad { accumulate: true, .. });
    for access in unit.effects.iter().filter(|_| !rows_of_tokens) {
        let spec = spec(access.buf)?;
        bytes += access.count(spec.elements()) * spec.dtype.size();
    }
    let flops = match cmd {
        Cmd::Gemm { m, n, k, .. } => 2.0 * *m as f64 * *n as f64 * *k as f64,
        Cmd::GroupGemm { m, n, k, members, .. } => 2.0 * (m * n) as f64 * (k * members) as f64,
        _ => 0.0,
    };
    Ok(latency(unit) + (bytes as f64 / BYTES).max(flops / FLOPS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;

    /// Who is done before a command begins, by the lanes and waits alone.
    fn done_before(placed: &[Placed], count: usize) -> Vec<Vec<bool>> {
        let mut done = vec![vec![false; count]; count];
        let mut last: Vec<Option<usize>> = vec![None; 64];
        for Placed { index, lane, waits } in placed {
            for other in last[*lane].iter().chain(waits) {
                let mut known = done[*other].clone();
                known[*other] = true;
                done[*index].iter_mut().zip(known).for_each(|(done, known)| *done |= known);
            }
            last[*lane] = Some(*index);
        }
        done
    }

    #[test]
    fn lanes_and_waits_keep_every_order() {
        for seed in 0..200u64 {
            let count = 2 + (rng::draw(&[seed]) % 60) as usize;
            let before: Vec<Vec<usize>> = (0..count)
                .map(|i| (0..i).filter(|j| rng::draw(&[seed, i as u64, *j as u64]).is_multiple_of(7)).collect())
                .collect();
            let costs: Vec<f64> = (0..count).map(|i| 1.0 + (rng::draw(&[seed, 9, i as u64]) % 9) as f64).collect();
            for lanes in [1, 2, 4] {
                let placed = place(&before, &costs, lanes);
                assert_eq!(placed, place(&before, &costs, lanes), "the same again");
                let mut all: Vec<usize> = placed.iter().map(|p| p.index).collect();
                all.sort_unstable();
                assert_eq!(all, (0..count).collect::<Vec<_>>());
                assert!(placed.iter().all(|p| p.lane < lanes));
                let done = done_before(&placed, count);
                for (index, others) in before.iter().enumerate() {
                    assert!(others.iter().all(|other| done[index][*other]), "seed {seed}: {index} after {others:?}");
                }
                if lanes == 1 {
                    assert!(placed.iter().all(|p| p.waits.is_empty()));
                }
            }
        }
    }

    #[test]
    fn what_is_independent_runs_side_by_side_and_waits_are_few() {
        // Two chains that meet: 0 → 1 → 2 and 3 → 4 → 5, then 6.
        let before = vec![vec![], vec![0], vec![0, 1], vec![], vec![3], vec![3, 4], vec![0, 1, 2, 3, 4, 5]];
        let placed = place(&before, &[1.0; 7], 4);
        let lane = |index| placed.iter().find(|p| p.index == index).unwrap().lane;
        assert!(lane(0) == lane(1) && lane(1) == lane(2) && lane(3) == lane(4) && lane(4) == lane(5));
        assert_ne!(lane(0), lane(3));
        let waits: usize = placed.iter().map(|p| p.waits.len()).sum();
        assert_eq!(waits, 1, "the last one waits for the other chain's end: {placed:?}");
    }
}
