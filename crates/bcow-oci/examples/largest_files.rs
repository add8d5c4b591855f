//! Converts an image of an OCI layout, and lists its largest files:
//! `largest_files LAYOUT TAG IMAGE.bcow`.

use std::path::Path;

use bcow::{Image, OpenOptions};
use bcow_erofs::reader::{FileType, Filesystem, Walk};
use bcow_oci::{ConvertOptions, Source, convert};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [layout, tag, output] = arguments.as_slice() else {
        return Err("usage: largest_files LAYOUT TAG IMAGE.bcow".into());
    };
    let source = Source::Oci {
        directory: layout.into(),
        reference: Some(tag.clone()),
    };
    // The last argument sees progress and can cancel; `()` does neither.
    let report = convert(&source, Path::new(output), &ConvertOptions::default(), &())?;
    println!(
        "{output}: {} inodes in {} bytes",
        report.entries, report.file_bytes
    );

    let fs = Filesystem::open(Image::open(Path::new(output), &OpenOptions::default())?)?;
    let mut files = Vec::new();
    let mut walk = Walk::new(&fs);
    while let Some(inode) = walk.next()? {
        if inode.kind == FileType::Regular {
            files.push((
                inode.size,
                String::from_utf8_lossy(walk.path()).into_owned(),
            ));
        }
    }
    files.sort_by(|a, b| b.cmp(a));
    for (size, path) in files.iter().take(10) {
        println!("{size:12} {path}");
    }
    Ok(())
}
