//! `bcow ps`

use std::panic::resume_unwind;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use bcow_fuse::{Door, MountedImage};
use serde_json::{Value, json};

use crate::ask::{self, Answer};
use crate::error::{CommandError, Context};
use crate::names::printable;
use crate::running::{self, Server, Service};
use crate::ui::Ui;

/// List mounts and served disks of this machine
///
/// The command lists the processes of `bcow mount`, `bcow serve` and `bcow attach`, and the mounts
/// of pools. Root sees the processes of all users and containers; other users see their own. The
/// command sends no request to these processes, so it also lists a process that hangs. If it finds
/// no process of a mount, it shows what the kernel reports about the mount, and whether the process
/// of the mount has died. The state of a plain image that the kernel reads without a process is
/// `kernel`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON (schema bcow.ps/1)
    #[arg(long)]
    json: bool,
}

/// Time limit for the answer of a mount whose process is not visible.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Mounts that are asked at the same time.
const ASKED_AT_ONCE: usize = 64;

/// One line of the list: a mount or a served disk, and its process.
struct Row {
    /// `None` if the service has no process, or if its process is dead or cannot be examined.
    server: Option<Server>,
    /// `None` if the state is not known.
    state: Option<&'static str>,
    /// The user of the process; `None` if the user is not known.
    uid: Option<u32>,
    service: Service,
}

/// Prints all services as a table or as JSON.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let rows = rows()?;
    if args.json {
        let services: Vec<Value> = rows.iter().map(document).collect();
        return ui.print_json(&json!({ "schema": "bcow.ps/1", "services": services }));
    }
    let mut out = ui.output();
    if rows.is_empty() {
        ui.status("nothing is mounted or served");
        return out.finish();
    }
    let lines: Vec<[String; 7]> = rows.iter().map(columns).collect();
    let titles = [
        "PID",
        "USER",
        "KIND",
        "MODE",
        "STATE",
        "SINCE",
        "IMAGE AND PLACE",
    ];
    let widths: Vec<usize> = (0..titles.len())
        .map(|column| {
            let cells = lines.iter().map(|line| line[column].chars().count());
            cells.max().unwrap_or(0).max(titles[column].len())
        })
        .collect();
    let lines = std::iter::once(titles.map(str::to_owned)).chain(lines);
    for line in lines {
        let cells: Vec<String> = line
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:<width$}"))
            .collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    out.finish()
}

/// The services of all processes that this user can examine, then the mounts of other processes.
fn rows() -> Result<Vec<Row>, CommandError> {
    let mut rows: Vec<Row> = Vec::new();
    let servers = running::servers();
    let mut mounts = bcow_fuse::mounted_images().context(|| "cannot list the mounts".to_owned())?;
    mounts.retain(|mount| {
        !servers
            .iter()
            .any(|server| server.has_mount(&mount.device, &mount.path))
    });
    for server in servers {
        rows.extend(server.services.iter().map(|service| Row {
            state: Some(server.state.name()),
            uid: Some(server.uid),
            service: service.clone(),
            server: Some(server.clone()),
        }));
    }
    // A process that hangs delays its answer, so the processes are asked at the same time.
    for some in mounts.chunks(ASKED_AT_ONCE) {
        std::thread::scope(|scope| {
            let asked: Vec<_> = some
                .iter()
                .map(|mount| scope.spawn(|| without_process(mount)))
                .collect();
            let answered = asked.into_iter().map(ScopedJoinHandle::join);
            rows.extend(answered.map(|row| row.unwrap_or_else(|panic| resume_unwind(panic))));
        });
    }
    Ok(rows)
}

/// The row of a mount whose process cannot be examined, from the data of the kernel.
fn without_process(mount: &MountedImage) -> Row {
    let mode = if mount.is_writable { "rw" } else { "ro" };
    Row {
        server: None,
        state: match ask::ask(mount, ANSWER_TIMEOUT) {
            Answer::NotServed => Some("dead"),
            Answer::NoProcess => Some("kernel"),
            _ => None,
        },
        uid: match mount.door {
            Door::Fuse => mount.owner.map(|(uid, _)| uid),
            Door::Kernel(_) | Door::Direct(_) => Some(0),
        },
        service: Service {
            kind: "mount".to_owned(),
            image: match &mount.door {
                Door::Fuse => mount.source.to_string_lossy().into_owned(),
                Door::Kernel(name) => name.disk.clone(),
                Door::Direct(file) => file.to_string_lossy().into_owned(),
            },
            layers: Vec::new(),
            export: None,
            upper: None,
            at: vec![mount.path.to_string_lossy().into_owned()],
            mode: mode.to_owned(),
            since: 0,
            device: Some(mount.device.clone()),
            owners: None,
            descriptor: None,
            pool: None,
        },
    }
}

/// The cells of a row, in the order of the titles.
fn columns(row: &Row) -> [String; 7] {
    let Row {
        server,
        state,
        uid,
        service,
    } = row;
    let unknown = || "-".to_owned();
    let mut place = printable(&service.image).into_owned();
    if !service.layers.is_empty() {
        place += &format!(", layer {}", printable(&service.layers.join(", ")));
    }
    place += &format!(" at {}", printable(&service.at.join(", ")));
    if let Some(upper) = &service.upper {
        place += &format!(", upper {}", printable(upper));
    }
    if let Some(export) = &service.export {
        place += &format!(", export {}", printable(export));
    }
    if let Some(pool) = &service.pool {
        place += &format!(", pool {}", printable(pool));
    }
    if server
        .as_ref()
        .is_some_and(|server| server.is_in_other_namespace)
    {
        place += " (in another mount namespace)";
    }
    [
        server
            .as_ref()
            .map_or_else(unknown, |server| server.pid.to_string()),
        uid.map_or_else(unknown, |uid| {
            printable(&running::user_name(uid)).into_owned()
        }),
        printable(&service.kind).into_owned(),
        printable(&service.mode).into_owned(),
        state.map_or_else(unknown, str::to_owned),
        start_time(service).unwrap_or_else(unknown),
        place,
    ]
}

/// The start time of a service in the form of RFC 3339; `None` if it is not known.
fn start_time(service: &Service) -> Option<String> {
    let since = i64::try_from(service.since)
        .ok()
        .filter(|&since| since > 0)?;
    bcow::rfc3339(since)
}

/// A row as JSON.
fn document(row: &Row) -> Value {
    let Row {
        server,
        state,
        uid,
        service,
    } = row;
    json!({
        "pid": server.as_ref().map(|server| server.pid),
        "uid": uid,
        "user": uid.map(running::user_name),
        "state": state,
        "other_mount_namespace": server.as_ref().map(|server| server.is_in_other_namespace),
        "kind": service.kind,
        "image": service.image,
        "layers": service.layers,
        "export": service.export,
        "upper": service.upper,
        "at": service.at,
        "mode": service.mode,
        "pool": service.pool,
        "since": start_time(service),
        "since_unix_seconds": (service.since > 0).then_some(service.since),
    })
}
