//! The messages of containerd's snapshot service and of its diff service, version 1, and the
//! message types that they use; and what is read of a request of CRI.
//!
//! The numbers of the fields are those of `api/services/snapshots/v1/snapshots.proto`,
//! `api/services/diff/v1/diff.proto`, `api/types/descriptor.proto` and `api/types/mount.proto` of
//! containerd. The field `snapshotter` of each request, which names the plugin inside containerd,
//! is not needed here; a reader of Protocol Buffers skips it. The fields for CRI are those of
//! `pkg/apis/runtime/v1/api.proto` of k8s.io/cri-api.

use std::collections::HashMap;

use prost::{Enumeration, Message};

/// The service's name in the paths of requests.
pub const SERVICE: &str = "containerd.services.snapshots.v1.Snapshots";
/// The name of the diff service.
pub const DIFF_SERVICE: &str = "containerd.services.diff.v1.Diff";
/// The name of CRI's image service.
pub const IMAGE_SERVICE: &str = "runtime.v1.ImageService";

/// `containerd.types.Mount`.
#[derive(Clone, PartialEq, Message)]
pub struct Mount {
    #[prost(string, tag = "1")]
    pub kind: String,
    #[prost(string, tag = "2")]
    pub source: String,
    // Field 3 is a target below the mount point.
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

/// The answer to Prepare, View and Mounts.
#[derive(Clone, PartialEq, Message)]
pub struct Mounts {
    #[prost(message, repeated, tag = "1")]
    pub mounts: Vec<Mount>,
}

/// The request of Prepare and View.
#[derive(Clone, PartialEq, Message)]
pub struct Create {
    #[prost(string, tag = "2")]
    pub key: String,
    #[prost(string, tag = "3")]
    pub parent: String,
    #[prost(map = "string, string", tag = "4")]
    pub labels: HashMap<String, String>,
}

/// The request of Mounts, Remove, Stat and Usage.
#[derive(Clone, PartialEq, Message)]
pub struct Key {
    #[prost(string, tag = "2")]
    pub key: String,
}

/// The request of Commit.
#[derive(Clone, PartialEq, Message)]
pub struct Commit {
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub key: String,
    #[prost(map = "string, string", tag = "4")]
    pub labels: HashMap<String, String>,
    #[prost(string, tag = "5")]
    pub parent: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum Kind {
    Unknown = 0,
    View = 1,
    Active = 2,
    Committed = 3,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, PartialEq, Message)]
pub struct Timestamp {
    #[prost(int64, tag = "1")]
    pub seconds: i64,
    #[prost(int32, tag = "2")]
    pub nanos: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Info {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub parent: String,
    #[prost(enumeration = "Kind", tag = "3")]
    pub kind: i32,
    #[prost(message, optional, tag = "4")]
    pub created_at: Option<Timestamp>,
    #[prost(message, optional, tag = "5")]
    pub updated_at: Option<Timestamp>,
    #[prost(map = "string, string", tag = "6")]
    pub labels: HashMap<String, String>,
}

/// The answer to Stat and Update.
#[derive(Clone, PartialEq, Message)]
pub struct InfoAnswer {
    #[prost(message, optional, tag = "1")]
    pub info: Option<Info>,
}

/// `google.protobuf.FieldMask`.
#[derive(Clone, PartialEq, Message)]
pub struct FieldMask {
    #[prost(string, repeated, tag = "1")]
    pub paths: Vec<String>,
}

/// The request of Update.
#[derive(Clone, PartialEq, Message)]
pub struct Update {
    #[prost(message, optional, tag = "2")]
    pub info: Option<Info>,
    #[prost(message, optional, tag = "3")]
    pub mask: Option<FieldMask>,
}

/// The request of List.
#[derive(Clone, PartialEq, Message)]
pub struct List {
    #[prost(string, repeated, tag = "2")]
    pub filters: Vec<String>,
}

/// One message of the answer to List.
#[derive(Clone, PartialEq, Message)]
pub struct Listed {
    #[prost(message, repeated, tag = "1")]
    pub info: Vec<Info>,
}

/// The answer to Usage.
#[derive(Clone, PartialEq, Message)]
pub struct Usage {
    #[prost(int64, tag = "1")]
    pub size: i64,
    #[prost(int64, tag = "2")]
    pub inodes: i64,
}

/// `containerd.types.Descriptor`.
#[derive(Clone, PartialEq, Message)]
pub struct Descriptor {
    #[prost(string, tag = "1")]
    pub media_type: String,
    #[prost(string, tag = "2")]
    pub digest: String,
    #[prost(int64, tag = "3")]
    pub size: i64,
}

/// The request of Apply. Its other fields are keys for encrypted layers, and whether to make files
/// durable, which a commit does here.
#[derive(Clone, PartialEq, Message)]
pub struct Apply {
    #[prost(message, optional, tag = "1")]
    pub diff: Option<Descriptor>,
    #[prost(message, repeated, tag = "2")]
    pub mounts: Vec<Mount>,
}

/// The answer to Apply: the archive without its compression.
#[derive(Clone, PartialEq, Message)]
pub struct Applied {
    #[prost(message, optional, tag = "1")]
    pub applied: Option<Descriptor>,
}

/// A message without fields: the request of Cleanup, and several answers.
#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

/// `runtime.v1.PullImageRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct PullImage {
    #[prost(message, optional, tag = "1")]
    pub image: Option<Image>,
    #[prost(message, optional, tag = "2")]
    pub auth: Option<Auth>,
}

/// `runtime.v1.ImageSpec`.
#[derive(Clone, PartialEq, Message)]
pub struct Image {
    #[prost(string, tag = "1")]
    pub image: String,
}

/// `runtime.v1.AuthConfig`. It has no `Debug` of its fields, which are secrets.
#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct Auth {
    #[prost(string, tag = "1")]
    pub username: String,
    #[prost(string, tag = "2")]
    pub password: String,
    /// `USERNAME:PASSWORD` in base64.
    #[prost(string, tag = "3")]
    pub auth: String,
    #[prost(string, tag = "4")]
    pub server_address: String,
    #[prost(string, tag = "5")]
    pub identity_token: String,
}

impl std::fmt::Debug for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Auth")
    }
}
