//! Everything of a rank that outlives a step, by name; and numbers on their way into buffers and out.

use std::collections::BTreeMap;

use bytemuck::Pod;
use half::bf16;
use qeffect_core::dtype::Dtype;

use super::Shard;
use crate::device::{Buf, BufSpec, Device};
use crate::error::{Error, Result};
use crate::stage::{Role, Stage};
use crate::state::WorkingBufs;

/// Values of a buffer that is saved or compared: type, shape, bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    /// Type of its elements.
    pub dtype: Dtype,
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Its elements, little-endian.
    pub bytes: Vec<u8>,
}

impl<S: Stage> Shard<S> {
    /// Everything that outlives a step, by name: masters, gradients, moments, caches, scales, histories, commits. Names
    /// are those of layers, so two runs that cut the model differently can be compared.
    pub fn export(&mut self) -> Result<BTreeMap<String, Named>> {
        let factor = self.gradient_factor();
        let mut wanted = vec![("commits".to_owned(), self.optim.counter, Export::Whole)];
        for part in &self.parts {
            let spec = part.stage.spec();
            for (param, bufs) in spec.params.iter().zip(&part.state.params) {
                let path = &param.path;
                wanted.extend([
                    (format!("{path}/master"), bufs.master.buf, Export::Whole),
                    (format!("{path}/gradient"), bufs.grad.buf, Export::Mean),
                    (format!("{path}/moment1"), bufs.moment1.buf, Export::Whole),
                    (format!("{path}/moment2"), bufs.moment2.buf, Export::Whole),
                ]);
                match bufs.working {
                    WorkingBufs::Plain(act) => wanted.push((format!("{path}/working"), act.buf, Export::Whole)),
                    WorkingBufs::Fp8(view) => {
                        wanted.push((format!("{path}/codes"), view.codes, Export::Whole));
                        wanted.push((format!("{path}/scale_inv"), view.scale_inv, Export::Whole));
                        wanted.extend(view.other.map(|buf| (format!("{path}/transposed"), buf, Export::Whole)));
                    }
                }
            }
            for role in Role::ALL {
                let Some(bank) = part.state.bank(role) else { continue };
                for (index, path) in spec.cells(role).iter().enumerate() {
                    wanted.push((format!("{path}.{}/scale", role.name()), bank.scales, Export::Column(index)));
                    wanted.push((format!("{path}.{}/history", role.name()), bank.history, Export::Column(index)));
                }
            }
        }
        let mut named = BTreeMap::new();
        for (name, buf, taken) in wanted {
            let BufSpec { dtype, rows, cols, .. } = self.device.spec(buf)?.clone();
            let mut bytes = vec![0; rows * cols * dtype.size()];
            self.device.read(buf, &mut bytes)?;
            let value = match taken {
                Export::Whole => Named { dtype, shape: [rows, cols], bytes },
                Export::Mean => {
                    let (dtype, mut bytes) = widened(dtype, bytes);
                    scale(dtype, &mut bytes, factor);
                    Named { dtype, shape: [rows, cols], bytes }
                }
                Export::Column(column) => {
                    let at = |row: usize| (row * cols + column) * dtype.size();
                    let bytes = (0..rows).flat_map(|row| bytes[at(row)..][..dtype.size()].to_vec()).collect();
                    Named { dtype, shape: [rows, 1], bytes }
                }
            };
            named.insert(name, value);
        }
        Ok(named)
    }

    pub(super) fn upload_reals(&mut self, buf: Buf, values: &[f64]) -> Result<()> {
        let BufSpec { dtype, name, .. } = self.device.spec(buf)?;
        match dtype {
            Dtype::F64 => Ok(self.device.write(buf, bytemuck::cast_slice(values))?),
            Dtype::F32 => {
                let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
                Ok(self.device.write(buf, bytemuck::cast_slice(&values))?)
            }
            dtype => Err(Error::Config(format!("`{name}` holds {dtype}, not numbers of a master type"))),
        }
    }

    pub(super) fn read_pod<T: Pod>(&mut self, buf: Buf) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); self.device.spec(buf)?.elements()];
        self.device.read(buf, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    pub(super) fn read_reals(&mut self, buf: Buf) -> Result<Vec<f64>> {
        let BufSpec { dtype, name, .. } = self.device.spec(buf)?;
        match dtype {
            Dtype::F64 => self.read_pod::<f64>(buf),
            Dtype::F32 => Ok(self.read_pod::<f32>(buf)?.into_iter().map(f64::from).collect()),
            Dtype::Bf16 => Ok(self.read_pod::<bf16>(buf)?.into_iter().map(f64::from).collect()),
            dtype => Err(Error::Config(format!("`{name}` holds {dtype}, not numbers"))),
        }
    }
}

/// What [`Shard::export`] takes of a buffer.
enum Export {
    Whole,
    /// A gradient, which is stored as a sum.
    Mean,
    /// One cell of a bank.
    Column(usize),
}

/// A sum over microbatches as the mean that its readers make of it, rounded to the type of masters.
pub(super) fn mean(dtype: Dtype, sum: f64, factor: f32) -> f64 {
    match dtype {
        Dtype::F64 => sum * f64::from(factor),
        _ => f64::from(sum as f32 * factor),
    }
}

/// Sums that were stored in bf16 as floats: their means are no bf16.
fn widened(dtype: Dtype, bytes: Vec<u8>) -> (Dtype, Vec<u8>) {
    if dtype != Dtype::Bf16 {
        return (dtype, bytes);
    }
    let upper = bytes.chunks_exact(2).flat_map(|word| [0, 0, word[0], word[1]]);
    (Dtype::F32, upper.collect())
}

/// As [`mean`], of every element in `bytes`.
fn scale(dtype: Dtype, bytes: &mut [u8], factor: f32) {
    for element in bytes.chunks_exact_mut(dtype.size()) {
        if let Ok(word) = <[u8; 8]>::try_from(&*element) {
            element.copy_from_slice(&mean(dtype, f64::from_le_bytes(word), factor).to_le_bytes());
        } else if let Ok(word) = <[u8; 4]>::try_from(&*element) {
            let mean = mean(dtype, f64::from(f32::from_le_bytes(word)), factor);
            element.copy_from_slice(&(mean as f32).to_le_bytes());
        }
    }
}
