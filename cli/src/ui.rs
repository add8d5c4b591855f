//! The terminal: results go to standard output, everything else to standard error.

use std::fmt;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use bcow::CacheFigures;
use bcow_convert::Work;
use bcow_images::global::{ColorWhen, GlobalArgs, ProgressForm};
use bcow_oci::LeftOut;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use serde_json::json;

use crate::error::CommandError;
use crate::image::Messages;
use crate::interrupt::Interrupt;
use crate::names::{printable, quoted};
use crate::size::{Count, Human};

/// The only way from a command to the terminal.
pub struct Ui {
    quiet: bool,
    verbose: u8,
    color: bool,
    stdout_is_terminal: bool,
    progress: ProgressForm,
    bars: MultiProgress,
}

impl Ui {
    /// Examines the streams and the environment.
    pub fn new(options: &GlobalArgs) -> Self {
        let stderr_is_terminal = io::stderr().is_terminal();
        let color = match options.color {
            ColorWhen::Always => true,
            ColorWhen::Never => false,
            ColorWhen::Auto => {
                let no_color = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
                let dumb = std::env::var_os("TERM").is_some_and(|v| v == "dumb");
                stderr_is_terminal && !no_color && !dumb
            }
        };
        let progress = if options.quiet { ProgressForm::None } else { options.progress };
        let has_bar = stderr_is_terminal && progress == ProgressForm::Auto;
        let bars = MultiProgress::with_draw_target(if has_bar {
            ProgressDrawTarget::stderr_with_hz(10)
        } else {
            ProgressDrawTarget::hidden()
        });
        Ui {
            quiet: options.quiet,
            verbose: options.verbose,
            color,
            stdout_is_terminal: io::stdout().is_terminal(),
            progress,
            bars,
        }
    }

    /// Starts the log on standard error, with the verbosity of `-v` or `BCOW_LOG`.
    pub fn start_log(&self) {
        use tracing_subscriber::EnvFilter;
        let default = match (self.quiet, self.verbose) {
            (true, _) => "error",
            (false, 0) => "warn",
            (false, 1) => "info",
            (false, 2) => "debug",
            (false, _) => "trace",
        };
        // A filter with a spelling mistake must not keep the command from running: its good parts
        // hold and the rest is ignored.
        let filter = match std::env::var("BCOW_LOG") {
            Ok(directives) if !directives.is_empty() => EnvFilter::new(directives),
            _ => EnvFilter::new(default),
        };
        let bars = self.bars.clone();
        let started = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_ansi(self.color)
            .with_writer(move || LogWriter(bars.clone()))
            .try_init();
        // Only a second call can fail; the first log then remains in use.
        drop(started);
    }

    /// Whether to print only warnings and errors.
    pub fn quiet(&self) -> bool {
        self.quiet
    }

    /// Whether standard output is a terminal.
    pub fn stdout_is_terminal(&self) -> bool {
        self.stdout_is_terminal
    }

    /// Standard output, buffered. Call [`Output::finish`] when the result is complete.
    pub fn output(&self) -> Output {
        Output {
            stream: BufWriter::with_capacity(64 << 10, io::stdout()),
            is_first: true,
        }
    }

    /// Prints one JSON document as a result, indented.
    pub fn print_json(&self, document: &impl Serialize) -> Result<(), CommandError> {
        let mut out = self.output();
        let stream = out.stream();
        serde_json::to_writer_pretty(stream, document)
            .map_err(|error| CommandError::standard_output(&error.into()))?;
        writeln!(out)?;
        out.finish()
    }

