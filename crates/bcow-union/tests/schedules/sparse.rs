//! The models of partial files.

use bcow_testkit::changed;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::{KeepSize, PartialOptions};

use crate::model::{Model, alone, behind, random, with_filler};
use crate::orders::Op;

const B: u64 = BLOCK_BYTES;
/// Number of schedules of each model in one run.
const SCHEDULES: usize = 400;

fn write(at: u64, length: u64) -> Op {
    Op::Write { at, length }
}

fn zero(at: u64, length: u64) -> Op {
    Op::Zero {
        at,
        length,
        size: KeepSize::Keep,
    }
}

fn read(at: u64, length: u64) -> Op {
    Op::Read { at, length }
}

fn model<const N: usize>(lower: u64, options: PartialOptions, threads: [&[Op]; N]) -> Model {
    Model {
        lower,
        first: Vec::new(),
        threads: threads.map(<[Op]>::to_vec).to_vec(),
        options,
    }
}

#[test]
fn writers_of_parts_of_a_block_and_the_filler_lose_nothing() {
    let writers: [&[Op]; 3] = [
        &[write(100, 50), write(500, 10)],
        &[write(300, 100)],
        &[read(0, B), write(B - 7, 20)],
    ];
    model(2 * B, with_filler(), writers).check(SCHEDULES);
    model(2 * B, behind(), writers).check(SCHEDULES);
}

#[test]
fn a_block_that_is_read_while_it_is_completed_is_whole() {
    let threads: [&[Op]; 3] = [
        &[write(10, 5), read(0, B)],
        &[read(0, B), read(0, 20)],
        &[Op::Settle, write(2000, 96)],
    ];
    model(B, alone(), threads).check(SCHEDULES);
}

#[test]
fn a_block_that_is_punched_or_cut_while_it_is_completed_stays_so() {
    for op in [zero(0, B), zero(50, B), Op::Resize(60), Op::Resize(0)] {
        let threads: [&[Op]; 3] = [
            &[write(20, 10), write(200, 10)],
            &[op, write(B - 50, 10), read(0, B)],
            &[Op::Settle, Op::Flush],
        ];
        model(B + 10, with_filler(), threads).check(SCHEDULES);
    }
}

#[test]
fn truncated_bytes_read_as_zeros_after_growth() {
    let threads: [&[Op]; 2] = [
        &[Op::Resize(B + 30), Op::Resize(3 * B), Op::Flush],
        &[write(B + 10, 10), write(2 * B + 5, 10), read(0, 3 * B)],
    ];
    model(3 * B, with_filler(), threads).check(SCHEDULES);
    model(3 * B, alone(), threads).check(SCHEDULES);
}

#[test]
fn the_last_block_grows_while_it_is_completed() {
    let threads: [&[Op]; 3] = [
        &[write(B + 10, 10), write(B + 900, 30)],
        &[write(2 * B + 100, 10)],
        &[Op::Settle, write(B, 900)],
    ];
    model(B + 900, with_filler(), threads).check(SCHEDULES);
}

#[test]
fn a_flush_has_all_that_was_written_before_it() {
    let threads: [&[Op]; 3] = [
        &[write(10, 10), Op::Flush, write(20, 10)],
        &[write(B + 10, 10), Op::Flush],
        &[write(0, B), Op::LetGo],
    ];
    model(2 * B, alone(), threads).check(SCHEDULES);
    let cut: [&[Op]; 3] = [
        &[write(B + 10, 10), Op::Flush],
        &[Op::Resize(B + 15), write(2 * B, 5), Op::Flush],
        &[Op::LetGo],
    ];
    model(2 * B, with_filler(), cut).check(SCHEDULES);
}

#[test]
fn a_partial_is_promoted_only_when_nothing_of_the_lower_file_shows() {
    let threads: [&[Op]; 3] = [
        &[write(0, B), Op::Promote, write(5, 5)],
        &[write(B + 5, 20), Op::Promote, Op::Flush],
        &[Op::Settle, write(B, 5), Op::LetGo],
    ];
    model(B + 100, with_filler(), threads).check(SCHEDULES);
}

#[test]
fn fetching_ahead_overwrites_no_written_bytes() {
    // The flushes go forward in order; the fourth one triggers the readahead from the image.
    let mut first = Vec::new();
    for block in 0..3 {
        first.extend([write(block * B, B), Op::Flush]);
    }
    let model = Model {
        lower: 12 * B - 5,
        first,
        threads: vec![
            vec![write(3 * B, B), Op::Flush],
            vec![write(5 * B + 100, 10), write(12 * B, 3)],
            vec![Op::Resize(8 * B + 3), read(5 * B, 3 * B)],
        ],
        options: changed(alone(), |new| new.ahead_blocks = 8),
    };
    model.check(SCHEDULES);
}

#[test]
fn seek_finds_only_real_holes() {
    let threads: [&[Op]; 3] = [
        &[zero(B, B), write(B + 10, 10), Op::SeekData(B)],
        &[Op::SeekHole(0), Op::SeekHole(B)],
        &[Op::Settle, write(2 * B - 10, 20)],
    ];
    model(3 * B, with_filler(), threads).check(SCHEDULES);
}

#[test]
fn models_by_chance_hold() {
    for seed in 0..60 {
        random(seed).check(60);
    }
}
