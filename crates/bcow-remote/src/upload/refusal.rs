//! The explanations of a registry.

use serde::Deserialize;

use crate::client::Answer;
use crate::error::{Fault, Problem, printable};

/// Largest size of the text with which a registry explains an error.
const EXPLANATION_BYTES: u64 = 16 << 10;

/// The error of an answer, with the explanation of the registry.
pub(super) fn refusal(mut answer: Answer) -> Fault {
    let fault = answer.refusal();
    let mut explanation = || explanation(&mut answer).unwrap_or_default();
    let problem = match fault.problem {
        Problem::Denied { status, .. } => Problem::Denied {
            status,
            explanation: explanation(),
        },
        Problem::Status(status) => Problem::Refused {
            status,
            explanation: explanation(),
        },
        problem => problem,
    };
    Fault { problem, ..fault }
}

fn explanation(answer: &mut Answer) -> Option<String> {
    #[derive(Deserialize)]
    struct Document {
        errors: Vec<One>,
    }
    #[derive(Deserialize)]
    struct One {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
    }
    let bytes = answer.body.read_document(EXPLANATION_BYTES).ok()?;
    let document: Document = serde_json::from_slice(&bytes).ok()?;
    let first = document.errors.into_iter().next()?;
    let text = match (&*first.code, &*first.message) {
        ("", message) => message.to_owned(),
        (code, "") => code.to_owned(),
        (code, message) => format!("{code}: {message}"),
    };
    Some(printable(&text))
}
