//! `bcow ps`

use std::panic::resume_unwind;
use std::thread;
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

/// Time limit for the answer of a mount.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Mounts that are asked at the same time.
const ASKED_AT_ONCE: usize = 64;

/// One line of the list: a mount or a served disk, and its process.
#[derive(Default, Serialize)]
pub struct Row {
    /// The mount, if it is one of this mount namespace.
    #[serde(skip)]
    pub mount: Option<MountedImage>,
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
    pub at: Vec<String>,
    mode: String,
    pub pool: Option<String>,
    /// As `since_unix_seconds`: `None` if the start time is not known.
    since: Option<String>,
    pub since_unix_seconds: Option<u64>,
    sandbox: Vec<String>,
    /// `None` if the process takes no requests for it.
    control: Option<String>,
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
pub fn rows() -> Result<Vec<Row>, CommandError> {
    let mut rows: Vec<Row> = Vec::new();
    let servers = running::servers();
    let mut mounts = bcow_fuse::mounted_images().context(|| "cannot list the mounts".to_owned())?;
    for server in &servers {
        for service in &server.services {
            let is_its = |mount: &&MountedImage| {
                let found = mount_of(server, mount);
                found.is_some_and(|found| std::ptr::eq(found, service))
            };
            let mount = mounts.iter().find(is_its).cloned();
            rows.push(Row::of(server, service.clone(), mount));
        }
    }
    mounts.retain(|mount| {
        !servers
            .iter()
            .any(|server| mount_of(server, mount).is_some())
    });
    rows.extend(at_once(&mounts, without_process));
    Ok(rows)
}

/// The service of this process that has the mount.
fn mount_of<'s>(server: &'s Server, mount: &MountedImage) -> Option<&'s Service> {
    match mount.driver {
        // No process has it. The kernel may have given it the device number of a mount that has
        // just ended, whose process lists that still.
        Driver::Direct(_) => None,
        Driver::Fuse | Driver::Kernel(_) => server.mount(&mount.device, &mount.path),
    }
}

/// Does the same with each of these at the same time: a process that hangs delays its answer.
pub fn at_once<T: Sync, R: Send>(these: &[T], act: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (act, mut results) = (&act, Vec::new());
    for some in these.chunks(ASKED_AT_ONCE) {
        thread::scope(|scope| {
            let ask = |one| {
                let started = thread::Builder::new().spawn_scoped(scope, move || act(one));
                started.map_err(|_| one)
            };
            let asked: Vec<_> = some.iter().map(ask).collect();
            results.extend(asked.into_iter().map(|asked| match asked {
                Ok(asked) => asked.join().unwrap_or_else(|panic| resume_unwind(panic)),
                // The system refuses a thread.
                Err(one) => act(one),
            }));
        });
    }
    results
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
        mount: Some(mount.clone()),
        ..Row::default()
    }
}

impl Row {
    fn of(server: &Server, service: Service, mount: Option<MountedImage>) -> Self {
        let since = Some(service.since).filter(|&since| since > 0);
        Row {
            mount,
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
            sandbox: service.sandbox,
            control: service.control,
        }
    }

    /// The state, or `-`.
    pub fn state(&self) -> &'static str {
        self.state.unwrap_or("-")
    }

    /// The image, where it is served, and what belongs to it.
    pub fn place(&self) -> String {
        let mut place = printable(&self.image).into_owned();
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
        place
    }

    /// The cells, in the order of the titles.
    fn columns(&self) -> [String; 7] {
        let shown = |text: &str| printable(text).into_owned();
        let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        [
            known(self.pid.map(|pid| pid.to_string())),
            known(self.user.as_deref().map(shown)),
            shown(&self.kind),
            shown(&self.mode),
            self.state().to_owned(),
            known(self.since.clone()),
            self.place(),
        ]
    }
}
