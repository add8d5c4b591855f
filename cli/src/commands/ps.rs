//! `bcow ps`

use std::panic::resume_unwind;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use bcow_fuse::{Driver, MountedImage};
use serde::Serialize;
use serde_json::json;

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
#[derive(Default, Serialize)]
struct Row {
    /// As `other_mount_namespace`: `None` if the service has no process, or if its process is dead
    /// or cannot be examined.
    pid: Option<u32>,
    /// As `user`: `None` if the user of the process is not known.
    uid: Option<u32>,
    user: Option<String>,
    /// `None` if the state is not known.
    state: Option<&'static str>,
    other_mount_namespace: Option<bool>,
    kind: String,
    image: String,
    layers: Vec<String>,
    export: Option<String>,
    upper: Option<String>,
    at: Vec<String>,
    mode: String,
    pool: Option<String>,
    /// As `since_unix_seconds`: `None` if the start time is not known.
    since: Option<String>,
    since_unix_seconds: Option<u64>,
}

/// Prints all services as a table or as JSON.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let services = rows()?;
    if args.json {
        return ui.print_json(&json!({ "schema": "bcow.ps/1", "services": services }));
    }
    if services.is_empty() {
        ui.status("nothing is mounted or served");
    }
    let titles = [
        "PID",
        "USER",
        "KIND",
        "MODE",
        "STATE",
        "SINCE",
        "IMAGE AND PLACE",
    ];
    let mut out = ui.output();
    out.table(titles, services.iter().map(Row::columns))?;
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
        let services = server.services.iter();
        rows.extend(services.map(|service| Row::of(&server, service.clone())));
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
    let uid = match mount.driver {
        Driver::Fuse => mount.owner.map(|(uid, _)| uid),
        Driver::Kernel(_) | Driver::Direct(_) => Some(0),
    };
    Row {
        state: match ask::ask(mount, ANSWER_TIMEOUT) {
            Answer::NotServed => Some("dead"),
            Answer::NoProcess => Some("kernel"),
            _ => None,
        },
        uid,
        user: uid.map(running::user_name),
        kind: "mount".to_owned(),
        image: match &mount.driver {
            Driver::Fuse => mount.source.to_string_lossy().into_owned(),
            Driver::Kernel(name) => name.disk.clone(),
            Driver::Direct(file) => file.to_string_lossy().into_owned(),
        },
        at: vec![mount.path.to_string_lossy().into_owned()],
        mode: if mount.is_writable { "rw" } else { "ro" }.to_owned(),
        ..Row::default()
    }
}

impl Row {
    fn of(server: &Server, service: Service) -> Self {
        let since = Some(service.since).filter(|&since| since > 0);
        Row {
            pid: Some(server.pid),
            uid: Some(server.uid),
            user: Some(running::user_name(server.uid)),
            state: Some(server.state.name()),
            other_mount_namespace: Some(server.is_in_other_namespace),
            kind: service.kind,
            image: service.image,
            layers: service.layers,
            export: service.export,
            upper: service.upper,
            at: service.at,
            mode: service.mode,
            pool: service.pool,
            since: since.and_then(|since| bcow::rfc3339(since.try_into().ok()?)),
            since_unix_seconds: since,
        }
    }

    /// The cells, in the order of the titles.
    fn columns(&self) -> [String; 7] {
        let shown = |text: &str| printable(text).into_owned();
        let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let mut place = shown(&self.image);
        if !self.layers.is_empty() {
            place += &format!(", layer {}", printable(&self.layers.join(", ")));
        }
        place += &format!(" at {}", printable(&self.at.join(", ")));
        for (name, value) in [
            ("upper", &self.upper),
            ("export", &self.export),
            ("pool", &self.pool),
        ] {
            if let Some(value) = value {
                place += &format!(", {name} {}", printable(value));
            }
        }
        if self.other_mount_namespace == Some(true) {
            place += " (in another mount namespace)";
        }
        [
            known(self.pid.map(|pid| pid.to_string())),
            known(self.user.as_deref().map(shown)),
            shown(&self.kind),
            shown(&self.mode),
            known(self.state.map(str::to_owned)),
            known(self.since.clone()),
            place,
        ]
    }
}
