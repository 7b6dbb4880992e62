//! Stages: what the driver runs, and how a stage says what it owns.
//!
//! A stage is one contiguous part of the model. Its three actions are the relations of the contract, with affine values:
//!
//! ```text
//! F: (x, S0)        ↦ (y, tape, S1)          moves forward state
//! I: (dy, tape, S1) ↦ (dx, work, S2)         moves backward state
//! W: work           ↦ gradients              no token in reach: cannot touch state
//! ```
//!
//! Whatever decides bits is named by the path of the layer in the whole model, never by stage or rank.

use std::collections::BTreeMap;
use std::ops::Range;

use qeffect_core::recipe::Recipe;
use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::Act;
use crate::cx::Cx;
use crate::error::Result;
use crate::op::Effects;
pub use crate::retained::{Layout, Retained};

/// A part of the model.
///
/// Tensors that go in are leased by the caller and stay its property: a stage that needs one longer retains it. Tensors
/// that come out are leased to the caller. An input or output is as many tensors as [`StageSpec`] says: one, mostly. The
/// first stage is fed tokens by its context and gives no dX; the last one writes the loss, gives no Y and takes no dY.
pub trait Stage {
    /// From F to I.
    type Tape: Retained;
    /// From I to W.
    type Work: Retained;

    /// What it owns.
    fn spec(&self) -> &StageSpec;

    /// What its ops declare to do to hidden state. A session compares it with what its schedule was checked for.
    fn effects(&self) -> Effects;

    /// F.
    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], token: Token<Fwd>) -> Result<(Vec<Act>, Self::Tape, Token<Fwd>)>;

    /// I, with the gradients of vectors.
    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: Self::Tape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, Self::Work, Token<Bwd>)>;

    /// W: the gradients of matrices.
    fn weight_grad(&self, cx: &mut Cx<'_>, work: Self::Work) -> Result<()>;

    /// F of evaluation: moves no state and retains nothing. The last stage writes the loss where the context has
    /// targets, and gives its logits.
    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>>;
}

/// A parameter of a stage, by its position in [`StageSpec::params`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ParamId(pub usize);

impl ParamId {
    /// Of a parameter that is not registered yet.
    pub(crate) const UNREGISTERED: ParamId = ParamId(usize::MAX);
}

/// A state cell of a stage, by its position among the cells of its role.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct CellId {
    /// What is quantised.
    pub role: Role,
    /// Position in [`StageSpec::cells`] of that role.
    pub index: usize,
}

/// What a state cell belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Role {
    /// Input of a product: rolled by F.
    Input,
    /// Weight of a product: rolled by refresh.
    Weight,
    /// Gradient of a product's output: rolled by I.
    GradOutput,
}

impl Role {
    /// All roles.
    pub const ALL: [Role; 3] = [Role::Input, Role::Weight, Role::GradOutput];

    /// The name used in files: `blocks.0.qkv.input`.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Input => "input",
            Role::Weight => "weight",
            Role::GradOutput => "grad_output",
        }
    }
}

/// How a parameter begins.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// 0.
    Zeros,
    /// 1.
    Ones,
    /// Normal, mean 0, of this standard deviation.
    Normal(f64),
}

/// Which action writes a parameter's gradient, once per microbatch, and how; only vectors are not
/// decayed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ParamKind {
    /// Gradient from W, a product: [`Cx::weight_product`].
    Matrix,
    /// Gradient from W, a partial per microbatch in every placement, because few of its rows are touched.
    Embedding,
    /// Gradient from I.
    Vector,
}

/// In which form ops read a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Working {
    /// The master itself.
    Master,
    /// Rounded to the activation type.
    Activation,
    /// Quantised to E4M3 with the scale of this cell.
    Fp8(CellId),
}

/// A parameter.
#[derive(Clone, PartialEq, Debug)]
pub struct ParamSpec {
    /// Its name in the whole model: `blocks.3.qkv.weight`.
    pub path: String,
    /// Rows; outputs of a linear layer.
    pub rows: usize,
    /// Columns; 1 row and n columns for a vector.
    pub cols: usize,
    /// First values.
    pub init: Init,
    /// Where its gradient comes from.
    pub kind: ParamKind,
    /// In which form it is read.
    pub working: Working,
}

impl ParamSpec {
    /// Number of elements.
    pub const fn elements(&self) -> usize {
        self.rows * self.cols
    }
}

/// A table of a stage, by its position among them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TableId(pub(crate) usize);

