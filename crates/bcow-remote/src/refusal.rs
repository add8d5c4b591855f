//! The explanations of a registry.

use serde_json::Value;

use crate::client::Answer;
use crate::error::{Fault, Problem, printable};

/// Largest size of the text with which a registry explains an error.
const EXPLANATION_BYTES: u64 = 16 << 10;

/// The error of an answer of a registry.
pub(crate) struct Refused {
    /// The registry's code for the error. Empty if it gives none.
    pub(crate) code: String,
    pub(crate) fault: Fault,
}

/// The error of an answer, with the explanation of the registry.
pub(crate) fn refusal(answer: Answer) -> Fault {
    refused(answer).fault
}

/// The error of an answer, with the code and the explanation of the registry.
pub(crate) fn refused(answer: Answer) -> Refused {
    let fault = answer.refusal();
    if !matches!(fault.problem, Problem::Denied { .. } | Problem::Status(_)) {
        let code = String::new();
        return Refused { code, fault };
    }
    let document = answer.document(EXPLANATION_BYTES).unwrap_or_default();
    let (code, message) = first_error(&document).unwrap_or_default();
    let explanation = printable(&match (&*code, &*message) {
        ("", message) => message.to_owned(),
        (code, "") => code.to_owned(),
        (code, message) => format!("{code}: {message}"),
    });
    let problem = match fault.problem {
        Problem::Denied { status, .. } => Problem::denied(status, explanation),
        Problem::Status(status) if !explanation.is_empty() => Problem::Refused {
            status,
            explanation,
        },
        problem => problem,
    };
    let fault = Fault { problem, ..fault };
    Refused { code, fault }
}

/// The code and the message of the first error in a document; `None` if that is no JSON.
pub(crate) fn first_error(document: &[u8]) -> Option<(String, String)> {
    let document: Value = serde_json::from_slice(document).ok()?;
    let error = &document["errors"][0];
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    Some((text("code"), text("message")))
}
