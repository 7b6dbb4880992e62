//! How a model of equal blocks is cut into stages, said once for all such models.

/// Writes, for a model whose configuration, block and final norm are given, the four stages into which a pipeline cuts it,
/// with their parameters and the methods of its configuration that make them.
///
/// The configuration has methods `validate`, `tokens`, `embedding`, `block`, `norm` and `head`, and fields `recipe`, `layers`
/// and `hidden`.
macro_rules! pipeline {
    ($config:ty: $block:ident($Block:ident), $norm:ident($Norm:ident) as $norm_field:ident) => {
        /// A stage: some blocks, with the embedding before the first and the head after the last.
        pub type ModelStage = Cut<Built<first, First>, Built<middle, Middle>, Built<last, Last>, Built<whole, Whole>>;

        /// Parameters at the start of the pipeline.
        #[derive(Clone, Debug, Params)]
        #[params(crate = crate)]
        pub struct First {
            #[params(name = "")]
            embedding: Embedding,
            blocks: Layers<$Block>,
        }

        /// The embedding, and blocks.
        #[stage(crate = crate)]
        pub fn first(w: &First) -> Act {
            let mut x = embedding(&w.embedding);
            for layer in &w.blocks {
                x = $block(x, layer);
            }
            x
        }

        /// Parameters inside the pipeline.
        #[derive(Clone, Debug, Params)]
        #[params(crate = crate)]
        pub struct Middle {
            blocks: Layers<$Block>,
        }

        /// Blocks only.
        #[stage(crate = crate)]
        pub fn middle(x: Act, w: &Middle) -> Act {
            let mut x = x;
            for layer in &w.blocks {
                x = $block(x, layer);
            }
            x
        }

        /// Parameters at the end of the pipeline.
        #[derive(Clone, Debug, Params)]
        #[params(crate = crate)]
        pub struct Last {
            blocks: Layers<$Block>,
            $norm_field: $Norm,
            head: Linear,
        }

        /// Blocks, the final norm, the projection to logits, the loss.
        #[stage(crate = crate)]
        pub fn last(x: Act, w: &Last) -> Loss {
            let mut x = x;
            for layer in &w.blocks {
                x = $block(x, layer);
            }
            cross_entropy(linear($norm(x, &w.$norm_field), &w.head))
        }

        /// Parameters of the whole model.
        #[derive(Clone, Debug, Params)]
        #[params(crate = crate)]
        pub struct Whole {
            #[params(name = "")]
            first: First,
            #[params(name = "")]
            last: Last,
        }

        /// All of it.
        #[stage(crate = crate)]
        pub fn whole(w: &Whole) -> Loss {
            last(first(&w.first), &w.last)
        }

        impl $config {
            /// Blocks per stage, as even as possible; the first stages take what is left over.
            ///
            /// # Errors
            ///
            /// If there are more stages than blocks.
            pub fn split(&self, stages: usize) -> Result<Vec<usize>> {
                layers::split(self.layers, stages)
            }

            /// The stages, given the number of blocks of each. A stage holds at least one unit: the first has the embedding
            /// and the last the head, so these two may have no block.
            ///
            /// # Errors
            ///
            /// A size that does not fit; blocks that are not those of the model.
            pub fn stages(&self, blocks: &[usize]) -> Result<Vec<ModelStage>> {
                self.validate()?;
                let boundary = [self.tokens(), self.hidden];
                layers::cut(self.layers, blocks, |blocks, first, last| {
                    let blocks = self.blocks(blocks)?;
                    Ok(match (first, last) {
                        (true, false) => Cut::First(Built::new(self.recipe, boundary, self.first(blocks))),
                        (false, false) => Cut::Middle(Built::new(self.recipe, boundary, Middle { blocks })),
                        (false, true) => Cut::Last(Built::new(self.recipe, boundary, self.last(blocks))),
                        (true, true) => Cut::Whole(Built::new(self.recipe, boundary, self.whole(blocks))),
                    })
                })
            }

            fn blocks(&self, blocks: Range<usize>) -> Result<Layers<$Block>> {
                Ok(Layers::new(blocks.start, blocks.map(|_| self.block()).collect::<Result<_>>()?))
            }

            fn first(&self, blocks: Layers<$Block>) -> First {
                First { embedding: self.embedding(), blocks }
            }

            fn last(&self, blocks: Layers<$Block>) -> Last {
                Last { blocks, $norm_field: self.norm(), head: self.head() }
            }

            fn whole(&self, blocks: Layers<$Block>) -> Whole {
                Whole { first: self.first(blocks), last: self.last(Layers::new(self.layers, Vec::new())) }
            }

            /// The whole model, with its parameters in the order of its layers.
            fn spec(&self) -> Result<StageSpec> {
                let mut spec = StageSpec::new(self.recipe);
                self.whole(self.blocks(0..self.layers)?).register(&mut Registry::new(&mut spec));
                Ok(spec)
            }

            /// Where the norm's partial sums lie, the same for every cut.
            ///
            /// # Errors
            ///
            /// A size of a block that does not fit.
            pub fn norm_plan(&self) -> Result<NormPlan> {
                NormPlan::new(self.spec()?.params.iter().map(|param| (param.path.as_str(), param.elements())))
            }

            /// Number of parameters; a weight that is tied to another counts once.
            ///
            /// # Errors
            ///
            /// As [`Self::norm_plan`].
            pub fn parameters(&self) -> Result<usize> {
                let spec = self.spec()?;
                let own = spec.params.iter().enumerate().filter(|(id, _)| spec.tied_to(ParamId(*id)).is_none());
                Ok(own.map(|(_, param)| param.elements()).sum())
            }
        }
    };
}
pub(crate) use pipeline;
