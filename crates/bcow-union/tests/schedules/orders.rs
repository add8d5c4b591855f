//! The content that a file may have, for all sequential orders of the operations of several
//! threads.

use std::collections::BTreeMap;

use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::KeepSize;

/// An operation of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Write {
        at: u64,
        length: u64,
    },
    Zero {
        at: u64,
        length: u64,
        size: KeepSize,
    },
    Resize(u64),
    Read {
        at: u64,
        length: u64,
    },
    SeekData(u64),
    SeekHole(u64),
    Settle,
    Flush,
    /// Simulates a kill of the program if all changes of the partial file are recorded.
    LetGo,
    Promote,
}

/// Possible origins of a byte, as a bit set: [`ABSENT`], [`ZERO`], [`LOWER`], and one bit for each
/// operation that writes.
pub type Origins = u64;
/// The byte is beyond the end of the file.
pub const ABSENT: Origins = 1;
pub const ZERO: Origins = 2;
/// The byte is that of the lower file.
pub const LOWER: Origins = 4;
const WRITTEN: u32 = 3;

/// The bit for bytes that operation `number` writes.
fn written(number: usize) -> Origins {
    1 << (WRITTEN + number as u32)
}

/// The byte that operation `number` writes.
pub fn tag(number: usize) -> u8 {
    1 + number as u8
}

/// Possible origins of ranges. Each key is the start of a range, which ends at the next key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bytes(BTreeMap<u64, Origins>);

impl Bytes {
    fn nothing(places: &[u64]) -> Self {
        Bytes(places.iter().map(|at| (*at, 0)).collect())
    }

    fn add(&mut self, state: &[Origins]) {
        for (could, bit) in self.0.values_mut().zip(state) {
            *could |= bit;
        }
    }

    fn and(&mut self, other: &Bytes) {
        for (could, also) in self.0.values_mut().zip(other.0.values()) {
            *could &= also;
        }
    }

    /// Checks whether `byte` is allowed at `at`; `None` is beyond the end of the file. `lower` is
    /// the byte of the lower file.
    pub fn allow(&self, at: u64, byte: Option<u8>, lower: Option<u8>) -> Result<(), String> {
        let could = self
            .0
            .range(..=at)
            .next_back()
            .map_or(0, |(_, could)| *could);
        let is = match byte {
            None => ABSENT,
            Some(0) => ZERO,
            Some(byte) if Some(byte) == lower => LOWER,
            Some(byte) => 1u64.checked_shl(WRITTEN + u32::from(byte) - 1).unwrap_or(0),
        };
        if could & is != 0 {
            Ok(())
        } else {
            Err(format!("byte {at} is {byte:?}, which could be {could:b}"))
        }
    }
}

/// The possible content over all orders.
pub struct Orders {
    /// After all operations.
    pub last: Bytes,
    /// At any time.
    pub ever: Bytes,
    /// At the time of operation `number`, for operations that change nothing.
    pub at: Vec<Bytes>,
    /// At any time from operation `number` on.
    pub since: Vec<Bytes>,
}

impl Orders {
    /// Computes all orders for a lower file of `lower` bytes. The operations of the first thread
    /// come before all others.
    pub fn of(lower: u64, threads: &[Vec<Op>]) -> Orders {
        let count: usize = threads.iter().map(Vec::len).sum();
        let places = places(lower, threads);
        let nothing = Bytes::nothing(&places);
        let mut orders = Orders {
            last: nothing.clone(),
            ever: nothing.clone(),
            at: vec![nothing.clone(); count],
            since: vec![nothing; count],
        };
        let state = places
            .iter()
            .map(|at| if *at < lower { LOWER } else { ABSENT })
            .collect();
        let mut walk = Walk {
            places: &places,
            threads,
            orders: &mut orders,
            next: vec![0; threads.len()],
            done: Vec::new(),
        };
        walk.go(state);
        orders
    }

    /// The possible content after a power cut when these flushes have completed. Bytes that were
    /// truncated or added in the meantime may also be zeros.
    pub fn after(&self, flushed: &[usize]) -> Bytes {
        let mut bytes = self.ever.clone();
        for number in flushed {
            bytes.and(&self.since[*number]);
        }
        for could in bytes.0.values_mut() {
            if *could & ABSENT != 0 {
                *could |= ZERO;
            }
        }
        bytes
    }
}

