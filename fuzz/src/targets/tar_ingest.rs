//! Any bytes as a layer's tar (or gzip or zstd of one), read as a conversion reads it.

pub fn fuzz(bytes: &[u8]) {
    bcow_oci::fuzz_ingest(bytes);
}
