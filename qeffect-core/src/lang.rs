//! The schedule language: tokens, syntax tree, interpreter.
pub mod token;
