//! Products as tests run them: operands with known values, sums in float64, and what sums may be off by.

use half::bf16;
use qeffect_core::fp8::Fp8;
use qeffect_kernels::cache::Cache;
use qeffect_kernels::gemm::{Matrix, Operands, Plan, Product, Products, Type, WORKSPACE};
use qeffect_kernels::{Buffer, Span};

use crate::rig::{Rig, bits, numbers, rounded};

fn products(rig: &Rig) -> Products {
    Products::open(&rig.context, Cache::standard()).unwrap()
}

fn format(of: Type) -> Fp8 {
    if of == Type::E5M2 { Fp8::E5M2 } else { Fp8::E4M3 }
}

/// An operand on the device, and the values of its elements.
pub struct Side {
    codes: Buffer<u8>,
    wide: Buffer<bf16>,
    pub of: Type,
    pub values: Vec<f32>,
}

impl Side {
    pub fn new(rig: &Rig, of: Type, values: &[f32]) -> Side {
        let values: Vec<f32> = match of {
            Type::Bf16 => values.iter().map(|x| rounded(*x)).collect(),
            _ => values.iter().map(|x| format(of).decode(format(of).encode(*x))).collect(),
        };
        let codes: Vec<u8> = values.iter().map(|x| format(of).encode(*x)).collect();
        let wide: Vec<bf16> = values.iter().map(|x| bf16::from_f32(*x)).collect();
        Side { codes: rig.upload(&codes), wide: rig.upload(&wide), of, values }
    }

    pub fn matrix(&self) -> Matrix {
        if self.of == Type::Bf16 { Matrix::Bf16(self.wide.span()) } else { Matrix::Codes(self.codes.span()) }
    }
}

/// Both sides with these scales, and no bias; the result is written and not added.
pub fn operands(left: &Side, right: &Side, scales: [Option<Span<f32>>; 2], out: Matrix) -> Operands {
    let [left_scale, right_scale] = scales;
    Operands { left: left.matrix(), right: right.matrix(), left_scale, right_scale, bias: None, out, accumulate: false }
}

/// Small integers: every partial sum is exact in any order.
pub fn integers(seed: u64, len: usize) -> Vec<f32> {
    numbers(seed, len).iter().map(|x| (x * 2.5).round()).collect()
}

/// Sums in float64 of row-major operands with their terms side by side.
pub fn reference(rows: usize, columns: usize, depth: usize, left: &[f32], right: &[f32]) -> Vec<f64> {
    (0..rows * columns)
        .map(|i| {
            let (a, b) = (&left[i / columns * depth..][..depth], &right[i % columns * depth..][..depth]);
            a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
        })
        .collect()
}

/// What each sum may be off by, for all that its terms add up to without their signs. Tensor cores take the terms of one
/// instruction, and what came before, with about 14 bits of the largest, so errors of many terms cancel for the most part.
pub const EXACT: f64 = 1.0 / 2048.0;
/// Sums that stay in the tensor cores.
pub const FAST: f64 = 1.0 / 512.0;

/// Sums of terms without their signs.
pub fn sizes(rows: usize, columns: usize, depth: usize, left: &[f32], right: &[f32]) -> Vec<f64> {
    let [left, right] = [left, right].map(|side| side.iter().map(|x| x.abs()).collect::<Vec<_>>());
    reference(rows, columns, depth, &left, &right)
}

pub struct Bench<'a> {
    pub rig: &'a Rig,
    pub products: Products,
    pub workspace: Buffer<u8>,
}

impl<'a> Bench<'a> {
    pub fn new(rig: &'a Rig) -> Bench<'a> {
        Bench { rig, products: products(rig), workspace: rig.poisoned(WORKSPACE) }
    }

    pub fn plan(&mut self, product: Product) -> Plan {
        self.products.plan(&self.rig.stream, product).unwrap()
    }

    pub fn run(&self, plan: &Plan, operands: &Operands) {
        plan.run(&self.rig.stream, operands, self.workspace.span()).unwrap();
    }

    /// The product, after checking that adding it in place is one rounded addition per element.
    pub fn adds(&mut self, product: Product, left: &Side, right: &Side, scales: [&Buffer<f32>; 2]) -> Vec<f32> {
        let plan = self.plan(product);
        let start = numbers(3, product.rows * product.columns);
        let (alone, sum) = (self.rig.poisoned::<f32>(start.len()), self.rig.upload(&start));
        for (out, accumulate) in [(&alone, false), (&sum, true)] {
            let scales = scales.map(|scale| Some(scale.span()));
            let operands = operands(left, right, scales, Matrix::F32(out.span()));
            self.run(&plan, &Operands { accumulate, ..operands });
        }
        let alone = alone.read().unwrap();
        let added: Vec<f32> = start.iter().zip(&alone).map(|(start, product)| start + product).collect();
        assert_eq!(bits(&sum.read().unwrap()), bits(&added), "{product}");
        alone
    }
}
