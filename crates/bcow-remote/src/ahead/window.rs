//! The pieces of the parts that are requested at one time.
//!
//! The parts are in the order in which they are needed, and the requests share the network. So the
//! more bytes are requested at one time, the later the first of them arrive; with too few, the
//! network is idle between the end of an answer and the begin of the next one. The window begins
//! with a size for an ordinary network. It grows as long as answers begin later than they take to
//! arrive, because then the network could carry more.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use crate::file::Pace;
use crate::lock::lock;

/// Bytes of a piece at first, and at most. A piece is one request.
const FIRST_PIECE_BYTES: u64 = 256 << 10;
const MAX_PIECE_BYTES: u64 = 1 << 20;
/// The window has this number of pieces of the full size.
const PIECES: u64 = 4;
/// The same while a read of a program waits for a server.
const PIECES_BESIDE_READS: u64 = 2;
/// How often a thread that waits looks whether it shall end.
const LOOK: Duration = Duration::from_millis(50);

/// A range of a file, of which the window makes pieces.
pub(super) struct Whole {
    pub(super) range: Range<u64>,
    /// Memory is the only place for what is fetched.
    pub(super) is_uncached: bool,
}

/// A part of a [`Whole`].
pub(super) struct Piece {
    /// The index of the whole.
    pub(super) whole: usize,
    pub(super) range: Range<u64>,
}

pub(super) struct Window {
    wholes: Vec<Whole>,
    /// The lock is held to take or to return a piece, never during a request, and no other lock is
    /// taken under it.
    state: Mutex<WindowState>,
    freed: Condvar,
}

enum Taken {
    Piece(Piece),
    /// The piece does not fit.
    Full,
    /// There is no further piece.
    End,
}

struct WindowState {
    /// The next piece begins here: the index of a whole, and a byte of its file.
    next: (usize, u64),
    in_flight_bytes: u64,
    piece_bytes: u64,
    /// The shortest time to the begin of an answer. Others also contain the time in which the
    /// network was busy with the answers before.
    latency: Duration,
    /// What may still be taken of files that have no cache.
    uncached_bytes: u64,
}

impl Piece {
    pub(super) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

impl Window {
    /// At most `uncached_bytes` are taken of wholes that have no cache; what is behind is left out.
    pub(super) fn new(wholes: Vec<Whole>, uncached_bytes: u64) -> Self {
        let start = wholes.first().map_or(0, |whole| whole.range.start);
        Window {
            wholes,
            state: Mutex::new(WindowState {
                next: (0, start),
                in_flight_bytes: 0,
                piece_bytes: FIRST_PIECE_BYTES,
                latency: Duration::MAX,
                uncached_bytes,
            }),
            freed: Condvar::new(),
        }
    }

    /// The number of pieces, if they do not grow; at most `most`.
    pub(super) fn pieces(&self, most: usize) -> usize {
        let pieces = self.wholes.iter().map(|whole| {
            let bytes = whole.range.end.saturating_sub(whole.range.start);
            bytes.div_ceil(FIRST_PIECE_BYTES)
        });
        pieces.fold(0, u64::saturating_add).min(most as u64) as usize
    }

    /// Takes the next piece when it fits into the window; `None` at the end, or soon after `stop`
    /// is set.
    pub(super) fn take(
        &self,
        stop: &AtomicBool,
        is_read_waiting: impl Fn() -> bool,
    ) -> Option<Piece> {
        while !stop.load(Ordering::Relaxed) {
            let pieces = if is_read_waiting() { PIECES_BESIDE_READS } else { PIECES };
            let mut state = lock(&self.state);
            match self.try_take(&mut state, pieces) {
                Taken::Piece(piece) => return Some(piece),
                Taken::End => return None,
                Taken::Full => drop(self.freed.wait_timeout(state, LOOK)),
            }
        }
        None
    }

    /// Takes the next piece if it fits into a window of `pieces` pieces of the full size.
    fn try_take(&self, state: &mut WindowState, pieces: u64) -> Taken {
        let Some(piece) = self.next(state) else {
            return Taken::End;
        };
        let in_flight_bytes = state.in_flight_bytes + piece.bytes();
        if state.in_flight_bytes > 0 && in_flight_bytes > pieces * state.piece_bytes {
            return Taken::Full;
        }
        if self.wholes[piece.whole].is_uncached {
            state.uncached_bytes -= piece.bytes();
        }
        state.in_flight_bytes = in_flight_bytes;
        state.next = (piece.whole, piece.range.end);
        Taken::Piece(piece)
    }

