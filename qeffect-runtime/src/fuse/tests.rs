//! Random lists leave the same bits in every buffer that is kept, fused or not; and what must not be fused is not.

use std::collections::{BTreeMap, BTreeSet};

use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;

use super::*;
use crate::cmd::Scalar;
use crate::cpu::CpuDevice;
use crate::device::{BufSpec, Device};
use crate::rng;

struct Dice(u64, u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        rng::below(rng::draw(&[self.0, self.1]), n as u64) as usize
    }

    /// Different ones.
    fn some<const N: usize>(&mut self, of: &[Buf]) -> [Buf; N] {
        let mut left = of.to_vec();
        std::array::from_fn(|_| left.remove(self.below(left.len())))
    }
}

const ROWS: usize = 5;
const COLS: usize = 6;

/// Few buffers of each kind, so that commands meet.
struct Bench {
    device: CpuDevice,
    matrices: Vec<Buf>,
    wide: Vec<Buf>,
    wide_codes: Vec<Buf>,
    per_row: Vec<Buf>,
    per_column: Vec<Buf>,
    codes: Vec<Buf>,
    turned: Vec<Buf>,
    ones: Vec<Buf>,
    scales: Buf,
    targets: Buf,
    flag: Buf,
}

impl Bench {
    fn new(seed: u64) -> Bench {
        let mut device = CpuDevice::new();
        let mut count = 0;
        let mut make = |name: &str, dtype: Dtype, rows: usize, cols: usize, n: usize| -> Vec<Buf> {
            let one = |_| {
                let buf = device.alloc(BufSpec::new(name, dtype, rows, cols)).unwrap();
                let bytes: Vec<u8> = (0..rows * cols)
                    .flat_map(|_| {
                        count += 1;
                        match dtype {
                            Dtype::F32 => {
                                let x = rng::uniform(rng::draw(&[seed, count])) as f32 * 2.0 - 0.9;
                                x.to_le_bytes().to_vec()
                            }
                            Dtype::U32 => 0u32.to_le_bytes().to_vec(),
                            _ => vec![0],
                        }
                    })
                    .collect();
                device.write(buf, &bytes).unwrap();
                buf
            };
            (0..n).map(one).collect()
        };
        Bench {
            matrices: make("matrix", Dtype::F32, ROWS, COLS, 6),
            wide: make("wide", Dtype::F32, ROWS, 2 * COLS, 3),
            wide_codes: make("wide codes", Dtype::E4M3, ROWS, 2 * COLS, 2),
            per_row: make("per row", Dtype::F32, ROWS, 1, 3),
            per_column: make("per column", Dtype::F32, 1, COLS, 4),
            codes: make("codes", Dtype::E4M3, ROWS, COLS, 3),
            turned: make("transposed codes", Dtype::E4M3, COLS, ROWS, 3),
            ones: make("one", Dtype::F32, 1, 1, 3),
            scales: make("scales", Dtype::F32, 1, 3, 1)[0],
            targets: make("targets", Dtype::U32, ROWS, 1, 1)[0],
            flag: make("flag", Dtype::U32, 1, 1, 1)[0],
            device,
        }
    }

    fn all(&self) -> Vec<Buf> {
        let lists = [
            &self.matrices,
            &self.wide,
            &self.wide_codes,
            &self.per_row,
            &self.per_column,
            &self.codes,
            &self.turned,
            &self.ones,
        ];
        lists.into_iter().flatten().copied().chain([self.scales, self.flag]).collect()
    }

    fn sizes(&self) -> BTreeMap<Buf, usize> {
        self.all().into_iter().map(|buf| (buf, self.device.spec(buf).unwrap().elements())).collect()
    }

    fn contents(&mut self, bufs: &BTreeSet<Buf>) -> Vec<Vec<u8>> {
        let read = |buf: &Buf| {
            let mut bytes = vec![0; self.device.spec(*buf).unwrap().bytes()];
            self.device.read(*buf, &mut bytes).unwrap();
            bytes
        };
        bufs.iter().map(read).collect()
    }

    fn cast(&self, dice: &mut Dice, src: Buf) -> Cmd {
        let wide = self.wide.contains(&src);
        let [codes] = dice.some(if wide { &self.wide_codes } else { &self.codes });
        let [turned] = dice.some(&self.turned);
        let [scale_inv] = dice.some(&self.ones);
        Cmd::Quantise {
            src,
            rows: ROWS,
            cols: if wide { 2 * COLS } else { COLS },
            format: Format::E4M3,
            scale: Scalar { buf: self.scales, index: dice.below(2) },
            codes,
            transposed: (!wide && dice.below(2) == 0).then_some(turned),
            beside: None,
            scale_inv,
            amax: (dice.below(2) == 0).then_some(Scalar { buf: self.scales, index: 2 }),
            flag: (dice.below(2) == 0).then_some(self.flag),
        }
    }

