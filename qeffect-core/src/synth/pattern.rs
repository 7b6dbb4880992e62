//! Schedules that repeat a building block: V-shapes whose memory is chosen by the block.
//!
//! Qi et al., *Pipeline Parallelism with Controllable Memory*, 2024. Each rank holds two stages in a
//! V. A block says in which unit slot a rank runs F and I of both for microbatch 0; microbatch m runs
//! six slots per microbatch later, and the W's, oldest first, take what is free. How long a block
//! keeps a microbatch decides the peak. The steady state is the block's; both ends are then tightened:
//! actions move to earlier free slots as long as what they need is there and the peak does not grow,
//! once with the W's in their places, and once (at the end alone) with the W's taken out and filled in
//! anew. The order of slots on a rank is its program.

use std::borrow::Cow;

use super::{Parts, assemble, item};
use crate::action::{Item, Kind};
use crate::ids::Rank;
use crate::schedule::Schedule;

/// Slots of F on the way down, F on the way up, I on the way up and I on the way down, of
/// microbatch 0 on one rank.
pub type Block = [u32; 4];

/// Slots from one microbatch to the next: F, I and W of two stages.
const TURN: u32 = 6;

/// Why a block is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Invalid {
    /// No rank, no microbatch, or more actions than a schedule may have.
    Size,
    /// On this rank an action stands before what it needs, or two actions take the same slot.
    Slots(Rank),
}

/// Repeats a block, one entry per rank, for a number of microbatches.
///
/// # Errors
///
/// If the block contradicts itself or the sizes are out of range (at most 2^20 actions: tightening
/// takes time that grows with the square of ranks and microbatches).
pub fn repeat(name: &'static str, block: &[Block], microbatches: u32) -> Result<Schedule, Invalid> {
    const MOST: u64 = 1 << 20;
    let ranks = u32::try_from(block.len()).map_err(|_| Invalid::Size)?;
    if ranks == 0 || microbatches == 0 || u64::from(ranks) * u64::from(microbatches) * u64::from(TURN) > MOST {
        return Err(Invalid::Size);
    }
    validate(block)?;
    let rows = |starts: &Block| {
        let mut rows: Rows = Default::default();
        for (row, start) in rows.iter_mut().zip(starts) {
            row.extend((0..microbatches).map(|m| start + TURN * m));
        }
        rows[WEIGHT] = weights(&rows);
        rows
    };
    let mut grid: Vec<Rows> = block.iter().map(rows).collect();
    tighten(&mut grid, Pass::Both);
    squeeze(&mut grid);
    tighten(&mut grid, Pass::End);
    let placement: Vec<Rank> = (0..ranks).chain((0..ranks).rev()).map(Rank).collect();
    let programs = (0..ranks).map(|rank| program(&grid[rank as usize], rank, ranks)).collect();
    let params = vec![(Cow::Borrowed("P"), i64::from(ranks)), (Cow::Borrowed("M"), i64::from(microbatches))];
    Ok(assemble(Parts { name, params, ranks, microbatches, placement: &placement, programs }))
}

/// Slots of one rank: [`Block`]'s four kinds by microbatch, and the W's by the order of their I's.
type Rows = [Vec<u32>; 5];

const INPUT: [usize; 2] = [2, 3];
const WEIGHT: usize = 4;

fn validate(block: &[Block]) -> Result<(), Invalid> {
    for (rank, starts) in block.iter().enumerate() {
        let fault = Err(Invalid::Slots(Rank(rank as u32)));
        if !starts.is_sorted_by(|a, b| a < b) {
            return fault;
        }
        let mut residues = starts.map(|start| start % TURN);
        residues.sort_unstable();
        if residues.windows(2).any(|pair| pair[0] == pair[1]) {
            return fault;
        }
        // F goes down on row 0 and up on row 1, I down again on row 2 and up on row 3.
        if let Some(before) = rank.checked_sub(1).map(|before| block[before])
            && !(before[0] < starts[0] && starts[1] < before[1] && before[2] < starts[2] && starts[3] < before[3])
        {
            return fault;
        }
    }
    Ok(())
}

