//! Runs several pieces of work in parallel.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::ConvertError;
use crate::export::ExportError;

/// An error type with a value for cancelled work.
pub(crate) trait Stoppable {
    /// The error of cancelled work.
    fn interrupted() -> Self;
    /// Whether this is the error of cancelled work.
    fn is_interrupted(&self) -> bool;
}

impl Stoppable for ConvertError {
    fn interrupted() -> Self {
        ConvertError::Interrupted
    }
    fn is_interrupted(&self) -> bool {
        matches!(self, ConvertError::Interrupted)
    }
}

impl Stoppable for ExportError {
    fn interrupted() -> Self {
        ExportError::Interrupted
    }
    fn is_interrupted(&self) -> bool {
        matches!(self, ExportError::Interrupted)
    }
}

/// Runs `work(i)` for each `i` of `order` on up to `threads` threads, started in that order; the
/// results are in the order of the indices. After an error, `stop` is set and no further work
/// starts. Of several errors, the function returns the one with the lowest index that is not merely
/// a reaction to `stop`.
pub(crate) fn run<T: Send, E: Stoppable + Send>(
    order: &[usize],
    threads: usize,
    stop: &AtomicBool,
    work: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    // Locked once per piece of work, when it is done, and with no other lock held.
    let done: Mutex<Vec<(usize, Result<T, E>)>> = Mutex::default();
    let worker = || {
        while !stop.load(Ordering::Relaxed) {
            let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) else {
                break;
            };
            let result = work(index);
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            done.lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner())
                .push((index, result));
        }
    };
    match threads.min(order.len()) {
        0 | 1 => worker(),
        threads => std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(worker);
            }
        }),
    }
    let mut done = done
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    done.sort_by_key(|(index, _)| *index);
    let mut results = Vec::with_capacity(done.len());
    let mut interrupted = false;
    for (_, result) in done {
        match result {
            Ok(result) => results.push(result),
            Err(error) if error.is_interrupted() => interrupted = true,
            Err(error) => return Err(error),
        }
    }
    if interrupted { Err(E::interrupted()) } else { Ok(results) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_ordered_by_index() {
        let order = [3, 0, 2, 1];
        for threads in 1..5 {
            let found = run(&order, threads, &AtomicBool::new(false), |i| {
                Ok::<_, ConvertError>(i * 10)
            });
            assert_eq!(found.unwrap(), [0, 10, 20, 30]);
        }
    }

    #[test]
    fn the_error_is_the_one_that_stopped_the_others() {
        let stop = AtomicBool::new(false);
        let order: Vec<usize> = (0..100).collect();
        let found: Result<Vec<()>, ConvertError> = run(&order, 4, &stop, |i| match i {
            17 => Err(ConvertError::Options("17".into())),
            _ if stop.load(Ordering::Relaxed) => Err(ConvertError::Interrupted),
            _ => Ok(()),
        });
        assert!(matches!(found, Err(ConvertError::Options(text)) if text == "17"));
    }
}
