//! A restart of a pool, from the side of its client.

use std::time::{Duration, Instant};

use bcow_images::error::CommandError;
use bcow_images::image::Messages;
use bcow_images::size::plural;
use bcow_mounts::PoolName;

use crate::client::{self, PoolAtSocket};
use crate::protocol::Request;

/// How long the new process may take. It waits for half a minute for servers that do not answer.
const TAKES_OVER_WITHIN: Duration = Duration::from_secs(120);

/// Replaces the process of a pool. With `force`, first unmounts what the next process cannot take
/// over.
pub fn restart(name: &PoolName, force: bool, ui: &dyn Messages) -> Result<(), CommandError> {
    let mut connection = client::require(name)?;
    let supervisor = connection.supervisor();
    let before = connection.hello.restarts;
    connection.ask(&Request::Restart { force }, ui)?;
    connection.wait_for_end();
    let cannot = || CommandError::new(format!("cannot restart the pool {}", name));
    let ended = || {
        cannot()
            .caused_by_text("no process has taken over")
            .hint("the system log, or the file of --log-file, has the reason")
    };
    let begun = Instant::now();
    let hello = loop {
        match client::find_named(name)? {
            PoolAtSocket::Running(connection) if connection.hello.restarts > before => {
                break connection.hello;
            }
            // The supervisor has given up, or another pool has the name now.
            PoolAtSocket::Running(_) | PoolAtSocket::Dead | PoolAtSocket::Missing => {
                client::wait_for_supervisor(supervisor);
                return Err(ended());
            }
            // It opens the images again.
            PoolAtSocket::Silent if begun.elapsed() < TAKES_OVER_WITHIN => {}
            PoolAtSocket::Silent => {
                return Err(cannot().caused_by_text("the new process does not answer yet"));
            }
        }
    };
    ui.status(&format_args!(
        "process {} serves the pool {}",
        hello.pid, name
    ));
    match hello.lost {
        0 => Ok(()),
        lost => Err(CommandError::new(format!(
            "{} of the pool {} could not be taken over",
            plural(lost, "mount"),
            name
        ))
        .hint("the system log, or the file of --log-file, has the reason")),
    }
}
