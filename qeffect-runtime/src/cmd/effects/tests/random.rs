//! Random commands on few buffers, of which every kind is drawn.

use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_core::recipe::AmaxAlgo;
use qeffect_core::scaling::ScaleRule;

use crate::cmd::effects::*;
use crate::cmd::{AdamWConfig, AttentionShape, DropoutKey, DropoutRate, RotaryShape};
use crate::cpu::CpuDevice;
use crate::device::Device;
use crate::rng;

/// A source of choices.
pub(super) struct Dice(pub(super) u64, pub(super) u64);

impl Dice {
    pub(super) fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        (rng::draw(&[self.0, self.1]) % n as u64) as usize
    }

    pub(super) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Different ones.
    pub(super) fn some<const N: usize, T: Copy>(&mut self, of: &[T]) -> [T; N] {
        let mut left = of.to_vec();
        std::array::from_fn(|_| left.remove(self.below(left.len())))
    }
}

pub(super) const ROWS: usize = 4;
pub(super) const COLS: usize = 12;
pub(super) const SHAPE: AttentionShape =
    AttentionShape { sequences: 1, length: ROWS, heads: 2, kv_heads: 2, head_dim: 2 };

/// Few buffers of each kind, so that commands collide.
pub(super) struct Bench {
    pub(super) device: CpuDevice,
    matrices: Vec<Buf>,
    square: Vec<Buf>,
    rows: Vec<Buf>,
    heads: Vec<Buf>,
    columns: Vec<Buf>,
    halves: Vec<Buf>,
    codes: Vec<Buf>,
    ones: Vec<Buf>,
    flags: Vec<Buf>,
    ids: Vec<Buf>,
    targets: Buf,
    scales: Buf,
    history: Buf,
    partials: Buf,
    losses: Buf,
    rates: Buf,
    counters: Vec<Buf>,
}

impl Bench {
    pub(super) fn new(seed: u64) -> Bench {
        let mut device = CpuDevice::new();
        let mut values = 0;
        let mut make = |name: &str, dtype: Dtype, rows: usize, cols: usize| {
            let buf = device.alloc(BufSpec::new(name, dtype, rows, cols)).unwrap();
            let mut next = || {
                values += 1;
                rng::draw(&[seed, 77, values])
            };
            let bytes: Vec<u8> = (0..rows * cols)
                .flat_map(|i| match dtype {
                    Dtype::F32 => {
                        let x = rng::uniform(next()) as f32 * 2.0 - 0.9;
                        x.to_le_bytes().to_vec()
                    }
                    Dtype::U32 if name == "order" => (i as u32).to_le_bytes().to_vec(),
                    Dtype::U32 if name == "ids" => (i as u32 / 2).to_le_bytes().to_vec(),
                    Dtype::U32 => 0u32.to_le_bytes().to_vec(),
                    Dtype::U64 => 0u64.to_le_bytes().to_vec(),
                    _ => vec![(next() % 96) as u8],
                })
                .collect();
            device.write(buf, &bytes).unwrap();
            buf
        };
        let mut several = |name: &str, dtype, rows, cols, n: usize| -> Vec<Buf> {
            (0..n).map(|_| make(name, dtype, rows, cols)).collect()
        };
        Bench {
            matrices: several("matrix", Dtype::F32, ROWS, COLS, 6),
            square: several("square", Dtype::F32, ROWS, ROWS, 4),
            rows: several("per row", Dtype::F32, ROWS, 1, 5),
            heads: several("per head and row", Dtype::F32, SHAPE.heads, ROWS, 2),
            columns: several("per column", Dtype::F32, 1, COLS, 4),
            halves: several("half", Dtype::F32, ROWS, COLS / 2, 3),
            codes: several("codes", Dtype::E4M3, ROWS, COLS, 3),
            ones: several("one", Dtype::F32, 1, 1, 3),
            flags: several("flag", Dtype::U32, 1, 1, 2),
            ids: several("ids", Dtype::U32, ROWS, 1, 1),
            targets: several("order", Dtype::U32, ROWS, 1, 1)[0],
            scales: several("scales", Dtype::F32, 1, 3, 1)[0],
            history: several("history", Dtype::F32, 3, 3, 1)[0],
            partials: several("partials", Dtype::F32, 1, 3, 1)[0],
            losses: several("losses", Dtype::F32, 1, 3, 1)[0],
            rates: several("rates", Dtype::F32, 64, 3, 1)[0],
            counters: several("counter", Dtype::U64, 1, 1, 1),
            device,
        }
    }

    fn all(&self) -> Vec<Buf> {
        let wide = [&self.matrices, &self.square, &self.halves, &self.codes];
        let narrow = [&self.rows, &self.heads, &self.columns, &self.ones, &self.flags];
        let single = [self.scales, self.history, self.partials, self.losses, self.counters[0]];
        wide.into_iter().chain(narrow).flatten().copied().chain(single).collect()
    }

