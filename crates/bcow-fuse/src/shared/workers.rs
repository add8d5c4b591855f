//! Threads for work that can wait for a server.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Most threads of one image.
const MOST: usize = 16;
/// How long a thread waits for the next work.
const WAIT: Duration = Duration::from_secs(1);

/// The threads of one image: the work for others does not wait for it. They are started when there
/// is work.
#[derive(Default)]
pub struct Workers {
    state: Mutex<WorkState>,
    changed: Condvar,
}

#[derive(Default)]
struct WorkState {
    waiting: VecDeque<Box<dyn FnOnce() + Send>>,
    threads: usize,
    idle: usize,
}

impl Workers {
    /// Does `work` in another thread; in this one, if none can be started.
    pub fn run(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) {
        {
            let mut state = self.state.lock();
            state.waiting.push_back(Box::new(work));
            if state.waiting.len() <= state.idle {
                self.changed.notify_one();
                return;
            }
            if state.threads == MOST {
                return;
            }
            state.threads += 1;
        }
        let workers = Arc::clone(self);
        let thread = std::thread::Builder::new().name("work".into());
        if thread.spawn(move || workers.work()).is_err() {
            self.work();
        }
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            while let Some(work) = state.waiting.pop_front() {
                drop(state);
                work();
                state = self.state.lock();
            }
            state.idle += 1;
            let waited = self.changed.wait_for(&mut state, WAIT);
            state.idle -= 1;
            if waited.timed_out() && state.waiting.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn work_that_waits_delays_only_that_of_its_image() {
        let (one, other) = (Arc::<Workers>::default(), Arc::<Workers>::default());
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (done, results) = mpsc::channel();
        for _ in 0..MOST {
            let (held, done) = (Arc::clone(&held), done.clone());
            one.run(move || {
                let _ = held.lock().recv();
                done.send("held").unwrap();
            });
        }
        let later = done.clone();
        one.run(move || later.send("later").unwrap());
        for _ in 0..2 {
            let done = done.clone();
            other.run(move || done.send("other").unwrap());
            assert_eq!(results.recv(), Ok("other"));
        }
        assert_eq!(one.state.lock().threads, MOST);
        results.try_recv().unwrap_err();
        drop(release);
        let mut left: Vec<_> = (0..=MOST).map(|_| results.recv().unwrap()).collect();
        left.sort_unstable();
        assert_eq!(left.last(), Some(&"later"));
    }
}
