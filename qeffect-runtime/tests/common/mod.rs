//! A driver of one rank without threads: the unsplit reference that everything else is compared with.
#![allow(dead_code, reason = "every test binary uses its own part")]

pub mod how;
pub mod line;
pub mod one_layer;
pub mod settings;
pub mod sites;
pub mod spans;
pub mod spoil;
pub mod spoilt;
pub mod state_cases;
pub mod tap;

use qeffect_core::bind::Gradients;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::Device;
use qeffect_runtime::gpt::{GptConfig, GptStage, GptTape, GptWork};
use qeffect_runtime::optim::{OptimConfig, Verdict};
use qeffect_runtime::shard::{Shard, ShardConfig};
use qeffect_runtime::stage::Stage as _;

pub struct Solo {
    pub shard: Shard<GptStage>,
    pub stages: u32,
    pub microbatches: u32,
    fwd: Vec<Option<Token<Fwd>>>,
    bwd: Vec<Option<Token<Bwd>>>,
}

impl Solo {
    /// On the cpu device, with copied gradients.
    pub fn new(config: &GptConfig, blocks: &[usize], microbatches: u32, optim: OptimConfig) -> Solo {
        Self::on(Box::new(CpuDevice::new()), config, blocks, microbatches, optim, (Gradients::Copied, 1))
    }

    /// With groups of that many microbatches, where gradients are coalesced.
    pub fn on(
        device: Box<dyn Device>,
        config: &GptConfig,
        blocks: &[usize],
        microbatches: u32,
        optim: OptimConfig,
        (gradients, coalesce): (Gradients, u32),
    ) -> Solo {
        let stages = config.stages(blocks).unwrap();
        let count = stages.len() as u32;
        let stages = stages.into_iter().enumerate().map(|(id, stage)| (StageId(id as u32), stage)).collect();
        let norm = config.norm_plan().unwrap();
        let shard_config =
            ShardConfig { gradients, coalesce, ..settings::alone(microbatches, config.tokens(), optim, norm) };
        let mut shard = Shard::new(device, stages, shard_config).unwrap();
        shard.init(1).unwrap();
        shard.prologue().unwrap();
        let fwd = (0..count).map(|stage| Some(Token::first(StageId(stage)))).collect();
        let bwd = (0..count).map(|stage| Some(Token::first(StageId(stage)))).collect();
        Solo { shard, stages: count, microbatches, fwd, bwd }
    }

    /// Names of all parameters, by stage.
    pub fn paths(&self) -> Vec<String> {
        let of = |stage: &GptStage| stage.spec().params.iter().map(|param| param.path.clone()).collect::<Vec<_>>();
        self.shard.stages().flat_map(|(_, stage)| of(stage)).collect()
    }

    pub fn begin(&mut self, batch: &[Windows]) {
        self.shard.begin_step(batch).unwrap();
        for stage in 0..self.stages {
            self.shard.refresh(StageId(stage)).unwrap();
        }
    }

    /// F of all stages; the tapes, by stage.
    pub fn forward(&mut self, m: u32) -> Vec<GptTape> {
        let mut x = Vec::new();
        let mut tapes = Vec::new();
        for stage in 0..self.stages {
            let token = self.fwd[stage as usize].take().unwrap();
            let (y, tape, token) = self.shard.forward(StageId(stage), Microbatch(m), &x, token).unwrap();
            self.fwd[stage as usize] = Some(token);
            x.into_iter().for_each(|x| self.shard.free(x).unwrap());
            tapes.push(tape);
            x = y;
        }
        assert!(x.is_empty());
        tapes
    }

    /// I of all stages; the works, by stage from the last.
    pub fn input_grad(&mut self, m: u32, tapes: Vec<GptTape>) -> Vec<GptWork> {
        let mut dy = Vec::new();
        let mut works = Vec::new();
        for (stage, tape) in tapes.into_iter().enumerate().rev() {
            let token = self.bwd[stage].take().unwrap();
            let (dx, work, token) =
                self.shard.input_grad(StageId(stage as u32), Microbatch(m), &dy, tape, token).unwrap();
            self.bwd[stage] = Some(token);
            dy.into_iter().for_each(|dy| self.shard.free(dy).unwrap());
            works.push(work);
            dy = dx;
        }
        assert!(dy.is_empty());
        works
    }

    /// W of all stages.
    pub fn weight_grad(&mut self, m: u32, works: Vec<GptWork>) {
        for (stage, work) in (0..self.stages).rev().zip(works) {
            self.shard.weight_grad(StageId(stage), Microbatch(m), work).unwrap();
        }
    }

    /// What all ranks decide from, where there is one.
    pub fn agree(&mut self) {
        self.shard.measure().unwrap();
        let measured = self.shard.offer().unwrap();
        self.shard.accept(&[measured]).unwrap();
        self.shard.settle().unwrap();
    }

    pub fn finish(&mut self) -> Verdict {
        for stage in 0..self.stages {
            self.shard.reduce(StageId(stage)).unwrap();
        }
        self.agree();
        self.shard.commit().unwrap();
        self.shard.verdict().unwrap()
    }

    /// One step: F(m), I(m), W(m), microbatches ascending.
    pub fn step(&mut self, batch: &[Windows]) -> (f64, Verdict) {
        self.begin(batch);
        for m in 0..self.microbatches {
            let tapes = self.forward(m);
            let works = self.input_grad(m, tapes);
            self.weight_grad(m, works);
        }
        let verdict = self.finish();
        let losses = self.shard.losses().unwrap();
        (losses.iter().sum::<f64>() / losses.len() as f64, verdict)
    }

    /// The mean loss of a batch, by evaluation.
    pub fn evaluate(&mut self, batch: &[Windows]) -> f64 {
        self.shard.load(batch).unwrap();
        for m in 0..batch.len() as u32 {
            let mut x = Vec::new();
            for stage in 0..self.stages {
                let y = self.shard.evaluate(StageId(stage), Microbatch(m), &x, true).unwrap();
                x.into_iter().for_each(|x| self.shard.free(x).unwrap());
                x = y;
            }
            x.into_iter().for_each(|logits| self.shard.free(logits).unwrap());
        }
        self.shard.pool().quiescent().unwrap();
        let losses = self.shard.losses().unwrap();
        losses[..batch.len()].iter().sum::<f64>() / batch.len() as f64
    }
}

/// Tokens that repeat within and across sequences.
pub fn batch(config: &GptConfig, step: u64, microbatches: u32) -> Vec<Windows> {
    let token = |m: u32, i: usize| {
        let word = qeffect_runtime::rng::draw(&[9, step, u64::from(m), i as u64]);
        // Squared, so that some tokens are much more frequent than others.
        let u = qeffect_runtime::rng::uniform(word);
        (u * u * config.vocab as f64) as u32
    };
    (0..microbatches)
        .map(|m| Windows {
            tokens: (0..config.tokens()).map(|i| token(m, i)).collect(),
            targets: (0..config.tokens()).map(|i| token(m, i + 1)).collect(),
        })
        .collect()
}
