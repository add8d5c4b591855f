//! Checks an upper while no process writes to it: each mark, each map, each object that a mark
//! names, and each object without a reference.
//!
//! The codes of findings are stable; docs/upper.md lists them. Leaks and wrong link counts can be
//! repaired. Damaged marks cannot, because their information exists nowhere else.

mod beside;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use bcow::BlockDevice;
use bcow_erofs::reader::{FileType, Filesystem, Inode, Nid};
use rustix::fs::{AtFlags, Stat};
use rustix::io::Errno;

pub use bcow::check::{Finding, Findings, Place, Severity};

use super::builder::join;
use super::partial::{self, HostFile};
use crate::upper::beneath::open_directory_beneath;
use crate::upper::xattr::each_name;
use crate::upper::{
    Attribute, Instance, META, Mark, Marks, Metacopy, Names, NlinkDelta, OVERRIDE, Origin,
    Override, Ownership, Redirect, UpperError, UpperReader, is_whiteout, work,
};

/// The largest number of nodes for which link counts are verified: the same limit as for a
/// comparison or a commit. A few marks can make an upper refer to any number of files of an image.
const MAX_FILES: u64 = 4_000_000;

/// The result of a check.
#[derive(Debug, Default)]
pub struct Report {
    /// The findings: directory by directory, then those beside the tree. Each place is a path below
    /// the upper; `.` for the root.
    pub findings: Findings,
    /// The number of directories in the tree.
    pub directories: u64,
    /// The number of names of other objects in the tree.
    pub files: u64,
    /// The number of whiteouts.
    pub whiteouts: u64,
    /// The number of metadata copies: files of which all bytes are the image's.
    pub metadata_copies: u64,
    /// The number of partial files.
    pub partials: u64,
    /// The repairs that are possible.
    repairs: Vec<Repair>,
}

/// A repair that needs no guess.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Repair {
    /// Remove this map, which no partial file uses.
    Map(Vec<u8>),
    /// Remove this entry of the index, which has no name in the tree.
    Index(Vec<u8>),
    /// Empty the work directory.
    Work,
    /// Set the [`NlinkDelta::Upper`] of this entry of the index.
    Nlink(Vec<u8>, i32),
}

impl Report {
    /// Whether no finding has the severity [`Severity::Error`].
    pub fn is_sound(&self) -> bool {
        self.findings.is_sound()
    }

    /// Whether [`repair`] would change anything.
    pub fn is_repairable(&self) -> bool {
        !self.repairs.is_empty()
    }

    /// Whether the directory of temporary files has leftovers, which the next open for writing
    /// removes. The finding about them may not be among those that were kept.
    pub fn has_leftover_work(&self) -> bool {
        self.repairs.contains(&Repair::Work)
    }

    fn error(&mut self, code: &'static str, path: &[u8], message: impl Into<String>) {
        self.findings
            .add(Finding::error(code, place(path), message));
    }

    fn warning(&mut self, code: &'static str, path: &[u8], message: impl Into<String>) {
        self.findings
            .add(Finding::warning(code, place(path), message));
    }

    /// Adds a warning, and its repair.
    fn repairable(&mut self, code: &'static str, path: &[u8], message: &str, repair: Repair) {
        let finding = Finding::warning(code, place(path), message);
        self.findings.add(finding.repaired_by(match repair {
            Repair::Map(_) => "removes the map",
            Repair::Index(_) => "removes the entry",
            Repair::Work => "empties the directory",
            Repair::Nlink(..) => "records the right number",
        }));
        self.repairs.push(repair);
    }
}

fn place(path: &[u8]) -> Place {
    Place::Path(if path.is_empty() { b"." } else { path }.to_vec())
}

/// The image of an upper.
#[derive(Clone)]
pub struct CheckedImage {
    /// Its file system.
    pub filesystem: Arc<Filesystem>,
    /// The device of the file system.
    pub device: Arc<dyn BlockDevice>,
}

/// Checks the upper of `upper`. References to the image are checked only if `image` is given. With
/// `data`, also reads all stored data. Fails only if the host fails in a way that makes a check
/// impossible; other problems are findings.
pub fn check(
    upper: &UpperReader,
    image: Option<&CheckedImage>,
    data: bool,
) -> Result<Report, UpperError> {
    let host = |errno| UpperError::io(upper.path(), "read it", errno);
    let mut checker = Checker {
        upper,
        names: upper.names(),
        image: image.map(|image| &*image.filesystem),
        data,
        read: HashSet::new(),
        report: Report::default(),
        partials: HashMap::new(),
        indexed: HashMap::new(),
        pending: Vec::new(),
    };
    if upper.is_lost()? {
        let message = "the machine stopped while it was mounted with --sync volatile";
        let path = format!("{META}/volatile").into_bytes();
        checker.report.error("upper-volatile", &path, message);
    }
    checker.beside("index", Checker::index).map_err(host)?;
    checker.tree().map_err(host)?;
    checker.beside("maps", Checker::maps).map_err(host)?;
    checker.beside("work", Checker::work).map_err(host)?;
    if let Some(image) = image {
        checker.links(image);
    }
    Ok(checker.report)
}

