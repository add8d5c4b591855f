//! What clients, a supervisor and earlier processes of a pool send: requests, answers, records of
//! mounts, packets with descriptors. The first byte selects one. A packet is behind a byte with the
//! number of its descriptors, and ends with a zero byte.

pub fn fuzz(bytes: &[u8]) {
    bcow_pool::fuzz_messages(bytes);
}
