//! `bcow extract`
//!
//! Names come from the image and may be hostile, and other processes that can write to the
//! destination may be hostile too. So the kernel never resolves a whole path: each directory is
//! opened from its parent's descriptor with openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS), names
//! are single components (checked in [`crate::walk`]), and every file is created new (O_EXCL,
//! mkdir, link, mknod) and then handled by descriptor.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use bcow_erofs::reader::{ExtentSource, FileType, Inode, Nid};
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::error::{CommandError, Context};
use crate::image::{LastLink, LayerArgs, OpenImage, StoreArgs, Tree};
use crate::interrupt::Interrupt;
use crate::names;
use crate::size::{Count, Human, plural};
use crate::ui::{Progress, Ui};
use crate::walk::{Entries, Seen, join};

/// Unpack an image, or a part of it, into a directory
///
/// If PATH is a directory in the image (default: the root), its contents are extracted into DIR. If
/// PATH is another type of file, it is extracted into DIR under its own name. The command makes DIR
/// if it is missing.
///
/// The command extracts files of all types with mode, modification time in nanoseconds, extended
/// attributes and hard links; holes stay holes. For root, it also sets the owners of the image, and
/// an attribute that cannot be set is an error. For an ordinary user, all extracted files belong to
/// that user and have no set-user-ID and set-group-ID bits; the command leaves out devices and
/// privileged attributes (trusted.*, security.*) with a warning.
///
/// The command writes nothing outside DIR, whatever the image contains. An existing directory keeps
/// its attributes; an existing file is an error. With --force, existing directories below DIR get
/// the attributes of the image, and existing files are replaced, never written into. After an
/// error, the files extracted so far remain. With --keep-going, the command reports each damaged
/// part of the image, leaves it out, extracts the rest, and exits with status 1.
#[derive(Debug, clap::Args)]
#[command(override_usage = "bcow extract [OPTIONS] <IMG> [PATH] <DIR>")]
pub struct Args {
    /// The image: a file, oci:DIR[:REF] or oci:DIR@sha256:DIGEST
    #[arg(value_name = "IMG", value_hint = clap::ValueHint::FilePath)]
    image: PathBuf,
    /// A path in the image [default: its root], and the directory to extract into
    #[arg(value_name = "[PATH] DIR", value_hint = clap::ValueHint::AnyPath)]
    path_or_directory: OsString,
    #[arg(hide = true, value_hint = clap::ValueHint::DirPath)]
    directory: Option<PathBuf>,
    /// Replace existing files
    #[arg(short, long)]
    force: bool,
    /// Extract all readable files of a damaged image: report each unreadable file and leave it out
    #[arg(short, long)]
    keep_going: bool,
    /// Set owners as in the image (the default for root)
    #[arg(long, conflicts_with = "no_same_owner")]
    same_owner: bool,
    /// Do not set owners: all files belong to the current user (the default for ordinary users)
    #[arg(long)]
    no_same_owner: bool,
    /// Leave out extended attributes, ACLs and file capabilities
    #[arg(long)]
    no_xattrs: bool,
    #[command(flatten)]
    layers: LayerArgs,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Unpacks.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let (path, directory) = match &args.directory {
        Some(directory) => (args.path_or_directory.as_bytes(), directory.as_path()),
        None => (&b"/"[..], Path::new(&args.path_or_directory)),
    };
    let interrupt = Interrupt::catch();
    let image = match args.keep_going && args.layers.layers.is_empty() {
        // What a missing layer has cannot be read either.
        true => OpenImage::open_without_content(&args.image, &args.stores, ui)?,
        false => OpenImage::open_with_layers(&args.image, &args.layers, &args.stores)?,
    };
    let tree = image.tree()?;
    let start = tree.find(path, LastLink::Follow)?;
    // Modes are set as they are in the image, and nothing else runs in this process.
    rustix::process::umask(Mode::empty());

