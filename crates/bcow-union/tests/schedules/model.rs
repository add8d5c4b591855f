//! Runs a model once for each schedule that the model checker selects, and checks the results.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bcow_testkit::Random;
use bcow_testkit::shuttle::rand::{Rng, thread_rng};
use bcow_testkit::{changed, explore};
use bcow_union::Seek;
use bcow_union::testing::account::Account;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::{
    Durability, KeepSize, Lower, Partial, PartialOptions, Partials,
};
use bcow_union::testing::upper::{Metacopy, Namespace};

use crate::host::{Below, Host, Maps};
use crate::orders::{Op, Orders, number, tag};
use crate::support::{TestLower, quiet};
use crate::world::World;

/// The operations on a partial file and their threads.
#[derive(Debug, Clone)]
pub struct Model {
    /// Size of the lower file in bytes.
    pub lower: u64,
    /// Operations before the threads start.
    pub first: Vec<Op>,
    pub threads: Vec<Vec<Op>>,
    pub options: PartialOptions,
}

/// Options without background threads.
pub fn alone() -> PartialOptions {
    quiet()
}

/// Options with a background thread that fills without delay.
pub fn with_filler() -> PartialOptions {
    PartialOptions {
        fillers: 1,
        fill_delay: Duration::ZERO,
        ..quiet()
    }
}

/// Options with which writers complete blocks themselves, as if the background were behind.
pub fn behind() -> PartialOptions {
    changed(quiet(), |new| new.most_incomplete = 0)
}

impl Model {
    /// Checks this number of schedules.
    pub fn check(self, schedules: usize) {
        let orders = Arc::new(self.orders());
        explore(schedules, move || Run::new(&self, &orders).carry_out());
    }

    fn orders(&self) -> Orders {
        let mut threads = vec![self.first.clone()];
        threads.extend(self.threads.iter().cloned());
        Orders::of(self.lower, &threads)
    }

    fn number(&self, thread: Option<usize>, index: usize) -> usize {
        match thread {
            None => index,
            Some(thread) => self.first.len() + number(&self.threads, thread, index),
        }
    }
}

/// One schedule.
struct Run {
    model: Model,
    orders: Arc<Orders>,
    world: World,
    host: Arc<Host>,
    lower: Arc<TestLower>,
    partial: Arc<Partial>,
    partials: Partials,
    /// Number and end of each completed flush.
    flushed: Mutex<Vec<(usize, usize)>>,
}

impl Run {
    fn new(model: &Model, orders: &Arc<Orders>) -> Self {
        let world = World::new(model.lower);
        let host = Host::of(&world);
        let lower = Arc::new(TestLower::full(model.lower));
        let account = Arc::new(Account::new(None));
        let partials = Partials::on(
            Maps::of(&world),
            Namespace::Trusted,
            account,
            model.options.clone(),
        );
        let below = Below::new(Arc::clone(&lower));
        let partial = partials.create_on(host.clone(), below);
        Run {
            model: model.clone(),
            orders: Arc::clone(orders),
            world,
            host,
            lower,
            partial: partial.unwrap(),
            partials,
            flushed: Mutex::default(),
        }
    }

    fn carry_out(self) {
        for (index, op) in self.model.first.iter().enumerate() {
            self.step(op, self.model.number(None, index));
        }
        let run = &self;
        bcow::sync::thread::scope(|scope| {
            for (thread, ops) in run.model.threads.iter().enumerate() {
                scope.spawn(move || {
                    for (index, op) in ops.iter().enumerate() {
                        run.step(op, run.model.number(Some(thread), index));
                    }
                });
            }
        });
        self.judge();
    }

