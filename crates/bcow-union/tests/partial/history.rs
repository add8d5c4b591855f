//! The past states of a file, and the states that it may have after a crash.

/// The states of a file in order.
pub struct History {
    steps: Vec<Step>,
}

struct Step {
    /// The moments between which the file reached the state.
    begun: usize,
    ended: usize,
    /// Whether this state and all earlier ones are durable when the step has ended.
    durable: bool,
    bytes: Vec<u8>,
}

impl History {
    /// A file with this durable content.
    pub fn new(bytes: Vec<u8>) -> Self {
        History {
            steps: vec![Step {
                begun: 0,
                ended: 0,
                durable: true,
                bytes,
            }],
        }
    }

    /// The current content.
    pub fn now(&self) -> &[u8] {
        &self.steps.last().unwrap().bytes
    }

    /// Adds a state that the file reached between two moments.
    pub fn step(&mut self, begun: usize, ended: usize, durable: bool, bytes: Vec<u8>) {
        self.steps.push(Step {
            begun,
            ended,
            durable,
            bytes,
        });
    }

    /// Whether a file may contain `found` after a crash at `moment`. Each byte must have its value
    /// of the last durable step that had ended, or of a later step that had begun. A byte may also
    /// be zero where the file grew in these later steps, because the written data may be lost.
    pub fn allows(&self, moment: usize, found: &[u8]) -> Result<(), String> {
        let base = self
            .steps
            .iter()
            .rposition(|step| step.durable && step.ended <= moment)
            .unwrap();
        let begun = |step: &&Step| step.begun < moment;
        let since: Vec<&Step> = std::iter::once(&self.steps[base])
            .chain(self.steps[base + 1..].iter().take_while(begun))
            .collect();
        let grew: Vec<_> = since
            .windows(2)
            .map(|pair| pair[0].bytes.len()..pair[1].bytes.len())
            .collect();
        let size = found.len();
        if !since.iter().any(|step| step.bytes.len() == size)
            && !grew.iter().any(|grown| grown.contains(&size))
        {
            let sizes: Vec<_> = since.iter().map(|step| step.bytes.len()).collect();
            return Err(format!("{size} bytes, not one of {sizes:?}"));
        }
        for (at, byte) in found.iter().enumerate() {
            let held = since.iter().any(|step| step.bytes.get(at) == Some(byte));
            let new = *byte == 0 && grew.iter().any(|grown| grown.contains(&at));
            if !held && !new {
                let could: Vec<_> = since.iter().map(|step| step.bytes.get(at)).collect();
                return Err(format!("byte {at} is {byte}, not one of {could:?}"));
            }
        }
        Ok(())
    }
}

#[test]
fn synced_bytes_and_later_bytes_are_allowed() {
    let mut history = History::new(vec![9; 4]);
    history.step(1, 2, false, vec![9, 1, 1, 9]);
    history.step(3, 4, true, vec![9, 1, 1, 9]);
    history.step(5, 6, false, vec![9, 1]);
    history.step(7, 8, false, vec![9, 1, 0, 0, 0]);
    assert!(history.allows(1, &[9; 4]).is_ok());
    assert!(history.allows(2, &[9, 9, 1, 9]).is_ok());
    assert!(history.allows(4, &[9; 4]).is_err());
    assert!(history.allows(6, &[9, 1]).is_ok());
    assert!(history.allows(6, &[9, 1, 0, 0]).is_err());
    assert!(history.allows(8, &[9, 1, 0, 0]).is_ok());
    assert!(history.allows(8, &[9, 1, 9, 9, 0]).is_err());
}
