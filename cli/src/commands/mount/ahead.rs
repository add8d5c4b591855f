//! Fetches parts of an image on another machine before programs read them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use bcow_remote::{Ahead, AheadEvent, Complete};
use bcow_union::log::{self, Severity};

use super::Args;
use crate::image::OpenImage;

/// When the rest of an image is fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CompleteWhen {
    Always,
    Idle,
    Never,
}

/// Fetching in the background, which ends when this is dropped.
pub struct Fetching(Arc<AtomicBool>);

impl Drop for Fetching {
    fn drop(&mut self) {
        // A request that is on its way ends with the process.
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Starts to fetch the image, as far as the options say. Failures are logged only.
pub fn start(args: &Args, image: &OpenImage) -> Option<Fetching> {
    let files = args.stores.remote.files();
    if files.is_empty() {
        return None;
    }
    let complete = match args.complete {
        None | Some(CompleteWhen::Never) => Complete::Never,
        Some(CompleteWhen::Idle) => Complete::Idle,
        Some(CompleteWhen::Always) => Complete::Always,
    };
    if complete == Complete::Never {
        return None;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let name = image.path().display().to_string();
    let work = {
        let stop = Arc::clone(&stop);
        move || {
            let ahead = Ahead {
                parts: Vec::new(),
                files,
                complete,
                report,
            };
            ahead.run(&stop);
        }
    };
    match thread::Builder::new().name("ahead".to_owned()).spawn(work) {
        Ok(_) => Some(Fetching(stop)),
        Err(error) => {
            tracing::warn!("{name}: not fetched ahead: {error}");
            None
        }
    }
}

fn report(event: &AheadEvent) {
    let severity = match event {
        AheadEvent::Fetched { .. } | AheadEvent::Complete { .. } | AheadEvent::NotCompleted(_) => {
            Severity::Notice
        }
        AheadEvent::Missing { .. } | AheadEvent::Failed(_) => Severity::Warning,
    };
    log::log(severity, &event.to_string());
}
