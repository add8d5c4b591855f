//! What servers send, for a fuzzer: the parts of an answer that this crate parses itself.

use crate::address::Address;
use crate::auth::{Token, parse_challenge};
use crate::cosign::{PublicKey, signs};
use crate::refusal::first_error;
use crate::registry::{Reference, entries};
use crate::s3::{S3Name, explanation};
use crate::s3_upload::{elements, escape, unescape};
use crate::source::{content_range, next_target};
use crate::upload::session::length;

/// Reads `bytes` as the value of each header, and as each document, that a server can send. Errors
/// are expected; only a panic, or a property that does not hold, is a finding.
pub fn fuzz_answer(bytes: &[u8]) {
    let _ = first_error(bytes);
    let _ = entries(bytes);
    let _ = signs(bytes, "sha256:00");
    if let Ok(token) = serde_json::from_slice::<Token>(bytes) {
        let _ = token.text();
        assert!(token.lifetime().as_secs() >= 1);
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let _ = parse_challenge(text);
    if let Some((first, last, total)) = content_range(text) {
        assert!(first <= last && total.is_none_or(|total| last < total));
    }
    let _ = length(text);
    let _ = explanation(text);
    for upload in elements(text, "Upload") {
        for id in elements(upload, "UploadId") {
            let _ = unescape(id);
        }
    }
    assert_eq!(unescape(&escape(text)), text);
    if let Ok(key) = PublicKey::parse_pem(text) {
        assert!(!key.accepts(b"message", bytes));
    }
    let base = Address::parse("https://host:5000/v2/name/blobs/x?a=b");
    assert!(base.is_ok());
    let targets = [Some(text), next_target(text)];
    let joined = targets.into_iter().flatten().filter_map(|target| {
        let base = base.as_ref().ok()?;
        base.join(target).ok()
    });
    for address in joined {
        // A redirect leads to an address that leads to itself.
        let again = Address::parse(&address.to_string());
        assert_eq!(
            again.map(|again| again.to_string()).ok(),
            Some(address.to_string())
        );
    }
    if let Ok(reference) = text.parse::<Reference>() {
        let again = reference.to_string().parse::<Reference>();
        assert_eq!(again.ok().as_ref(), Some(&reference));
    }
    let _ = text.parse::<S3Name>();
}
