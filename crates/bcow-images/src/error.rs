//! The failure of a command, and its exit status.
//!
//! On the terminal: `error:` what failed and where, then its causes, then `hint:` if there is one.

use std::error::Error;
use std::fmt;

use bcow_remote::{Problem, RemoteError};
use serde::{Deserialize, Serialize};

/// Exit statuses, documented in the help and in the user's guide.
pub mod exit {
    pub const DONE: u8 = 0;
    /// The operation failed.
    pub const FAILED: u8 = 1;
    /// The command line is invalid.
    pub const USAGE: u8 = 2;
    /// Stopped by SIGINT or a similar signal; the status that a shell reports for SIGINT.
    pub const INTERRUPTED: u8 = 130;
    /// The reader of standard output closed it; the status that a shell reports for SIGPIPE.
    pub const PIPE_CLOSED: u8 = 141;

    /// `bcow inspect --resolve`: the name leads to no BCoW image that may be used.
    pub const RESOLVED_TO_NONE: u8 = 3;
    /// `bcow inspect --resolve`: the registry denies access.
    pub const RESOLVE_DENIED: u8 = 4;

    /// `bcow diff`: there are differences.
    pub const DIFFERENT: u8 = 1;
    /// `bcow diff`: the comparison could not be done.
    pub const DIFF_TROUBLE: u8 = 2;

    /// fsck(8): errors were corrected, and none is left.
    pub const FSCK_REPAIRED: u8 = 1;
    /// fsck(8): errors are left uncorrected.
    pub const FSCK_ERRORS_LEFT: u8 = 4;
    /// fsck(8): the check itself could not be done.
    pub const FSCK_OPERATIONAL: u8 = 8;
    /// fsck(8): the command line is invalid.
    pub const FSCK_USAGE: u8 = 16;
}

/// What a failure says about a remote image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Answer {
    /// Nothing.
    #[default]
    None,
    /// There is no BCoW image that may be used.
    NoImage,
    /// The server denies access.
    Denied,
}

impl Answer {
    fn of(problem: &Problem) -> Self {
        match problem {
            Problem::Signature(_) | Problem::NotFound(_) => Answer::NoImage,
            Problem::Denied { .. } => Answer::Denied,
            Problem::Offline { problem, .. } => Answer::of(problem),
            _ => Answer::None,
        }
    }
}

/// A command's failure. A process of a pool sends it to its client as JSON.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct CommandError {
    message: String,
    #[serde(default)]
    causes: Vec<String>,
    hint: Option<String>,
    exit: u8,
    #[serde(skip)]
    may_pass: bool,
    #[serde(skip)]
    answer: Answer,
}

impl CommandError {
    /// A failed operation. `message` names the action and the object, in lower case, without a full
    /// stop.
    pub fn new(message: impl Into<String>) -> Self {
        CommandError {
            message: message.into(),
            exit: exit::FAILED,
            ..CommandError::default()
        }
    }

