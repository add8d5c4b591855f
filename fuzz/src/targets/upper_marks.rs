//! Any bytes as the value of each attribute of a file in an upper. Without its checksum, a value
//! that is accepted is written as it was read, or as another one with the same meaning.

use bcow_union::testing::upper::marks::Mark;
use bcow_union::testing::upper::{Marks, Override, TimesMark};

pub fn fuzz(bytes: &[u8]) {
    for mark in Mark::ALL {
        let mut marks = Marks::default();
        if marks.apply(mark, bytes).is_err() {
            continue;
        }
        let written = match mark {
            Mark::Opaque => continue,
            Mark::Redirect => marks.redirect.as_ref().map(|redirect| redirect.encode()),
            Mark::Origin => marks.origin.map(|origin| origin.encode().to_vec()),
            Mark::Metacopy => marks.metacopy.encode().map(<[u8]>::to_vec),
            Mark::Nlink => marks.nlink.map(|nlink| nlink.encode().into_bytes()),
            Mark::Partial => marks.partial.map(|partial| partial.encode().to_vec()),
            Mark::Times => marks
                .times
                .as_ref()
                .map(|times: &TimesMark| times.encode().to_vec()),
        };
        let mut again = Marks::default();
        if let Some(written) = written {
            again
                .apply(mark, &written)
                .expect("a value that was written");
            assert_eq!(again, marks);
        }
    }
    if let Ok(owner) = Override::decode(bytes) {
        assert_eq!(Override::decode(owner.encode().as_bytes()), Ok(owner));
    }
}
