//! Exports: block devices with names.

use std::sync::Arc;

use bcow::{BlockDevice, WritableDevice};

use crate::context::Contexts;
use crate::error::Error;
use crate::proto::{Framing, MAX_STRING_BYTES, transmission_flag as flag};

/// A read-only or a writable device.
#[derive(Clone)]
pub enum Device {
    /// Clients may only read.
    ReadOnly(Arc<dyn BlockDevice>),
    /// Clients may read and write.
    Writable(Arc<dyn WritableDevice>),
}

impl Device {
    /// The device for reads.
    pub fn reader(&self) -> &dyn BlockDevice {
        match self {
            Device::ReadOnly(device) => &**device,
            Device::Writable(device) => &**device,
        }
    }

    /// The device for writes; `None` if it is read-only.
    pub fn writer(&self) -> Option<&dyn WritableDevice> {
        match self {
            Device::ReadOnly(_) => None,
            Device::Writable(device) => Some(&**device),
        }
    }
}

/// A device with a name.
#[derive(Clone)]
pub struct Export {
    /// The name by which clients select the export; at most 4096 bytes.
    pub name: String,
    /// A description for users; may be empty, at most 4096 bytes.
    pub description: String,
    pub device: Device,
}

impl Export {
    /// The properties of the export (see [`crate::proto::transmission_flag`]).
    pub fn transmission_flags(&self, framing: Framing) -> u16 {
        let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_CACHE;
        // For both kinds of device, a flush covers all earlier writes of all threads.
        flags |= flag::CAN_MULTI_CONN;
        flags |= match self.device {
            Device::ReadOnly(_) => flag::READ_ONLY,
            Device::Writable(_) => flag::SEND_TRIM | flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO,
        };
        if framing >= Framing::Structured {
            flags |= flag::SEND_DF;
        }
        flags
    }
}

/// An export as a client has selected it.
#[derive(Clone)]
pub(crate) struct Selection {
    pub(crate) export: Arc<Export>,
    pub(crate) framing: Framing,
    pub(crate) contexts: Contexts,
}

/// All exports of a server.
#[derive(Clone)]
pub struct Exports(Vec<Arc<Export>>);

impl Exports {
    /// Fails if the list is empty, if two exports have the same name, or if a name or description
    /// is too long.
    pub fn new(exports: Vec<Export>) -> Result<Self, Error> {
        if exports.is_empty() {
            return Err(Error::NoExport);
        }
        for (index, export) in exports.iter().enumerate() {
            if export.name.len() > MAX_STRING_BYTES || export.description.len() > MAX_STRING_BYTES {
                return Err(Error::NameTooLong(export.name.clone()));
            }
            if exports[..index]
                .iter()
                .any(|other| other.name == export.name)
            {
                return Err(Error::SameName(export.name.clone()));
            }
        }
        Ok(Exports(exports.into_iter().map(Arc::new).collect()))
    }

    /// Finds an export by name. If there is only one export, the empty name finds it too.
    pub fn find(&self, name: &[u8]) -> Option<&Arc<Export>> {
        let named = self.0.iter().find(|export| export.name.as_bytes() == name);
        match (named, &self.0[..]) {
            (None, [only]) if name.is_empty() => Some(only),
            (named, _) => named,
        }
    }

    /// All exports, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Export>> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export(name: &str) -> Export {
        Export {
            name: name.into(),
            description: String::new(),
            device: Device::ReadOnly(Arc::new(vec![0; 512])),
        }
    }

    #[test]
    fn only_an_only_export_is_the_default() {
        let one = Exports::new(vec![export("a")]).unwrap();
        assert!(one.find(b"").is_some());
        assert!(one.find(b"b").is_none());
        let two = Exports::new(vec![export("a"), export("b")]).unwrap();
        assert!(two.find(b"").is_none());
        assert_eq!(two.find(b"b").unwrap().name, "b");
    }

    #[test]
    fn two_exports_of_one_name_are_refused() {
        let twice = Exports::new(vec![export("a"), export("a")]);
        assert!(matches!(twice, Err(Error::SameName(name)) if name == "a"));
    }
}
