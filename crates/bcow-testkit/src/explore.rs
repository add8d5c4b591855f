//! Runs a small multithreaded program under many schedules.

use std::sync::Arc;

use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, MaxSteps, Runner};

/// Stack size of a thread in bytes: frames of the disk engine hold headers and sectors.
const STACK_BYTES: usize = 512 << 10;
/// Number of points at which schedules of the second kind change the order of the threads.
const DEPTH: usize = 4;

/// Runs `model` under `schedules` schedules. Half of them select a random thread at each step. The
/// other half let one thread run as far as possible and switch at a few points (probabilistic
/// concurrency testing).
///
/// The schedules are the same in every run. `BCOW_SCHEDULES=N` runs N times as many;
/// `BCOW_SCHEDULE=S` runs only the one that a failure printed.
pub fn explore(schedules: usize, model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let run = || {
        let model = Arc::clone(&model);
        move || model()
    };
    if let Ok(schedule) = std::env::var("BCOW_SCHEDULE") {
        return shuttle::replay(run(), &schedule);
    }
    let rounds = std::env::var("BCOW_SCHEDULES");
    let rounds = rounds.map_or(1, |rounds| rounds.parse().expect("a number"));
    let half = schedules.div_ceil(2);
    for seed in 0..rounds {
        explore_with(RandomScheduler::new_from_seed(seed, half), run());
        explore_with(PctScheduler::new_from_seed(seed, DEPTH, half), run());
    }
}

fn explore_with(scheduler: impl Scheduler + 'static, model: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.stack_size = STACK_BYTES;
    config.max_steps = MaxSteps::FailAfter(200_000);
    config.silence_warnings = true;
    Runner::new(scheduler, config).run(model);
}
