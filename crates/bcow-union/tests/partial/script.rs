//! Random operations on a partial file on a host in memory, with a history of its allowed content.

use std::sync::Arc;

use bcow_testkit::Random;
use bcow_union::testing::account::Account;
use bcow_union::testing::blocks::BLOCK_BYTES;
use bcow_union::testing::partial::{
    Durability, KeepSize, Lower, Partial, PartialError, PartialOptions, Partials,
};
use bcow_union::testing::upper::{Metacopy, Namespace};

use crate::history::History;
use crate::support::{TestLower, quiet};
use crate::world::World;

const B: u64 = BLOCK_BYTES;

/// A partial file under test.
pub struct Script {
    pub world: World,
    pub lower: Arc<TestLower>,
    pub partial: Arc<Partial>,
    pub history: History,
    random: Random,
    tag: u8,
}

/// The partial files of a world.
pub fn partials(world: &World, options: PartialOptions) -> Partials {
    let store = Arc::new(world.clone());
    Partials::on(
        store,
        Namespace::Trusted,
        Arc::new(Account::new(None)),
        options,
    )
}

/// The whole content of a partial file.
pub fn shown(partial: &Partial) -> Result<Vec<u8>, PartialError> {
    let mut bytes = vec![0xEE; partial.size() as usize];
    let read = partial.read_at(0, &mut bytes)?;
    assert_eq!(read, bytes.len());
    Ok(bytes)
}

/// The opened partial file, if the file is one, and the content of the file.
pub type Reopened = (Option<Arc<Partial>>, Vec<u8>);

/// Opens the file in a world as the union does.
pub fn reopened(world: &World, lower: &Arc<TestLower>) -> Result<Reopened, PartialError> {
    let Some(mark) = world.mark() else {
        return Ok(match world.metacopy() {
            Metacopy::None => (None, world.content()),
            Metacopy::Whole => (None, lower.bytes.clone()),
            Metacopy::Partial => panic!("it is marked as a partial file and has no mark"),
        });
    };
    let partials = partials(world, quiet());
    let partial = partials.open_on(&mark, world.host(), lower.clone())?;
    let bytes = shown(&partial)?;
    Ok((Some(partial), bytes))
}

impl Script {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let most = *random.pick(&[B, 6 * B, 20 * B]);
        let size = 1 + random.below(most);
        let lower = Arc::new(TestLower::new(seed, size));
        let world = World::new(size);
        let partials = partials(&world, quiet());
        let lower_file: Arc<dyn Lower> = lower.clone();
        let partial = partials.create_on(world.host(), lower_file).unwrap();
        Script {
            history: History::new(lower.bytes.clone()),
            world,
            lower,
            partial,
            random,
            tag: 0,
        }
    }

    /// Executes a random operation and returns its error.
    pub fn step(&mut self) -> Result<(), PartialError> {
        let random = &mut self.random;
        let size = self.partial.size();
        let at = match random.below(3) {
            0 => random.below(size + 2 * B),
            1 => random.below(size / B + 2) * B,
            _ => random.below(size + 1),
        };
        let length = match random.below(5) {
            0 => 1 + random.below(600),
            1 => B,
            2 => 1 + random.below(3 * B),
            3 => (1 + random.below(4)) * B,
            _ => 512,
        };
        let begun = self.world.now();
        let mut bytes = self.history.now().to_vec();
        let mut durable = false;
        let partial = Arc::clone(&self.partial);
        let result = match random.below(16) {
            0..7 => {
                self.tag = self.tag % 200 + 1;
                let data = vec![self.tag; length as usize];
                let end = (at + length) as usize;
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[at as usize..end].fill(self.tag);
                write_all(&partial, at, &data)
            }
            7 => {
                let keep = *random.pick(&[KeepSize::Keep, KeepSize::Grow]);
                let end = (at + length) as usize;
                if keep == KeepSize::Grow && bytes.len() < end {
                    bytes.resize(end, 0);
                }
                let end = end.min(bytes.len());
                if (at as usize) < end {
                    bytes[at as usize..end].fill(0);
                }
                partial.zero(at, length, keep)
            }
            8 | 9 => {
                bytes.resize(at as usize, 0);
                partial.set_size(at)
            }
            10 => partial.settle(),
            11 => shown(&partial).map(|shown| assert!(shown == bytes, "it shows something else")),
            12 if partial.is_complete() => {
                let was_marked = self.world.mark().is_some();
                let promoted = partial.promote();
                durable = was_marked && matches!(promoted, Ok(true));
                promoted.map(drop)
            }
            _ => {
                durable = true;
                partial.flush(Durability::Durable)
            }
        };
        let ended = self.world.now();
        let durable = durable && result.is_ok();
        self.history.step(begun, ended, durable, bytes);
        result
    }

    /// After a failed operation: checks that the content of the partial file is allowed, and
    /// expects this content from now on.
    pub fn accept(&mut self, before: &[u8], context: &str) {
        let after = self.history.now().to_vec();
        let shown = shown(&self.partial).unwrap();
        let longest = before.len().max(after.len());
        assert!(shown.len() <= longest, "{context}");
        for (at, byte) in shown.iter().enumerate() {
            let could = [before.get(at), after.get(at)];
            let new = at >= before.len() && *byte == 0;
            assert!(
                new || could.contains(&Some(byte)),
                "byte {at}: {byte}, {could:?}, {context}"
            );
        }
        let now = self.world.now();
        self.history.step(now, now, false, shown);
    }
}

/// Writes all bytes and retries short writes, as programs do.
pub fn write_all(partial: &Partial, at: u64, data: &[u8]) -> Result<(), PartialError> {
    let mut done = 0;
    while done < data.len() {
        done += partial.write_at(at + done as u64, &data[done..])?;
    }
    Ok(())
}
