//! What converts to what: one table, from which `bcow convert` acts, and from which its help and
//! its errors are made.

use crate::name::Name;
use crate::name_error::NameError;

/// What a source has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Content {
    /// An ordinary container image.
    Ordinary,
    /// A root file system or a layer, in a tar archive.
    Archive,
    /// A root file system in a directory.
    Directory,
    /// An image in BCoW form.
    Image,
    /// A disk, in BCoW form or in another one.
    Disk,
}

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// One BCoW file.
    File,
    /// One layer, for mounts over other layers.
    Layer,
    /// One BCoW file per layer, and a stack.
    Layers,
    /// One file per layer for containerd's erofs snapshotter.
    ContainerdCache,
    /// A disk in another format.
    Foreign,
}

/// How a source becomes what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// All layers become one image.
    Flatten,
    /// An archive becomes one layer.
    Layer,
    /// Each layer becomes a file.
    Split,
    /// Each layer becomes a file for containerd.
    SplitForContainerd,
    /// An image in BCoW form is encoded again, in one file.
    Recode,
    /// The same, layer by layer.
    RecodeLayers,
    /// The address space of a disk or an image becomes a disk.
    Disk,
    /// There is no way.
    None,
}

impl Content {
    /// All contents, in the order of the table.
    pub const ALL: [Content; 5] = [
        Content::Ordinary,
        Content::Archive,
        Content::Directory,
        Content::Image,
        Content::Disk,
    ];

    /// A noun phrase.
    pub fn title(self) -> &'static str {
        match self {
            Content::Ordinary => "a container image",
            Content::Archive => "a tar archive",
            Content::Directory => "a directory",
            Content::Image => "an image in BCoW form",
            Content::Disk => "a disk",
        }
    }
}

impl Target {
    /// All targets, in the order of the table.
    pub const ALL: [Target; 5] = [
        Target::File,
        Target::Layer,
        Target::Layers,
        Target::ContainerdCache,
        Target::Foreign,
    ];

    /// The names of such destinations.
    pub fn title(self) -> &'static str {
        match self {
            Target::File => "FILE, s3:",
            Target::Layer => "FILE with --as-layer",
            Target::Layers => "oci:, oci-archive:, docker:, s3: with --layers",
            Target::ContainerdCache => "containerd-cache:",
            Target::Foreign => "raw:, qcow2:",
        }
    }
}

/// The way from each content to each target: a row for each content, and a column for each target.
const WAYS: [[Way; 5]; 5] = {
    use Way::{Disk, Flatten, Layer, None, Recode, RecodeLayers, Split, SplitForContainerd};
    [
        [Flatten, None, Split, SplitForContainerd, None],
        [Flatten, Layer, Split, SplitForContainerd, None],
        [Flatten, None, Split, None, None],
        [Recode, None, RecodeLayers, None, Disk],
        [Disk, None, None, None, Disk],
    ]
};

pub fn way(content: Content, target: Target) -> Way {
    WAYS[content as usize][target as usize]
}

/// The error of a source and a destination without a way between them. It names both, and a way
/// that exists.
pub fn no_way(content: Content, target: Target, source: &Name, destination: &Name) -> NameError {
    let title = content.title();
    let (message, hint) = match target {
        Target::Foreign => (
            format!("{destination} can be made only from a disk, and {source} is {title}"),
            format!("`bcow convert {source} IMAGE.bcow` makes an image of it first"),
        ),
        Target::ContainerdCache => (
            match content {
                Content::Image => format!(
                    "{source} is {title}: its layers for {destination} are not supported yet"
                ),
                _ => format!("{source} is {title}, not an image with layers for {destination}"),
            },
            "name the ordinary image, whose diffIDs containerd asks for: oci:DIR[:REF], \
             docker://HOST/REPO[:TAG]"
                .to_owned(),
        ),
        Target::Layer => (
            format!("{destination} becomes a layer only of a tar archive, and {source} is {title}"),
            "leave out --as-layer".to_owned(),
        ),
        Target::Layers | Target::File => (
            format!("{destination} takes images, not disks, and {source} is {title}"),
            "write to a file, or without --layers to s3://BUCKET/KEY".to_owned(),
        ),
    };
    NameError { message, hint }
}

/// The table as text: the destinations of each content, a line for each.
pub fn table() -> String {
    let mut text = String::new();
    for content in Content::ALL {
        let mut title = content.title();
        for target in Target::ALL {
            if way(content, target) != Way::None {
                text += &format!("    {title:<23} {}\n", target.title());
                title = "";
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn rows_and_columns_are_in_the_order_of_the_enums() {
        for (index, content) in Content::ALL.into_iter().enumerate() {
            assert_eq!(content as usize, index);
        }
        for (index, target) in Target::ALL.into_iter().enumerate() {
            assert_eq!(target as usize, index);
        }
    }

    #[test]
    fn refusal_names_both_names_and_leads_on() {
        let (source, destination) = (Name::file(Path::new("from")), Name::file(Path::new("to")));
        for content in Content::ALL {
            for target in Target::ALL {
                let error = no_way(content, target, &source, &destination);
                let text = error.to_string();
                assert!(text.contains("from") && text.contains("to"), "{text}");
                assert!(!error.hint().is_empty());
            }
        }
    }

    #[test]
    fn every_content_has_a_way_to_one_file() {
        for content in Content::ALL {
            assert_ne!(way(content, Target::File), Way::None);
        }
        let ways = WAYS.iter().flatten().filter(|way| **way != Way::None);
        assert_eq!(table().lines().count(), ways.count());
    }
}
