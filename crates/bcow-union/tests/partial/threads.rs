//! Several threads on the same blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bcow_testkit::Random;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::{Durability, KeepSize, Lower, PartialOptions};

use crate::script::{partials, reopened, shown, write_all};
use crate::support::{TestLower, cases, quiet};
use crate::world::World;

const B: u64 = BLOCK_BYTES;
const BLOCKS: u64 = 40;
const THREADS: u64 = 4;
/// Length of a lane. The lanes alternate between the threads.
const LANE: u64 = 64;

/// Each thread writes and reads back its own lanes of all blocks, while other threads read, flush
/// and complete blocks.
fn run(seed: u64) {
    let lower = Arc::new(TestLower::full(BLOCKS * B));
    let world = World::new(lower.size());
    let options = PartialOptions {
        fillers: 2,
        fill_delay: Duration::ZERO,
        most_incomplete: 10,
        ..quiet()
    };
    let partials = partials(&world, options);
    let partial = partials.create_on(world.host(), lower.clone()).unwrap();
    let ended = AtomicBool::new(false);
    let disturb = || {
        let mut random = Random::new(seed);
        while !ended.load(Ordering::Relaxed) {
            match random.below(4) {
                0 => partial.flush(Durability::Durable).unwrap(),
                1 => partial.settle().unwrap(),
                // The new end is after the lanes. Some resizes close the gate of the partial file.
                2 => partial.set_size((BLOCKS + random.below(5)) * B).unwrap(),
                _ => {
                    let end = BLOCKS * B;
                    partial
                        .zero(end, random.below(5 * B), KeepSize::Keep)
                        .unwrap();
                }
            }
        }
    };
    let write = |thread: u64| {
        let mut random = Random::new(seed * THREADS + thread);
        let mut own = vec![0; (BLOCKS * B / LANE / THREADS) as usize];
        for round in 0..400 {
            let lane = random.below(own.len() as u64);
            let at = (lane * THREADS + thread) * LANE;
            if random.one_in(3) {
                let mut found = [0; LANE as usize];
                partial.read_at(at, &mut found).unwrap();
                let expected = own[lane as usize];
                for (byte, at) in found.into_iter().zip(at as usize..) {
                    let below = lower.bytes[at];
                    let expected = if expected == 0 { below } else { expected };
                    assert_eq!(byte, expected, "seed {seed} thread {thread} byte {at}");
                }
            } else {
                own[lane as usize] = 1 + (round % 100) as u8;
                write_all(&partial, at, &[own[lane as usize]; LANE as usize]).unwrap();
            }
        }
        own
    };
    let write = &write;
    let lanes: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let disturber = scope.spawn(disturb);
        let writers: Vec<_> = (0..THREADS)
            .map(|thread| scope.spawn(move || write(thread)))
            .collect();
        let lanes = writers.into_iter().map(|writer| writer.join().unwrap());
        let lanes = lanes.collect();
        ended.store(true, Ordering::Relaxed);
        disturber.join().unwrap();
        lanes
    });
    partial.set_size(BLOCKS * B).unwrap();
    let mut expected = lower.bytes.clone();
    for (thread, own) in lanes.iter().enumerate() {
        for (lane, tag) in own.iter().enumerate().filter(|(_, tag)| **tag != 0) {
            let at = (lane * THREADS as usize + thread) * LANE as usize;
            expected[at..at + LANE as usize].fill(*tag);
        }
    }
    assert!(shown(&partial).unwrap() == expected, "seed {seed}");
    partial.flush(Durability::Durable).unwrap();
    let (_, bytes) = reopened(&world.killed(), &lower).unwrap();
    assert!(bytes == expected, "seed {seed}, opened again");
}

#[test]
fn threads_on_the_same_blocks_lose_nothing() {
    for seed in 0..cases(20) {
        run(seed);
    }
}