    fn random(&self, dice: &mut Dice) -> Vec<Cmd> {
        let [x, y, z] = dice.some(&self.matrices);
        let [w] = dice.some(&self.wide);
        let [mean, rstd] = dice.some(&self.per_row);
        let [gain, bias, sums] = dice.some(&self.per_column);
        let cols = COLS;
        let kind = dice.below(16);
        let cmd = match kind {
            0 => Cmd::Fill { dst: x, value: 0.25 },
            1 => Cmd::Copy { src: x, dst: y },
            2 | 3 => Cmd::Add { a: x, b: y, out: z },
            4 => Cmd::LayerNorm { x, gain, bias, y, mean, rstd, cols },
            5 => Cmd::RmsNorm { x, gain, y, rstd, cols },
            6 => Cmd::LayerNormGrad { dy: x, x: y, gain, mean, rstd, dx: z, gain_grad: bias, bias_grad: sums, cols },
            7 => Cmd::RmsNormGrad { dy: x, x: y, gain, rstd, dx: z, gain_grad: sums, cols },
            8 => Cmd::Gelu { x, y },
            9 => Cmd::GeluGrad { x, dy: y, dx: z },
            10 => Cmd::Silu { x, y },
            11 => Cmd::SiluGrad { x, dy: y, dx: z },
            12 => Cmd::Swiglu { x: w, y, cols },
            13 => {
                let [v, w] = dice.some(&self.wide);
                return vec![Cmd::SwigluGrad { x: v, dy: x, dx: w, cols }, self.cast(dice, w)];
            }
            14 => Cmd::CrossEntropyGrad {
                logits: x,
                targets: self.targets,
                lse: rstd,
                dlogits: y,
                vocabulary: cols,
                factor: 0.5,
            },
            _ => {
                let src = if dice.below(3) == 0 { y } else { x };
                return vec![Cmd::ColumnSums { x, out: sums, cols }, self.cast(dice, src)];
            }
        };
        // What is often asked of the value: its sum with another, a norm of the sum, its codes and column sums.
        let value = made(&cmd).map(|made| made.values).filter(|value| self.matrices.contains(value));
        let mut cmds = vec![cmd];
        if let Some(value) = value {
            let [other, out] = dice.some(&self.matrices);
            if dice.below(3) == 0 && value != other && value != out {
                cmds.push(Cmd::Add { a: value, b: other, out });
                if dice.below(2) == 0 {
                    if dice.below(2) == 0 {
                        cmds.push(Cmd::ColumnSums { x: out, out: sums, cols });
                    }
                    if dice.below(2) == 0 {
                        cmds.push(self.cast(dice, out));
                    }
                    cmds.push(Cmd::Fill { dst: value, value: 0.5 });
                    return cmds;
                }
            }
            if dice.below(2) == 0 {
                cmds.push(Cmd::ColumnSums { x: value, out: sums, cols });
            }
            if dice.below(2) == 0 {
                cmds.push(self.cast(dice, value));
            }
        }
        if let (2 | 3, 0) = (kind, dice.below(2)) {
            let norm = Cmd::LayerNorm { x: z, gain, bias, y: x, mean, rstd, cols };
            cmds.extend([norm, self.cast(dice, x)]);
        }
        cmds
    }
}

#[test]
fn random_lists_keep_their_bits() {
    let mut names = BTreeMap::new();
    let (mut dropped, mut residuals, mut sums, mut cast_sums) = (0, 0, 0, 0);
    for seed in 0..400 {
        let mut dice = Dice(seed, 0);
        let [mut plain, mut joined] = [Bench::new(seed), Bench::new(seed)];
        let cmds: Vec<Cmd> = (0..12).flat_map(|_| plain.random(&mut dice)).collect();
        let kept: BTreeSet<Buf> = plain.all().into_iter().filter(|_| dice.below(2) == 0).collect();
        let sizes = plain.sizes();
        let fused = fuse(cmds.clone(), &|buf| kept.contains(&buf), &|buf| sizes.get(&buf).copied());
        for cmd in &fused {
            if let Cmd::Fused(fused) = cmd {
                *names.entry(fused.name()).or_insert(0) += 1;
                dropped += usize::from(fused.needs_scratch());
                residuals += usize::from(fused.residual.is_some());
                sums += usize::from(fused.plus.is_some());
                cast_sums += usize::from(fused.plus.is_some() && fused.outputs.codes.is_some());
            }
        }
        cmds.iter().for_each(|cmd| plain.device.issue(cmd).unwrap());
        fused.iter().for_each(|cmd| joined.device.issue(cmd).unwrap());
        assert_eq!(plain.contents(&kept), joined.contents(&kept), "seed {seed}: {cmds:#?} became {fused:#?}");
    }
    assert_eq!(names.len(), 12, "every producer was met: {names:?}");
    let counts = (dropped, residuals, sums, cast_sums);
    assert!(dropped > 100 && residuals > 20 && sums > 20 && cast_sums > 5, "{counts:?}");
}

