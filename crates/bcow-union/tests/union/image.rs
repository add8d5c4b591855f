//! The images below the unions, and their content.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::{Arc, LazyLock};

use bcow::BlockDevice;
use bcow_erofs::reader::Filesystem;
use bcow_testkit::make_erofs;
pub use bcow_testkit::noise;

use crate::host::{make_whiteout, set_attribute};

/// The extended attribute that stores the ACL.
pub const ACCESS_ACL: &str = "system.posix_acl_access";

/// Encodes an ACL of tag, permissions and ID.
pub fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// An ACL with which all users may read, and user 1000 has the permissions `may`.
pub fn acl_of_user(may: u16) -> Vec<u8> {
    const NO_ID: u32 = u32::MAX;
    acl(&[
        (0x01, 7, NO_ID),
        (0x02, may, 1000),
        (0x04, 5, NO_ID),
        (0x10, 7, NO_ID),
        (0x20, 5, NO_ID),
    ])
}

/// Size of the file `big` of the image `few`, in bytes.
pub const BIG: usize = 300_000;

/// Content of the file `big` of the image `few`.
pub fn big() -> Vec<u8> {
    noise(1, BIG)
}

/// An EROFS image.
pub struct Image(Arc<Vec<u8>>);

/// One file of each type, a file with two links, a file large enough for partial files, and an ACL
/// on the root.
pub fn few() -> &'static Image {
    &IMAGES[0]
}

/// Files with sizes around multiples of a block, so that some ends are inline and some in blocks,
/// and a file with four links.
pub fn many() -> &'static Image {
    &IMAGES[1]
}

/// Many large and small files and directories, and a device 0:0 with two links.
pub fn crowd() -> &'static Image {
    &IMAGES[2]
}

// All images are made together and once: a child process inherits the locks of other tests until
// its exec.
static IMAGES: LazyLock<[Image; 3]> =
    LazyLock::new(|| [fill_few, fill_many, fill_crowd].map(Image::of));

fn fill_few(tree: &Path) {
    fs::create_dir_all(tree.join("dir/sub")).unwrap();
    fs::write(tree.join("small"), b"small file\n").unwrap();
    fs::write(tree.join("big"), big()).unwrap();
    fs::write(tree.join("dir/x"), b"x").unwrap();
    fs::write(tree.join("dir/sub/y"), b"y").unwrap();
    fs::write(tree.join("h1"), b"two names").unwrap();
    fs::hard_link(tree.join("h1"), tree.join("h2")).unwrap();
    symlink("small", tree.join("link")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    fs::set_permissions(tree, fs::Permissions::from_mode(0o755)).unwrap();
    set_attribute(tree, ACCESS_ACL, &acl_of_user(7));
}

fn fill_many(tree: &Path) {
    for name in ["a/b/c", "a/d", "e/f", "g"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    let sizes = [0, 1, 100, 4095, 4096, 4097, 70_000, 131_072, 300_001];
    for (index, size) in sizes.into_iter().enumerate() {
        let parent = ["a", "a/b", "a/b/c", "e", "g"][index % 5];
        let path = tree.join(parent).join(format!("file{index}"));
        fs::write(path, noise(index as u64, size)).unwrap();
    }
    fs::write(tree.join("large"), noise(77, 2_000_000)).unwrap();
    fs::write(tree.join("h1"), noise(78, 100_000)).unwrap();
    for link in ["a/h2", "a/b/h3", "g/h4"] {
        fs::hard_link(tree.join("h1"), tree.join(link)).unwrap();
    }
    symlink("a/file0", tree.join("link")).unwrap();
}

fn fill_crowd(tree: &Path) {
    for index in 0..400 {
        fs::write(tree.join(format!("f{index}")), b"small file\n").unwrap();
        for name in [format!("dir{index}"), format!("deep{index}")] {
            fs::create_dir(tree.join(&name)).unwrap();
            fs::write(tree.join(name).join("gone"), b"").unwrap();
        }
    }
    for index in 0..40 {
        fs::write(tree.join(format!("b{index}")), vec![index; 300_000]).unwrap();
    }
    make_whiteout(&tree.join("device"));
    fs::create_dir(tree.join("devices")).unwrap();
    fs::hard_link(tree.join("device"), tree.join("devices/other")).unwrap();
}

impl Image {
    /// Makes the image of a tree with mkfs.erofs.
    fn of(fill: fn(&Path)) -> Image {
        let directory = tempfile::tempdir().unwrap();
        let [tree, image] = ["tree", "image"].map(|name| directory.path().join(name));
        fs::create_dir(&tree).unwrap();
        fill(&tree);
        make_erofs(
            &tree,
            &image,
            &["-U", "6a0f7b5e-0000-4000-8000-00000000bc0f"],
        );
        let mut bytes = fs::read(image).unwrap();
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        Image(Arc::new(bytes))
    }

    /// The bytes of the image.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        self.0.clone()
    }

    /// The content of the image.
    pub fn filesystem(&self) -> Arc<Filesystem> {
        Arc::new(Filesystem::open(self.device()).unwrap())
    }
}
