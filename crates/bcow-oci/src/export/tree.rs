//! Converts a file system into the entries of an archive.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;

use bcow_erofs::overlay::{DEVICE, IMPLICIT, LINK, OPAQUE, Role, is_whiteout, role};
use bcow_erofs::reader::{
    DeviceNumber, ErofsError, ExtentSource, FileType, Filesystem, Inode, Nid, Symlinks, Timestamp,
    Walk, XattrList,
};

use super::{TarForm, TarReport};
use crate::cancel::Cancel;
use crate::error::ConvertError;
use crate::options::Progress;
use crate::tar::writer::{EntryError, Kind, MAX_PAX_BYTES, TarHeader, TarWriter};
use crate::tar::{MAX_RUNS, Run};
use crate::text::{plural, quoted};

/// Bytes of content per read.
const PIECE: u64 = 1 << 20;
/// Limit on the bytes of paths of inodes with several names.
const MAX_LINK_BYTES: usize = 1 << 29;
/// Limit on symbolic links in a hardlink's target path, as in the merge of layers.
const MAX_LINKS: u32 = 40;
/// Prefix of whiteouts in layers.
const WHITEOUT: &[u8] = b".wh.";
/// Name of the file that makes a directory of a layer opaque.
const OPAQUE_WHITEOUT: &[u8] = b".wh..wh..opq";
/// Total size of holes from which a layer uses the sparse format. The image specification advises
/// against sparse entries, because not all tools support them; but a file that is one large hole
/// should not become as many zeros.
const LAYER_HOLE_BYTES: u64 = 64 << 20;

/// The file at `path` in the merged tree of `layers`. `links` counts the links on the way.
fn linked_file(
    layers: &[&Filesystem],
    path: &[u8],
    links: &mut u32,
) -> Result<Option<Inode>, ErofsError> {
    let mut at = Vec::new();
    let mut todo = names(path);
    while let Some(name) = todo.pop() {
        if name == b".." {
            at.pop();
            continue;
        }
        at.push(name);
        let Some((index, inode)) = find_in_layers(layers, &at.join(&b'/'))? else {
            return Ok(None);
        };
        if inode.kind == FileType::Directory {
            continue;
        }
        let is_lower_link = role(layers[index], &inode)? == Role::LowerLink;
        if todo.is_empty() && !is_lower_link {
            return Ok(Some(inode));
        }
        *links += 1;
        if inode.kind != FileType::Symlink || *links > MAX_LINKS {
            return Ok(None);
        }
        let target = layers[index].read_link(&inode)?;
        if is_lower_link {
            // Only the last name of a path can be such a link. As in a merge, its target is in the
            // layers below, or else in its own one.
            return if todo.is_empty() {
                match linked_file(&layers[..index], &target, links)? {
                    None => linked_file(&layers[..=index], &target, links),
                    found => Ok(found),
                }
            } else {
                Ok(None)
            };
        }
        at.pop();
        if target.starts_with(b"/") {
            at.clear();
        }
        todo.extend(names(&target));
    }
    Ok(None)
}

/// The names of a path, the last one first.
fn names(path: &[u8]) -> Vec<Vec<u8>> {
    let names = path.rsplit(|&b| b == b'/');
    let names = names.filter(|name| !matches!(*name, b"" | b"."));
    names.map(<[u8]>::to_vec).collect()
}

/// The object at `path` in the merged tree of `layers`, and the index of its layer.
fn find_in_layers(
    layers: &[&Filesystem],
    path: &[u8],
) -> Result<Option<(usize, Inode)>, ErofsError> {
    for (index, layer) in layers.iter().enumerate().rev() {
        let place = LayerObject::find(layer, path)?;
        match place.object {
            Some(inode) if !place.is_above && !is_whiteout(layer, &inode)? => {
                return Ok(Some((index, inode)));
            }
            Some(_) => return Ok(None),
            None if place.is_below_opaque => return Ok(None),
            None => {}
        }
    }
    Ok(None)
}

