//! Failures of the host: the program gets the error, no byte is wrong, and the partial file works
//! again when the host does.

use bcow_testkit::Random;
use bcow_union::testing::partial::Durability;
use rustix::io::Errno;

use crate::script::{Script, reopened, shown, write_all};
use crate::support::cases;
use crate::world::Fault;

const STEPS: usize = 20;

fn run(seed: u64, fault: Option<Fault>) -> (u64, u64) {
    let context = format!("seed {seed}, {fault:?}");
    let mut script = Script::new(seed);
    script.world.plan(fault);
    for step in 0..STEPS {
        let before = script.history.now().to_vec();
        let Err(error) = script.step() else {
            continue;
        };
        let context = format!("{context}, step {step}: {error}");
        let fault = fault.expect("nothing fails by itself");
        let reported = error.errno().raw_os_error();
        assert!(
            reported == fault.errno || reported == Errno::IO.raw_os_error(),
            "{context}"
        );
        script.accept(&before, &context);
        if script.world.calls().2 {
            break;
        }
    }
    let (calls, hits, failed_sync) = script.world.calls();
    script.world.plan(None);
    let expected = script.history.now().to_vec();
    let found = shown(&script.partial).unwrap();
    let differs = found
        .iter()
        .zip(&expected)
        .position(|(found, expected)| found != expected);
    assert_eq!(found.len(), expected.len(), "{context}");
    assert_eq!(differs, None, "{context}");
    match script.partial.flush(Durability::Durable) {
        Ok(()) => {
            let (_, bytes) = reopened(&script.world.killed(), &script.lower).unwrap();
            assert!(bytes == expected, "opened again: {context}");
        }
        // The state on the host is unknown. From now on, the partial file reports errors.
        Err(error) => {
            assert!(failed_sync, "{error}: {context}");
            assert_eq!(error.errno(), Errno::IO, "{context}");
            assert!(script.partial.flush(Durability::Durable).is_err());
            assert!(write_all(&script.partial, 0, b"x").is_err(), "{context}");
            let world = script.world.killed();
            let (_, bytes) = reopened(&world, &script.lower).unwrap();
            let allowed = script.history.allows(script.world.now(), &bytes);
            assert_eq!(allowed, Ok(()), "{context}");
        }
    }
    (calls, hits)
}

/// What writes need after they have returned is reserved before.
#[test]
fn a_full_host_loses_no_write_that_succeeded() {
    for seed in 0..cases(60) {
        let mut script = Script::new(seed);
        for _ in 0..STEPS {
            script.step().unwrap();
        }
        let expected = script.history.now().to_vec();
        script.world.plan(Some(Fault {
            after: 0,
            stays: true,
            errno: Errno::NOSPC.raw_os_error(),
        }));
        // The call that the plan names fails in any case.
        script.world.host().content().size().unwrap_err();
        script.partial.flush(Durability::Durable).unwrap();
        let (_, bytes) = reopened(&script.world.killed(), &script.lower).unwrap();
        assert!(bytes == expected, "seed {seed}");
    }
}

#[test]
fn a_host_that_fails_spoils_no_partial() {
    let seeds = cases(60);
    let mut hit = 0;
    for seed in 0..seeds {
        let (calls, _) = run(seed, None);
        let mut random = Random::new(seed);
        for _ in 0..30 {
            let fault = Fault {
                after: random.below(calls),
                stays: random.one_in(2),
                errno: random.pick(&[Errno::NOSPC, Errno::IO]).raw_os_error(),
            };
            hit += run(seed, Some(fault)).1;
        }
    }
    assert!(hit > seeds * 20, "{hit} faults");
}
