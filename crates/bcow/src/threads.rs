//! Runs work over an index range on a few threads, with results in order.

use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock, start, thread};

/// Returns `work(0)`, ..., `work(count - 1)` in index order, computed by up to `threads` threads.
/// After an error no further index is started; of several errors the one with the lowest index is
/// returned.
pub(crate) fn map_indexed<T: Send, E: Send>(
    count: u64,
    threads: usize,
    work: impl Fn(u64) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let threads = threads.clamp(1, 64).min(count.max(1) as usize);
    if threads == 1 {
        return (0..count).map(work).collect();
    }
    let next = AtomicU64::new(0);
    let failed = AtomicBool::new(false);
    // Collects finished results. It is locked once per index, after the work, with no other lock
    // held.
    let done = Mutex::new(Vec::new());
    let worker = || {
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                break;
            }
            let result = work(index);
            if result.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            lock(&done).push((index, result));
        }
    };
    thread::scope(|scope| {
        // This thread works too, alone if the system refuses others.
        let _ = (1..threads).all(|_| start(scope, worker));
        worker();
    });
    let mut done = std::mem::take(&mut *lock(&done));
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_index_order() {
        let squares = map_indexed(100, 4, |i| Ok::<_, ()>(i * i));
        assert_eq!(squares, Ok((0..100).map(|i| i * i).collect()));
    }

    #[test]
    fn first_error_is_returned() {
        let result = map_indexed(100, 4, |i| if i == 17 { Err(i) } else { Ok(()) });
        assert_eq!(result, Err(17));
    }
}
