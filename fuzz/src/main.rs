//! The fuzzer of all targets. The variable `BCOW_FUZZ` names one: see `fuzz/run`.

#![no_main]

mod targets;

use std::panic;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use targets::{TARGETS, Target};

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("BCOW_FUZZ").unwrap_or_default();
    let found = TARGETS.into_iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no target {name:?}")).1
});

/// The hook of the fuzzer makes each panic a crash, also one that bcow makes an error.
fn spare_guarded_panics() {
    let crash = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if !bcow_foreign::is_guarded() {
            crash(panic);
        }
    }));
}

fuzz_target!(
    init: {
        targets::prepare();
        spare_guarded_panics();
    },
    |bytes: &[u8]| (*TARGET)(bytes)
);