    fn step(&self, op: &Op, number: usize) {
        let partial = &*self.partial;
        match *op {
            Op::Write { at, length } => {
                let data = vec![tag(number); length as usize];
                let written = self.host.changing(|| partial.write_at(at, &data));
                assert_eq!(written.unwrap(), data.len());
            }
            Op::Zero { at, length, size } => {
                let zeroed = self.host.changing(|| partial.zero(at, length, size));
                zeroed.unwrap();
            }
            Op::Resize(size) => self.host.changing(|| partial.set_size(size)).unwrap(),
            Op::Read { at, length } => {
                let mut bytes = vec![0xEE; length as usize];
                let read = partial.read_at(at, &mut bytes).unwrap();
                bytes.truncate(read);
                let could = &self.orders.at[number];
                for place in at..at + length {
                    let byte = bytes.get((place - at) as usize).copied();
                    self.allow(could.allow(place, byte, self.below(place)), "read");
                }
            }
            Op::SeekData(at) => {
                let found = partial.seek(at, Seek::Data).unwrap();
                // The skipped range must be zeros.
                let end = found.unwrap_or(self.longest());
                self.are_zeros(at..end, number);
            }
            Op::SeekHole(at) => {
                if let Some(found) = partial.seek(at, Seek::Hole).unwrap() {
                    self.are_zeros(found..found + 1, number);
                }
            }
            Op::Settle => partial.settle().unwrap(),
            Op::Flush => {
                partial.flush(Durability::Durable).unwrap();
                let now = self.world.now();
                self.flushed.lock().unwrap().push((number, now));
            }
            Op::LetGo => {
                if partial.is_recorded() {
                    let world = self.world.killed();
                    self.compare(&world, &self.orders.since[number], "let go");
                }
            }
            Op::Promote => drop(partial.promote().unwrap()),
        }
    }

