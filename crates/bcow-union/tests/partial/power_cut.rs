//! Power cuts: each synced byte is present, no block is incomplete, and truncated data does not
//! come back.
//!
//! `BCOW_POWER_CUTS=20` runs twenty times as many cuts, with other seeds.

use std::sync::Arc;

use bcow_testkit::Random;
use bcow_testkit::changed;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::{Durability, Lower, PartialOptions};
use rustix::io::Errno;

use crate::script::{Script, partials, reopened, shown, write_all};
use crate::support::{TestLower, quiet};
use crate::world::{Fault, World};

fn rounds() -> u64 {
    let rounds = std::env::var("BCOW_POWER_CUTS");
    rounds.map_or(1, |rounds| rounds.parse().expect("a number"))
}

fn run(seed: u64, steps: usize) -> u64 {
    let mut script = Script::new(seed);
    for _ in 0..steps {
        script.step().unwrap();
    }
    let mut random = Random::new(seed ^ 0x5555);
    let end = script.world.now();
    let mut cuts = 0;
    for cut in 0..60 {
        cuts += 1;
        let moment = match cut {
            0 => end,
            _ => random.below(end as u64 + 1) as usize,
        };
        let world = script.world.cut(moment, &mut random);
        let context = || {
            format!(
                "seed {seed}, cut {cut} at {moment}\n{}",
                script.world.describe(moment)
            )
        };
        let (partial, bytes) = match reopened(&world, &script.lower) {
            Ok(found) => found,
            Err(error) => panic!("{error}: {}", context()),
        };
        if let Err(problem) = script.history.allows(moment, &bytes) {
            panic!("{problem}: {}", context());
        }
        // The current content is durable after a flush, and truncated data does not come back.
        let Some(partial) = partial else {
            continue;
        };
        let longer = bytes.len() as u64 + 10_000;
        partial.set_size(longer).unwrap();
        partial.flush(Durability::Durable).unwrap();
        let grown = [&bytes[..], &[0; 10_000]].concat();
        assert!(shown(&partial).unwrap() == grown, "grown: {}", context());
        let again = world.cut(world.now(), &mut random);
        let (_, bytes) = reopened(&again, &script.lower).unwrap();
        assert!(bytes == grown, "opened again: {}", context());
        cuts += 1;
    }
    cuts
}

#[test]
fn a_power_cut_loses_nothing_of_a_partial_that_was_synced() {
    let cuts: u64 = (0..rounds() * 120).map(|seed| run(seed, 25)).sum();
    println!("{cuts} power cuts");
}

/// Flushes often enough that the map is written again several times.
#[test]
fn a_power_cut_loses_nothing_when_a_map_is_written_anew() {
    const BLOCKS: u64 = 700;
    // Every second block first, so that each block is a record of its own.
    let order = (0..BLOCKS).map(|n| n * 2 % BLOCKS + u64::from(n * 2 >= BLOCKS));
    let written = flush_each(BLOCKS, order, quiet());
    assert!(written > 2);
}

