//! Signatures of manifests, as cosign makes them: ECDSA on P-256 over a small document ("simple
//! signing") that names the digest of the manifest.
//!
//! A signature is found under the tag `sha256-HEX.sig` of the repository, or as a referrer of the
//! manifest (OCI 1.1). It covers the digest, and the digest covers every byte of the image.

use data_encoding::BASE64;
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use serde_json::Value;

use crate::error::{Problem, RemoteError, printable};
use crate::registry::{Registry, entries, referrers_tag};

/// The annotation of a layer with its signature.
const SIGNATURE: &str = "dev.cosignproject.cosign/signature";
/// The artifact type of signatures that are attached as referrers.
const REFERRER: &str = "application/vnd.dev.cosign.artifact.sig.v1+json";
/// Largest size of a signed document.
const PAYLOAD_BYTES: u64 = 64 << 10;
/// Signatures of one image that are looked at.
const MAX_SIGNATURES: usize = 32;
/// The DER form of a public key on P-256 before its point (RFC 5480).
const SPKI: [u8; 26] = [
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
const POINT_BYTES: usize = 65;

/// A public key: ECDSA on P-256.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PublicKey {
    point: Vec<u8>,
}

impl PublicKey {
    /// Parses the PEM form that `cosign generate-key-pair` and `openssl ec -pubout` write.
    pub fn parse_pem(text: &str) -> Result<Self, &'static str> {
        const BEGIN: &str = "-----BEGIN PUBLIC KEY-----";
        const END: &str = "-----END PUBLIC KEY-----";
        let (_, behind) = text.split_once(BEGIN).ok_or("it has no PEM public key")?;
        let (body, _) = behind
            .split_once(END)
            .ok_or("its PEM public key has no end")?;
        let body: String = body.split_whitespace().collect();
        let der = BASE64
            .decode(body.as_bytes())
            .map_err(|_| "its PEM public key is not valid base64")?;
        let point = der
            .strip_prefix(&SPKI)
            .filter(|point| point.len() == POINT_BYTES)
            .ok_or("its public key is not ECDSA on P-256; other kinds are not supported yet")?;
        Ok(PublicKey {
            point: point.to_owned(),
        })
    }

    pub(crate) fn accepts(&self, message: &[u8], signature: &[u8]) -> bool {
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.point);
        key.verify(message, signature).is_ok()
    }
}

/// The result for one signature that is not right.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wrong {
    /// The registry has no signature.
    Missing,
    /// Another key has made it, or it is damaged.
    Key,
    /// It is right, and for something else.
    Digest(String),
    /// Its manifest, or the document that it signs, is invalid.
    Payload,
}

impl Wrong {
    fn explanation(self, digest: &str) -> String {
        match self {
            Wrong::Missing => format!("the registry has no signature of {digest}"),
            Wrong::Key => format!("no signature of {digest} is by the given key"),
            Wrong::Digest(other) => {
                format!("the signature is of {}, not of {digest}", printable(&other))
            }
            Wrong::Payload => "the signature or the signed document is invalid".to_owned(),
        }
    }
}

impl Registry {
    /// Fails unless the owner of `key` has signed the manifest with this digest (`sha256:HEX`).
    pub fn verify(&self, digest: &str, key: &PublicKey) -> Result<(), RemoteError> {
        let place = || format!("manifest {digest} of {}", self.reference());
        let mut worst = Wrong::Missing;
        let tag = format!("{}.sig", referrers_tag(digest));
        let tagged = match self.tagged(&tag) {
            Ok(manifest) => Some(manifest),
            Err(error) if matches!(error.problem, Problem::NotFound(_)) => None,
            Err(error) => return Err(error),
        };
        if let Some(manifest) = tagged
            && self.check(&manifest, digest, key, &mut worst)?
        {
            return Ok(());
        }
        let listed = self.referrers(digest, REFERRER)?;
        let listed = entries(&listed).map_err(|problem| problem.at(place()))?;
        for entry in listed.iter().take(MAX_SIGNATURES) {
            let manifest = match self.manifest_with_digest(text(&entry["digest"])) {
                // A list may name what was deleted.
                Err(error) if matches!(error.problem, Problem::NotFound(_)) => continue,
                manifest => manifest?,
            };
            if self.check(&manifest, digest, key, &mut worst)? {
                return Ok(());
            }
        }
        Err(Problem::Signature(worst.explanation(digest)).at(place()))
    }

