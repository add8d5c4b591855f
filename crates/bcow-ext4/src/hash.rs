//! The hash of names in directories: half MD4 over unsigned bytes.
//!
//! Source: `half_md4_transform` and `str2hashbuf_unsigned` in the kernel's `fs/ext4/hash.c`.

use zerocopy::little_endian::U32;

/// The sort key of a name in the hash tree of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NameHash {
    /// The hash that a search of the tree compares. It is even.
    pub major: u32,
    /// Orders names with equal major hashes.
    pub minor: u32,
}

/// The greatest hash. It marks the end of a directory, so no name has it.
const END: u32 = 0x7fff_ffff << 1;

/// The constants that the rounds of MD4 add.
const CONSTANTS: [u32; 3] = [0, 0x5a82_7999, 0x6ed9_eba1];
/// The order in which the rounds take the words of a name.
const ORDERS: [[usize; 8]; 3] = [
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 3, 5, 7, 0, 2, 4, 6],
    [3, 7, 2, 6, 1, 5, 0, 4],
];
/// The bits by which the rounds rotate.
const SHIFTS: [[u32; 4]; 3] = [[3, 7, 11, 19], [3, 5, 9, 13], [3, 9, 11, 15]];

/// Hashes names: the initial state of MD4, which is the hash seed of a file system.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NameHasher([u32; 4]);

impl NameHasher {
    /// The hasher of a file system with this seed. The seed 0 selects the initial state of MD4.
    pub fn new(seed: &[u8; 16]) -> NameHasher {
        let words: [U32; 4] = zerocopy::transmute!(*seed);
        match words.map(U32::get) {
            [0, 0, 0, 0] => NameHasher([0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476]),
            seed => NameHasher(seed),
        }
    }

    pub fn hash(&self, name: &[u8]) -> NameHash {
        let mut state = self.0;
        let mut rest = name;
        while !rest.is_empty() {
            transform(&mut state, &words(rest));
            rest = rest.get(32..).unwrap_or_default();
        }
        let major = match state[1] & !1 {
            END => END - 2,
            hash => hash,
        };
        NameHash {
            major,
            minor: state[2],
        }
    }
}

/// The first 32 bytes of `name` as words. Bytes with the value of its length fill the rest.
fn words(name: &[u8]) -> [u32; 8] {
    let pad = u32::from_le_bytes([name.len() as u8; 4]);
    let mut words = [pad; 8];
    for (word, bytes) in words.iter_mut().zip(name.chunks(4)) {
        *word = bytes
            .iter()
            .fold(pad, |word, &byte| word << 8 | u32::from(byte));
    }
    words
}

/// Adds 32 bytes of a name to the state.
fn transform(state: &mut [u32; 4], words: &[u32; 8]) {
    let mixes: [fn(u32, u32, u32) -> u32; 3] = [
        |x, y, z| z ^ (x & (y ^ z)),
        |x, y, z| (x & y).wrapping_add((x ^ y) & z),
        |x, y, z| x ^ y ^ z,
    ];
    let [mut a, mut b, mut c, mut d] = *state;
    for (round, mix) in mixes.into_iter().enumerate() {
        for (step, at) in ORDERS[round].into_iter().enumerate() {
            let sum = a
                .wrapping_add(mix(b, c, d))
                .wrapping_add(words[at])
                .wrapping_add(CONSTANTS[round]);
            let rotated = sum.rotate_left(SHIFTS[round][step % 4]);
            (a, b, c, d) = (d, rotated, b, c);
        }
    }
    for (word, added) in state.iter_mut().zip([a, b, c, d]) {
        *word = word.wrapping_add(added);
    }
}

#[cfg(test)]
mod tests {
    use super::{NameHash, NameHasher};

    /// The expected hashes are those of `debugfs -R 'dx_hash -h half_md4 NAME'`, which uses no
    /// seed. `debugfs` hashes signed bytes, which makes no difference for ASCII.
    #[test]
    fn hash_is_that_of_debugfs() {
        let long = "a name of more than thirty-two bytes, which takes two transformations";
        let expected = [
            ("a", 0xd5fa_7d7a, 0xacb4_8187),
            (long, 0x4d60_81e6, 0x55c2_3ca4),
        ];
        let hasher = NameHasher::new(&[0; 16]);
        for (name, major, minor) in expected {
            let hash = hasher.hash(name.as_bytes());
            assert_eq!(hash, NameHash { major, minor }, "{name}");
        }
    }
}
