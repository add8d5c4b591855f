//! The first write to a file: makes a plain file of a small one, and a partial file of a larger
//! one.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::Inode;
use rustix::io::Errno;

use super::content::own_descriptor;
use super::nodes::{Content, Node, NodeState};
use super::plain::{plain_file, set_plain};
use super::types::SetTime;
use super::{UnionFs, host};
use crate::blocks::BLOCK_BYTES;
use crate::host::errno_of;
use crate::ledger::Flags;
use crate::options::SyncPolicy;
use crate::upper::Metacopy;

/// Bytes that the first write to a partial file needs: a block for its marks, a block for its map,
/// and a block of data.
const FIRST_BYTES: usize = 3 * BLOCK_BYTES as usize;

impl UnionFs {
    /// Makes a plain file or a partial file of a file before its first write.
    pub(super) fn make_writable(&self, node: &Arc<Node>) -> Result<(), Errno> {
        self.ensure_upper(node)?;
        let mut state = node.write_state();
        self.open_content(node, &mut state)?;
        if !matches!(state.content, Content::Lower) {
            return Ok(());
        }
        let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
        let file = plain_file(&state)?;
        if inode.size <= self.options.small_bytes {
            return self.copy_whole(node, &mut state, &inode, &file);
        }
        if let Some(upper) = &mut state.upper
            && !upper.has_origin
        {
            // A partial file finds its inode of the image only by the origin mark.
            self.set_origin(&file, inode.nid)?;
            upper.has_origin = true;
        }
        // The inode is that of the map, which the first flush creates.
        let _room = self.room(FIRST_BYTES, 1)?;
        let made = self
            .partials
            .create(own_descriptor(&file)?, self.below(node)?);
        self.measure(&*file);
        let partial = made.map_err(|error| self.content_failed(node, error))?;
        // A file that was copied up after it lost its name will not be looked up again, so its
        // partial file is not kept.
        if rustix::fs::fstat(&*file)?.st_nlink == 0 {
            partial
                .discard()
                .map_err(|error| self.content_failed(node, error))?;
        } else {
            self.open_partials
                .add(partial.id(), &partial, Arc::downgrade(node));
        }
        state.content = Content::Partial(partial);
        if let Some(upper) = &mut state.upper {
            upper.is_partial = true;
        }
        Ok(())
    }

    /// Copies the bytes of a small file. Until the bytes are durable, the metacopy mark stays and
    /// says that they are in the image. A crash then restores the image's content, so the write
    /// does not wait for the disk.
    fn copy_whole(
        &self,
        node: &Arc<Node>,
        state: &mut NodeState,
        inode: &Inode,
        file: &Arc<File>,
    ) -> Result<(), Errno> {
        // The copy is not a change of the file; the write that follows sets its own times.
        let (atime, mtime) = host::times(&rustix::fs::fstat(&**file)?);
        let keep_times =
            || host::set_times(file, Some(SetTime::At(atime)), Some(SetTime::At(mtime)));
        let copied = self
            .discard_blocks(file, inode.size)
            .and_then(|()| self.copy_bytes(node, inode, file))
            .and_then(|()| keep_times());
        if let Err(errno) = copied {
            // Give the space back. The mark still says that the bytes are in the image.
            let _ = self.discard_blocks(file, inode.size);
            let _ = keep_times();
            return Err(errno);
        }
        self.copied_whole.fetch_add(1, Ordering::Relaxed);
        set_plain(state);
        let most = match self.options.sync {
            // A file without a name does not survive a crash of the machine. A process that takes
            // over the mount finds the bytes by the mark.
            _ if node.is_removed.load(Ordering::Acquire) => {
                return match self.ledger {
                    Some(_) => self.set_metacopy(file, Metacopy::None),
                    None => Ok(()),
                };
            }
            SyncPolicy::Strict => 1,
            SyncPolicy::Batch(most) => most,
            SyncPolicy::Volatile => {
                let cleared = self.set_metacopy(file, Metacopy::None);
                self.measure(&**file);
                return cleared;
            }
        };
        if let Some(upper) = &mut state.upper {
            upper.in_batch = true;
        }
        node.set_flags(Flags::IN_BATCH, true);
        self.add_to_batch(node, most);
        Ok(())
    }

    /// Discards the blocks of the host's file of a copy of metadata, for example bytes of a copy
    /// that a crash undid, and sets its size to `size`.
    fn discard_blocks(&self, file: &File, size: u64) -> Result<(), Errno> {
        let stat = rustix::fs::fstat(file)?;
        if stat.st_blocks > 0 || u64::try_from(stat.st_size) != Ok(size) {
            rustix::fs::ftruncate(file, 0)?;
            rustix::fs::ftruncate(file, size)?;
            self.measure(file);
        }
        Ok(())
    }

    fn copy_bytes(&self, node: &Node, inode: &Inode, file: &File) -> Result<(), Errno> {
        let _reserved = self
            .account
            .reserve_whole_write(file, 0..inode.size)
            .map_err(|error| self.content_failed(node, error))?;
        let mut at = 0;
        let mut failed = None;
        let read = self.image.read_with(inode, 0, inode.size, &mut |piece| {
            if failed.is_none() {
                failed = file.write_all_at(piece, at).err();
            }
            at += piece.len() as u64;
        });
        self.measure(file);
        read?;
        match failed {
            Some(error) => Err(errno_of(&error)),
            None => Ok(()),
        }
    }
}
