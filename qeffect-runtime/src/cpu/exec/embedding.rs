//! The embedding.

use super::{Activation, Master, Result, Run, kernel};
use crate::device::DeviceError;
use crate::kernels::{Real, embedding};

impl Run<'_> {
    pub(super) fn embed<E: Activation>(&mut self) -> Result {
        fields!(self, Embed { tokens, table: words, positions, out, seq, cols });
        let name = self.name;
        self.table.write(name, [*out], |table, [y]| {
            let y = table.out::<E>(name, *out, y)?;
            let places = positions.map(|buf| table.get::<E::Acc>(name, buf)).transpose()?;
            if let (Some(buf), Some(values)) = (*positions, places)
                && values.len() != seq * cols
            {
                return Err(table.short(name, buf, seq * cols));
            }
            let ids = table.get::<u32>(name, *tokens)?;
            embedding::embedding_forward(ids, *cols, table.get(name, *words)?, places, y).map_err(kernel(name))
        })
    }

    pub(super) fn embed_grad<E: Activation>(&mut self) -> Result {
        fields!(self, EmbedGrad { tokens, order, dy, table_grad, positions_grad, cols, accumulate });
        let name = self.name;
        let mut partial = std::mem::take(E::Acc::rows(self.workspace));
        let sorted = &mut self.workspace.positions;
        let result = self.table.write(name, [*table_grad], |table, [words]| {
            let dy_values = table.get::<E>(name, *dy)?;
            let ids = table.get::<u32>(name, *tokens)?;
            let order = table.get::<u32>(name, *order)?;
            group(ids, order, sorted).ok_or_else(|| DeviceError::Failed {
                cmd: name,
                reason: "the order of rows does not sort the tokens".into(),
            })?;
            let words = table.out::<E::Acc>(name, *table_grad, words)?;
            partial.resize(sorted.tokens.len() * cols, <E::Acc as Real>::ZERO);
            embedding::token_gradient(dy_values, *cols, sorted, &mut partial).map_err(kernel(name))?;
            if !accumulate {
                words.fill(<E::Acc as Real>::ZERO);
            }
            embedding::scatter_rows(&sorted.tokens, *cols, &partial, words).map_err(kernel(name))
        });
        *E::Acc::rows(self.workspace) = partial;
        result?;
        let Some(positions_grad) = *positions_grad else { return Ok(()) };
        let mut partial = std::mem::take(E::Acc::rows(self.workspace));
        let result = self.table.write(name, [positions_grad], |table, [places]| {
            let places = table.out::<E::Acc>(name, positions_grad, places)?;
            let dy = table.get::<E>(name, *dy)?;
            if !accumulate {
                return embedding::position_gradient(dy, *cols, places).map_err(kernel(name));
            }
            partial.resize(places.len(), <E::Acc as Real>::ZERO);
            embedding::position_gradient(dy, *cols, &mut partial).map_err(kernel(name))?;
            places.iter_mut().zip(&partial).for_each(|(sum, x)| *sum = *sum + *x);
            Ok(())
        });
        *E::Acc::rows(self.workspace) = partial;
        result
    }
}

/// Groups rows by token, given their order; `None` if that is no such order.
fn group(ids: &[u32], order: &[u32], sorted: &mut embedding::TokenPositions) -> Option<()> {
    sorted.tokens.clear();
    sorted.starts.clear();
    sorted.order.clear();
    if ids.len() != order.len() {
        return None;
    }
    let mut before = None;
    for (index, row) in order.iter().enumerate() {
        let key = (*ids.get(*row as usize)?, *row);
        if before.is_some_and(|before| before >= key) {
            return None;
        }
        if before.is_none_or(|(token, _)| token != key.0) {
            sorted.tokens.push(key.0);
            sorted.starts.push(index as u32);
        }
        sorted.order.push(*row);
        before = Some(key);
    }
    sorted.starts.push(order.len() as u32);
    Some(())
}
