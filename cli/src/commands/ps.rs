//! `bcow ps`

use serde_json::{Value, json};

use bcow_fuse::MountedImage;

use crate::error::CommandError;
use crate::names::printable;
use crate::running::{self, Server, Service};
use crate::ui::Ui;

/// List mounts and served disks of this machine
///
/// The command lists the processes of `bcow mount`, `bcow serve` and `bcow attach`. Root sees the
/// processes of all users and containers; other users see their own. The command sends no request
/// to these processes, so it also lists a process that hangs. If it cannot examine the process of a
/// mount, it shows only what the kernel reports about the mount.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON (schema bcow.ps/1)
    #[arg(long)]
    json: bool,
}

/// A line.
struct Row {
    /// `None` if the process cannot be looked at.
    server: Option<Server>,
    uid: Option<u32>,
    service: Service,
}

/// Prints what is served.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let rows = rows();
    if args.json {
        let processes: Vec<Value> = rows.iter().map(document).collect();
        return ui.print_json(&json!({ "schema": "bcow.ps/1", "services": processes }));
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

fn rows() -> Vec<Row> {
    let servers = running::servers();
    let mounts = bcow_fuse::mounted_images().unwrap_or_default();
    let known: Vec<&str> = servers
        .iter()
        .flat_map(|server| &server.services)
        .filter_map(|service| service.device.as_deref())
        .collect();
    let strangers = mounts
        .iter()
        .filter(|mount| !known.contains(&mount.device.as_str()))
        .map(|mount| Row {
            server: None,
            uid: mount.owner.map(|(uid, _)| uid),
            service: of_kernel(mount),
        });
    let strangers: Vec<Row> = strangers.collect();
    servers
        .into_iter()
        .flat_map(|server| {
            let services = server.services.clone();
            services.into_iter().map(move |service| Row {
                uid: Some(server.uid),
                server: Some(server.clone()),
                service,
            })
        })
        .chain(strangers)
        .collect()
}

/// What the kernel says of a mount.
fn of_kernel(mount: &MountedImage) -> Service {
    Service {
        kind: "mount".to_owned(),
        image: mount.source.to_string_lossy().into_owned(),
        export: None,
        upper: None,
        at: vec![mount.path.to_string_lossy().into_owned()],
        mode: match mount.is_writable {
            true => "rw",
            false => "ro",
        }
        .to_owned(),
        since: 0,
        device: Some(mount.device.clone()),
    }
}

fn columns(row: &Row) -> [String; 7] {
    let Row {
        server,
        uid,
        service,
    } = row;
    let unknown = || "-".to_owned();
    let mut place = format!(
        "{} at {}",
        printable(&service.image),
        printable(&service.at.join(", "))
    );
    if let Some(upper) = &service.upper {
        place += &format!(", upper {}", printable(upper));
    }
    if let Some(export) = &service.export {
        place += &format!(", export {}", printable(export));
    }
    if server.as_ref().is_some_and(|server| server.is_elsewhere) {
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
        server
            .as_ref()
            .map_or_else(unknown, |server| server.state.name().to_owned()),
        time(service).unwrap_or_else(unknown),
        place,
    ]
}

/// Since when; `None` if that is not known.
fn time(service: &Service) -> Option<String> {
    let since = i64::try_from(service.since)
        .ok()
        .filter(|&since| since > 0)?;
    bcow::rfc3339(since)
}

fn document(row: &Row) -> Value {
    let Row {
        server,
        uid,
        service,
    } = row;
    json!({
        "pid": server.as_ref().map(|server| server.pid),
        "uid": uid,
        "user": uid.map(running::user_name),
        "state": server.as_ref().map(|server| server.state.name()),
        "other_mount_namespace": server.as_ref().map(|server| server.is_elsewhere),
        "kind": service.kind,
        "image": service.image,
        "export": service.export,
        "upper": service.upper,
        "at": service.at,
        "mode": service.mode,
        "since": time(service),
        "since_unix_seconds": (service.since > 0).then_some(service.since),
    })
}