/// Data in the page cache of the host's kernel is not on the disk. A kill between the write and the
/// sync of a record leaves a record that the next mount reads, but that a power cut may still
/// remove.
#[test]
fn a_power_cut_after_a_kill_loses_nothing_that_was_synced() {
    let errno = Errno::IO.raw_os_error();
    let mut random = Random::new(1);
    for (after, adds_blocks) in (0..).flat_map(|after| [(after, false), (after, true)]) {
        let lower = Arc::new(TestLower::full(100 * BLOCK_BYTES));
        let world = World::new(lower.size());
        let before = partials(&world, quiet());
        let partial = before.create_on(world.host(), lower.clone()).unwrap();
        write_all(&partial, 0, &[1; BLOCK_BYTES as usize]).unwrap();
        partial.flush(Durability::Durable).unwrap();
        write_all(&partial, 5 * BLOCK_BYTES, &[1; BLOCK_BYTES as usize]).unwrap();
        // Simulate a kill: this call fails, and the partial file makes no further calls.
        world.plan(Some(Fault {
            after,
            stays: false,
            errno,
        }));
        let flushed = partial.flush(Durability::Durable);
        world.plan(Some(Fault {
            after: 0,
            stays: true,
            errno,
        }));
        drop((partial, before));
        world.plan(None);
        let killed = world.now();
        let partials = partials(&world, quiet());
        let partial = partials
            .open_on(&world.mark().unwrap(), world.host(), lower.clone())
            .unwrap();
        let mut expected = shown(&partial).unwrap();
        let at = 5 * BLOCK_BYTES + 100;
        write_all(&partial, at, &[2; 50]).unwrap();
        expected[at as usize..][..50].fill(2);
        if adds_blocks {
            let at = 9 * BLOCK_BYTES;
            write_all(&partial, at, &[3; 700]).unwrap();
            expected[at as usize..][..700].fill(3);
        }
        partial.flush(Durability::Durable).unwrap();
        let synced = world.now();
        if adds_blocks {
            write_all(&partial, 20 * BLOCK_BYTES, &[4; BLOCK_BYTES as usize]).unwrap();
            partial.flush(Durability::Volatile).unwrap();
        }
        drop((partial, partials));
        for moment in (killed..=world.now()).flat_map(|moment| [moment; 40]) {
            let context = || {
                format!(
                    "after {after}, {adds_blocks}, at {moment} of {synced}\n{}",
                    world.describe(moment)
                )
            };
            let cut = world.cut(moment, &mut random);
            let bytes = match reopened(&cut, &lower) {
                Ok((_, bytes)) => bytes,
                Err(error) => panic!("{error}: {}", context()),
            };
            let written = 20 * BLOCK_BYTES as usize;
            assert!(
                moment < synced || bytes[..written] == expected[..written],
                "{}",
                context()
            );
        }
        if flushed.is_ok() && adds_blocks {
            assert!(after >= 3, "{after}");
            return;
        }
    }
}

#[test]
fn a_power_cut_loses_nothing_where_blocks_are_mapped_ahead() {
    let options = changed(quiet(), |new| new.ahead_blocks = 50);
    flush_each(300, 0..300, options);
}

/// Writes a part of each block and flushes after each; cuts the power at several moments. Returns
/// how often the map was written.
fn flush_each(blocks: u64, order: impl Iterator<Item = u64>, options: PartialOptions) -> u64 {
    let lower = Arc::new(TestLower::full(blocks * BLOCK_BYTES));
    let world = World::new(lower.size());
    let partials = partials(&world, options);
    let partial = partials.create_on(world.host(), lower.clone()).unwrap();
    let mut ended = Vec::new();
    let mut moments = Vec::new();
    for at in order {
        write_all(&partial, at * BLOCK_BYTES, &[1; 512]).unwrap();
        let written = partials.statistics().maps_written;
        partial.flush(Durability::Durable).unwrap();
        ended.push((world.now(), at));
        if partials.statistics().maps_written > written {
            // The most critical moment: cut here more often.
            moments.extend([world.now(); 10]);
        }
    }
    let mut random = Random::new(1);
    let anywhere = |_| random.below(world.now() as u64 + 1) as usize;
    moments.extend((0..rounds() * 150).map(anywhere));
    for moment in moments {
        let after = world.cut(moment, &mut random);
        let (_, bytes) = reopened(&after, &lower).unwrap();
        for (_, block) in ended.iter().take_while(|(ended, _)| *ended <= moment) {
            let at = (block * BLOCK_BYTES) as usize;
            assert_eq!(bytes[at], 1, "block {block} at {moment}");
        }
        // All other bytes are those of the image.
        for (at, byte) in bytes.iter().enumerate() {
            let is_written = at % (BLOCK_BYTES as usize) < 512;
            assert!(
                is_written || *byte == lower.bytes[at],
                "byte {at} at {moment}"
            );
        }
    }
    partials.statistics().maps_written
}