    /// Prints the result of a command that writes `name` as a JSON document.
    pub fn print_report(
        &self,
        schema: &'static str,
        name: impl fmt::Display,
        report: &impl Serialize,
    ) -> Result<(), CommandError> {
        #[derive(Serialize)]
        struct Document<'r, R> {
            schema: &'static str,
            name: String,
            #[serde(flatten)]
            report: &'r R,
        }
        let name = name.to_string();
        self.print_json(&Document {
            schema,
            name,
            report,
        })
    }

    /// A message for the user.
    pub fn status(&self, message: impl fmt::Display) {
        if !self.quiet {
            self.to_stderr(format_args!("{message}\n"));
        }
    }

    /// A problem that does not end the command.
    pub fn warning(&self, message: impl fmt::Display) {
        let label = self.paint("warning:", "\x1b[1;33m");
        let message = message.to_string();
        self.to_stderr(format_args!("{label} {}\n", printable(&message)));
    }

    /// An action that the user can take.
    pub fn hint(&self, message: impl fmt::Display) {
        if !self.quiet {
            let label = self.paint("hint:", "\x1b[1;36m");
            let message = message.to_string();
            self.to_stderr(format_args!("{label} {}\n", printable(&message)));
        }
    }

    /// Prints the failure of the command.
    pub fn error(&self, error: &CommandError) {
        let mut text = format!(
            "{} {}\n",
            self.paint("error:", "\x1b[1;31m"),
            printable(error.message())
        );
        for cause in error.causes() {
            text += &format!(
                "  {} {}\n",
                self.paint("caused by:", "\x1b[1m"),
                printable(cause)
            );
        }
        if let Some(hint) = error.hint_text() {
            text += &format!(
                "{} {}\n",
                self.paint("hint:", "\x1b[1;36m"),
                printable(hint)
            );
        }
        self.to_stderr(format_args!("{text}"));
    }

    /// A progress bar over bytes. Invisible unless standard error is a terminal.
    pub fn progress(&self) -> Progress<'_> {
        let bar = self.bars.add(ProgressBar::no_length());
        bar.set_style(style(SPINNER));
        Progress {
            ui: self,
            bar,
            warned: Mutex::new(0),
            line_at: Mutex::new(Some(Instant::now())),
        }
    }

    /// Does the work of a command, with a progress bar. Catches signals from now on.
    pub fn work<T>(
        &self,
        act: impl FnOnce(&Work<'_>) -> Result<T, CommandError>,
    ) -> Result<T, CommandError> {
        let interrupt = Interrupt::catch();
        act(&Work {
            messages: self,
            progress: &self.progress(),
            interrupt: &interrupt,
        })
    }

    /// Says which parts of `source` a new image does not have.
    pub fn note_left_out(&self, source: &dyn fmt::Display, left_out: &LeftOut) {
        if !left_out.is_empty() {
            let text = format!("note: not taken from {source}: {left_out}");
            self.status(printable(&text));
        }
    }

    fn paint(&self, text: &'static str, code: &'static str) -> impl fmt::Display {
        let (before, after) = if self.color { (code, "\x1b[0m") } else { ("", "") };
        format!("{before}{text}{after}")
    }

    fn to_stderr(&self, text: fmt::Arguments<'_>) {
        // If standard error fails, the error cannot be reported.
        self.bars.suspend(|| {
            let _ = io::stderr().write_all(text.to_string().as_bytes());
        });
    }
}

impl Messages for Ui {
    fn status(&self, text: &dyn fmt::Display) {
        Ui::status(self, text);
    }

    fn warning(&self, text: &dyn fmt::Display) {
        Ui::warning(self, text);
    }

    fn hint(&self, text: &str) {
        Ui::hint(self, text);
    }
}

/// Standard output. Its errors are already the command's errors, so that `?` does the right thing,
/// also when the reader went away (`bcow ls IMG | head`).
pub struct Output {
    stream: BufWriter<io::Stdout>,
    /// Whether the next item is the first one of a list.
    is_first: bool,
}

impl Output {
    /// What `write!` and `writeln!` call.
    pub fn write_fmt(&mut self, text: fmt::Arguments<'_>) -> Result<(), CommandError> {
        self.stream
            .write_fmt(text)
            .map_err(|e| CommandError::standard_output(&e))
    }

