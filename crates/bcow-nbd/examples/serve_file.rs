//! Serves a plain file: what the server itself costs, without a format below. `serve_file FILE
//! SOCKET`

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bcow::{BlockDevice, Error, Space, WritableDevice};
use bcow_nbd::{Device, Export, Exports, Listener, Server, ServerOptions};

struct Plain {
    file: File,
    size: u64,
}

fn failed(action: &'static str, offset: u64) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Io {
        action,
        offset,
        source,
    }
}

impl BlockDevice for Plain {
    fn size(&self) -> u64 {
        self.size
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.file
            .read_exact_at(buf, offset)
            .map_err(failed("read", offset))
    }
}

impl WritableDevice for Plain {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(failed("write", offset))
    }
    fn write_zeroes(&self, offset: u64, length: u64, _: Space) -> Result<(), Error> {
        let zeros = vec![0; length.min(1 << 20) as usize];
        let mut done = 0;
        while done < length {
            let n = (length - done).min(zeros.len() as u64);
            self.write_at(offset + done, &zeros[..n as usize])?;
            done += n;
        }
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> Result<(), Error> {
        Ok(())
    }
    fn flush(&self) -> Result<(), Error> {
        self.file.sync_data().map_err(failed("sync", 0))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, path, socket] = &arguments[..] else {
        return Err("serve_file FILE SOCKET".into());
    };
    let file = File::options().read(true).write(true).open(path)?;
    let size = file.metadata()?.len();
    let export = Export {
        name: "file".into(),
        description: String::new(),
        device: Device::Writable(Arc::new(Plain { file, size })),
    };
    let server = Server::new(Exports::new(vec![export])?, ServerOptions::default())?;
    server.serve(&[Listener::unix(Path::new(socket))?])?;
    Ok(())
}