/// Performs the repairs of `report` and returns descriptions of them. The report must be current:
/// the caller has made it while `instance` was open, or while no other process could write.
pub fn repair(instance: &Instance, report: &Report) -> Result<Vec<String>, UpperError> {
    let mut done = Vec::new();
    let host = |errno| UpperError::io(instance.path(), "repair it", errno);
    for repair in &report.repairs {
        let shown = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        done.push(match repair {
            Repair::Map(name) => {
                work::unlink(instance.maps(), name).map_err(host)?;
                let name = shown(name);
                format!("removed {META}/maps/{name}, which no partial file uses")
            }
            Repair::Index(name) => {
                work::unlink(instance.index(), name).map_err(host)?;
                let name = shown(name);
                format!("removed {META}/index/{name}, which no name refers to")
            }
            // The open of the instance has emptied the directory.
            Repair::Work => format!("emptied {META}/work"),
            Repair::Nlink(name, delta) => {
                let value = NlinkDelta::Upper(*delta).encode();
                let at = Attribute::Named(instance.index(), name);
                Mark::Nlink
                    .set(at, instance.namespace(), value.as_bytes())
                    .map_err(host)?;
                format!("set the number of names of {META}/index/{}", shown(name))
            }
        });
    }
    for dir in [instance.maps(), instance.index(), instance.work()] {
        rustix::fs::fsync(dir).map_err(host)?;
    }
    Ok(done)
}

struct Checker<'c> {
    upper: &'c UpperReader,
    names: Names,
    image: Option<&'c Filesystem>,
    /// Whether data is read.
    data: bool,
    /// Host inode numbers of files with several names whose data was read.
    read: HashSet<u64>,
    report: Report,
    /// Partial files by number: host inode number and path.
    partials: HashMap<u64, (u64, Vec<u8>)>,
    /// Entries of the index: the image's inode numbers by host inode number.
    indexed: HashMap<u64, u64>,
    /// Pending directories, with the directory of the image that each continues, if it is known.
    pending: Vec<(Vec<u8>, Option<Inode>)>,
}

