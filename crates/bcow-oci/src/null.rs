//! Fields of JSON documents whose value is `null`.

use serde::{Deserialize, Deserializer};

/// Reads a field whose value may be `null`, which means the same as an absent field. Programs in Go
/// write empty lists in this way, and read it so.
pub(crate) fn null_as_absent<'de, D, T>(value: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(value)?.unwrap_or_default())
}
