//! Prints a file of an image, as `bcow cat` does: `print_file IMAGE PATH`.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bcow::{Image, OpenOptions};
use bcow_erofs::reader::Filesystem;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [image, path] = arguments.as_slice() else {
        return Err("usage: print_file IMAGE PATH".into());
    };
    // Each block that is read has a checksum.
    let image = Image::open(Path::new(image), &OpenOptions::default())?;
    let fs = Filesystem::open(image)?;
    let nid = fs.resolve(path.as_bytes())?.ok_or("no such file")?;
    let inode = fs.inode(nid)?;
    let mut out = std::io::stdout().lock();
    let mut buf = vec![0; 1 << 16];
    let mut offset = 0;
    loop {
        let length = fs.read(&inode, offset, &mut buf)?;
        if length == 0 {
            return Ok(());
        }
        out.write_all(&buf[..length])?;
        offset += length as u64;
    }
}
