//! Random operations on a partial file and on bytes in memory: both must give the same results.

use std::sync::Arc;

use bcow_testkit::Random;
use bcow_union::Seek;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::{Durability, KeepSize, Partial, PartialOptions};

use crate::support::{Place, TestLower, on_host, quiet};

const B: u64 = BLOCK_BYTES;

/// The expected content of a partial file.
struct Model {
    bytes: Vec<u8>,
}

impl Model {
    fn write(&mut self, at: u64, data: &[u8]) {
        let end = at as usize + data.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[at as usize..end].copy_from_slice(data);
    }

    fn zero(&mut self, at: u64, length: u64, size: KeepSize) {
        let mut end = (at + length) as usize;
        match size {
            KeepSize::Grow if self.bytes.len() < end => self.bytes.resize(end, 0),
            _ => end = end.min(self.bytes.len()),
        }
        if (at as usize) < end {
            self.bytes[at as usize..end].fill(0);
        }
    }
}

fn check(partial: &Partial, model: &Model, context: &str) {
    assert_eq!(partial.size(), model.bytes.len() as u64, "{context}");
    let mut read = vec![0xEE; model.bytes.len() + 10];
    let count = partial.read_at(0, &mut read).unwrap();
    assert_eq!(count, model.bytes.len(), "{context}");
    for (at, (found, expected)) in read.iter().zip(&model.bytes).enumerate() {
        assert_eq!(found, expected, "byte {at} {context}");
    }
}

/// All bytes other than zeros are in data; holes contain only zeros.
fn check_seek(partial: &Partial, model: &Model, at: u64, context: &str) {
    let size = model.bytes.len() as u64;
    let data = partial.seek(at, Seek::Data).unwrap();
    let hole = partial.seek(at, Seek::Hole).unwrap();
    if at >= size {
        assert_eq!((data, hole), (None, None), "{context}");
        return;
    }
    let zeros = &model.bytes[at as usize..data.unwrap_or(size) as usize];
    assert!(zeros.iter().all(|byte| *byte == 0), "{context}");
    let hole = hole.unwrap();
    assert!((at..=size).contains(&hole), "{context}");
    assert!(data != Some(hole) || hole == size, "{context}");
}

/// An offset near the edge of a block.
fn place(random: &mut Random, size: u64) -> u64 {
    let at = random.below(size + 3 * B);
    match random.below(4) {
        0 => at / B * B,
        1 => (at / B * B).saturating_sub(random.below(3)),
        2 => at / B * B + random.below(3),
        _ => at,
    }
}

fn length(random: &mut Random) -> u64 {
    match random.below(6) {
        0 => random.below(30),
        1 => B,
        2 => random.below(B),
        3 => random.below(3 * B),
        4 => random.below(80) * B,
        _ => 512,
    }
}

fn run(seed: u64, steps: usize, options: PartialOptions) {
    let mut random = Random::new(seed);
    let most = *random.pick(&[1, B, 10 * B, 300 * B]);
    let lower_size = random.below(most + 1) + random.below(2);
    let lower = Arc::new(TestLower::new(seed, lower_size));
    let mut model = Model {
        bytes: lower.bytes.clone(),
    };
    let dir = Place::new();
    let mut partials = on_host(&dir, options.clone());
    let host = dir.file(lower_size);
    let mut partial = partials
        .create(host.try_clone().unwrap(), lower.clone())
        .unwrap();
    let mut tag = 0u8;
    for step in 0..steps {
        let context = format!("seed {seed} step {step}");
        let size = model.bytes.len() as u64;
        let at = place(&mut random, size);
        let len = length(&mut random);
        match random.below(20) {
            0..8 => {
                tag = tag.wrapping_add(1);
                let data = vec![tag.max(1); len as usize];
                assert_eq!(partial.write_at(at, &data).unwrap(), data.len());
                if len > 0 {
                    model.write(at, &data);
                }
            }
            8..10 => {
                let mut buf = vec![0xEE; len as usize];
                let read = partial.read_at(at, &mut buf).unwrap();
                let end = (at + len).min(size);
                assert_eq!(read as u64, end.saturating_sub(at), "{context}");
                if read > 0 {
                    assert_eq!(
                        buf[..read],
                        model.bytes[at as usize..end as usize],
                        "{context}"
                    );
                }
            }
            10 => {
                let keep = *random.pick(&[KeepSize::Keep, KeepSize::Grow]);
                partial.zero(at, len, keep).unwrap();
                if len > 0 || keep == KeepSize::Grow {
                    model.zero(at, len, keep);
                }
            }
            11..13 => {
                let to = if random.one_in(5) { 0 } else { at };
                partial.set_size(to).unwrap();
                model.bytes.resize(to as usize, 0);
            }
            13 if len > 0 => {
                let keep = *random.pick(&[KeepSize::Keep, KeepSize::Grow]);
                partial.allocate(at, len, keep).unwrap();
                if keep == KeepSize::Grow && size < at + len {
                    model.bytes.resize((at + len) as usize, 0);
                }
            }
            14 => check_seek(&partial, &model, at, &context),
            15 => partial
                .flush(*random.pick(&[Durability::Durable, Durability::Volatile]))
                .unwrap(),
            16 => {
                partial.settle().unwrap();
                assert_eq!(partial.status().unwrap().incomplete, 0, "{context}");
            }
            17 => check(&partial, &model, &context),
            18 => {
                // Open it again, in the same mount or in a new one.
                if random.one_in(2) {
                    partial.flush(Durability::Volatile).unwrap();
                    drop(partial);
                    drop(partials);
                    partials = on_host(&dir, options.clone());
                }
                let Some(mark) = dir.mark() else {
                    return check_plain(&dir, &model, &context);
                };
                let host = host.try_clone().unwrap();
                partial = partials.open(mark, host, lower.clone()).unwrap();
            }
            _ => {
                let complete = partial.is_complete();
                if random.one_in(4) {
                    assert_eq!(partial.promote().unwrap(), complete, "{context}");
                    assert_eq!(dir.mark().is_none(), complete, "{context}");
                }
            }
        }
    }
    check(&partial, &model, &format!("seed {seed} at the end"));
    let status = partial.status().unwrap();
    assert_eq!(status.blocks, (model.bytes.len() as u64).div_ceil(B));
    assert!(status.present <= status.blocks, "{status:?}");
}

fn check_plain(dir: &Place, model: &Model, context: &str) {
    assert_eq!(
        crate::support::content(&dir.host()),
        model.bytes,
        "{context}"
    );
}

#[test]
fn partial_agrees_with_bytes_in_memory() {
    for seed in 0..crate::support::cases(60) {
        run(seed, 150, quiet());
    }
}

#[test]
fn it_does_so_with_a_busy_background() {
    let busy = PartialOptions {
        fillers: 2,
        fill_delay: std::time::Duration::ZERO,
        most_incomplete: 3,
        durable: false,
        ..quiet()
    };
    for seed in 1000..1000 + crate::support::cases(20) {
        run(seed, 300, busy.clone());
    }
}