/// The export of one file system into an archive.
pub(super) struct TreeExport<'e> {
    fs: &'e Filesystem,
    tar: TarWriter<&'e mut dyn Write>,
    form: TarForm,
    /// All layers below, the lowest first, in overlayfs form; `None` if they are unknown.
    below: Option<&'e [&'e Filesystem]>,
    cancel: Cancel<'e>,
    progress: &'e dyn Progress,
    /// The first path of each inode that has more names to come.
    links: HashMap<Nid, FirstName>,
    link_bytes: usize,
    /// Directories above hardlinks to lower layers; they are in the archive already.
    early: HashSet<Vec<u8>>,
    /// Directories whose opaque mark is in the archive already.
    emptied: HashSet<Vec<u8>>,
    /// Links to files of this layer, which no layer below has: path and target.
    own_links: BTreeMap<Vec<u8>, LowerLink>,
    report: TarReport,
}

/// A hardlink to a file of a lower layer.
struct LowerLink {
    path: Vec<u8>,
    target: Vec<u8>,
    /// The file, or the link itself if the layers below are unknown.
    attributes: Inode,
}

struct FirstName {
    path: Vec<u8>,
    /// Number of names to come, from the link count of the inode.
    left: u32,
}

impl<'e> TreeExport<'e> {
    pub(super) fn new(
        fs: &'e Filesystem,
        form: TarForm,
        out: &'e mut dyn Write,
        cancel: Cancel<'e>,
        progress: &'e dyn Progress,
    ) -> Self {
        TreeExport {
            fs,
            tar: TarWriter::new(out),
            form,
            below: None,
            cancel,
            progress,
            links: HashMap::new(),
            link_bytes: 0,
            early: HashSet::new(),
            emptied: HashSet::new(),
            own_links: BTreeMap::new(),
            report: TarReport::default(),
        }
    }

