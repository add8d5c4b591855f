//! Tests of partial files through their public interface.

mod damage;
mod faults;
mod first_write;
mod history;
mod model;
mod power_cut;
mod script;
mod sparse;
mod support;
mod threads;
mod times;
mod world;