    /// Writes bytes as they are.
    pub fn write_bytes(&mut self, bytes: &[u8]) -> Result<(), CommandError> {
        self.stream
            .write_all(bytes)
            .map_err(|e| CommandError::standard_output(&e))
    }

    /// Writes a name, quoted for a terminal, or else its bytes.
    pub fn name(&mut self, name: &[u8], quote: bool) -> Result<(), CommandError> {
        if quote {
            self.write_bytes(quoted(name).as_bytes())
        } else {
            self.write_bytes(name)
        }
    }

    /// For libraries that write to the stream themselves; [`CommandError::standard_output`]
    /// converts their errors.
    pub fn stream(&mut self) -> &mut dyn Write {
        &mut self.stream
    }

    /// Begins a JSON document with the fields of `head`, for a result that is not held in memory.
    pub fn open_document(&mut self, head: &impl Serialize) -> Result<(), CommandError> {
        let head = serde_json::to_string(head);
        let head = head.map_err(|error| CommandError::standard_output(&error.into()))?;
        write!(self, "{}", head.strip_suffix('}').unwrap_or(&head))
    }

    /// Begins a list in the JSON document.
    pub fn open_list(&mut self, name: &str) -> Result<(), CommandError> {
        self.is_first = true;
        write!(self, ",\"{name}\":[")
    }

    /// Writes an item of the list, on a line of its own.
    pub fn item(&mut self, item: &impl Serialize) -> Result<(), CommandError> {
        let separator = if self.is_first { "" } else { "," };
        self.is_first = false;
        writeln!(self, "{separator}")?;
        self.json(item)
    }

    pub fn close_list(&mut self) -> Result<(), CommandError> {
        write!(self, "\n]")
    }

    /// Writes a further field of the JSON document.
    pub fn field(&mut self, name: &str, value: &impl Serialize) -> Result<(), CommandError> {
        write!(self, ",\"{name}\":")?;
        self.json(value)
    }

    pub fn close_document(&mut self) -> Result<(), CommandError> {
        writeln!(self, "}}")
    }

    fn json(&mut self, value: &impl Serialize) -> Result<(), CommandError> {
        serde_json::to_writer(&mut self.stream, value)
            .map_err(|error| CommandError::standard_output(&error.into()))
    }

