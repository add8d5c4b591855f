//! Fields of JSON documents that are absent or null.

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// Reads a field whose value may be `null`, which means the same as an absent field. Programs in Go
/// write empty lists in this way, and read it so.
pub(crate) fn null_as_absent<'de, D, T>(value: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

/// Reads a text that may be `null` or empty, which means the same as an absent field.
pub(crate) fn some_text<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    let text = Option::<String>::deserialize(value)?;
    Ok(text.filter(|text| !text.is_empty()))
}

/// The fields that have a value.
pub(crate) fn some_fields<const N: usize>(
    fields: [(&str, Option<Value>); N],
) -> Map<String, Value> {
    let fields = fields.into_iter();
    fields
        .filter_map(|(key, value)| Some((key.to_owned(), value?)))
        .collect()
}