fn sizes(_: Buf) -> Option<usize> {
    Some(ROWS * COLS)
}

/// GELU into `y`, something, then the cast of `y`.
fn with_between(bench: &Bench, between: impl Fn(&Bench) -> Vec<Cmd>) -> Vec<Cmd> {
    let (x, y) = (bench.matrices[0], bench.matrices[1]);
    let mut cmds = vec![Cmd::Gelu { x, y }];
    cmds.extend(between(bench));
    cmds.push(bench.cast(&mut Dice(1, 0), y));
    cmds
}

#[test]
fn a_command_in_the_way_keeps_them_apart() {
    let bench = Bench::new(0);
    let none = |_| false;
    let fused = fuse(with_between(&bench, |_| vec![]), &none, &sizes);
    let [Cmd::Fused(only)] = &fused[..] else { panic!("{fused:?}") };
    assert_eq!((only.name(), only.outputs.values), ("fused_gelu", None));
    // The scale moves between the two.
    let moved = with_between(&bench, |bench| vec![Cmd::Fill { dst: bench.scales, value: 2.0 }]);
    assert_eq!(fuse(moved.clone(), &none, &sizes), moved);
    // Something else does not matter.
    let beside = with_between(&bench, |bench| vec![Cmd::Fill { dst: bench.matrices[2], value: 2.0 }]);
    assert_eq!(fuse(beside, &none, &sizes).len(), 2);
}

#[test]
fn a_value_is_stored_where_somebody_reads_it() {
    let bench = Bench::new(0);
    let (x, y, z) = (bench.matrices[0], bench.matrices[1], bench.matrices[2]);
    let stored = |tail: Vec<Cmd>, kept: &[Buf]| {
        let mut cmds = with_between(&bench, |_| vec![]);
        cmds.extend(tail);
        let fused = fuse(cmds, &|buf| kept.contains(&buf), &sizes);
        let Cmd::Fused(first) = &fused[0] else { panic!("{fused:?}") };
        first.outputs.values.is_some()
    };
    assert!(!stored(vec![], &[]));
    assert!(stored(vec![], &[y]));
    assert!(stored(vec![Cmd::Copy { src: y, dst: z }], &[]));
    assert!(!stored(vec![Cmd::Copy { src: x, dst: y }, Cmd::Copy { src: y, dst: z }], &[y]), "written anew before");
    assert!(stored(vec![Cmd::CopyIf { flag: bench.flag, src: x, dst: y }], &[y]), "perhaps not written");
}

#[test]
fn the_gradient_of_a_norm_takes_in_the_sum_behind_it_and_what_is_taken_from_that() {
    let bench = Bench::new(0);
    let [dy, x, dx, other, out] = [0, 1, 2, 3, 4].map(|i| bench.matrices[i]);
    let [gain, gain_grad, sums] = [0, 1, 2].map(|i| bench.per_column[i]);
    let (rstd, cols) = (bench.per_row[0], COLS);
    let norm = Cmd::RmsNormGrad { dy, x, gain, rstd, dx, gain_grad, cols };
    let cast = |src| [Cmd::ColumnSums { x: src, out: sums, cols }, bench.cast(&mut Dice(1, 0), src)];
    let fused = |between: Vec<Cmd>, src, kept: &[Buf]| {
        let cmds = [vec![norm.clone()], between, cast(src).to_vec()].concat();
        fuse(cmds, &|buf| kept.contains(&buf), &sizes)
    };
    // The sum, or without one the gradient itself, is stored though nobody reads it.
    let sum = Cmd::Add { a: other, b: dx, out };
    for (between, src, plus) in [(vec![sum.clone()], out, Some(other)), (vec![], dx, None)] {
        let list = fused(between, src, &[]);
        let [Cmd::Fused(only)] = &list[..] else { panic!("{list:?}") };
        assert_eq!((only.name(), only.plus, only.outputs.values), ("fused_rms_norm_grad", plus, Some(src)));
        assert_eq!(only.outputs.column_sums, Some(sums));
        assert!(only.outputs.codes.is_some());
    }
    // Where somebody reads the gradient before the sum, both are made, and the cast is that of the sum.
    let list = fused(vec![sum.clone()], out, &[dx]);
    assert!(matches!(&list[..], [Cmd::RmsNormGrad { .. }, Cmd::Add { .. }, Cmd::Fused(_)]), "{list:?}");
    // A scale that moves between the two keeps the cast apart.
    let list = fused(vec![sum, Cmd::Fill { dst: bench.scales, value: 2.0 }], out, &[]);
    let [Cmd::Fused(first), Cmd::Fill { .. }, Cmd::Quantise { .. }] = &list[..] else { panic!("{list:?}") };
    assert_eq!((first.outputs.codes, first.outputs.column_sums), (None, Some(sums)));
}
