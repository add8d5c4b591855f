//! Any bytes as the map of a partial file: read, and what it says written and read again.

use bcow_union::testing::blocks::BlockSet;
use bcow_union::testing::partial::journal::{Header, Replay, SECTOR_BYTES, encode};

pub fn fuzz(bytes: &[u8]) {
    let (sectors, left) = bytes.as_chunks::<SECTOR_BYTES>();
    let Some((first, records)) = sectors.split_first() else {
        return;
    };
    let number = |at: usize| u64::from_le_bytes(first[at..at + 8].try_into().unwrap());
    let Ok(header) = Header::decode(first, number(16), number(24)) else {
        return;
    };
    let mut replay = Replay::new(header);
    if records.iter().any(|record| replay.sector(record).is_err()) {
        return;
    }
    let Ok(replayed) = replay.finish(!left.is_empty()) else {
        return;
    };
    let present = replayed.present;
    assert!(present.len() <= header.blocks);
    let runs = present.runs(0..header.blocks);
    assert_eq!(
        runs.map(|run| run.end - run.start).sum::<u64>(),
        present.len()
    );

    let written = encode(&present, &header, 0);
    // As records tell it in no more words than they were read in, but that each may split what
    // another has joined.
    assert!(written.len() <= 3 * bytes.len() + SECTOR_BYTES);
    let mut again = Replay::new(Header {
        confirmed: (written.len() / SECTOR_BYTES) as u64,
        ..header
    });
    for record in written.as_chunks::<SECTOR_BYTES>().0 {
        again.sector(record).unwrap();
    }
    let again = again.finish(false).unwrap();
    assert!(same(&present, &again.present));
}

fn same(one: &BlockSet, other: &BlockSet) -> bool {
    one.len() == other.len() && one.runs(0..u64::MAX).eq(other.runs(0..u64::MAX))
}