/// The I's of a rank in time: slot, row and microbatch.
fn input_grads(rows: &Rows) -> impl Iterator<Item = (u32, usize, usize)> + '_ {
    let mut next = [0usize; 2];
    std::iter::from_fn(move || {
        let at = |n: usize, next: &[usize; 2]| rows[INPUT[n]].get(next[n]).copied();
        let first = match (at(0, &next), at(1, &next)) {
            (Some(a), Some(b)) => usize::from(b < a),
            (Some(_), None) => 0,
            (None, Some(_)) => 1,
            (None, None) => return None,
        };
        let slot = at(first, &next)?;
        next[first] += 1;
        Some((slot, INPUT[first], next[first] - 1))
    })
}

/// Slots of the W's, oldest first, where the rank is free.
fn weights(rows: &Rows) -> Vec<u32> {
    let mut passed = [0usize; 4];
    let mut slot = 0;
    let mut found = Vec::with_capacity(rows[2].len() * 2);
    for (input, ..) in input_grads(rows) {
        slot = slot.max(input + 1);
        loop {
            let mut taken = false;
            for (row, passed) in rows.iter().zip(&mut passed) {
                *passed += row[*passed..].iter().take_while(|known| **known < slot).count();
                taken |= row.get(*passed) == Some(&slot);
            }
            if !taken {
                break;
            }
            slot += 1;
        }
        found.push(slot);
        slot += 1;
    }
    found
}

/// Most microbatches that are live at once, over both stages: from F to the end of W.
fn peak(rows: &Rows) -> usize {
    let (mut down, mut up, mut ended, mut most) = (0, 0, 0, 0);
    loop {
        let slot = match (rows[0].get(down), rows[1].get(up)) {
            (Some(first), Some(second)) if second < first => {
                up += 1;
                *second
            }
            (Some(first), _) => {
                down += 1;
                *first
            }
            (None, Some(second)) => {
                up += 1;
                *second
            }
            (None, None) => return most,
        };
        ended += rows[WEIGHT][ended..].iter().take_while(|weight| **weight < slot).count();
        most = most.max(down + up - ended);
    }
}

/// Which ends are tightened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// Both, with every W in its slot.
    Both,
    /// The end alone; the W's are filled in anew around each move.
    End,
}

/// Moves the actions before and after the steady state to the earliest slots that keep the peak.
///
/// The steady state begins with the first I of the first stage and ends with its last F.
fn tighten(grid: &mut [Rows], pass: Pass) {
    let limit = grid.iter().map(peak).max().unwrap_or(0);
    let kinds = if pass == Pass::Both { 0..5 } else { 0..4 };
    let mut order: Vec<(u32, usize, usize, usize)> = Vec::new();
    for (rank, rows) in grid.iter().enumerate() {
        for row in kinds.clone() {
            order.extend(rows[row].iter().enumerate().map(|(n, slot)| (*slot, rank, row, n)));
        }
    }
    order.sort_unstable();
    let at = |row, n| order.iter().position(|o| (o.1, o.2, o.3) == (0, row, n)).unwrap_or(order.len());
    let first = at(3, 0);
    let last = at(0, grid[0][0].len() - 1).max(first);
    let horizon = order.last().map_or(0, |o| o.0 as usize + 1);
    let mut taken = vec![vec![false; horizon]; grid.len()];
    for (at, &(slot, rank, row, n)) in order.iter().enumerate() {
        let fixed = (first..=last).contains(&at) || (at < first && pass == Pass::End);
        let mut chosen = slot;
        if !fixed {
            for earlier in ready(grid, rank, row, n)..slot {
                if taken[rank][earlier as usize] {
                    continue;
                }
                grid[rank][row][n] = earlier;
                if pass == Pass::End {
                    grid[rank][WEIGHT] = weights(&grid[rank]);
                }
                if peak(&grid[rank]) <= limit {
                    chosen = earlier;
                    break;
                }
            }
            grid[rank][row][n] = chosen;
        }
        taken[rank][chosen as usize] = true;
    }
    if pass == Pass::End {
        for rows in grid {
            rows[WEIGHT] = weights(rows);
        }
    }
}

/// The first slot in which everything that an action needs has ended.
fn ready(grid: &[Rows], rank: usize, row: usize, n: usize) -> u32 {
    let rows = &grid[rank];
    let before = (n > 0).then(|| rows[row][n - 1]);
    let (own, other) = match row {
        WEIGHT => (input_grads(rows).nth(n).map(|(slot, ..)| slot), None),
        0 => (None, rank.checked_sub(1)),
        2 => (Some(rows[1][n]), rank.checked_sub(1)),
        _ => (Some(rows[row - 1][n]), Some(rank + 1)),
    };
    let other = other.and_then(|other| grid.get(other)).map(|rows| rows[row][n]);
    [before, own, other].into_iter().flatten().max().map_or(0, |slot| slot + 1)
}