    /// Writes a table with aligned columns; nothing without rows.
    pub fn table<const COLUMNS: usize>(
        &mut self,
        titles: [&str; COLUMNS],
        rows: impl IntoIterator<Item = [String; COLUMNS]>,
    ) -> Result<(), CommandError> {
        let mut lines = vec![titles.map(str::to_owned)];
        lines.extend(rows);
        if lines.len() == 1 {
            return Ok(());
        }
        let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max();
        let widths: Vec<usize> = (0..COLUMNS).filter_map(width).collect();
        for line in &lines {
            let cells = line.iter().zip(&widths);
            let cells: Vec<String> = cells
                .map(|(cell, &width)| format!("{cell:<width$}"))
                .collect();
            writeln!(self, "{}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }

    /// Writes out what is buffered: the only place where a full disk shows for short results.
    pub fn finish(mut self) -> Result<(), CommandError> {
        self.stream
            .flush()
            .map_err(|e| CommandError::standard_output(&e))
    }
}

/// The use of a cache of decoded blocks.
pub fn cache_line(cache: &CacheFigures) -> String {
    format!(
        "cache:       {} of {}; {} hits, {} misses",
        Human(cache.held_bytes),
        Human(cache.limit_bytes),
        Count(cache.hits),
        Count(cache.misses)
    )
}

/// Work without a count.
const SPINNER: &str = "{spinner} {msg}  {elapsed}";
/// A count without an end.
const COUNTER: &str = "{spinner} {msg}  {bytes}  {bytes_per_sec}  {elapsed}";
/// A count with an end. The bar comes last and gets the remaining width of the terminal.
const BAR: &str = "{msg} {bytes} / {total_bytes}  {bytes_per_sec}  {eta} left [{wide_bar}]";

fn style(template: &str) -> ProgressStyle {
    // The templates are constants, and a test parses them.
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

/// A progress bar that disappears when it is dropped.
pub struct Progress<'u> {
    ui: &'u Ui,
    bar: ProgressBar,
    warned: Mutex<u64>,
    /// When the last line was printed; `None` if the next one is due.
    line_at: Mutex<Option<Instant>>,
}

/// Time between two lines about the progress of a phase.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

impl Progress<'_> {
    fn line_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.line_at.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Prints the first line of a phase, if it has none.
    fn line_if_due(&self) {
        let is_due = self.line_at().is_none();
        if is_due {
            self.line();
        }
    }

    /// Prints a line about the progress, if the user wants lines and one is due.
    fn line(&self) {
        let form = self.ui.progress;
        if !matches!(form, ProgressForm::Plain | ProgressForm::Json) {
            return;
        }
        let mut line_at = self.line_at();
        if line_at.is_some_and(|at| at.elapsed() < LINE_INTERVAL) {
            return;
        }
        *line_at = Some(Instant::now());
        let (phase, bytes, total) = (self.bar.message(), self.bar.position(), self.bar.length());
        let line = match (form, total) {
            (ProgressForm::Json, _) => {
                let schema = "bcow.progress/1";
                json!({ "schema": schema, "phase": phase, "bytes": bytes, "total_bytes": total })
                    .to_string()
            }
            (_, Some(total)) => format!("{phase}: {} of {}", Human(bytes), Human(total)),
            (_, None) => format!("{phase}: {}", Human(bytes)),
        };
        self.ui.to_stderr(format_args!("{line}\n"));
    }
}

/// Warnings of one operation that are shown one by one; a hostile tarball could bring millions.
const WARNINGS_SHOWN: u64 = 20;

impl bcow_oci::Progress for Progress<'_> {
    /// Sets the number of bytes of the work, if it is known, and restarts the count.
    fn total(&self, bytes: Option<u64>) {
        self.bar.reset();
        match bytes {
            Some(bytes) => {
                self.bar.set_style(style(BAR));
                self.bar.set_length(bytes);
            }
            None => {
                self.bar.set_style(style(SPINNER));
                self.bar.unset_length();
            }
        }
        self.line_if_due();
    }

    fn advance(&self, bytes: u64) {
        if self.bar.length().is_none() && self.bar.position() == 0 {
            self.bar.set_style(style(COUNTER));
        }
        self.bar.inc(bytes);
        self.line();
    }

    /// Several phases may share one count.
    fn phase(&self, name: &str) {
        // The first one starts a thread.
        if !self.bar.is_hidden() {
            self.bar.enable_steady_tick(Duration::from_millis(200));
        }
        // A phase without a count has no line yet.
        self.line_if_due();
        self.bar.set_message(printable(name).into_owned());
        // The count may still be that of the phase before.
        *self.line_at() = None;
    }

    fn warning(&self, message: &str) {
        let mut warned = self.warned.lock().unwrap_or_else(|e| e.into_inner());
        *warned += 1;
        if *warned <= WARNINGS_SHOWN {
            self.ui.warning(message);
        }
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        if self.bar.position() > 0 {
            *self.line_at() = None;
        }
        self.line_if_due();
        self.bar.finish_and_clear();
        let warned = *self.warned.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(more) = warned.checked_sub(WARNINGS_SHOWN).filter(|&n| n > 0) {
            self.ui
                .warning(format_args!("{more} more warnings of this kind"));
        }
    }
}

/// Writes log lines without damage to the progress bars.
struct LogWriter(MultiProgress);

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_templates_parse() {
        for template in [SPINNER, COUNTER, BAR] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
