//! Any bytes as a layer's tar (or gzip or zstd of one), taken in as a conversion would.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| bcow_oci::fuzz_ingest(bytes));
