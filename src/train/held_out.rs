//! Evaluation on held-out bytes, and logits for sampling, through the forward-only schedule.

use qeffect_core::plan::Checked;
use qeffect_runtime::data::{ByteData, Windows};
use qeffect_runtime::error::Error;
use qeffect_runtime::gpt::GptStage;
use qeffect_runtime::session::{Evaluation, Session};

use super::{Result, TrainError};

/// Fewest bytes of an evaluation during the run: the first ones of the held-out part.
const SAMPLE_BYTES: usize = 64 * 1024;

/// The forward-only schedule, bound to a session.
pub struct HeldOut {
    evaluation: Evaluation,
    microbatches: usize,
    sequences: usize,
    passes: usize,
}

impl HeldOut {
    pub fn new(data: &ByteData, session: &Session<GptStage>, checked: Checked, sequences: usize) -> Result<HeldOut> {
        let microbatches = checked.schedule.microbatches as usize;
        let (found, needed) = (data.held_out_windows(), microbatches * sequences);
        if found < needed {
            return Err(TrainError::Config(format!(
                "the held-out tenth of the text has {found} windows of {} bytes, an evaluation needs {needed}: use a longer text or fewer microbatches",
                data.seq()
            )));
        }
        let passes = found / needed;
        Ok(HeldOut { evaluation: session.evaluation(checked)?, microbatches, sequences, passes })
    }

    /// Mean loss and bytes over all windows that fill whole passes.
    pub fn all(&self, data: &ByteData, session: &mut Session<GptStage>) -> Result<(f64, usize)> {
        self.run(data, session, self.passes)
    }

    /// The same over the first [`SAMPLE_BYTES`] or a little more.
    pub fn sample(&self, data: &ByteData, session: &mut Session<GptStage>) -> Result<(f64, usize)> {
        let bytes = self.microbatches * self.sequences * data.seq();
        self.run(data, session, SAMPLE_BYTES.div_ceil(bytes).min(self.passes))
    }

    fn run(&self, data: &ByteData, session: &mut Session<GptStage>, passes: usize) -> Result<(f64, usize)> {
        let (mut sum, mut count) = (0.0, 0);
        for pass in 0..passes {
            let batch: Vec<Windows> = (0..self.microbatches)
                .map(|m| data.held_out_microbatch((pass * self.microbatches + m) * self.sequences, self.sequences).0)
                .collect();
            for loss in session.evaluate(&self.evaluation, batch)? {
                sum += loss;
                count += 1;
            }
        }
        Ok((sum / f64::from(count), count as usize * self.sequences * data.seq()))
    }

    /// Logits of one microbatch of windows.
    pub fn logits(&self, session: &mut Session<GptStage>, windows: &Windows) -> Result<Vec<f64>, Error> {
        let batch = vec![windows.clone(); self.microbatches];
        let all = session.logits(&self.evaluation, batch)?;
        all.into_iter().next().ok_or_else(|| Error::Config("the evaluation gave no logits".into()))
    }
}