    fn judge(self) {
        let bytes = self.shown();
        for place in 0..self.longest() {
            let byte = bytes.get(place as usize).copied();
            let allowed = self.orders.last.allow(place, byte, self.below(place));
            self.allow(allowed, "left");
        }
        self.holes_are_zeros(&bytes);
        // Cut the power at a random moment.
        let mut random = Random::new(thread_rng().r#gen());
        let moment = random.below(self.world.now() as u64 + 1) as usize;
        let flushed: Vec<usize> = {
            let flushed = self.flushed.lock().unwrap();
            let ended = flushed.iter().filter(|(_, ended)| *ended <= moment);
            ended.map(|(number, _)| *number).collect()
        };
        let cut = self.world.cut(moment, &mut random);
        let could = self.orders.after(&flushed);
        self.compare(&cut, &could, "after a power cut");
        // Complete all blocks. The content must not change.
        self.partial.settle().unwrap();
        assert_eq!(self.partial.status().unwrap().incomplete, 0);
        assert_eq!(self.partials.statistics().incomplete_blocks, 0);
        self.is_as_late_as_its_last_change();
        assert!(self.shown() == bytes, "settling changed something");
        self.partial.flush(Durability::Durable).unwrap();
        assert!(self.partial.is_recorded());
        let (killed, cut) = (self.world.killed(), {
            let now = self.world.now();
            self.world.cut(now, &mut random)
        });
        for world in [killed, cut] {
            assert!(
                self.reopened(&world) == bytes,
                "it is not as it was flushed"
            );
        }
    }

    fn is_as_late_as_its_last_change(&self) {
        let (modified, changed) = self.host.times();
        assert!(
            modified >= changed,
            "the time is {modified}, the last change was at {changed}"
        );
    }

    fn compare(&self, world: &World, could: &crate::orders::Bytes, context: &str) {
        let bytes = self.reopened(world);
        for place in 0..self.longest().max(bytes.len() as u64) {
            let byte = bytes.get(place as usize).copied();
            self.allow(could.allow(place, byte, self.below(place)), context);
        }
    }

    /// The content that the next mount shows for the files in a world.
    fn reopened(&self, world: &World) -> Vec<u8> {
        let Some(mark) = world.mark() else {
            return match world.metacopy() {
                Metacopy::None => world.content(),
                Metacopy::Whole => self.lower.bytes.clone(),
                Metacopy::Partial => panic!("it is marked as a partial file and has no mark"),
            };
        };
        let account = Arc::new(Account::new(None));
        let store = Arc::new(world.clone());
        let partials = Partials::on(store, Namespace::Trusted, account, quiet());
        let lower: Arc<dyn Lower> = self.lower.clone();
        let partial = partials.open_on(&mark, world.host(), lower).unwrap();
        read_all(&partial)
    }

    fn shown(&self) -> Vec<u8> {
        read_all(&self.partial)
    }

    fn holes_are_zeros(&self, bytes: &[u8]) {
        let mut at = 0;
        while at < bytes.len() as u64 {
            let data = self.partial.seek(at, Seek::Data).unwrap();
            let data = data.unwrap_or(bytes.len() as u64);
            assert!(
                bytes[at as usize..data as usize]
                    .iter()
                    .all(|byte| *byte == 0)
            );
            let hole = self.partial.seek(data, Seek::Hole).unwrap();
            at = hole.unwrap_or(bytes.len() as u64);
            assert!(at > data || data == bytes.len() as u64);
        }
    }

    fn are_zeros(&self, range: std::ops::Range<u64>, number: usize) {
        let could = &self.orders.at[number];
        for place in range {
            let zero = could.allow(place, Some(0), None);
            self.allow(zero.or_else(|_| could.allow(place, None, None)), "a hole");
        }
    }

    fn allow(&self, allowed: Result<(), String>, context: &str) {
        if let Err(why) = allowed {
            panic!("{context}: {why}, {:?}", self.model);
        }
    }

    fn below(&self, place: u64) -> Option<u8> {
        self.lower.bytes.get(place as usize).copied()
    }

    /// Limit of the length of the file in this model.
    fn longest(&self) -> u64 {
        let ops = self
            .model
            .first
            .iter()
            .chain(self.model.threads.iter().flatten());
        let ends = ops.map(|op| match *op {
            Op::Write { at, length } => at + length,
            Op::Zero {
                at,
                length,
                size: KeepSize::Grow,
            } => at + length,
            Op::Resize(size) => size,
            _ => 0,
        });
        ends.max().unwrap_or(0).max(self.model.lower)
    }
}

fn read_all(partial: &Partial) -> Vec<u8> {
    let mut bytes = vec![0xEE; partial.size() as usize];
    let read = partial.read_at(0, &mut bytes).unwrap();
    assert_eq!(read, bytes.len());
    bytes
}

pub fn random(seed: u64) -> Model {
    const B: u64 = BLOCK_BYTES;
    let mut random = Random::new(seed);
    let lower = *random.pick(&[B + 900, 2 * B, 3 * B - 1]);
    let op = |random: &mut Random| {
        let at = *random.pick(&[
            0,
            100,
            2000,
            B - 1,
            B,
            B + 100,
            B + 900,
            2 * B,
            2 * B + 5,
            3 * B,
        ]);
        let length = *random.pick(&[1, 500, 2000, B - 100, B, B + 200]);
        match random.below(16) {
            0..7 => Op::Write { at, length },
            7 => Op::Zero {
                at,
                length,
                size: *random.pick(&[KeepSize::Keep, KeepSize::Grow]),
            },
            8 => Op::Resize(at),
            9 => Op::Read {
                at: 0,
                length: 4 * B,
            },
            10 => Op::SeekData(at),
            11 => Op::SeekHole(at),
            12 => Op::Settle,
            13 => Op::LetGo,
            14 => Op::Promote,
            _ => Op::Flush,
        }
    };
    let mut ops = |most: u64| -> Vec<Op> {
        let count = 1 + random.below(most);
        (0..count).map(|_| op(&mut random)).collect()
    };
    let first = ops(2);
    let threads = match seed % 3 {
        0 => vec![ops(2), ops(2), ops(2)],
        _ => vec![ops(3), ops(3)],
    };
    let options = match seed % 4 {
        0 => alone(),
        1 => behind(),
        _ => with_filler(),
    };
    Model {
        lower,
        first,
        threads,
        options,
    }
}