/// Numbers that ops read and nobody writes. They are not saved.
#[derive(Clone, PartialEq, Debug)]
pub struct TableSpec {
    /// What it is, for messages.
    pub name: String,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// `[rows, cols]`; stored in the type of the masters.
    pub values: Vec<f64>,
}

/// What a stage owns.
#[derive(Clone, PartialEq, Debug)]
pub struct StageSpec {
    /// How its numbers are stored and scaled.
    pub recipe: Recipe,
    /// Rows and columns of the tensors of its input; none for the first stage.
    pub input: Vec<[usize; 2]>,
    /// Rows and columns of the tensors of its output; none for the last stage.
    pub output: Vec<[usize; 2]>,
    /// Its parameters.
    pub params: Vec<ParamSpec>,
    cells: [Vec<String>; 3],
    tables: Vec<TableSpec>,
    decays: BTreeMap<ParamId, bool>,
    views: Vec<ViewSpec>,
    ties: Vec<(ParamId, String)>,
}

/// A part of a packed parameter under a name of its own.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ViewSpec {
    /// Its name in the whole model: `blocks.3.q.weight`.
    pub path: String,
    /// Of which parameter.
    pub param: ParamId,
    /// Which rows; of a vector, which elements.
    pub rows: Range<usize>,
}

impl StageSpec {
    /// A stage that owns nothing yet.
    pub fn new(recipe: Recipe) -> StageSpec {
        StageSpec {
            recipe,
            input: Vec::new(),
            output: Vec::new(),
            params: Vec::new(),
            cells: Default::default(),
            tables: Vec::new(),
            decays: BTreeMap::new(),
            views: Vec::new(),
            ties: Vec::new(),
        }
    }

    /// Adds a parameter.
    pub fn param(&mut self, param: ParamSpec) -> ParamId {
        self.params.push(param);
        ParamId(self.params.len() - 1)
    }

    /// Adds a table, or finds the same one.
    pub fn table(&mut self, table: TableSpec) -> TableId {
        let known = self.tables.iter().position(|known| *known == table);
        TableId(known.unwrap_or_else(|| {
            self.tables.push(table);
            self.tables.len() - 1
        }))
    }

    /// Its tables.
    pub fn tables(&self) -> &[TableSpec] {
        &self.tables
    }

    /// Whether the optimizer lets a parameter decay: by itself a matrix does and a vector does not.
    pub fn decays(&self, param: ParamId) -> bool {
        let matrix = || self.params.get(param.0).is_some_and(|spec| spec.kind != ParamKind::Vector);
        self.decays.get(&param).copied().unwrap_or_else(matrix)
    }

    /// Has the optimizer let a parameter decay, or not.
    pub fn set_decay(&mut self, param: ParamId, decay: bool) {
        self.decays.insert(param, decay);
    }

    /// Parts of packed parameters by names of their own.
    pub fn views(&self) -> &[ViewSpec] {
        &self.views
    }

    /// What a path names: a parameter, or the elements of one that a view has. Parameters are stored row by row.
    pub fn find(&self, path: &str) -> Option<(ParamId, Range<usize>)> {
        if let Some(at) = self.params.iter().position(|param| param.path == path) {
            return Some((ParamId(at), 0..self.params[at].elements()));
        }
        let view = self.views.iter().find(|view| view.path == path)?;
        let param = self.params.get(view.param.0)?;
        let cols = if param.rows == 1 { 1 } else { param.cols };
        Some((view.param, view.rows.start * cols..view.rows.end * cols))
    }

    /// Names a part of a parameter.
    pub fn add_view(&mut self, path: String, param: ParamId, rows: Range<usize>) {
        self.views.push(ViewSpec { path, param, rows });
    }

    /// Parameters that are tied to another one, by its path.
    pub fn ties(&self) -> &[(ParamId, String)] {
        &self.ties
    }

    /// Ties a parameter to another one of the model, of the same shape and first values, wherever that lives: their
    /// gradients are added once per step, so they stay equal.
    pub fn tie(&mut self, param: ParamId, to: &str) {
        self.ties.push((param, to.into()));
    }

    /// The parameter that another one is tied to, by path.
    pub(crate) fn tied_to(&self, param: ParamId) -> Option<&str> {
        self.ties.iter().find(|(tied, _)| *tied == param).map(|(_, to)| to.as_str())
    }

    /// Adds a state cell of the layer `path`.
    pub fn cell(&mut self, role: Role, path: &str) -> CellId {
        let cells = &mut self.cells[role as usize];
        cells.push(path.into());
        CellId { role, index: cells.len() - 1 }
    }

    /// Paths of the cells of a role.
    pub fn cells(&self, role: Role) -> &[String] {
        &self.cells[role as usize]
    }
}