    pub(super) fn contents(&mut self) -> Vec<Vec<u8>> {
        let all = self.all();
        let read = |buf: Buf| {
            let mut bytes = vec![0; self.device.spec(buf).unwrap().bytes()];
            self.device.read(buf, &mut bytes).unwrap();
            bytes
        };
        all.into_iter().map(read).collect()
    }

    fn random(&self, dice: &mut Dice) -> Cmd {
        let cell = dice.below(3);
        let plain = |buf| Operand { buf, scale_inv: None, transposed: false };
        let turned = |buf| Operand { buf, scale_inv: None, transposed: true };
        let unless = dice.pick(&self.flags);
        match dice.below(35) {
            0 => Cmd::Fill { dst: dice.pick(&self.matrices), value: 0.25 },
            1 => {
                let [src, dst] = dice.some(&self.matrices);
                Cmd::Copy { src, dst }
            }
            2 => {
                let [src, dst] = dice.some(&self.columns);
                Cmd::Convert { src, dst }
            }
            3 => {
                let [a, b] = dice.some(&self.matrices);
                let out = dice.pick(&self.square);
                Cmd::Gemm {
                    m: ROWS,
                    n: ROWS,
                    k: COLS,
                    a: plain(a),
                    b: turned(b),
                    bias: None,
                    out,
                    accumulate: dice.below(2) == 0,
                    fast: false,
                }
            }
            4 => {
                let (a, [b, out]) = (dice.pick(&self.square), dice.some(&self.matrices));
                let bias = Some(dice.pick(&self.columns));
                Cmd::Gemm {
                    m: ROWS,
                    n: COLS,
                    k: ROWS,
                    a: plain(a),
                    b: plain(b),
                    bias,
                    out,
                    accumulate: false,
                    fast: false,
                }
            }
            5 | 6 => {
                let [codes, transposed] = dice.some(&self.codes);
                Cmd::Quantise {
                    src: dice.pick(&self.matrices),
                    rows: ROWS,
                    cols: COLS,
                    format: Format::E4M3,
                    scale: Scalar { buf: self.scales, index: cell },
                    codes,
                    transposed: (dice.below(2) == 0).then_some(transposed),
                    beside: None,
                    scale_inv: dice.pick(&self.ones),
                    amax: Some(Scalar { buf: self.history, index: cell }),
                    flag: Some(dice.pick(&self.flags)),
                }
            }
            7 => Cmd::Roll {
                scales: self.scales,
                history: self.history,
                cells: if dice.below(2) == 0 { 0..usize::MAX } else { 1..2 },
                rule: ScaleRule::new(Format::E4M3, 0, AmaxAlgo::Max),
                unless: Some(unless),
            },
            8 => {
                let [table, positions, out] = dice.some(&self.matrices);
                let (tokens, flag) = (self.ids[0], Some(unless));
                let positions = Some(positions);
                Cmd::Embed { tokens, table, positions, out, flag, seq: ROWS, cols: COLS }
            }
            9 => {
                let [dy, table_grad, positions_grad] = dice.some(&self.matrices);
                let (tokens, order) = (self.ids[0], self.targets);
                let (positions_grad, accumulate) = (Some(positions_grad), dice.below(2) == 0);
                Cmd::EmbedGrad { tokens, order, dy, table_grad, positions_grad, seq: ROWS, cols: COLS, accumulate }
            }
            10 => {
                let ([x, y], [gain, bias]) = (dice.some(&self.matrices), dice.some(&self.columns));
                let [mean, rstd] = dice.some(&self.rows);
                Cmd::LayerNorm { x, gain, bias, y, mean, rstd, cols: COLS }
            }
            11 => {
                let [dy, x, dx] = dice.some(&self.matrices);
                let [gain, gain_grad, bias_grad] = dice.some(&self.columns);
                let [mean, rstd] = dice.some(&self.rows);
                Cmd::LayerNormGrad { dy, x, gain, mean, rstd, dx, gain_grad, bias_grad, cols: COLS }
            }
            12 => {
                let [x, y] = dice.some(&self.matrices);
                Cmd::Gelu { x, y }
            }
            13 => {
                let [x, dy, dx] = dice.some(&self.matrices);
                Cmd::GeluGrad { x, dy, dx }
            }
            14 => {
                let (qkv, out) = (dice.pick(&self.matrices), dice.pick(&self.square));
                Cmd::Attention { qkv, out, lse: dice.pick(&self.heads), shape: SHAPE }
            }
            15 => {
                let [a, b, out] = dice.some(&self.square);
                Cmd::Add { a, b, out }
            }
            16 => Cmd::ColumnSums { x: dice.pick(&self.matrices), out: dice.pick(&self.columns), cols: COLS },
            17 => Cmd::CrossEntropy {
                logits: dice.pick(&self.matrices),
                targets: self.targets,
                lse: dice.pick(&self.rows),
                loss: Scalar { buf: self.losses, index: cell },
                flag: Some(unless),
                vocabulary: COLS,
            },
            18 => {
                let [logits, dlogits] = dice.some(&self.matrices);
                let lse = dice.pick(&self.rows);
                let (targets, vocabulary) = (self.targets, COLS);
                Cmd::CrossEntropyGrad { logits, targets, lse, dlogits, vocabulary, factor: 0.25 }
            }
            19 => {
                let [a, b, out] = dice.some(&self.matrices);
                Cmd::SumSlots { slots: vec![a, b, a].into(), out }
            }
            20 => {
                let (src, partials) = (dice.pick(&self.matrices), self.partials);
                Cmd::SumSquares { src, factor: 0.5, partials, first: cell }
            }
            21 => {
                let ([norm, clip], [flags, flag]) = (dice.some(&self.ones), dice.some(&self.flags));
                Cmd::Settle { partials: self.partials, flags, limit: 1.0, norm, clip, flag }
            }
            22 => {
                let [param, grad, moment1, moment2] = dice.some(&self.matrices);
                let config = AdamWConfig { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
                let (clip, table, counter) = (dice.pick(&self.ones), self.rates, self.counters[0]);
                Cmd::AdamW { param, grad, moment1, moment2, factor: 0.5, clip, table, counter, config, unless }
            }
            23 => {
                let ([qkv, dqkv], dout) = (dice.some(&self.matrices), dice.pick(&self.square));
                Cmd::AttentionGrad { qkv, lse: dice.pick(&self.heads), dout, dqkv, shape: SHAPE }
            }
            24 => {
                let ([src, dst], [from, to]) = (dice.some(&self.matrices), [dice.below(24), dice.below(24)]);
                Cmd::CopyRange { src, src_at: from, dst, dst_at: to, len: 1 + dice.below(24) }
            }
            25 => Cmd::CheckFinite { src: dice.pick(&self.rows), flag: unless },
            26 => {
                let ([x, y], gain, rstd) = (dice.some(&self.matrices), dice.pick(&self.columns), dice.pick(&self.rows));
                Cmd::RmsNorm { x, gain, y, rstd, cols: COLS }
            }
            27 => {
                let ([dy, x, dx], [gain, gain_grad]) = (dice.some(&self.matrices), dice.some(&self.columns));
                Cmd::RmsNormGrad { dy, x, gain, rstd: dice.pick(&self.rows), dx, gain_grad, cols: COLS }
            }
            28 => {
                let ([x, out], table) = (dice.some(&self.matrices), dice.pick(&self.square));
                let shape = RotaryShape { length: ROWS, heads: 2, head_dim: ROWS, width: COLS };
                Cmd::Rotary { x, table, out, shape, inverse: dice.below(2) == 0 }
            }
            29 => {
                let [x, y] = dice.some(&self.matrices);
                Cmd::Silu { x, y }
            }
            30 => {
                let [x, dy, dx] = dice.some(&self.matrices);
                Cmd::SiluGrad { x, dy, dx }
            }
            31 => Cmd::Swiglu { x: dice.pick(&self.matrices), y: dice.pick(&self.halves), cols: COLS / 2 },
            32 => {
                let ([x, dx], dy) = (dice.some(&self.matrices), dice.pick(&self.halves));
                Cmd::SwigluGrad { x, dy, dx, cols: COLS / 2 }
            }
            33 => {
                let [x, y] = dice.some(&self.matrices);
                let key = DropoutKey { seed: 1, site: 2, microbatch: 3 };
                let rate = DropoutRate { threshold: 1 << 30, factor: 1.25 };
                Cmd::Dropout { x, y, step: self.counters[0], key, rate }
            }
            _ => match dice.below(2) {
                0 => Cmd::Advance { counter: self.counters[0], unless },
                _ => {
                    let [src, dst] = dice.some(&self.matrices);
                    Cmd::CopyIf { flag: unless, src, dst }
                }
            },
        }
    }

    pub(super) fn list(&self, dice: &mut Dice, len: usize) -> Vec<Cmd> {
        (0..len).map(|_| self.random(dice)).collect()
    }

    pub(super) fn effects(&self, list: &[Cmd]) -> Vec<Vec<Access>> {
        list.iter().map(|cmd| cmd.effects(|buf| self.device.spec(buf).ok().map(BufSpec::elements))).collect()
    }
}
