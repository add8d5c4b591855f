//! containerd's filters, as in `kind==active,labels."containerd.io/gc.root"`.
//!
//! A filter is a list of selectors, separated by commas, all of which must match:
//!
//! ```text
//! selector := fieldpath [ operator value ]
//! fieldpath := field { "." field }
//! field := quoted | letters, digits and underscores
//! operator := "==" | "!=" | "~="
//! value := quoted | characters other than commas and spaces
//! ```
//!
//! A quoted text is in double quotes, with the escapes of Go. The value of `~=`, a regular
//! expression, can also be between slashes or bars. A selector without an operator matches if the
//! field is present.

use std::iter::Peekable;
use std::str::Chars;

use regex::{Regex, RegexBuilder};

use crate::error::Error;
use crate::record::SnapshotRecord;

/// Regular expressions in one request, at most.
const MAX_EXPRESSIONS: usize = 64;
/// Bytes of memory of a regular expression, at most: a short text can ask for much.
const EXPRESSION_BYTES: usize = 1 << 20;

/// Filters, at least one of which must match; without any, all snapshots match.
pub struct Filters(Vec<Vec<Selector>>);

struct Selector {
    field: Field,
    test: Test,
}

enum Field {
    Name,
    Parent,
    Kind,
    Label(String),
    /// A field that snapshots do not have.
    Other,
}

enum Test {
    Present,
    Equal(String),
    NotEqual(String),
    Matches(Regex),
}

impl Filters {
    /// Parses the filters of a request.
    pub fn parse(filters: &[String]) -> Result<Self, Error> {
        let expressions = filters.iter().map(|text| text.matches("~=").count());
        if expressions.sum::<usize>() > MAX_EXPRESSIONS {
            return Err(Error::Invalid(format!(
                "the filters have more than {MAX_EXPRESSIONS} regular expressions"
            )));
        }
        let parse = |text: &String| {
            Parser::new(text)
                .filter()
                .map_err(|problem| Error::Invalid(format!("filter {text:?}: {problem}")))
        };
        filters
            .iter()
            .map(parse)
            .collect::<Result<_, _>>()
            .map(Filters)
    }

    /// Whether the filters select the snapshot.
    pub fn select(&self, record: &SnapshotRecord) -> bool {
        let all = |selectors: &Vec<Selector>| selectors.iter().all(|s| s.matches(record));
        self.0.is_empty() || self.0.iter().any(all)
    }
}

impl Selector {
    fn matches(&self, record: &SnapshotRecord) -> bool {
        let value = match &self.field {
            Field::Name => Some(record.name.as_str()),
            Field::Parent => Some(record.parent.as_deref().unwrap_or_default()),
            Field::Kind => Some(record.kind.name()),
            Field::Label(name) => record.labels.get(name).map(String::as_str),
            Field::Other => None,
        };
        match &self.test {
            Test::Present => value.is_some(),
            Test::Equal(other) => value == Some(other),
            Test::NotEqual(other) => value.unwrap_or_default() != other,
            Test::Matches(expression) => expression.is_match(value.unwrap_or_default()),
        }
    }
}

/// Which characters begin a quoted text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quotes {
    Double,
    DoubleSlashOrBar,
}

struct Parser<'t> {
    rest: Peekable<Chars<'t>>,
}

impl<'t> Parser<'t> {
    fn new(text: &'t str) -> Self {
        Parser {
            rest: text.chars().peekable(),
        }
    }

    fn filter(mut self) -> Result<Vec<Selector>, String> {
        let mut selectors = Vec::new();
        self.skip_spaces();
        if self.rest.peek().is_none() {
            return Ok(selectors);
        }
        loop {
            selectors.push(self.selector()?);
            self.skip_spaces();
            match self.rest.next() {
                None => return Ok(selectors),
                Some(',') => {}
                Some(other) => return Err(format!("unexpected {other:?}")),
            }
        }
    }

    fn selector(&mut self) -> Result<Selector, String> {
        let field = self.field_path()?;
        self.skip_spaces();
        let test = match self.rest.peek() {
            None | Some(',') => Test::Present,
            Some(_) => self.test()?,
        };
        Ok(Selector { field, test })
    }

    fn field_path(&mut self) -> Result<Field, String> {
        let first = self.field()?;
        let mut rest = Vec::new();
        while self.rest.next_if_eq(&'.').is_some() {
            rest.push(self.field()?);
        }
        Ok(match (first.as_str(), rest.is_empty()) {
            ("name", true) => Field::Name,
            ("parent", true) => Field::Parent,
            ("kind", true) => Field::Kind,
            ("labels", false) => Field::Label(rest.join(".")),
            _ => Field::Other,
        })
    }

    fn field(&mut self) -> Result<String, String> {
        self.skip_spaces();
        if self.rest.peek() == Some(&'"') {
            return self.quoted();
        }
        let field = self.while_char(|c| c.is_ascii_alphanumeric() || c == '_');
        if field.is_empty() { Err("a field is missing".to_owned()) } else { Ok(field) }
    }

    fn test(&mut self) -> Result<Test, String> {
        let operator = self.while_char(|c| matches!(c, '=' | '!' | '~'));
        match operator.as_str() {
            "==" => Ok(Test::Equal(self.value(Quotes::Double)?)),
            "!=" => Ok(Test::NotEqual(self.value(Quotes::Double)?)),
            "~=" => {
                let expression = self.value(Quotes::DoubleSlashOrBar)?;
                let expression = RegexBuilder::new(&expression)
                    .size_limit(EXPRESSION_BYTES)
                    .build();
                Ok(Test::Matches(
                    expression.map_err(|error| error.to_string())?,
                ))
            }
            "" => Err("an operator (==, != or ~=) is missing".to_owned()),
            other => Err(format!("unsupported operator {other:?}")),
        }
    }

