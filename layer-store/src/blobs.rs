//! The blobs of ordinary images, which engines read for `podman save` and `podman push`.
//!
//! Each is fetched whole and compared with its digest before the first byte is served. They are
//! kept in a directory of a bounded size.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::SystemTime;

use bcow_tool::host::entries;
use bcow_tool::registry::{RegistryOptions, explained, with_auth_file};
use bcow_tool::{At, Tool};
use data_encoding::HEXLOWER;
use parking_lot::{Condvar, Mutex};
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::layer::Layer;

/// The directory with blobs.
pub struct Blobs {
    directory: PathBuf,
    limit_bytes: u64,
    tool: Tool,
    options: Vec<String>,
    /// The file with the credentials for registries.
    auth_file: PathBuf,
    /// The blobs that are being fetched, with their sizes. Protects the files against removal by
    /// other threads.
    fetching: Mutex<HashMap<String, u64>>,
    fetched: Condvar,
}

impl Blobs {
    /// The blobs in `directory`, at most `limit_bytes`. Those of an earlier process are removed.
    /// The first blob creates the directory.
    pub fn open(
        directory: PathBuf,
        limit_bytes: u64,
        tool: Tool,
        options: &RegistryOptions,
    ) -> Self {
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::error!("cannot remove {}: {error}", directory.display());
            }
            _ => {}
        }
        Blobs {
            directory,
            limit_bytes,
            tool,
            options: with_auth_file(&options.of_commands, &options.auth_file),
            auth_file: options.auth_file.clone(),
            fetching: Mutex::default(),
            fetched: Condvar::new(),
        }
    }

    /// The blob of a layer, complete and verified.
    pub fn get(&self, layer: &Layer) -> Result<File, Error> {
        let blob = &layer.blob;
        let path = self.directory.join(&blob.digest);
        let mut fetching = self.fetching.lock();
        while fetching.contains_key(&blob.digest) {
            self.fetched.wait(&mut fetching);
        }
        match File::open(&path) {
            Ok(file) => {
                // The time of the last use.
                let _ = file.set_modified(SystemTime::now());
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Ok(Err(error).at("open", &path)?),
        }
        fs::create_dir_all(&self.directory).at("create", &self.directory)?;
        self.make_room(blob.size, fetching.values().sum())?;
        fetching.insert(blob.digest.clone(), blob.size);
        drop(fetching);
        let new = self.directory.join(format!("{}.new", blob.digest));
        let fetched = self.fetch(layer, &new, &path);
        if fetched.is_err() {
            let _ = fs::remove_file(&new);
        }
        self.fetching.lock().remove(&blob.digest);
        self.fetched.notify_all();
        fetched
    }

    fn fetch(&self, layer: &Layer, new: &Path, path: &Path) -> Result<File, Error> {
        let blob = &layer.blob;
        let file = File::create(new).at("create", new)?;
        let mut arguments: Vec<OsString> = self.options.iter().map(OsString::from).collect();
        arguments.extend(["--".into(), OsString::from(&layer.image)]);
        arguments.extend([OsString::from(&blob.digest), blob.size.to_string().into()]);
        self.tool
            .run_into("fetch-blob", &arguments, Stdio::from(file))
            .map_err(|error| Error::State(explained(&error, &layer.image, &self.auth_file)))?;
        let mut file = File::open(new).at("open", new)?;
        let mut hash = Sha256::new();
        let mut piece = vec![0; 256 << 10];
        let mut bytes = 0;
        loop {
            match file.read(&mut piece).at("read", new)? {
                0 => break,
                read => {
                    hash.update(&piece[..read]);
                    bytes += read as u64;
                }
            }
        }
        let found = format!("sha256:{}", HEXLOWER.encode(&hash.finalize()));
        if found != blob.digest || bytes != blob.size {
            return Err(Error::State(format!(
                "the registry has sent {bytes} bytes with the digest {found} as the blob {} of {} \
                 bytes",
                blob.digest, blob.size
            )));
        }
        fs::rename(new, path).at("rename", new)?;
        Ok(file)
    }

    /// Removes the blobs that were not used for the longest time. Their readers keep them.
    fn make_room(&self, bytes: u64, in_flight: u64) -> Result<(), Error> {
        if bytes.saturating_add(in_flight) > self.limit_bytes {
            return Err(Error::State(format!(
                "a blob of {bytes} bytes does not fit into {}, which has a limit of {} bytes \
                 (--blob-limit)",
                self.directory.display(),
                self.limit_bytes
            )));
        }
        let mut files = Vec::new();
        for path in entries(&self.directory)? {
            if path.extension().is_none() {
                let found = fs::metadata(&path).at("examine", &path)?;
                files.push((found.modified().at("examine", &path)?, found.len(), path));
            }
        }
        files.sort();
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, size, path) in files {
            if total.saturating_add(in_flight).saturating_add(bytes) <= self.limit_bytes {
                break;
            }
            fs::remove_file(&path).at("remove", &path)?;
            total -= size;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use bcow_tool::resolved::sha256;

    use super::*;
    use crate::layer::tests::layer;

    /// A program that prints a text for each command, and counts its runs.
    fn program(directory: &Path, text: &str) -> Tool {
        let path = directory.join("bcow");
        let script = format!(
            "#!/bin/sh\necho >> {}.runs\nprintf '{text}'\n",
            path.display()
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Tool::new(Some(path)).unwrap()
    }

    fn of(text: &str) -> Layer {
        let mut layer = layer('a', '1');
        layer.blob.digest = format!("sha256:{}", sha256(text));
        layer.blob.size = text.len() as u64;
        layer
    }

    fn blobs(directory: &Path, text: &str, limit: u64) -> Blobs {
        let options = bcow_tool::RegistryArgs::default()
            .options(Path::new("/c"))
            .unwrap();
        let tool = program(directory, text);
        Blobs::open(directory.join("blobs"), limit, tool, &options)
    }

    #[test]
    fn blob_is_served_after_its_digest_was_compared() {
        let directory = tempfile::tempdir().unwrap();
        let blobs = blobs(directory.path(), "seven b", 7);
        let runs = || fs::read(directory.path().join("bcow.runs")).unwrap().len();
        let before = runs();
        for _ in 0..2 {
            let mut text = String::new();
            let mut file = blobs.get(&of("seven b")).unwrap();
            io::Seek::rewind(&mut file).unwrap();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "seven b");
        }
        assert_eq!(runs(), before + 1);
        let error = blobs.get(&of("seven c")).unwrap_err().to_string();
        assert!(
            error.contains("has sent 7 bytes with the digest"),
            "{error}"
        );
        let error = blobs.get(&of("8 bytes!")).unwrap_err().to_string();
        assert!(error.contains("--blob-limit"), "{error}");
        let left = fs::read_dir(directory.path().join("blobs"))
            .unwrap()
            .count();
        assert_eq!(
            left, 0,
            "the first one made room for the second one, which is not valid"
        );
        assert!(blobs.fetching.lock().is_empty());
    }
}