    /// The piece after those that were taken.
    fn next(&self, state: &WindowState) -> Option<Piece> {
        let (mut index, mut start) = state.next;
        while self.wholes.get(index)?.range.end <= start {
            index += 1;
            start = self.wholes.get(index)?.range.start;
        }
        let whole = &self.wholes[index];
        let end = whole.range.end.min(start + state.piece_bytes);
        let is_left = !whole.is_uncached || end - start <= state.uncached_bytes;
        is_left.then_some(Piece {
            whole: index,
            range: start..end,
        })
    }

    /// Returns a piece that was fetched, or given up.
    pub(super) fn done(&self, piece: &Piece, pace: Option<Pace>) {
        let mut state = lock(&self.state);
        state.in_flight_bytes -= piece.bytes();
        if let Some(pace) = pace {
            state.latency = state.latency.min(pace.latency);
            if pace.transfer < state.latency && piece.bytes() == state.piece_bytes {
                state.piece_bytes = (state.piece_bytes * 2).min(MAX_PIECE_BYTES);
            }
        }
        self.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const SLOW: Pace = Pace {
        latency: Duration::from_millis(20),
        transfer: Duration::from_millis(60),
    };
    const FAR: Pace = Pace {
        latency: Duration::from_millis(200),
        transfer: Duration::from_millis(60),
    };

    /// A window over ranges, each with its start and its end.
    fn window(ranges: &[(u64, u64)], is_uncached: bool) -> Window {
        let wholes = ranges.iter().map(|&(start, end)| Whole {
            range: start..end,
            is_uncached,
        });
        Window::new(wholes.collect(), 1000 * KIB)
    }

    /// What the window gives until it is full, or at its end.
    fn taken(window: &Window, pieces: u64) -> Vec<Piece> {
        let mut state = lock(&window.state);
        let next = || match window.try_take(&mut state, pieces) {
            Taken::Piece(piece) => Some(piece),
            Taken::Full | Taken::End => None,
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn pieces_are_taken_in_order_as_far_as_the_window_reaches() {
        let window = window(&[(0, 10 * KIB), (5000 * KIB, 6400 * KIB)], false);
        let first = taken(&window, PIECES);
        let starts: Vec<_> = first.iter().map(|piece| piece.range.start / KIB).collect();
        assert_eq!(starts, [0, 5000, 5256, 5512]);
        window.done(&first[1], Some(SLOW));
        let next = taken(&window, PIECES);
        assert_eq!(next.len(), 1);
        assert_eq!(next[0].range, 5768 * KIB..6024 * KIB);
    }

    #[test]
    fn window_is_smaller_while_a_read_waits() {
        let window = window(&[(0, 10 << 20)], false);
        assert_eq!(taken(&window, PIECES_BESIDE_READS).len(), 2);
        assert_eq!(taken(&window, PIECES).len(), 2);
    }

    #[test]
    fn window_grows_until_the_network_is_busy() {
        let window = window(&[(0, 100 << 20)], false);
        for bytes in [256, 512, 1024, 1024] {
            let first = taken(&window, PIECES);
            assert_eq!(first[0].bytes(), bytes * KIB);
            for piece in &first {
                window.done(piece, Some(FAR));
            }
        }
    }

    #[test]
    fn window_does_not_grow_because_of_its_own_queue() {
        let window = window(&[(0, 100 << 20)], false);
        let first = taken(&window, PIECES);
        window.done(&first[0], Some(SLOW));
        for piece in &first[1..] {
            window.done(piece, Some(FAR));
        }
        assert_eq!(taken(&window, PIECES)[0].bytes(), 256 * KIB);
    }

    #[test]
    fn a_full_window_waits_for_a_piece_that_is_done() {
        let window = window(&[(0, 10 << 20)], false);
        let stop = AtomicBool::new(false);
        let first = taken(&window, PIECES_BESIDE_READS);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| window.take(&stop, || true));
            window.done(&first[0], None);
            let next = waits.join().expect("no panic").expect("a piece");
            assert_eq!(next.range.start, first[1].range.end);
        });
        stop.store(true, Ordering::Relaxed);
        assert!(window.take(&stop, || true).is_none(), "it was stopped");
    }

    #[test]
    fn memory_takes_a_bounded_part() {
        let window = window(&[(0, 100 << 20)], true);
        let mut bytes = 0;
        loop {
            let pieces = taken(&window, PIECES);
            if pieces.is_empty() {
                break;
            }
            for piece in &pieces {
                bytes += piece.bytes();
                window.done(piece, Some(SLOW));
            }
        }
        assert_eq!(bytes, 768 * KIB);
    }
}
