//! Runs several pieces of work in parallel.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::error::ConvertError;

/// Runs `work(i)` for each `i` of `order` on up to `threads` threads, started in that order; the
/// results are in the order of the indices. After an error, `stop` is set and no further work
/// starts. Of several errors, the function returns the one with the lowest index that is not merely
/// a reaction to `stop`.
pub(crate) fn run<T: Send>(
    order: &[usize],
    threads: usize,
    stop: &AtomicBool,
    work: impl Fn(usize) -> Result<T, ConvertError> + Sync,
) -> Result<Vec<T>, ConvertError> {
    let next = AtomicUsize::new(0);
    // Locked once per piece of work, when it is done, and with no other lock held.
    let done: Mutex<Vec<(usize, Result<T, ConvertError>)>> = Mutex::default();
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
    std::thread::scope(|scope| {
        // This thread works too, alone if the system refuses others.
        let _ = (1..threads.min(order.len())).all(|_| bcow::sync::start(scope, worker));
        worker();
    });
    let mut done = done
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    done.sort_by_key(|(index, _)| *index);
    let mut results = Vec::with_capacity(done.len());
    let mut interrupted = false;
    for (_, result) in done {
        match result {
            Ok(result) => results.push(result),
            Err(ConvertError::Interrupted) => interrupted = true,
            Err(error) => return Err(error),
        }
    }
    if interrupted { Err(ConvertError::Interrupted) } else { Ok(results) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_ordered_by_index() {
        let order = [3, 0, 2, 1];
        for threads in 1..5 {
            let found = run(&order, threads, &AtomicBool::new(false), |i| Ok(i * 10));
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