    let (root, made) = destination(directory)?;
    let privileged = rustix::process::geteuid().is_root();
    let progress = ui.progress();
    progress.phase("unpacking");
    let mut extraction = Extraction {
        ui,
        tree: &tree,
        shown: directory,
        interrupt: &interrupt,
        progress: &progress,
        force: args.force,
        keep_going: args.keep_going,
        privileged,
        owners: args.same_owner || (privileged && !args.no_same_owner),
        xattrs: !args.no_xattrs,
        root: root.try_clone().context(|| cannot_make(directory, b""))?,
        links: HashMap::new(),
        seen: Seen::default(),
        left_out: LeftOut::default(),
        unreadable: 0,
        entries: 0,
        bytes: 0,
    };
    let unpacked = extraction.start(&start, path, directory, root, made);
    if let Err(error) = unpacked {
        if made {
            // Only if nothing was unpacked into it.
            let _ = rustix::fs::rmdir(directory);
        }
        return Err(match error.is_in_image() {
            true => error.hint("--keep-going unpacks everything that can be read"),
            false => error,
        });
    }
    let Extraction {
        left_out,
        unreadable,
        entries,
        bytes,
        ..
    } = extraction;
    drop(progress);
    left_out.tell(ui);
    ui.status(format_args!(
        "{}: {} unpacked, {} of file content",
        directory.display(),
        match entries {
            1 => "1 entry".to_owned(),
            n => format!("{} entries", Count(n)),
        },
        Human(bytes)
    ));
    match unreadable {
        0 => Ok(()),
        count => Err(CommandError::new(format!(
            "{} could not be read and {} missing in {}",
            plural(count, "part"),
            if count == 1 { "is" } else { "are" },
            directory.display()
        ))
        .hint(format!(
            "`bcow fsck --data {}` says what is damaged",
            args.image.display()
        ))),
    }
}

/// The directory to unpack into, and whether it was made for that.
fn destination(directory: &Path) -> Result<(OwnedFd, bool), CommandError> {
    let made = match rustix::fs::mkdir(directory, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(error) => {
            return Err(CommandError::new(cannot_make(directory, b"")).caused_by(&error));
        }
    };
    // The user named this path, so links in it are the user's own.
    let fd = rustix::fs::open(
        directory,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .context(|| format!("cannot unpack into {}", directory.display()))?;
    Ok((fd, made))
}

/// A destination made for a single file gets no attributes from the image; it shall look as mkdir
/// would have made it under a usual umask.
fn chmod_like_mkdir(root: &OwnedFd, directory: &Path) -> Result<(), CommandError> {
    rustix::fs::fchmod(root, Mode::from_raw_mode(0o755)).context(|| cannot_make(directory, b""))
}

struct Extraction<'a> {
    ui: &'a Ui,
    tree: &'a Tree,
    /// The destination as the user wrote it.
    shown: &'a Path,
    interrupt: &'a Interrupt,
    progress: &'a Progress<'a>,
    force: bool,
    keep_going: bool,
    privileged: bool,
    owners: bool,
    xattrs: bool,
    root: OwnedFd,
    /// Where the first name of a file with several names went, relative to the root.
    links: HashMap<Nid, Vec<u8>>,
    seen: Seen,
    left_out: LeftOut,
    /// Parts of the image that could not be read: files, and names or attributes of directories.
    unreadable: u64,
    entries: u64,
    bytes: u64,
}

/// A directory on the way.
struct Level {
    inode: Inode,
    /// Its path in the image, for messages.
    source: Vec<u8>,
    /// Its path below the destination.
    path: Vec<u8>,
    fd: OwnedFd,
    /// Whether it gets the attributes that it has in the image.
    made: bool,
    entries: Entries,
}

