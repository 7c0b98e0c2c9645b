//! The signatures of the models.

/// The signatures that Triton has given, kept until they change.
#[derive(Debug, Default)]
pub struct Models {}
