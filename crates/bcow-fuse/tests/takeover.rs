//! A takeover that fails ends the mount. The test needs a process of its own, because it uses up
//! the file descriptors of the process.

mod support;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bcow::{BlockDevice, Error};
use bcow_fuse::{ImageFs, MountError, MountOptions, Session, WhenBusy, mounted_image, unmount};
use bcow_testkit::lacks;
use rustix::process::{Resource, Rlimit};
use support::{open, written_image};
use tempfile::TempDir;

/// An image in a file, which takes a descriptor.
struct InFile(File, u64);

impl BlockDevice for InFile {
    fn size(&self) -> u64 {
        self.1
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let read = self.0.read_exact_at(buf, offset);
        read.map_err(|source| Error::Io {
            action: "read",
            offset,
            source,
        })
    }
}

fn content() -> ImageFs {
    let (image, file) = (written_image(), tempfile::tempfile().unwrap());
    file.write_all_at(&image, 0).unwrap();
    ImageFs::new(open(Arc::new(InFile(file, image.len() as u64))))
}

/// Opens files until the process has no descriptor left.
fn use_up_descriptors() -> Vec<OwnedFd> {
    let open = || File::open("/dev/null").map(OwnedFd::from);
    std::iter::from_fn(|| open().ok()).collect()
}

#[test]
fn mount_ends_if_no_descriptor_is_left_for_its_takeover() {
    if lacks("/dev/fuse", Path::new("/dev/fuse").exists()) {
        return;
    }
    let directory = TempDir::new().unwrap();
    let options = MountOptions::default();
    let first = Session::mount(content(), Arc::default(), directory.path(), &options, 1).unwrap();
    let handover = first.hand_over().unwrap();
    let Some(handover) = handover else {
        lacks("a kernel that sends requests again", false);
        return;
    };
    // As if its process had ended without an unmount.
    std::mem::forget(first);
    let (next, stats) = (content(), Arc::default());
    let few = Rlimit {
        current: Some(200),
        ..rustix::process::getrlimit(Resource::Nofile)
    };
    let before = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, few).unwrap();
    let used = use_up_descriptors();
    let taken = Session::take_over(next, stats, handover, &options, 1);
    drop(used);
    rustix::process::setrlimit(Resource::Nofile, before).unwrap();
    let error = taken.err().expect("no descriptor").to_string();
    let after = mounted_image(directory.path());
    // No mount is left after a failure of this test.
    let _ = unmount(directory.path(), WhenBusy::Detach);
    assert!(error.contains("duplicate a descriptor"), "{error}");
    assert!(matches!(after, Err(MountError::NotMounted(_))), "{after:?}");
}
