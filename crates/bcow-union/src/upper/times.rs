//! The mark with the times of a file that the host's file does not have.

use bcow_erofs::tree::Timestamp;
use rustix::fs::Stat;

use super::MarkError;

/// The value of [`Mark::Times`](super::Mark::Times): the times that the mount shows.
///
/// The mark applies as long as the host's file has the modification time that it had when the mark
/// was written. So a later change of the content or of the names replaces the times without a
/// change of the mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimesMark {
    /// Modification time of the host's file.
    pub host_mtime: Timestamp,
    /// Modification time in the mount.
    pub mtime: Timestamp,
    /// Access time in the mount.
    pub atime: Timestamp,
    /// Change time in the mount, of a directory that is merged with one of the image.
    pub ctime: Timestamp,
}

/// The length of an encoded [`TimesMark`], in bytes.
pub const TIMES_MARK_BYTES: usize = 56;
const VERSION: u8 = 1;
const HEAD_BYTES: usize = 8;
const TIME_BYTES: usize = 12;

impl TimesMark {
    /// The attribute's value.
    pub fn encode(&self) -> [u8; TIMES_MARK_BYTES] {
        let mut bytes = [0; TIMES_MARK_BYTES];
        bytes[0] = VERSION;
        let times = [self.host_mtime, self.mtime, self.atime, self.ctime];
        for (field, time) in bytes[HEAD_BYTES..].chunks_exact_mut(TIME_BYTES).zip(times) {
            let (seconds, nanoseconds) = field.split_at_mut(8);
            seconds.copy_from_slice(&time.seconds.to_le_bytes());
            nanoseconds.copy_from_slice(&time.nanoseconds.to_le_bytes());
        }
        bytes
    }

    /// Decodes a value. Checks its length, its version, and the nanoseconds.
    pub fn decode(value: &[u8]) -> Result<TimesMark, MarkError> {
        let bad = || MarkError::new("overlay.bcow.times", value);
        let bytes: &[u8; TIMES_MARK_BYTES] = value.try_into().map_err(|_| bad())?;
        let (head, fields) = bytes.split_at(HEAD_BYTES);
        if head != [VERSION, 0, 0, 0, 0, 0, 0, 0] {
            return Err(bad());
        }
        let mut times = [Timestamp::default(); 4];
        for (time, field) in times.iter_mut().zip(fields.chunks_exact(TIME_BYTES)) {
            let seconds = field.first_chunk().ok_or_else(bad)?;
            let nanoseconds = field.last_chunk().ok_or_else(bad)?;
            *time = Timestamp {
                seconds: i64::from_le_bytes(*seconds),
                nanoseconds: u32::from_le_bytes(*nanoseconds),
            };
            if time.nanoseconds >= 1_000_000_000 {
                return Err(bad());
            }
        }
        let [host_mtime, mtime, atime, ctime] = times;
        Ok(TimesMark {
            host_mtime,
            mtime,
            atime,
            ctime,
        })
    }

    /// Whether the mark applies to a host file with this modification time.
    pub fn applies_to(&self, host_mtime: Timestamp) -> bool {
        self.host_mtime == host_mtime
    }
}

/// Modification time of a host's file.
pub fn modified(stat: &Stat) -> Timestamp {
    Timestamp {
        seconds: stat.st_mtime,
        nanoseconds: u32::try_from(stat.st_mtime_nsec).unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark() -> TimesMark {
        let time = |seconds, nanoseconds| Timestamp {
            seconds,
            nanoseconds,
        };
        TimesMark {
            host_mtime: time(15_032_385_535, 0),
            mtime: time(16_725_225_600, 999_999_999),
            atime: time(-5_000_000_000, 1),
            ctime: time(7, 8),
        }
    }

    #[test]
    fn mark_is_decoded_as_it_was_encoded() {
        assert_eq!(TimesMark::decode(&mark().encode()).unwrap(), mark());
        assert!(mark().applies_to(mark().host_mtime));
        assert!(!mark().applies_to(mark().mtime));
    }

    #[test]
    fn damaged_marks_are_refused() {
        let good = mark().encode();
        for (at, byte) in [(0, 2), (1, 1), (19, 0x40), (55, 0xff)] {
            let mut bad = good;
            bad[at] = byte;
            assert!(TimesMark::decode(&bad).is_err(), "byte {at}");
        }
        for length in [0, TIMES_MARK_BYTES - 1] {
            assert!(TimesMark::decode(&good[..length]).is_err());
        }
    }
}