impl Extraction<'_> {
    /// Unpacks what `source` names, which is `start`, into the directory `root`.
    fn start(
        &mut self,
        start: &Inode,
        source: &[u8],
        directory: &Path,
        root: OwnedFd,
        made: bool,
    ) -> Result<(), CommandError> {
        if start.kind == FileType::Directory {
            return self.tree(*start, source, root, made);
        }
        let name = source.rsplit(|&b| b == b'/').next().unwrap_or(source);
        if matches!(name, b"" | b"." | b"..") {
            return Err(CommandError::usage(format!(
                "{} does not end in a name",
                names::quoted(source)
            )));
        }
        let unpacked = self.node(start, source, &root, b"", name);
        self.pass(unpacked)?;
        match made {
            true => chmod_like_mkdir(&root, directory),
            false => Ok(()),
        }
    }

    /// Reports a part of the image that cannot be read, and returns `None`, if the rest is to be
    /// extracted anyway.
    fn pass<T>(&mut self, done: Result<T, CommandError>) -> Result<Option<T>, CommandError> {
        match done {
            Ok(done) => Ok(Some(done)),
            Err(error) if self.keep_going && error.is_in_image() => {
                self.ui.error(&error);
                self.unreadable += 1;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Unpacks the directory `start` as `fd`.
    fn tree(
        &mut self,
        start: Inode,
        source: &[u8],
        fd: OwnedFd,
        made: bool,
    ) -> Result<(), CommandError> {
        self.seen.enter(self.tree, start.nid, source)?;
        let mut stack = vec![Level {
            inode: start,
            source: source.to_vec(),
            path: Vec::new(),
            fd,
            made,
            entries: Entries::new(start),
        }];
        while let Some(level) = stack.last_mut() {
            let next = level.entries.next(self.tree, &level.source);
            // What a damaged directory names behind the damage cannot be found.
            let Some(entry) = self.pass(next)?.flatten() else {
                // Now that nothing more is made in it, its times hold.
                if level.made {
                    let set =
                        self.attributes(&level.inode, &level.source, &level.path, level.fd.as_fd());
                    self.pass(set)?;
                }
                self.entries += 1;
                stack.pop();
                continue;
            };
            self.interrupt.check()?;
            let source = join(&level.source, &entry.name);
            let inode = self.tree.inode(entry.nid, &source);
            let Some(inode) = self.pass(inode)? else {
                continue;
            };
            if inode.kind == FileType::Directory {
                let entered = self.seen.enter(self.tree, inode.nid, &source);
                if self.pass(entered)?.is_none() {
                    continue;
                }
                let path = join(&level.path, &entry.name);
                let (fd, made) = self.directory(&level.fd, &path, &entry.name)?;
                stack.push(Level {
                    inode,
                    source,
                    path,
                    fd,
                    made: made || self.force,
                    entries: Entries::new(inode),
                });
            } else {
                let made = self.node(&inode, &source, &level.fd, &level.path, &entry.name);
                self.pass(made)?;
            }
        }
        Ok(())
    }

    /// Makes or takes the directory `name` in `parent`.
    fn directory(
        &self,
        parent: &OwnedFd,
        path: &[u8],
        name: &[u8],
    ) -> Result<(OwnedFd, bool), CommandError> {
        let cannot = || cannot_make(self.shown, path);
        let mut made = rustix::fs::mkdirat(parent, name, Mode::RWXU);
        if made == Err(Errno::EXIST) && self.force && !is_directory(parent, name) {
            rustix::fs::unlinkat(parent, name, AtFlags::empty()).context(cannot)?;
            made = rustix::fs::mkdirat(parent, name, Mode::RWXU);
        }
        let made = match made {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(CommandError::new(cannot()).caused_by(&error)),
        };
        match open_beneath(
            parent.as_fd(),
            name,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW,
        ) {
            Ok(fd) => Ok((fd, made)),
            Err(Errno::NOTDIR | Errno::LOOP) if !made => Err(exists(cannot())),
            Err(error) => Err(CommandError::new(cannot()).caused_by(&error)),
        }
    }

    /// Makes `inode`, which is not a directory, as `name` in `parent`.
    fn node(
        &mut self,
        inode: &Inode,
        source: &[u8],
        parent: &OwnedFd,
        parent_path: &[u8],
        name: &[u8],
    ) -> Result<(), CommandError> {
        let path = join(parent_path, name);
        if self.force && !is_directory(parent, name) {
            match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => {
                    return Err(CommandError::new(cannot_make(self.shown, &path)).caused_by(&error));
                }
            }
        }
        if inode.nlink > 1 {
            if let Some(first) = self.links.get(&inode.nid) {
                self.hardlink(first, parent, &path, name)?;
                self.entries += 1;
                return Ok(());
            }
            self.links.insert(inode.nid, path.clone());
        }
        let made = match inode.kind {
            FileType::Regular => self.regular(inode, source, parent, &path, name),
            FileType::Symlink => self.symlink(inode, source, parent, &path, name),
            _ => self.special(inode, source, parent, &path, name),
        };
        match made {
            Ok(()) => self.entries += 1,
            // Its other names cannot be links to what is not there.
            Err(_) => {
                self.links.remove(&inode.nid);
            }
        }
        made
    }

    fn hardlink(
        &self,
        first: &[u8],
        parent: &OwnedFd,
        path: &[u8],
        name: &[u8],
    ) -> Result<(), CommandError> {
        let made = split(first)
            .map_or_else(
                || self.root.try_clone().map_err(|_| Errno::MFILE),
                |(directory, _)| {
                    open_beneath(
                        self.root.as_fd(),
                        directory,
                        OFlags::PATH | OFlags::DIRECTORY,
                    )
                },
            )
            .and_then(|directory| {
                let first_name = split(first).map_or(first, |(_, name)| name);
                rustix::fs::linkat(directory, first_name, parent, name, AtFlags::empty())
            });
        match made {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(exists(cannot_make(self.shown, path))),
            // The first name was left out, with a warning, because it is a device.
            Err(Errno::NOENT) if !self.privileged => Ok(()),
            Err(error) => Err(CommandError::new(format!(
                "{} as a hardlink to {}",
                cannot_make(self.shown, path),
                names::quoted(first)
            ))
            .caused_by(&error)),
        }
    }

    fn regular(
        &mut self,
        inode: &Inode,
        source: &[u8],
        parent: &OwnedFd,
        path: &[u8],
        name: &[u8],
    ) -> Result<(), CommandError> {
        let cannot = || cannot_make(self.shown, path);
        let fd = rustix::fs::openat2(
            parent,
            name,
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::RUSR | Mode::WUSR,
            BENEATH,
        )
        .map_err(|error| made_failed(cannot(), error))?;
        let file = File::from(fd);
        let written = self
            .content(inode, source, path, &file)
            .and_then(|()| self.attributes(inode, source, path, file.as_fd()));
        if written.is_err() {
            // Half a file under its full name would look like the file.
            let _ = rustix::fs::unlinkat(parent, name, AtFlags::empty());
        }
        written
    }

    fn content(
        &mut self,
        inode: &Inode,
        source: &[u8],
        path: &[u8],
        file: &File,
    ) -> Result<(), CommandError> {
        const PIECE: u64 = 4 << 20;
        let cannot = || format!("cannot write {}", below(self.shown, path));
        // Sets the length first: unwritten parts are then holes.
        file.set_len(inode.size).context(cannot)?;
        for extent in self.tree.filesystem().extents(inode, 0) {
            let extent = extent
                .context(|| self.tree.cannot_read(source))
                .map_err(CommandError::in_image)?;
            if extent.source == ExtentSource::Hole {
                continue;
            }
            let mut offset = extent.offset;
            let end = extent.offset.saturating_add(extent.length).min(inode.size);
            while offset < end {
                self.interrupt.check()?;
                let length = PIECE.min(end - offset);
                let mut at = offset;
                let mut written = Ok(());
                self.tree
                    .filesystem()
                    .read_with(inode, offset, length, &mut |bytes| {
                        if written.is_ok() {
                            written = file.write_all_at(bytes, at);
                        }
                        at += bytes.len() as u64;
                    })
                    .context(|| self.tree.cannot_read(source))
                    .map_err(CommandError::in_image)?;
                written.context(cannot)?;
                self.progress.advance(length);
                self.bytes += length;
                offset += length;
            }
        }
        Ok(())
    }

    fn symlink(
        &mut self,
        inode: &Inode,
        source: &[u8],
        parent: &OwnedFd,
        path: &[u8],
        name: &[u8],
    ) -> Result<(), CommandError> {
        let cannot = || cannot_make(self.shown, path);
        let target = self
            .tree
            .filesystem()
            .read_link(inode)
            .context(|| self.tree.cannot_read(source))
            .map_err(CommandError::in_image)?;
        rustix::fs::symlinkat(OsString::from_vec(target), parent, name)
            .map_err(|error| made_failed(cannot(), error))?;
        let finished = self.finish_symlink(inode, source, parent, path, name);
        if finished.is_err() {
            let _ = rustix::fs::unlinkat(parent, name, AtFlags::empty());
        }
        finished
    }

    fn finish_symlink(
        &mut self,
        inode: &Inode,
        source: &[u8],
        parent: &OwnedFd,
        path: &[u8],
        name: &[u8],
    ) -> Result<(), CommandError> {
        if self.owners {
            let (uid, gid) = self.owner(inode, source)?;
            rustix::fs::chownat(
                parent,
                name,
                Some(uid),
                Some(gid),
                AtFlags::SYMLINK_NOFOLLOW,
            )
            .context(|| format!("cannot set the owner of {}", below(self.shown, path)))?;
        }
        // A link cannot be opened for this; the directory's descriptor pins the place, and
        // lsetxattr does not follow the last component.
        let by_parent = join(fd_path(parent.as_fd()).as_bytes(), name);
        self.xattrs(inode, source, path, |attribute, value| {
            rustix::fs::lsetxattr(&by_parent[..], attribute, value, XattrFlags::empty())
        })?;
        rustix::fs::utimensat(
            parent,
            name,
            &self.times(inode, source)?,
            AtFlags::SYMLINK_NOFOLLOW,
        )
        .context(|| format!("cannot set the time of {}", below(self.shown, path)))
    }

    fn special(
        &mut self,
        inode: &Inode,
        source: &[u8],
        parent: &OwnedFd,
        path: &[u8],
        name: &[u8],
    ) -> Result<(), CommandError> {
        let cannot = || cannot_make(self.shown, path);
        let kind = match inode.kind {
            FileType::CharDevice => rustix::fs::FileType::CharacterDevice,
            FileType::BlockDevice => rustix::fs::FileType::BlockDevice,
            FileType::Socket => rustix::fs::FileType::Socket,
            _ => rustix::fs::FileType::Fifo,
        };
        let device = inode
            .rdev
            .map_or(0, |d| rustix::fs::makedev(d.major, d.minor));
        match rustix::fs::mknodat(parent, name, kind, Mode::empty(), device) {
            Ok(()) => {}
            Err(Errno::PERM) if !self.privileged => {
                self.left_out.devices.add(path);
                return Ok(());
            }
            Err(Errno::PERM) => {
                return Err(CommandError::new(cannot())
                    .caused_by(&Errno::PERM)
                    .hint("making devices takes CAP_MKNOD, which this process lacks"));
            }
            Err(error) => return Err(made_failed(cannot(), error)),
        }
        let finished = self.finish_special(inode, source, parent, path, name);
        if finished.is_err() {
            let _ = rustix::fs::unlinkat(parent, name, AtFlags::empty());
        }
        finished
    }

    fn finish_special(
        &mut self,
        inode: &Inode,
        source: &[u8],
        parent: &OwnedFd,
        path: &[u8],
        name: &[u8],
    ) -> Result<(), CommandError> {
        let cannot = || cannot_make(self.shown, path);
        let fd =
            open_beneath(parent.as_fd(), name, OFlags::PATH | OFlags::NOFOLLOW).context(cannot)?;
        let cannot_set = || format!("cannot set the attributes of {}", below(self.shown, path));
        // A pipe or device must not be opened; /proc gives a path that means exactly this inode.
        let by_descriptor = fd_path(fd.as_fd());
        if self.owners {
            let (uid, gid) = self.owner(inode, source)?;
            rustix::fs::chownat(&fd, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)
                .context(cannot_set)?;
        }
        self.xattrs(inode, source, path, |attribute, value| {
            rustix::fs::setxattr(&by_descriptor[..], attribute, value, XattrFlags::empty())
        })?;
        rustix::fs::chmodat(CWD, &by_descriptor[..], self.mode(inode), AtFlags::empty())
            .context(cannot_set)?;
        rustix::fs::utimensat(
            CWD,
            &by_descriptor[..],
            &self.times(inode, source)?,
            AtFlags::empty(),
        )
        .context(cannot_set)
    }

    /// Sets what a regular file or a directory has. The order matters: a change of owner clears
    /// set-user-ID bits and capabilities; without write permission an owner cannot set attributes; and
    /// everything before the times changes them.
    fn attributes(
        &mut self,
        inode: &Inode,
        source: &[u8],
        path: &[u8],
        fd: BorrowedFd<'_>,
    ) -> Result<(), CommandError> {
        let cannot_set = || format!("cannot set the attributes of {}", below(self.shown, path));
        if self.owners {
            let (uid, gid) = self.owner(inode, source)?;
            rustix::fs::fchown(fd, Some(uid), Some(gid))
                .context(|| format!("cannot set the owner of {}", below(self.shown, path)))?;
        }
        self.xattrs(inode, source, path, |name, value| {
            rustix::fs::fsetxattr(fd, name, value, XattrFlags::empty())
        })?;
        rustix::fs::fchmod(fd, self.mode(inode)).context(cannot_set)?;
        rustix::fs::futimens(fd, &self.times(inode, source)?).context(cannot_set)
    }

    fn xattrs(
        &mut self,
        inode: &Inode,
        source: &[u8],
        path: &[u8],
        set: impl Fn(&[u8], &[u8]) -> Result<(), Errno>,
    ) -> Result<(), CommandError> {
        if !self.xattrs {
            return Ok(());
        }
        let xattrs = self
            .tree
            .filesystem()
            .xattrs(inode)
            .context(|| self.tree.cannot_read(source))
            .map_err(CommandError::in_image)?;
        for (name, value) in xattrs {
            match set(&name, &value) {
                Ok(()) => {}
                Err(Errno::PERM | Errno::NOTSUP | Errno::ACCESS) if !self.privileged => {
                    self.left_out.xattrs.add(path);
                }
                Err(error) => {
                    return Err(CommandError::new(format!(
                        "cannot set extended attribute {} of {}",
                        names::quoted(&name),
                        below(self.shown, path)
                    ))
                    .caused_by(&error)
                    .hint("--no-xattrs leaves extended attributes out"));
                }
            }
        }
        Ok(())
    }

    /// A program that was to run as its owner must not come to run as somebody else.
    fn mode(&self, inode: &Inode) -> Mode {
        let kept = match (self.owners, inode.kind) {
            (true, _) => 0o7777,
            (false, FileType::Directory) => 0o1777,
            (false, _) => 0o777,
        };
        Mode::from_raw_mode(u32::from(inode.permissions) & kept)
    }

    fn owner(&self, inode: &Inode, source: &[u8]) -> Result<(Uid, Gid), CommandError> {
        // -1 means "unchanged" to chown(2), and is not a user.
        if inode.uid == u32::MAX || inode.gid == u32::MAX {
            return Err(CommandError::new(format!(
                "{}: owner {}:{} is impossible",
                self.tree.cannot_read(source),
                inode.uid,
                inode.gid
            ))
            .in_image()
            .hint("--no-same-owner leaves owners out"));
        }
        Ok((Uid::from_raw(inode.uid), Gid::from_raw(inode.gid)))
    }

    fn times(&self, inode: &Inode, source: &[u8]) -> Result<Timestamps, CommandError> {
        // Beyond a second, utimensat(2) takes some values for "now" and "leave it".
        if inode.mtime.nanoseconds >= 1_000_000_000 {
            return Err(CommandError::new(format!(
                "{}: its time has {} nanoseconds",
                self.tree.cannot_read(source),
                inode.mtime.nanoseconds
            ))
            .in_image());
        }
        let time = Timespec {
            tv_sec: inode.mtime.seconds,
            tv_nsec: inode.mtime.nanoseconds.into(),
        };
        // EROFS keeps one time per inode.
        Ok(Timestamps {
            last_access: time,
            last_modification: time,
        })
    }
}

/// Attributes and files that an ordinary user cannot create, reported once at the end.
#[derive(Default)]
struct LeftOut {
    devices: Tally,
    xattrs: Tally,
}

#[derive(Default)]
struct Tally {
    count: u64,
    first: Vec<u8>,
}

impl Tally {
    fn add(&mut self, path: &[u8]) {
        if self.count == 0 {
            self.first = path.to_vec();
        }
        self.count += 1;
    }
}

impl LeftOut {
    fn tell(&self, ui: &Ui) {
        for (tally, what, verb) in [
            (&self.devices, "device node", "make"),
            (&self.xattrs, "extended attribute", "set"),
        ] {
            if tally.count > 0 {
                ui.warning(format_args!(
                    "left out {} that only root can {verb} (the first: {})",
                    plural(tally.count, what),
                    names::quoted(&tally.first)
                ));
            }
        }
    }
}

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

fn open_beneath(directory: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(
        directory,
        path,
        flags | OFlags::CLOEXEC,
        Mode::empty(),
        BENEATH,
    )
}

fn is_directory(parent: &OwnedFd, name: &[u8]) -> bool {
    rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

/// A path's directory and name, if it has a directory.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let slash = path.iter().rposition(|&b| b == b'/')?;
    Some((&path[..slash], &path[slash + 1..]))
}

fn fd_path(fd: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// The path below the destination, for messages.
fn below(directory: &Path, path: &[u8]) -> String {
    match path {
        b"" => directory.display().to_string(),
        _ => names::quoted(&join(directory.as_os_str().as_bytes(), path)),
    }
}

fn cannot_make(directory: &Path, path: &[u8]) -> String {
    format!("cannot make {}", below(directory, path))
}

fn made_failed(message: String, error: Errno) -> CommandError {
    match error {
        Errno::EXIST => exists(message),
        Errno::NOSYS => CommandError::new(message)
            .caused_by(&error)
            .hint("openat2(2) is needed, which Linux has since 5.6"),
        _ => CommandError::new(message).caused_by(&error),
    }
}

fn exists(message: String) -> CommandError {
    CommandError::new(message)
        .caused_by_text("it is there already")
        .hint("--force replaces files that are there; an empty directory as DIR needs no force")
}
