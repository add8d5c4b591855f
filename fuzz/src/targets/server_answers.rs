//! Any bytes as the value of a header, or as a document, that a web server, a registry or S3 sends.

pub fn fuzz(bytes: &[u8]) {
    bcow_remote::fuzz_answer(bytes);
}
