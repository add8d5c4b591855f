//! Tests of disks under crashes, failing storage, delayed reads, and random operations.

mod faults;
mod incomplete;
mod kill;
mod ledger;
mod live;
mod many_regions;
mod model;
mod operations;
mod power_cut;
mod snapshots;