    /// An error of a library, with its own message.
    pub fn of(error: &(dyn Error + 'static)) -> Self {
        CommandError::new(error.to_string()).caused_by_source_of(error)
    }

    /// An invalid command line.
    pub fn usage(message: impl Into<String>) -> Self {
        CommandError::new(message).exit_with(exit::USAGE)
    }

    /// Adds `error` and everything below it to the causes.
    pub fn caused_by(mut self, error: &(dyn Error + 'static)) -> Self {
        if let Some(error) = RemoteError::below(error) {
            self = self.of_problem(&error.problem);
        }
        let mut next = Some(error);
        while let Some(error) = next {
            self.push_cause(error.to_string());
            next = error.source();
        }
        self
    }

    /// Adds everything below `error` to the causes, but not `error` itself.
    pub fn caused_by_source_of(self, error: &(dyn Error + 'static)) -> Self {
        match error.source() {
            Some(source) => self.caused_by(source),
            None => self,
        }
    }

    /// Adds a cause that is not an error of a library.
    pub fn caused_by_text(mut self, cause: impl Into<String>) -> Self {
        self.push_cause(cause.into());
        self
    }

    /// Adds an action that the user can take.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds an action, if there is one.
    pub fn hint_if(mut self, hint: Option<impl Into<String>>) -> Self {
        self.hint = hint.map(Into::into).or(self.hint);
        self
    }

    /// Records whether the cause may pass without any change by the user, for example because a
    /// server does not answer.
    pub fn passes_if(mut self, may_pass: bool) -> Self {
        self.may_pass |= may_pass;
        self
    }

    /// Records the problem with a server that is the cause.
    pub fn of_problem(mut self, problem: &Problem) -> Self {
        self.answer = Answer::of(problem);
        self.passes_if(problem.may_pass())
    }

    /// Records that there is no BCoW image that may be used.
    pub fn without_image(mut self) -> Self {
        self.answer = Answer::NoImage;
        self
    }

    /// What the failure says about a remote image.
    pub fn answer(&self) -> Answer {
        self.answer
    }

    /// Whether the operation may succeed after a while.
    pub fn may_pass(&self) -> bool {
        self.may_pass
    }

    /// Ends the process with this status rather than [`exit::FAILED`].
    pub fn exit_with(mut self, exit: u8) -> Self {
        self.exit = exit;
        self
    }

    /// The process's exit status.
    pub fn exit(&self) -> u8 {
        self.exit
    }

    /// The action and the object that failed.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The causes, outermost first.
    pub fn causes(&self) -> &[String] {
        &self.causes
    }

    /// The message with its causes, in one line, for logs.
    pub fn in_one_line(&self) -> String {
        let causes = self.causes.iter().map(String::as_str);
        let parts: Vec<&str> = std::iter::once(self.message()).chain(causes).collect();
        parts.join(": ")
    }

    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Writing standard output failed.
    pub fn standard_output(error: &std::io::Error) -> Self {
        let exit = match error.kind() {
            std::io::ErrorKind::BrokenPipe => exit::PIPE_CLOSED,
            _ => exit::FAILED,
        };
        CommandError::new("cannot write to standard output")
            .caused_by(error)
            .exit_with(exit)
    }

    /// Library errors end in `: {source}` and name the same source again; the source is printed
    /// only once.
    fn push_cause(&mut self, mut cause: String) {
        // "No such file or directory" is enough; the error number does not help the user.
        if let Some((text, number)) = cause.rsplit_once(" (os error ")
            && number.ends_with(')')
        {
            cause.truncate(text.len());
        }
        let above = self.causes.last().unwrap_or(&self.message);
        if !above.ends_with(&cause) {
            self.causes.push(cause);
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// The error of a command that a signal has ended.
pub fn interrupted() -> CommandError {
    CommandError::new("interrupted").exit_with(exit::INTERRUPTED)
}

/// Adds the failed action to an error of a library.
pub trait Context<T> {
    /// `what()` becomes the message, and the error its cause.
    fn context<M: Into<String>>(self, what: impl FnOnce() -> M) -> Result<T, CommandError>;
}

impl<T, E: Error + 'static> Context<T> for Result<T, E> {
    fn context<M: Into<String>>(self, what: impl FnOnce() -> M) -> Result<T, CommandError> {
        self.map_err(|error| CommandError::new(what()).caused_by(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Layered(&'static str, Option<Box<Layered>>);

    impl fmt::Display for Layered {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layered {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|e| e as &(dyn Error + 'static))
        }
    }

    #[test]
    fn a_cause_is_printed_only_once() {
        let error = Layered(
            "cannot read at byte 0: no such device",
            Some(Box::new(Layered("no such device", None))),
        );
        let error = CommandError::new("cannot open x").caused_by(&error);
        assert_eq!(error.causes(), ["cannot read at byte 0: no such device"]);
    }

    #[test]
    fn host_errors_come_without_their_numbers() {
        let error = std::io::Error::from_raw_os_error(2);
        let error = CommandError::new("x").caused_by(&error);
        assert_eq!(error.causes(), ["No such file or directory"]);
    }

    #[test]
    fn causes_keep_their_order() {
        let error = Layered("middle", Some(Box::new(Layered("inner", None))));
        let error = CommandError::new("outer").caused_by(&error);
        assert_eq!(error.causes(), ["middle", "inner"]);
    }
}
