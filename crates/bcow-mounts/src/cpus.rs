//! Lists of CPUs, as taskset(1) and the kernel write them: `0,4-7,8-14:2`.

use std::io;

use bcow_images::error::{CommandError, Context};
use rustix::thread::CpuSet;

/// CPUs in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus(Vec<usize>);

/// Parses a list: numbers and ranges, separated by commas; a range with `:N` is every Nth of it.
pub fn parse(text: &str) -> Result<Cpus, String> {
    let number = |text: &str| {
        let number: Option<usize> = text.parse().ok().filter(|_| !text.starts_with('+'));
        number.ok_or_else(|| format!("{text:?} is not the number of a CPU"))
    };
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (range, step) = match part.split_once(':') {
            Some((range, step)) => (range, number(step)?),
            None => (part, 1),
        };
        let (first, last) = match range.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(range)?, number(range)?),
        };
        if first > last || step == 0 {
            return Err(format!("empty range {part:?}"));
        }
        if last >= CpuSet::MAX_CPU {
            return Err(format!(
                "{last} exceeds the highest CPU number, {}",
                CpuSet::MAX_CPU - 1
            ));
        }
        cpus.extend((first..=last).step_by(step));
    }
    cpus.sort_unstable();
    cpus.dedup();
    Ok(Cpus(cpus))
}

impl Cpus {
    /// Restricts this thread, and all threads that it starts, to these CPUs. The error names the
    /// CPUs that do not exist or that this process may not use.
    pub fn confine(&self) -> Result<(), CommandError> {
        let cannot = || "cannot restrict the process to --cpus";
        let allowed = rustix::thread::sched_getaffinity(None).map_err(io::Error::from);
        let allowed = allowed.context(cannot)?;
        let refused: Vec<String> = self
            .0
            .iter()
            .filter(|&&cpu| !allowed.is_set(cpu))
            .map(usize::to_string)
            .collect();
        if !refused.is_empty() {
            return Err(CommandError::new(cannot()).caused_by_text(format!(
                "this process may not use {} {}",
                if refused.len() == 1 { "CPU" } else { "CPUs" },
                refused.join(", ")
            )));
        }
        let mut set = CpuSet::new();
        for &cpu in &self.0 {
            set.set(cpu);
        }
        rustix::thread::sched_setaffinity(None, &set)
            .map_err(io::Error::from)
            .context(cannot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_those_of_taskset() {
        for (text, cpus) in [
            ("0", &[0][..]),
            ("3,0-2", &[0, 1, 2, 3]),
            ("0-7:3", &[0, 3, 6]),
            ("1,1,0-1", &[0, 1]),
        ] {
            assert_eq!(parse(text), Ok(Cpus(cpus.to_vec())), "{text}");
        }
    }

    #[test]
    fn invalid_lists_are_refused() {
        for text in [
            "",
            ",",
            "a",
            "-1",
            "1-",
            "+1",
            "2-1",
            "0-4:0",
            "99999",
            "0-99999999999999999999",
            "1;2",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn missing_cpus_are_named() {
        // On a separate thread, in case it succeeds.
        let result = std::thread::spawn(|| parse("1022-1023").unwrap().confine()).join();
        let error = result.unwrap().unwrap_err();
        assert_eq!(error.causes(), ["this process may not use CPUs 1022, 1023"]);
    }
}
