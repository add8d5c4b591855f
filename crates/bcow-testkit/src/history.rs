//! The history of each sector of a disk, and its possible content after a crash.

use bcow::BlockDevice;

/// Size in bytes of a sector, which a disk writes atomically.
pub const SECTOR_BYTES: usize = 512;

/// Fills a sector with the content of a tag; tag 0 means zeros.
pub fn fill(tag: u32, sector: u64, bytes: &mut [u8]) {
    if tag == 0 {
        return bytes.fill(0);
    }
    let word = (u64::from(tag) << 32 | (sector & 0xFFFF_FFFF)).to_le_bytes();
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = word[at % 8];
    }
}

/// The tag of the content of a sector.
pub fn tag_of(sector: u64, bytes: &[u8]) -> Option<u32> {
    let tag = u32::from_le_bytes(bytes[4..8].try_into().ok()?);
    let mut expected = [0; SECTOR_BYTES];
    fill(tag, sector, &mut expected);
    (bytes == expected).then_some(tag)
}

/// The bytes of a disk whose sectors have these tags.
pub fn tagged(tags: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0; tags.len() * SECTOR_BYTES];
    for (sector, (piece, tag)) in (0..).zip(bytes.chunks_mut(SECTOR_BYTES).zip(tags)) {
        fill(*tag, sector, piece);
    }
    bytes
}

/// The tags of all sectors of a device, which must all be readable.
pub fn tags(device: &dyn BlockDevice) -> Vec<Option<u32>> {
    let mut bytes = vec![0; device.size() as usize];
    device
        .read_at(0, &mut bytes)
        .expect("all of it is readable");
    let sectors = (0..).zip(bytes.chunks(SECTOR_BYTES));
    sectors.map(|(at, bytes)| tag_of(at, bytes)).collect()
}

/// The states of a disk, step by step, as tags of sectors.
#[derive(Debug, Clone)]
pub struct History {
    /// Number of neighbouring sectors that change atomically: 8 if blocks are never overwritten in
    /// place.
    unit: usize,
    steps: Vec<Step>,
}

#[derive(Debug, Clone)]
struct Step {
    /// Start and end of the step, by a clock of the caller.
    begun: usize,
    ended: usize,
    /// Whether the content of this step is durable when it has ended.
    durable: bool,
    tags: Vec<u32>,
    /// Units that differ from the previous step.
    changed: Vec<usize>,
}

impl History {
    /// A disk with this durable content.
    pub fn new(unit: usize, tags: Vec<u32>) -> Self {
        History {
            unit,
            steps: vec![Step {
                begun: 0,
                ended: 0,
                durable: true,
                tags,
                changed: Vec::new(),
            }],
        }
    }

    /// The present tags of all sectors.
    pub fn now(&self) -> &[u32] {
        self.steps.last().map_or(&[], |step| &step.tags)
    }

    /// Adds a state that was reached between two moments.
    pub fn step(&mut self, begun: usize, ended: usize, durable: bool, tags: Vec<u32>) {
        let before = self.now();
        let units = tags.len().max(before.len()).div_ceil(self.unit);
        let of = |tags: &[u32], unit: usize| -> Vec<u32> {
            let start = (unit * self.unit).min(tags.len());
            tags[start..(start + self.unit).min(tags.len())].to_vec()
        };
        let changed = (0..units)
            .filter(|unit| of(before, *unit) != of(&tags, *unit))
            .collect();
        self.steps.push(Step {
            begun,
            ended,
            durable,
            tags,
            changed,
        });
    }

    /// Checks whether a disk that crashed at `moment` may hold `found`: every unit must be as in
    /// the last durable step that had ended, or as in a later step that had begun. The error names
    /// the unit.
    pub fn allows(&self, moment: usize, found: &[Option<u32>]) -> Result<(), String> {
        let last = self
            .steps
            .iter()
            .rposition(|step| step.durable && step.ended <= moment)
            .unwrap_or(0);
        let later: Vec<&Step> = self.steps[last..]
            .iter()
            .filter(|step| step.begun <= moment)
            .collect();
        if later.iter().all(|step| step.tags.len() != found.len()) {
            return Err(format!("{} sectors", found.len()));
        }
        let base = &self.steps[last];
        for (unit, held) in found.chunks(self.unit).enumerate() {
            let start = unit * self.unit;
            let range = start..start + held.len();
            let same = |step: &Step| {
                step.tags.get(range.clone()).is_some_and(|tags| {
                    tags.iter().zip(held).all(|(tag, held)| *held == Some(*tag))
                })
            };
            let allowed = same(base)
                || later[1..]
                    .iter()
                    .any(|step| step.changed.binary_search(&unit).is_ok() && same(step));
            if !allowed {
                let could: Vec<_> = later
                    .iter()
                    .filter_map(|step| step.tags.get(range.clone()))
                    .collect();
                return Err(format!(
                    "sectors {range:?} hold {held:?}; since the last flush (step {last}) they \
                     may hold {could:?}"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_flushed_or_came_later_is_allowed() {
        let mut history = History::new(2, vec![0, 0, 0, 0]);
        history.step(1, 2, false, vec![1, 1, 0, 0]);
        history.step(3, 4, true, vec![1, 1, 0, 0]);
        history.step(5, 6, false, vec![1, 2, 0, 0]);
        let found = |tags: [u32; 4]| tags.map(Some);
        assert!(history.allows(0, &found([0, 0, 0, 0])).is_ok());
        assert!(history.allows(0, &found([1, 1, 0, 0])).is_err());
        assert!(history.allows(1, &found([1, 1, 0, 0])).is_ok());
        assert!(history.allows(3, &found([0, 0, 0, 0])).is_ok());
        assert!(history.allows(4, &found([0, 0, 0, 0])).is_err());
        assert!(history.allows(5, &found([1, 2, 0, 0])).is_ok());
        assert!(history.allows(9, &found([2, 2, 0, 0])).is_err());
        assert!(
            history
                .allows(9, &[Some(1), None, Some(0), Some(0)])
                .is_err()
        );
        assert!(history.allows(9, &found([1, 1, 0, 0])[..2]).is_err());
    }

    #[test]
    fn tags_are_told_from_torn_sectors() {
        let mut bytes = [0; SECTOR_BYTES];
        assert_eq!(tag_of(7, &bytes), Some(0));
        fill(9, 7, &mut bytes);
        assert_eq!(tag_of(7, &bytes), Some(9));
        assert_eq!(tag_of(8, &bytes), None);
        bytes[100] ^= 1;
        assert_eq!(tag_of(7, &bytes), None);
    }
}