    fn value(&mut self, quotes: Quotes) -> Result<String, String> {
        self.skip_spaces();
        match self.rest.peek() {
            Some('"') => return self.quoted(),
            Some('/' | '|') if quotes == Quotes::DoubleSlashOrBar => return self.quoted(),
            _ => {}
        }
        let value = self.while_char(|c| c != ',' && !c.is_whitespace());
        if value.is_empty() { Err("a value is missing".to_owned()) } else { Ok(value) }
    }

    /// Reads a text up to the character that begins it.
    fn quoted(&mut self) -> Result<String, String> {
        let quote = self.rest.next();
        let mut text = String::new();
        while let Some(c) = self.rest.next() {
            match c {
                _ if Some(c) == quote => return Ok(text),
                '\n' => break,
                '\\' if quote == Some('"') => text.push(self.escaped()?),
                // Other escapes belong to the regular expression.
                '\\' => match self.rest.next() {
                    Some(c) if Some(c) == quote => text.push(c),
                    Some(c) => text.extend(['\\', c]),
                    None => break,
                },
                c => text.push(c),
            }
        }
        Err("a quoted text does not end".to_owned())
    }

    /// The character that an escape of a Go string means, without those of single bytes.
    fn escaped(&mut self) -> Result<char, String> {
        let c = self.rest.next().ok_or("an escape does not end")?;
        Ok(match c {
            'a' => '\x07',
            'b' => '\x08',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\x0b',
            '\\' | '"' | '\'' | '/' | '|' => c,
            'u' => self.code_point(4)?,
            'U' => self.code_point(8)?,
            other => return Err(format!("unsupported escape \\{other}")),
        })
    }

    fn code_point(&mut self, digits: usize) -> Result<char, String> {
        let text: String = self.rest.by_ref().take(digits).collect();
        let number = u32::from_str_radix(&text, 16).ok();
        number
            .filter(|_| text.len() == digits)
            .and_then(char::from_u32)
            .ok_or_else(|| format!("invalid escape of {text:?}"))
    }

    fn while_char(&mut self, holds: impl Fn(char) -> bool) -> String {
        std::iter::from_fn(|| self.rest.next_if(|&c| holds(c))).collect()
    }

    fn skip_spaces(&mut self) {
        while self.rest.next_if(|c| c.is_whitespace()).is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Id, Kind, Labels};

    fn record() -> SnapshotRecord {
        let labels = [
            ("plain", "1"),
            ("containerd.io/gc.root", "yes, \"now\""),
            ("path", "/a b/c"),
        ];
        let labels: Labels = labels.map(|(k, v)| (k.into(), v.into())).into();
        let name = "k8s.io/3/sha256:ab".to_owned();
        SnapshotRecord::new(Id(3), Kind::Active, name, Some("p".into()), labels)
    }

    fn selects(filters: &[&str]) -> Result<bool, String> {
        let filters: Vec<String> = filters.iter().map(|&text| text.to_owned()).collect();
        let filters = Filters::parse(&filters).map_err(|error| error.to_string())?;
        Ok(filters.select(&record()))
    }

    #[test]
    fn filters_select_by_each_field_and_operator() {
        for (filters, expected) in [
            (&[][..], true),
            (&[""], true),
            (&["name==k8s.io/3/sha256:ab"], true),
            (&["name==\"k8s.io/3/sha256:ab\""], true),
            (&["name==k8s.io/3/sha256:abc"], false),
            (&["name!=x"], true),
            (&["kind==active"], true),
            (&["kind==Active"], false),
            (&["parent==p"], true),
            (&["parent!=\"\""], true),
            (&["labels.plain"], true),
            (&["labels.missing"], false),
            (&["labels.missing!=x"], true),
            (&["labels.missing==\"\""], false),
            (&["labels.\"containerd.io/gc.root\""], true),
            (&["labels.containerd.io"], false),
            (&["labels"], false),
            (&["name.more"], false),
            (&["created"], false),
            (&[r#"labels."containerd.io/gc.root"=="yes, \"now\"""#], true),
            (&[r#"labels.path=="\u002fa b/c""#], true),
            (&["labels.path~=/^\\/a/"], true),
            (&["labels.path~=|^/a\\sb|"], true),
            (&["labels.path~=\"^/a\\\\sb\""], true),
            (&["name~=sha256"], true),
            (&["name~=^sha256"], false),
            (&["kind==active,parent==p"], true),
            (&["kind==active , parent == q"], false),
            (&["kind==view", "parent==p"], true),
            (&["kind==view", "parent==q"], false),
        ] {
            assert_eq!(selects(filters), Ok(expected), "{filters:?}");
        }
    }

    #[test]
    fn invalid_filters_are_refused() {
        for (filter, expected) in [
            ("==x", "a field is missing"),
            ("name==", "a value is missing"),
            ("name=x", "unsupported operator \"=\""),
            ("name?", "an operator"),
            ("name==a b", "unexpected 'b'"),
            ("name==a,", "a field is missing"),
            ("labels.", "a field is missing"),
            ("name==\"a", "a quoted text does not end"),
            ("name==\"\\q\"", "unsupported escape"),
            ("name==\"\\u12\"", "invalid escape"),
            ("name~=/(/", "unclosed group"),
            ("name~=/((a{100}){100}){100}/", "exceeds size limit"),
            (
                &["name~=a"; 65].join(","),
                "more than 64 regular expressions",
            ),
        ] {
            let error = selects(&[filter]).unwrap_err();
            assert!(error.contains(expected), "{filter}: {error}");
        }
    }
}
