//! Fetches parts of a remote image before programs read them: first the parts in the prefetch list
//! of the image (spec section 13, `prefetch`), then the rest.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bcow::Error;
use bcow_images::image::OpenImage;
use bcow_images::prefetch::{List, Shown};
use bcow_remote::{Ahead, Complete, Part, RemoteFile};
use bcow_union::log::{self, Severity};

use crate::args::{CompleteWhen, MountArgs};

/// Parts of a file with at most this many bytes between them are fetched with what is between: a
/// request more would take longer.
const GAP_BYTES: u64 = 64 << 10;

/// Fetching in the background, which ends when this is dropped.
pub struct Fetching(Arc<AtomicBool>);

impl Drop for Fetching {
    fn drop(&mut self) {
        // A request that is on its way ends with the process.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Fetching that has not begun. It begins when the process is in its sandbox, which the thread
/// would not enter.
pub struct Ready {
    name: String,
    shown: Shown,
    files: Vec<Arc<RemoteFile>>,
    when: Option<CompleteWhen>,
}

/// What is to be fetched of the image, as its prefetch list and the options say.
pub fn prepare(args: &MountArgs, image: &OpenImage) -> Option<Ready> {
    let files = args.stores.remote.files();
    (!files.is_empty()).then(|| Ready {
        name: image.path().display().to_string(),
        // Layers on top are files of this machine.
        shown: Shown::by(image.parts().first().map_or(image, |part| &part.image)),
        files,
        when: args.complete,
    })
}

impl Ready {
    /// Starts to fetch. Failures are only logged.
    pub fn start(self) -> Option<Fetching> {
        let stop = Arc::new(AtomicBool::new(false));
        let name = self.name.clone();
        let work = {
            let stop = Arc::clone(&stop);
            // The mount does not wait for the list.
            move || fetch(self, &stop)
        };
        match thread::Builder::new().name("ahead".to_owned()).spawn(work) {
            Ok(_) => Some(Fetching(stop)),
            Err(error) => {
                let message = format!("{name}: not fetched ahead: {error}");
                log::log(Severity::Warning, &message);
                None
            }
        }
    }
}

fn fetch(ready: Ready, stop: &AtomicBool) {
    let Ready {
        name,
        shown,
        files,
        when,
    } = ready;
    let note = |error: &Error| {
        let message = format!("{name}: its list of what a start reads is unused: {error}");
        log::log(Severity::Warning, &message);
    };
    let list = match shown.image().metadata() {
        Ok(metadata) => shown.list(&metadata),
        Err(error) => {
            note(&error);
            None
        }
    };
    let complete = match (when, &list) {
        (Some(CompleteWhen::Always), _) => Complete::Always,
        (Some(CompleteWhen::Idle), _) | (None, Some(_)) => Complete::Idle,
        (Some(CompleteWhen::Never), _) | (None, None) => Complete::Never,
    };
    let parts = list.map_or(Ok(Vec::new()), |list| parts(&list, &files));
    let ahead = Ahead {
        parts: parts.inspect_err(note).unwrap_or_default(),
        files,
        complete,
        report,
    };
    ahead.run(stop);
}

fn report(text: &str, is_failure: bool) {
    let severity = if is_failure { Severity::Warning } else { Severity::Notice };
    log::log(severity, text);
}

/// The parts of `files` that hold the listed blocks.
fn parts(list: &List, files: &[Arc<RemoteFile>]) -> Result<Vec<Part>, Error> {
    let files: HashMap<[u8; 32], &Arc<RemoteFile>> =
        files.iter().map(|file| (file.root().0, file)).collect();
    let mut parts: Vec<Part> = Vec::new();
    list.blocks(&mut |image, stored| {
        let root = image.header().merkle.as_ref().map(|tree| tree.root);
        // Files of this machine need no fetching.
        let Some(&file) = root.and_then(|root| files.get(&root)) else {
            return;
        };
        let range = stored.at.0..stored.at.0 + u64::from(stored.bytes);
        match parts.last_mut() {
            Some(last)
                if Arc::ptr_eq(&last.file, file)
                    && range.start >= last.range.start
                    && range.start <= last.range.end + GAP_BYTES =>
            {
                last.range.end = last.range.end.max(range.end);
            }
            _ => parts.push(Part {
                file: Arc::clone(file),
                range,
            }),
        }
    })?;
    Ok(parts)
}
