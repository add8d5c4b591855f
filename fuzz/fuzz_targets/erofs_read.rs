//! Any bytes as an EROFS image: checked, walked and read.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| bcow_erofs::debug::fuzz_read(bytes));