    /// Whether one of the signatures in a manifest is right. Else, `worst` says why not.
    fn check(
        &self,
        manifest: &[u8],
        digest: &str,
        key: &PublicKey,
        worst: &mut Wrong,
    ) -> Result<bool, RemoteError> {
        let Ok(manifest) = serde_json::from_slice::<Value>(manifest) else {
            *worst = Wrong::Payload;
            return Ok(false);
        };
        let layers = manifest["layers"].as_array().into_iter().flatten();
        for layer in layers.take(MAX_SIGNATURES) {
            let signature = layer["annotations"][SIGNATURE].as_str();
            let Some(signature) = signature.map(|text| BASE64.decode(text.as_bytes())) else {
                continue;
            };
            let payload = self.document(text(&layer["digest"]), PAYLOAD_BYTES)?;
            match verify(&payload, &signature.unwrap_or_default(), digest, key) {
                Ok(()) => return Ok(true),
                Err(wrong) => *worst = wrong.max(worst.clone()),
            }
        }
        Ok(false)
    }
}

/// Checks a signature, and then what it signs.
fn verify(payload: &[u8], signature: &[u8], digest: &str, key: &PublicKey) -> Result<(), Wrong> {
    if !key.accepts(payload, signature) {
        return Err(Wrong::Key);
    }
    signs(payload, digest)
}

/// Whether a signed document names this digest.
pub(crate) fn signs(payload: &[u8], digest: &str) -> Result<(), Wrong> {
    let signed: Value = serde_json::from_slice(payload).map_err(|_| Wrong::Payload)?;
    match signed["critical"]["image"]["docker-manifest-digest"].as_str() {
        Some(found) if found == digest => Ok(()),
        Some(found) => Err(Wrong::Digest(found.to_owned())),
        None => Err(Wrong::Payload),
    }
}

/// The text of a value; empty if it is something else, which no digest is.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn pair() -> (EcdsaKeyPair, PublicKey) {
        let random = SystemRandom::new();
        let scheme = &ECDSA_P256_SHA256_ASN1_SIGNING;
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(scheme, &random).expect("a key");
        let pair = EcdsaKeyPair::from_pkcs8(scheme, pkcs8.as_ref(), &random).expect("a key");
        let mut der = SPKI.to_vec();
        der.extend_from_slice(pair.public_key().as_ref());
        let pem = format!(
            "-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n",
            BASE64.encode(&der)
        );
        let key = PublicKey::parse_pem(&pem).expect("a key");
        (pair, key)
    }

    fn sign(pair: &EcdsaKeyPair, payload: &str) -> Vec<u8> {
        let signed = pair.sign(&SystemRandom::new(), payload.as_bytes());
        signed.expect("a signature").as_ref().to_vec()
    }

    fn payload(digest: &str) -> String {
        format!(r#"{{"critical": {{"image": {{"docker-manifest-digest": "{digest}"}}}}}}"#)
    }

    #[test]
    fn only_a_signature_of_this_digest_by_this_key_is_right() {
        let (pair, key) = pair();
        let check = |payload: &str, signature: &[u8], key: &PublicKey| {
            verify(payload.as_bytes(), signature, DIGEST, key)
        };
        let text = payload(DIGEST);
        let signature = sign(&pair, &text);
        assert_eq!(check(&text, &signature, &key), Ok(()));
        let (_, other) = self::pair();
        assert_eq!(check(&text, &signature, &other), Err(Wrong::Key));
        for at in 0..signature.len() {
            let mut damaged = signature.clone();
            damaged[at] ^= 1;
            assert_eq!(check(&text, &damaged, &key), Err(Wrong::Key));
        }
        assert_eq!(
            check(&text.replace(' ', ""), &signature, &key),
            Err(Wrong::Key)
        );
        let other = payload("sha256:00");
        let signed = sign(&pair, &other);
        let expected = Err(Wrong::Digest("sha256:00".into()));
        assert_eq!(check(&other, &signed, &key), expected);
        let signed = sign(&pair, "{}");
        assert_eq!(check("{}", &signed, &key), Err(Wrong::Payload));
    }

    #[test]
    fn other_keys_are_refused() {
        for text in [
            "",
            "-----BEGIN PUBLIC KEY-----",
            "-----BEGIN PUBLIC KEY-----\n?\n-----END PUBLIC KEY-----",
            "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA\n-----END PUBLIC KEY-----",
        ] {
            PublicKey::parse_pem(text).expect_err(text);
        }
    }
}
