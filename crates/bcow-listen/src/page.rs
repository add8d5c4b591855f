//! The text format of Prometheus (version 0.0.4).

use std::fmt::Write;

/// The name, the kind, the help and the value of a metric with one sample.
pub type Figure = (&'static str, &'static str, &'static str, u64);

/// A page in progress.
#[derive(Debug, Default)]
pub struct Page {
    families: Vec<Family>,
    /// The family of the next samples, as an index.
    current: usize,
    /// The labels of all samples.
    labels: Vec<(&'static str, String)>,
}

/// The samples of one metric. Prometheus wants them in one piece.
#[derive(Debug)]
struct Family {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    samples: String,
}

impl Page {
    /// Gives these labels to all samples from now on.
    pub fn label_all(&mut self, labels: Vec<(&'static str, String)>) {
        self.labels = labels;
    }

    /// Continues or begins a family. `kind` is `counter`, `gauge` or `histogram`.
    pub fn family(&mut self, name: &'static str, kind: &'static str, help: &'static str) {
        let known = self.families.iter().position(|family| family.name == name);
        self.current = known.unwrap_or_else(|| {
            self.families.push(Family {
                name,
                kind,
                help,
                samples: String::new(),
            });
            self.families.len() - 1
        });
    }

    /// Writes a family with one sample for each figure.
    pub fn figures(&mut self, figures: &[Figure]) {
        for (name, kind, help, value) in figures {
            self.family(name, kind, help);
            self.sample(name, &[], *value as f64);
        }
    }

    /// Writes a sample of the family that was begun or continued last.
    pub fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        let Some(family) = self.families.get_mut(self.current) else {
            return;
        };
        let own = self.labels.iter().map(|(label, value)| (*label, &**value));
        let labels: Vec<String> = own
            .chain(labels.iter().copied())
            .map(|(label, value)| format!("{label}=\"{}\"", escaped(value)))
            .collect();
        let samples = &mut family.samples;
        // Writing to a string cannot fail.
        let _ = if labels.is_empty() {
            writeln!(samples, "{name} {value}")
        } else {
            writeln!(samples, "{name}{{{}}} {value}", labels.join(","))
        };
    }

    /// The page.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for family in &self.families {
            let Family {
                name, kind, help, ..
            } = family;
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            text.push_str(&family.samples);
        }
        text
    }
}

fn escaped(value: &str) -> String {
    value
        .replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', r"\n")
}
