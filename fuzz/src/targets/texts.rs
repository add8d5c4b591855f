//! Any bytes as the texts that images, users and other programs write: a trace of `mount
//! --record`, a platform, a digest, a reference.

use bcow_oci::trace::Trace;
use bcow_oci::{Digest, Platform, Prefetch};

pub fn fuzz(bytes: &[u8]) {
    let trace = Trace::parse(bytes);
    assert_eq!(trace.is_ok(), Prefetch::parse(bytes).is_ok());
    if let Ok(trace) = trace {
        assert_eq!(Trace::parse(trace.to_text().as_bytes()), Ok(trace));
    }
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    if let Ok(digest) = text.parse::<Digest>() {
        assert_eq!(digest.to_string(), text);
    }
    if let Ok(platform) = text.parse::<Platform>() {
        let again = platform.to_string().parse::<Platform>();
        assert_eq!(again.expect("a platform again"), platform);
    }
}
