//! QEffect