impl Checker<'_> {
    /// Calls `check` for the directory `name` of [`META`]. Reports an object with that name that is
    /// not a directory or cannot be opened.
    fn beside(
        &mut self,
        name: &str,
        check: fn(&mut Self) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        if let Err(error) = self.upper.meta_directory(name) {
            let message = match error {
                UpperError::NotADirectory(_) => "it is not a directory".to_owned(),
                error => format!(
                    "it cannot be opened: {}",
                    error.errno().unwrap_or(Errno::IO)
                ),
            };
            let path = format!("{META}/{name}").into_bytes();
            self.report.error("upper-host", &path, message);
            return Ok(());
        }
        check(self)
    }

    fn tree(&mut self) -> Result<(), Errno> {
        let root = self.upper.root();
        let marks = self.marks(Attribute::Open(root), b"")?;
        let stat = rustix::fs::fstat(root)?;
        let below = self.image.and_then(|image| image.inode(image.root()).ok());
        self.entry(b"", &stat, &marks, None, below);
        // The root continues the image's root. Its marks do not matter.
        self.pending.push((Vec::new(), below));
        while let Some((path, lower)) = self.pending.pop() {
            self.directory(&path, lower)?;
        }
        Ok(())
    }

    fn directory(&mut self, path: &[u8], lower: Option<Inode>) -> Result<(), Errno> {
        let listed = open_directory_beneath(self.upper.root(), path)
            .and_then(|fd| Ok((work::list(fd.as_fd())?, fd)));
        let (mut names, fd) = match listed {
            Ok(listed) => listed,
            Err(errno) if path.is_empty() => return Err(errno),
            Err(errno) => {
                let message = format!("it cannot be listed: {errno}");
                self.report.error("upper-host", path, message);
                return Ok(());
            }
        };
        names.sort_unstable();
        let first = self.pending.len();
        for name in names {
            if path.is_empty() && name == META.as_bytes() {
                continue;
            }
            let full = join(path, &name);
            if let Err(errno) = self.name(fd.as_fd(), &name, &full, lower.as_ref()) {
                let message = format!("it cannot be read: {errno}");
                self.report.error("upper-host", &full, message);
            }
        }
        // The last element is processed first.
        self.pending[first..].reverse();
        Ok(())
    }

    fn name(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        path: &[u8],
        parent: Option<&Inode>,
    ) -> Result<(), Errno> {
        let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let below = self.child(parent, name);
        if is_whiteout(&stat) {
            self.report.whiteouts += 1;
            if self.image.is_some() && parent.is_some() && below.is_none() {
                let message = "a whiteout of a name that the image does not have";
                self.report.warning("upper-whiteout", path, message);
            }
            return Ok(());
        }
        let marks = self.marks(Attribute::Named(dir, name), path)?;
        let lower = self.entry(path, &stat, &marks, parent, below);
        if file_type(&stat) == rustix::fs::FileType::Directory {
            self.pending.push((path.to_vec(), lower));
        }
        Ok(())
    }

    fn child(&self, parent: Option<&Inode>, name: &[u8]) -> Option<Inode> {
        let image = self.image?;
        let entry = image.lookup(parent?, name).ok()??;
        image.inode(entry.nid).ok()
    }

    /// Reads the marks of a file. Each damaged mark is a finding.
    fn marks(&mut self, at: Attribute<'_>, path: &[u8]) -> Result<Marks, Errno> {
        let mut marks = Marks::default();
        let list = at.list()?;
        for name in each_name(&list) {
            let known = Mark::ALL
                .into_iter()
                .find(|mark| mark.name(self.names.namespace) == name);
            let read = match known {
                None if name == OVERRIDE => at
                    .get(name)?
                    .map(|value| Override::decode(&value).map(|owner| marks.owner = Some(owner))),
                None => None,
                Some(mark) => at.get(name)?.map(|value| marks.apply(mark, &value)),
            };
            if let Some(Err(error)) = read {
                self.report.error("upper-mark", path, error.to_string());
            }
        }
        Ok(marks)
    }

    /// Checks the marks of an object. Returns the inode of the image that it continues.
    fn entry(
        &mut self,
        path: &[u8],
        stat: &Stat,
        marks: &Marks,
        parent: Option<&Inode>,
        below: Option<Inode>,
    ) -> Option<Inode> {
        let kind = file_type(stat);
        let is_directory = kind == rustix::fs::FileType::Directory;
        let is_regular = kind == rustix::fs::FileType::RegularFile;
        if is_directory {
            self.report.directories += 1
        } else {
            self.report.files += 1
        }
        let misplaced = [
            (
                marks.opaque && !is_directory,
                "opaque",
                "is not a directory",
            ),
            (
                marks.metacopy != Metacopy::None && !is_regular,
                "metacopy",
                "is not a regular file",
            ),
            (
                marks.partial.is_some() && !is_regular,
                "sketch",
                "is not a regular file",
            ),
            (
                marks.metacopy == Metacopy::Partial && marks.partial.is_none(),
                "metacopy",
                "has no partial file mark",
            ),
            (
                marks.metacopy == Metacopy::None && self.shows_holes(marks, stat),
                "sketch",
                "has no metacopy mark, so overlayfs would show its holes",
            ),
            (
                marks.partial.is_some() && marks.origin.is_none(),
                "sketch",
                "has no origin in the image",
            ),
        ];
        for (is_wrong, mark, problem) in misplaced {
            if is_wrong {
                let message = format!("it is marked as {mark}, but {problem}");
                self.report.error("upper-mark-misplaced", path, message);
            }
        }
        if self.has_unsuitable_owner(stat, marks) {
            let message = "the type in its owner attribute does not suit the host's file";
            self.report.error("upper-mark-misplaced", path, message);
        }
        let lower = self.lower(path, marks, kind, parent, below);
        let has_lower_bytes = is_regular && marks.metacopy != Metacopy::None;
        if has_lower_bytes && self.image.is_some() && lower.is_none() {
            let message = "its data is in the image, which has no such file";
            self.report.error("upper-lower-missing", path, message);
        }
        if self.data && is_regular {
            self.read(path, stat);
        }
        if marks.partial.is_some() && is_regular {
            self.report.partials += 1;
            self.partial(path, stat, marks, lower.as_ref());
        } else if marks.metacopy == Metacopy::Whole && is_regular {
            self.report.metadata_copies += 1;
        }
        lower
    }

    /// The inode of the image that an object continues, by its marks and its name.
    fn lower(
        &mut self,
        path: &[u8],
        marks: &Marks,
        kind: rustix::fs::FileType,
        parent: Option<&Inode>,
        below: Option<Inode>,
    ) -> Option<Inode> {
        let image = self.image?;
        let mut found = None;
        if let Some(origin) = &marks.origin {
            match self.origin(image, origin, kind, marks) {
                Ok(inode) => found = Some(inode),
                Err(problem) => self.report.error("upper-origin", path, problem),
            }
        }
        let redirected = match &marks.redirect {
            None => below,
            Some(redirect) => {
                let target = match redirect {
                    Redirect::Path(path) => {
                        let nid = image.resolve(path).ok().flatten();
                        nid.and_then(|nid| image.inode(nid).ok())
                    }
                    Redirect::Sibling(name) => self.child(parent, name),
                };
                if !target.is_some_and(|inode| self.is_of_type(inode.kind, kind, marks)) {
                    let shown = String::from_utf8_lossy(&redirect.encode()).into_owned();
                    let message = format!("the image has no {shown:?} that it continues");
                    match found {
                        // With a valid origin, only overlayfs uses the redirect.
                        Some(_) => self.report.warning("upper-redirect", path, message),
                        None => self.report.error("upper-redirect", path, message),
                    }
                }
                target
            }
        };
        if marks.opaque {
            return None;
        }
        found.or(redirected.filter(|inode| self.is_of_type(inode.kind, kind, marks)))
    }

    /// The inode that the origin mark of an object of type `kind` names, or the problem with it.
    fn origin(
        &self,
        image: &Filesystem,
        origin: &Origin,
        kind: rustix::fs::FileType,
        marks: &Marks,
    ) -> Result<Inode, String> {
        if origin.uuid != image.superblock().uuid {
            return Err("its origin is in another image".to_owned());
        }
        let inode = image
            .inode(Nid(origin.nid))
            .map_err(|error| format!("its origin cannot be read: {error}"))?;
        if self.is_of_type(inode.kind, kind, marks) {
            return Ok(inode);
        }
        Err(format!(
            "its origin, inode {} of the image, is of another type ({})",
            origin.nid,
            type_name(inode.kind)
        ))
    }

    /// Whether the owner's attribute has a type that this host file cannot represent.
    fn has_unsuitable_owner(&self, stat: &Stat, marks: &Marks) -> bool {
        let owner = marks.owner.filter(|_| self.keeps_owners());
        owner.is_some_and(|owner| owner.kind_over(stat).is_err())
    }

    /// Whether a type of the image matches the type of a host file. Where owners are in an
    /// attribute, the type is there too.
    fn is_of_type(&self, kind: FileType, host: rustix::fs::FileType, marks: &Marks) -> bool {
        let owner = marks.owner.filter(|_| self.keeps_owners());
        match owner.and_then(|owner| owner.kind) {
            Some(kept) => kept == kind,
            None => rustix::fs::FileType::from_raw_mode(kind.mode_bits()) == host,
        }
    }

    fn keeps_owners(&self) -> bool {
        self.names.ownership == Ownership::Override
    }

    /// Reads all stored data of a file, to find read errors.
    fn read(&mut self, path: &[u8], stat: &Stat) {
        if stat.st_nlink > 1 && !self.read.insert(stat.st_ino) {
            return;
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if let Err(errno) = partial::read_all(self.upper, path, size) {
            let message = format!("it cannot be read: {errno}");
            self.report.error("upper-host", path, message);
        }
    }

    /// Whether the file is a partial file that the host's file does not hold completely. A complete
    /// partial file may lack the metacopy mark: during its promotion to a plain file, the marks are
    /// removed one after the other.
    fn shows_holes(&self, marks: &Marks, stat: &Stat) -> bool {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        marks
            .partial
            .is_some_and(|mark| !matches!(partial::is_complete(self.upper, &mark, size), Ok(true)))
    }

    fn partial(&mut self, path: &[u8], stat: &Stat, marks: &Marks, lower: Option<&Inode>) {
        let Some(mark) = &marks.partial else { return };
        if let Some((inode, other)) = self.partials.get(&mark.id) {
            if *inode != stat.st_ino {
                let other = String::from_utf8_lossy(other).into_owned();
                let message = format!("it has the same number as the partial file {other:?}");
                self.report.error("upper-sketch-number", path, message);
            }
            // This is another name of the same file.
            return;
        }
        self.partials.insert(mark.id, (stat.st_ino, path.to_vec()));
        let host = HostFile {
            path,
            inode: stat.st_ino,
            size: u64::try_from(stat.st_size).unwrap_or(0),
        };
        if let Err(problem) = partial::check(self.upper, mark, &host, lower) {
            self.report
                .error("upper-sketch-map", path, problem.to_string());
        }
    }
}

fn file_type(stat: &Stat) -> rustix::fs::FileType {
    rustix::fs::FileType::from_raw_mode(stat.st_mode)
}

fn type_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Regular => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::CharDevice => "a character device",
        FileType::BlockDevice => "a block device",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
    }
}
