//! Writers at the edge of the size limit.

use std::sync::Arc;

use bcow_testkit::explore;
use bcow_union::testing::account::Account;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::host::MarkedFile;
use bcow_union::testing::partial::{Partial, Partials};
use bcow_union::testing::upper::Namespace;
use rustix::io::Errno;

use crate::host::{Below, Host, Maps};
use crate::support::{TestLower, quiet};
use crate::world::World;

const B: u64 = BLOCK_BYTES;
/// Number of schedules.
const SCHEDULES: usize = 400;
/// Blocks of data that fit.
const BLOCKS: u64 = 3;

/// Writes two blocks from `block` on, and again what fitted.
fn write(partial: &Partial, block: u64) {
    let data = [7; 2 * B as usize];
    let mut done = 0;
    while done < data.len() {
        match partial.write_at(block * B + done as u64, &data[done..]) {
            Ok(written) => done += written,
            Err(error) => {
                assert_eq!(error.errno(), Errno::NOSPC);
                break;
            }
        }
    }
    // A stored block needs no room.
    if done > 0 {
        partial.write_at(block * B, &data[..1]).unwrap();
    }
}

#[test]
fn two_writers_at_the_limit_store_no_more_than_it_and_use_all_of_it() {
    explore(SCHEDULES, || {
        let world = World::new(10 * B);
        let host = Host::of(&world);
        // One block more, for the map.
        let account = Arc::new(Account::new(Some((BLOCKS + 1) * B)));
        let store = Maps::of(&world);
        let partials = Partials::on(store, Namespace::Trusted, Arc::clone(&account), quiet());
        let lower = Below::new(Arc::new(TestLower::full(10 * B)));
        let partial = partials.create_on(host.clone(), lower).unwrap();
        let stored = || host.content().stored_bytes().unwrap();
        bcow::sync::thread::scope(|scope| {
            let partial = &*partial;
            for block in [0, 5] {
                scope.spawn(move || write(partial, block));
            }
            for _ in 0..3 {
                assert!(stored() <= BLOCKS * B);
            }
        });
        assert_eq!(account.used(), stored() + B);
        // A writer can have found no room because of a reservation of the other one.
        for block in [0, 5] {
            write(&partial, block);
        }
        assert_eq!(stored(), BLOCKS * B);
        assert_eq!(account.left(), Some(0));
        partial.set_size(B).unwrap();
        assert_eq!(account.used(), stored() + B);
    });
}