/// Runs every program in its order as early as it can: gaps that nothing needs disappear.
fn squeeze(grid: &mut [Rows]) {
    let mut order: Vec<(u32, usize, usize, usize)> = Vec::new();
    for (rank, rows) in grid.iter().enumerate() {
        for (row, slots) in rows.iter().enumerate() {
            order.extend(slots.iter().enumerate().map(|(n, slot)| (*slot, rank, row, n)));
        }
    }
    order.sort_unstable();
    let mut free = vec![0; grid.len()];
    for (_, rank, row, n) in order {
        let other = match row {
            0 | 2 => rank.checked_sub(1),
            1 | 3 => Some(rank + 1),
            _ => None,
        };
        // What it needs came earlier in this order, and so has its new slot already.
        let arrives = other.and_then(|other| grid.get(other)).map_or(0, |rows| rows[row][n] + 1);
        let slot = arrives.max(free[rank]);
        grid[rank][row][n] = slot;
        free[rank] = slot + 1;
    }
}

/// The actions of a rank in the order of their slots.
fn program(rows: &Rows, rank: u32, ranks: u32) -> Vec<Item> {
    let stage_of = |row: usize| if row == 0 || row == 3 { rank } else { 2 * ranks - 1 - rank };
    let mut slots: Vec<(u32, Item)> = Vec::with_capacity(rows[0].len() * TURN as usize);
    for (row, times) in rows[..WEIGHT].iter().enumerate() {
        let kind = if row < 2 { Kind::Forward } else { Kind::InputGrad };
        slots.extend(times.iter().enumerate().map(|(m, slot)| (*slot, item(kind, stage_of(row), m as u32))));
    }
    let weights = rows[WEIGHT].iter().zip(input_grads(rows));
    slots.extend(weights.map(|(slot, (_, row, m))| (*slot, item(Kind::WeightGrad, stage_of(row), m as u32))));
    slots.sort_by_key(|(slot, _)| *slot);
    slots.into_iter().map(|(_, item)| item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counted slot by slot.
    fn plain_peak(rows: &Rows) -> usize {
        let end = rows[WEIGHT].iter().max().copied().unwrap_or(0);
        let live = |slot: u32| {
            let begun = rows[..2].iter().flatten().filter(|f| **f <= slot).count();
            begun - rows[WEIGHT].iter().filter(|w| **w < slot).count()
        };
        (0..=end).map(live).max().unwrap_or(0)
    }

    #[test]
    fn weights_take_the_first_free_slots_and_peaks_are_counted_right() {
        for starts in [[0, 1, 2, 3], [0, 7, 8, 15], [2, 9, 11, 18], [3, 4, 11, 18]] {
            for m in 1..9 {
                let mut rows: Rows = Default::default();
                for (row, start) in rows.iter_mut().zip(starts) {
                    row.extend((0..m).map(|n| start + TURN * n));
                }
                rows[WEIGHT] = weights(&rows);
                let mut all: Vec<u32> = rows.iter().flatten().copied().collect();
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len(), 6 * m as usize, "no slot twice");
                assert!(rows[WEIGHT].iter().zip(input_grads(&rows)).all(|(w, (i, ..))| *w > i));
                assert_eq!(peak(&rows), plain_peak(&rows), "{starts:?} {m}");
            }
        }
    }

    #[test]
    fn blocks_that_contradict_themselves_are_refused() {
        assert_eq!(repeat("x", &[], 1).err(), Some(Invalid::Size));
        assert_eq!(repeat("x", &[[0, 1, 2, 3]], 0).err(), Some(Invalid::Size));
        assert_eq!(repeat("x", &[[0, 1, 2, 3]], u32::MAX).err(), Some(Invalid::Size));
        assert_eq!(repeat("x", &[[0, 1, 2, 6]], 1).err(), Some(Invalid::Slots(Rank(0))));
        assert_eq!(repeat("x", &[[1, 0, 2, 3]], 1).err(), Some(Invalid::Slots(Rank(0))));
        assert_eq!(repeat("x", &[[0, 1, 2, 3], [0, 1, 2, 3]], 1).err(), Some(Invalid::Slots(Rank(1))));
        assert!(repeat("x", &[[0, 1, 2, 3]], 3).is_ok());
    }
}