/// The number of an operation.
pub fn number(threads: &[Vec<Op>], thread: usize, index: usize) -> usize {
    threads[..thread].iter().map(Vec::len).sum::<usize>() + index
}

/// The offsets at which the content can change its origin. All bytes of the range between two of
/// them have the same origin.
fn places(lower: u64, threads: &[Vec<Op>]) -> Vec<u64> {
    let mut places = vec![0, lower];
    for op in threads.iter().flatten() {
        match *op {
            Op::Write { at, length } | Op::Zero { at, length, .. } | Op::Read { at, length } => {
                places.extend([at, at + length]);
            }
            Op::Resize(at) | Op::SeekData(at) | Op::SeekHole(at) => places.push(at),
            Op::Settle | Op::Flush | Op::LetGo | Op::Promote => {}
        }
    }
    let end = places.iter().max().copied().unwrap_or(0);
    places.extend((0..=end / BLOCK_BYTES).map(|block| block * BLOCK_BYTES));
    places.sort_unstable();
    places.dedup();
    places
}

struct Walk<'a> {
    places: &'a [u64],
    threads: &'a [Vec<Op>],
    orders: &'a mut Orders,
    next: Vec<usize>,
    done: Vec<usize>,
}

impl Walk<'_> {
    fn go(&mut self, state: Vec<Origins>) {
        self.orders.ever.add(&state);
        for number in &self.done {
            self.orders.since[*number].add(&state);
        }
        let mut is_last = true;
        let first_is_done = self.next[0] == self.threads[0].len();
        for thread in 0..self.threads.len() {
            if thread > 0 && !first_is_done {
                break;
            }
            let index = self.next[thread];
            let Some(op) = self.threads[thread].get(index) else {
                continue;
            };
            is_last = false;
            let number = number(self.threads, thread, index);
            let mut state = state.clone();
            self.carry_out(op, number, &mut state);
            self.orders.at[number].add(&state);
            self.next[thread] += 1;
            self.done.push(number);
            self.go(state);
            self.done.pop();
            self.next[thread] -= 1;
        }
        if is_last {
            self.orders.last.add(&state);
        }
    }

    fn carry_out(&self, op: &Op, number: usize, state: &mut [Origins]) {
        let mut each = |change: &dyn Fn(u64, Origins) -> Origins| {
            for (at, bit) in self.places.iter().zip(state.iter_mut()) {
                *bit = change(*at, *bit);
            }
        };
        let present = |bit| if bit == ABSENT { ZERO } else { bit };
        match *op {
            Op::Write { at, length } => each(&|place, bit| match place {
                place if place >= at + length => bit,
                place if place >= at => written(number),
                _ => present(bit),
            }),
            Op::Zero { at, length, size } => each(&|place, bit| match place {
                place if place >= at + length => bit,
                _ if bit == ABSENT && size == KeepSize::Keep => bit,
                place if place >= at => ZERO,
                _ => present(bit),
            }),
            Op::Resize(size) => {
                each(&|place, bit| if place < size { present(bit) } else { ABSENT })
            }
            _ => {}
        }
    }
}

#[test]
fn orders_of_two_writes_leave_either() {
    let write = |at| Op::Write { at, length: 10 };
    let read = Op::Read { at: 0, length: 20 };
    let threads = [
        Vec::new(),
        vec![write(0), read],
        vec![write(5)],
        vec![Op::Resize(18)],
    ];
    let orders = Orders::of(20, &threads);
    let (lower, one, three) = (Some(200), Some(tag(0)), Some(tag(2)));
    for allowed in [
        (4, one),
        (7, one),
        (7, three),
        (12, three),
        (17, lower),
        (18, None),
    ] {
        orders.last.allow(allowed.0, allowed.1, lower).unwrap();
    }
    for not in [(4, lower), (12, one), (17, None), (18, lower)] {
        orders.last.allow(not.0, not.1, lower).unwrap_err();
    }
    orders.at[1].allow(12, lower, lower).unwrap();
    orders.at[1].allow(4, lower, lower).unwrap_err();
    orders.after(&[]).allow(4, lower, lower).unwrap();
    orders.after(&[1]).allow(4, lower, lower).unwrap_err();
    orders.after(&[1]).allow(19, Some(0), lower).unwrap();
}