    /// Sets the layers below this layer.
    pub(super) fn above(mut self, layers: &'e [&'e Filesystem]) -> Self {
        self.below = Some(layers);
        self
    }

    /// Writes the whole archive.
    pub(super) fn write(mut self) -> Result<TarReport, ConvertError> {
        if self.form == TarForm::Layer {
            self.lower_links()?;
        }
        let mut walk = Walk::new(self.fs);
        while let Some(inode) = walk.next().map_err(|e| read_error(walk.path(), e))? {
            self.cancel.check()?;
            self.inode(walk.path(), &inode)?;
        }
        self.write_own_links()?;
        self.tar.finish().map_err(ConvertError::WriteArchive)?;
        if self.report.sockets > 0 {
            let sockets = plural(self.report.sockets, "socket");
            self.progress
                .warning(&format!("left out {sockets}, which tar cannot represent"));
        }
        Ok(self.report)
    }

    /// Writes hardlinks to lower layers before all other entries. A program that unpacks the layer
    /// processes its entries in order, and an entry for another name (a whiteout, a new file, an
    /// opaque directory) may remove the target of a link.
    fn lower_links(&mut self) -> Result<(), ConvertError> {
        let mut links = Vec::new();
        let mut walk = Walk::new(self.fs);
        while let Some(inode) = walk.next().map_err(|e| read_error(walk.path(), e))? {
            self.cancel.check()?;
            let path = walk.path();
            if !self.is_lower_link(path, &inode)? {
                continue;
            }
            let target = self.fs.read_link(&inode).map_err(|e| read_error(path, e))?;
            self.remember(path.len() + target.len())?;
            // Programs that unpack layers may give the attributes of a link's header to the file.
            let file = match self.below {
                Some(layers) => linked_file(layers, &target, &mut 0),
                None => Ok(None),
            };
            let file = file.map_err(|e| read_error(path, e))?;
            let is_own = file.is_none() && self.below.is_some();
            let link = LowerLink {
                path: path.to_vec(),
                target: target.strip_prefix(b"/").unwrap_or(&target).to_vec(),
                attributes: file.unwrap_or(inode),
            };
            if is_own {
                drop(self.own_links.insert(path.to_vec(), link))
            } else {
                links.push(link)
            }
        }
        // A link that replaces a directory above another link's target comes last.
        let mut targets: Vec<&[u8]> = links.iter().map(|link| &link.target[..]).collect();
        targets.sort_unstable();
        let is_above_a_target = |link: &LowerLink| {
            let directory = [&link.path[..], b"/"].concat();
            let next = targets.partition_point(|target| *target < &directory[..]);
            targets
                .get(next)
                .is_some_and(|target| target.starts_with(&directory))
        };
        let (late, early): (Vec<_>, Vec<_>) =
            links.iter().partition(|link| is_above_a_target(link));
        // Further names of a file link to its first name, which remains.
        let mut firsts: HashMap<&[u8], &[u8]> = HashMap::new();
        for link in early.into_iter().chain(late) {
            self.check_name(&link.path)?;
            self.parents(&link.path)?;
            let target = match firsts.get(&link.target[..]) {
                Some(first) => first,
                None => {
                    firsts.insert(&link.target, &link.path);
                    &link.target[..]
                }
            };
            self.entry(&link.path, &link.attributes, Kind::Hardlink { target }, &[])?;
        }
        self.empty_early()
    }

    /// Writes the hardlinks to files of this layer whose targets came later in the source.
    fn write_own_links(&mut self) -> Result<(), ConvertError> {
        let links = std::mem::take(&mut self.own_links);
        for link in links.values() {
            self.check_name(&link.path)?;
            // The target may be such a link itself, and need not be in the archive yet.
            let mut target = &link.target;
            for _ in 0..MAX_LINKS {
                match links.get(target) {
                    Some(next) => target = &next.target,
                    None => break,
                }
            }
            let own = LayerObject::find(self.fs, target).map_err(|e| read_error(target, e))?;
            let file = own.object.filter(|file| {
                !own.is_above && !matches!(file.kind, FileType::Directory | FileType::Symlink)
            });
            let attributes = file.unwrap_or(link.attributes);
            let kind = Kind::Hardlink { target };
            self.entry(&link.path, &attributes, kind, &[])?;
        }
        Ok(())
    }

    /// Writes opaque marks into the early directories below an opaque one, the deepest first. The
    /// mark of the opaque directory would remove the lower layers' entries from them, and change
    /// their times after their own entries. Their own marks do so while these times are restored.
    fn empty_early(&mut self) -> Result<(), ConvertError> {
        let mut directories = Vec::new();
        for path in &self.early {
            let place = LayerObject::find(self.fs, path).map_err(|e| read_error(path, e))?;
            if place.is_below_opaque {
                directories.push(path.clone());
            }
        }
        directories.sort_unstable_by(|a, b| b.cmp(a));
        for path in directories {
            self.whiteout(&[&path, &b"/"[..], OPAQUE_WHITEOUT].concat())?;
            self.emptied.insert(path);
        }
        Ok(())
    }

    fn is_lower_link(&self, path: &[u8], inode: &Inode) -> Result<bool, ConvertError> {
        Ok(self.form == TarForm::Layer
            && inode.kind == FileType::Symlink
            && self.is_marked(path, inode, LINK)?)
    }

    fn is_marked(&self, path: &[u8], inode: &Inode, mark: &[u8]) -> Result<bool, ConvertError> {
        let value = self.fs.xattr(inode, mark);
        Ok(value.map_err(|e| read_error(path, e))?.is_some())
    }

    /// Writes the directories above `path` that the layer lists and that are not yet in the
    /// archive.
    fn parents(&mut self, path: &[u8]) -> Result<(), ConvertError> {
        let slashes = path.iter().enumerate().filter(|(_, b)| **b == b'/');
        for parent in std::iter::once(0).chain(slashes.map(|(at, _)| at)) {
            let parent = &path[..parent];
            if self.early.contains(parent) {
                continue;
            }
            let found = self.fs.resolve_with(parent, Symlinks::Keep);
            let inode = found.and_then(|nid| nid.map(|nid| self.fs.inode(nid)).transpose());
            let Some(inode) = inode.map_err(|e| read_error(parent, e))? else {
                continue;
            };
            if self.is_listed(parent, &inode)? {
                let xattrs = self.xattrs(parent, &inode)?;
                self.entry(parent, &inode, Kind::Directory, &xattrs)?;
            }
            self.remember(parent.len())?;
            self.early.insert(parent.to_vec());
        }
        Ok(())
    }

    /// Whether a directory of a layer gets an entry. A directory that exists only for the sake of a
    /// child gets none if a lower layer has it and so supplies its attributes. Otherwise the
    /// directory is new, and programs that unpack layers would give it different attributes. If the
    /// lower layers are unknown, such a directory gets no entry.
    fn is_listed(&self, path: &[u8], directory: &Inode) -> Result<bool, ConvertError> {
        if !self.is_marked(path, directory, IMPLICIT)? {
            return Ok(true);
        }
        let Some(layers) = self.below else {
            return Ok(false);
        };
        let error = |e| read_error(path, e);
        let mut hides = LayerObject::find(self.fs, path)
            .map_err(error)?
            .is_below_opaque;
        for layer in layers.iter().rev() {
            if hides {
                break;
            }
            let place = LayerObject::find(layer, path).map_err(error)?;
            match place.object {
                Some(object) => return Ok(object.kind != FileType::Directory),
                None => hides = place.is_below_opaque,
            }
        }
        Ok(true)
    }

    /// The extended attributes that go into the archive.
    fn xattrs(&self, path: &[u8], inode: &Inode) -> Result<XattrList, ConvertError> {
        let mut xattrs = self.fs.xattrs(inode).map_err(|e| read_error(path, e))?;
        if self.form == TarForm::Layer {
            const MARKS: [&[u8]; 4] = [DEVICE, IMPLICIT, LINK, OPAQUE];
            xattrs.retain(|(name, _)| !MARKS.contains(&name.as_slice()));
        }
        Ok(xattrs)
    }

    /// Writes the entries that stand for marks of the overlayfs form.
    fn marks(&mut self, path: &[u8], inode: &Inode) -> Result<bool, ConvertError> {
        if inode.kind == FileType::Directory {
            // Some programs refuse an archive with two entries of one name.
            if !self.early.contains(path) && self.is_listed(path, inode)? {
                let xattrs = self.xattrs(path, inode)?;
                self.entry(path, inode, Kind::Directory, &xattrs)?;
            }
            // The opaque mark comes before the contents of the directory.
            if !self.emptied.contains(path) && self.is_marked(path, inode, OPAQUE)? {
                let slash: &[u8] = if path.is_empty() { b"" } else { b"/" };
                self.whiteout(&[path, slash, OPAQUE_WHITEOUT].concat())?;
            }
            return Ok(true);
        }
        if is_whiteout(self.fs, inode).map_err(|e| read_error(path, e))? {
            let (parent, name) = path.split_at(path.len() - name_of(path).len());
            self.whiteout(&[parent, WHITEOUT, name].concat())?;
            return Ok(true);
        }
        self.is_lower_link(path, inode)
    }

    fn whiteout(&mut self, name: &[u8]) -> Result<(), ConvertError> {
        let entry = TarHeader {
            path: name,
            kind: Kind::Regular { size: 0 },
            permissions: 0,
            uid: 0,
            gid: 0,
            mtime: Timestamp::default(),
            xattrs: &[],
        };
        self.put(name, &entry)
    }

    fn inode(&mut self, path: &[u8], inode: &Inode) -> Result<(), ConvertError> {
        self.check_name(path)?;
        if inode.kind == FileType::Socket {
            self.report.sockets += 1;
            return Ok(());
        }
        if self.form == TarForm::Layer && self.marks(path, inode)? {
            return Ok(());
        }
        if let Some(first) = self.first_name(path, inode)? {
            let kind = Kind::Hardlink { target: &first };
            return self.entry(path, inode, kind, &[]);
        }
        let xattrs = self.xattrs(path, inode)?;
        let number = inode.rdev.unwrap_or(DeviceNumber { major: 0, minor: 0 });
        let kind = match inode.kind {
            FileType::Regular => return self.regular(path, inode, &xattrs),
            FileType::Directory => Kind::Directory,
            FileType::Symlink => {
                let target = self.fs.read_link(inode).map_err(|e| read_error(path, e))?;
                let kind = Kind::Symlink { target: &target };
                return self.entry(path, inode, kind, &xattrs);
            }
            FileType::CharDevice => Kind::CharDevice(number),
            FileType::BlockDevice => Kind::BlockDevice(number),
            FileType::Fifo | FileType::Socket => Kind::Fifo,
        };
        self.entry(path, inode, kind, &xattrs)
    }

    /// Rejects a name that a reader of layers takes for a whiteout.
    fn check_name(&self, path: &[u8]) -> Result<(), ConvertError> {
        if !name_of(path).starts_with(WHITEOUT) {
            return Ok(());
        }
        const PROBLEM: &str = "its name begins with .wh., which makes a whiteout of it in a layer";
        match self.form {
            TarForm::Tree => {
                let shown = quoted(&rooted(path));
                self.progress.warning(&format!("{shown}: {PROBLEM}"));
                Ok(())
            }
            TarForm::Flattened | TarForm::Layer => Err(ConvertError::Unrepresentable {
                path: rooted(path),
                problem: PROBLEM.to_owned(),
            }),
        }
    }

    /// Counts bytes of paths that are kept in memory.
    fn remember(&mut self, bytes: usize) -> Result<(), ConvertError> {
        self.link_bytes += bytes;
        if self.link_bytes > MAX_LINK_BYTES {
            Err(ConvertError::Export(format!(
                "the paths of hardlinked files take more than {MAX_LINK_BYTES} bytes"
            )))
        } else {
            Ok(())
        }
    }

    /// The inode's first path, if `path` is a further name of it.
    fn first_name(&mut self, path: &[u8], inode: &Inode) -> Result<Option<Vec<u8>>, ConvertError> {
        if inode.kind == FileType::Directory || inode.nlink < 2 {
            return Ok(None);
        }
        if let Some(first) = self.links.get_mut(&inode.nid) {
            // The last name frees the memory. If the inode has more names than its link count, a
            // further name starts a new file.
            first.left -= 1;
            if first.left > 0 {
                return Ok(Some(first.path.clone()));
            }
            let first = self.links.remove(&inode.nid);
            self.link_bytes -= first.as_ref().map_or(0, |first| first.path.len());
            return Ok(first.map(|first| first.path));
        }
        self.remember(path.len())?;
        let first = FirstName {
            path: path.to_vec(),
            left: inode.nlink - 1,
        };
        self.links.insert(inode.nid, first);
        Ok(None)
    }

    fn entry(
        &mut self,
        path: &[u8],
        inode: &Inode,
        kind: Kind<'_>,
        xattrs: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<(), ConvertError> {
        let name = match inode.kind {
            FileType::Directory if path.is_empty() => b"./".to_vec(),
            FileType::Directory => [path, b"/"].concat(),
            _ => path.to_vec(),
        };
        let entry = TarHeader {
            path: &name,
            kind,
            permissions: inode.permissions,
            uid: inode.uid,
            gid: inode.gid,
            mtime: inode.mtime,
            xattrs,
        };
        self.put(path, &entry)
    }

    fn put(&mut self, path: &[u8], entry: &TarHeader<'_>) -> Result<(), ConvertError> {
        self.tar.entry(entry).map_err(|error| match error {
            EntryError::Io(error) => ConvertError::WriteArchive(error),
            EntryError::PaxBytes(bytes) => ConvertError::Unrepresentable {
                path: rooted(path),
                problem: format!(
                    "its names and extended attributes take {bytes} bytes, more than \
                     {MAX_PAX_BYTES}"
                ),
            },
        })?;
        self.report.entries += 1;
        Ok(())
    }

    fn regular(
        &mut self,
        path: &[u8],
        inode: &Inode,
        xattrs: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<(), ConvertError> {
        let size = inode.size;
        let min_hole_bytes = match self.form {
            TarForm::Tree => 1,
            TarForm::Flattened | TarForm::Layer => LAYER_HOLE_BYTES,
        };
        let runs = runs(self.fs, inode, min_hole_bytes).map_err(|e| read_error(path, e))?;
        let whole = [Run {
            offset: 0,
            length: size,
        }];
        let (kind, data) = match &runs {
            Some(runs) => (Kind::Sparse { size, runs }, &runs[..]),
            None => (Kind::Regular { size }, &whole[..]),
        };
        self.entry(path, inode, kind, xattrs)?;
        for run in data {
            let mut done = 0;
            while done < run.length {
                self.cancel.check()?;
                let piece = PIECE.min(run.length - done);
                let mut written = Ok(());
                let mut sink = |bytes: &[u8]| {
                    if written.is_ok() {
                        written = self.tar.data(bytes);
                    }
                };
                let read = self
                    .fs
                    .read_with(inode, run.offset + done, piece, &mut sink);
                read.map_err(|e| read_error(path, e))?;
                written.map_err(ConvertError::WriteArchive)?;
                self.progress.advance(piece);
                self.report.content_bytes += piece;
                done += piece;
            }
        }
        Ok(())
    }
}

/// The data runs of a file, if its holes have `min_hole_bytes` bytes in total. If there are more
/// runs than readers accept, the smallest holes count as data. `None` if the holes have fewer
/// bytes.
fn runs(
    fs: &Filesystem,
    inode: &Inode,
    min_hole_bytes: u64,
) -> Result<Option<Vec<Run>>, ErofsError> {
    let mut smallest = 1;
    loop {
        if let Some(runs) = runs_between(fs, inode, smallest)? {
            let data: u64 = runs.iter().map(|run| run.length).sum();
            return Ok((inode.size - data >= min_hole_bytes).then_some(runs));
        }
        smallest = (smallest * 2).max(8192);
    }
}

/// The runs between holes of at least `smallest` bytes; `None` if there are too many.
fn runs_between(
    fs: &Filesystem,
    inode: &Inode,
    smallest: u64,
) -> Result<Option<Vec<Run>>, ErofsError> {
    let mut runs: Vec<Run> = Vec::new();
    for extent in fs.extents(inode, 0) {
        let extent = extent?;
        let is_hole = extent.source == ExtentSource::Hole;
        if is_hole && extent.length >= smallest {
            continue;
        }
        let is_full = runs.len() + 1 >= MAX_RUNS;
        match runs.last_mut() {
            Some(last) if last.offset + last.length == extent.offset => {
                last.length += extent.length;
            }
            // One run is reserved for the empty run that records a hole at the end.
            _ if is_full => return Ok(None),
            _ => runs.push(Run {
                offset: extent.offset,
                length: extent.length,
            }),
        }
    }
    Ok(Some(runs))
}

/// The object that a layer has at a path.
struct LayerObject {
    /// The object, or a non-directory above it; `None` if the layer has no object there.
    object: Option<Inode>,
    /// Whether `object` is above the path.
    is_above: bool,
    /// Whether an opaque directory above the path hides the layers below.
    is_below_opaque: bool,
}

impl LayerObject {
    fn find(layer: &Filesystem, path: &[u8]) -> Result<LayerObject, ErofsError> {
        let mut at = layer.inode(layer.root())?;
        let (mut is_below_opaque, mut is_above) = (false, false);
        for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            if at.kind != FileType::Directory {
                is_above = true;
                break;
            }
            is_below_opaque |= layer.xattr(&at, OPAQUE)?.is_some();
            let Some(entry) = layer.lookup(&at, name)? else {
                return Ok(LayerObject {
                    object: None,
                    is_above: false,
                    is_below_opaque,
                });
            };
            at = layer.inode(entry.nid)?;
        }
        Ok(LayerObject {
            object: Some(at),
            is_above,
            is_below_opaque,
        })
    }
}

fn name_of(path: &[u8]) -> &[u8] {
    path.rsplit(|&b| b == b'/').next().unwrap_or(path)
}

fn rooted(path: &[u8]) -> Vec<u8> {
    [b"/", path].concat()
}

fn read_error(path: &[u8], source: ErofsError) -> ConvertError {
    ConvertError::ReadImage {
        path: rooted(path),
        source,
    }
}
