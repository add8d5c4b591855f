//! Whatever a power cut leaves: every byte that was synced is there, no block is half filled, and nothing comes back that was cut off.
//!
//! `BCOW_POWER_CUTS=20` does twenty times as many, from other seeds.

use std::sync::Arc;

use bcow_testkit::Random;
use bcow_union::sketch::{BLOCK_BYTES, Durability, Lower, SketchKind, SketchOptions};

use crate::script::{Script, reopened, shown, sketches, write_all};
use crate::support::{TestLower, quiet};
use crate::world::World;

fn rounds() -> u64 {
    let rounds = std::env::var("BCOW_POWER_CUTS");
    rounds.map_or(1, |rounds| rounds.parse().expect("a number"))
}

fn run(kind: SketchKind, seed: u64, steps: usize) {
    let mut script = Script::new(kind, seed);
    for _ in 0..steps {
        script.step().unwrap();
    }
    let mut random = Random::new(seed ^ 0x5555);
    let end = script.world.now();
    for cut in 0..60 {
        let moment = match cut {
            0 => end,
            _ => random.below(end as u64 + 1) as usize,
        };
        let world = script.world.cut(moment, &mut random);
        let context = || {
            format!(
                "{kind:?}, seed {seed}, cut {cut} at {moment}\n{}",
                script.world.describe(moment)
            )
        };
        let (sketch, bytes) = match reopened(&world, &script.lower) {
            Ok(found) => found,
            Err(error) => panic!("{error}: {}", context()),
        };
        if let Err(problem) = script.history.allows(moment, &bytes) {
            panic!("{problem}: {}", context());
        }
        // What is there now is durable once it is flushed, and what was cut off does not come back.
        let Some(sketch) = sketch else {
            continue;
        };
        let longer = bytes.len() as u64 + 10_000;
        sketch.set_size(longer).unwrap();
        sketch.flush(Durability::Durable).unwrap();
        let grown = [&bytes[..], &[0; 10_000]].concat();
        assert!(shown(&*sketch).unwrap() == grown, "grown: {}", context());
        let again = world.cut(world.now(), &mut random);
        let (_, bytes) = reopened(&again, &script.lower).unwrap();
        assert!(bytes == grown, "opened again: {}", context());
    }
}

#[test]
fn a_power_cut_loses_nothing_of_a_sparse_sketch_that_was_synced() {
    for seed in 0..rounds() * 120 {
        run(SketchKind::Sparse, seed, 25);
    }
}

/// So many flushes that the map is written anew now and then.
#[test]
fn a_power_cut_loses_nothing_when_a_map_is_written_anew() {
    const BLOCKS: u64 = 700;
    // Every other one first, so that they are as many records.
    let order = (0..BLOCKS).map(|n| n * 2 % BLOCKS + u64::from(n * 2 >= BLOCKS));
    let written = flush_each(BLOCKS, order, quiet());
    assert!(written > 2);
}

#[test]
fn a_power_cut_loses_nothing_where_blocks_are_mapped_ahead() {
    let options = SketchOptions {
        ahead_blocks: 50,
        ..quiet()
    };
    flush_each(300, 0..300, options);
}

/// Writes a part of each of these blocks and flushes, and cuts the power here and there. Says how often the map was written.
fn flush_each(blocks: u64, order: impl Iterator<Item = u64>, options: SketchOptions) -> u64 {
    let lower = Arc::new(TestLower::full(blocks * BLOCK_BYTES));
    let world = World::new(lower.size());
    let sketches = sketches(&world, options);
    let sketch = sketches
        .create_on(SketchKind::Sparse, world.host(), lower.clone())
        .unwrap();
    let mut ended = Vec::new();
    let mut moments = Vec::new();
    for at in order {
        write_all(&*sketch, at * BLOCK_BYTES, &[1; 512]).unwrap();
        let written = sketches.statistics().maps_written;
        sketch.flush(Durability::Durable).unwrap();
        ended.push((world.now(), at));
        if sketches.statistics().maps_written > written {
            // Most can go wrong then.
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
        // Everything else is the image's.
        for (at, byte) in bytes.iter().enumerate() {
            let is_written = at % (BLOCK_BYTES as usize) < 512;
            assert!(
                is_written || *byte == lower.bytes[at],
                "byte {at} at {moment}"
            );
        }
    }
    sketches.statistics().maps_written
}

#[test]
fn a_power_cut_loses_nothing_of_a_packed_sketch_that_was_synced() {
    for seed in 0..rounds() * 25 {
        run(SketchKind::Packed, seed, 20);
    }
}
