//! Names are bytes. A terminal gets them quoted as GNU ls quotes them, a pipe gets them
//! unchanged. JSON gets text, and also hexadecimal if the name is not valid UTF-8.

use std::borrow::Cow;

use bcow::format::hex;

/// A name for a terminal: unchanged if it is harmless, otherwise quoted so that a POSIX shell with
/// `$'...'` reads the same bytes back, and so that no control character reaches the terminal.
pub fn quoted(name: &[u8]) -> String {
    if name.is_empty() {
        return "''".to_owned();
    }
    let mut pieces = Vec::new();
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            // Bidirectional and invisible characters are escaped like control characters: they
            // can make one name look like another.
            if c.is_control() || is_invisible(c) {
                let mut buf = [0; 4];
                pieces.extend(c.encode_utf8(&mut buf).bytes().map(Piece::Byte));
            } else {
                pieces.push(Piece::Char(c));
            }
        }
        pieces.extend(chunk.invalid().iter().copied().map(Piece::Byte));
    }
    let harmless = pieces
        .iter()
        .all(|p| matches!(p, Piece::Char(c) if is_plain(*c)))
        && !name.starts_with(b"~")
        && !name.starts_with(b"#");
    if harmless {
        return String::from_utf8_lossy(name).into_owned();
    }

    let mut out = String::from("'");
    let mut in_escape = false;
    for piece in pieces {
        match piece {
            Piece::Char('\'') => {
                close(&mut out, &mut in_escape);
                out += "'\\''";
            }
            Piece::Char(c) => {
                close(&mut out, &mut in_escape);
                out.push(c);
            }
            Piece::Byte(byte) => {
                if !in_escape {
                    out += "'$'";
                    in_escape = true;
                }
                match byte {
                    b'\n' => out += "\\n",
                    b'\t' => out += "\\t",
                    b'\r' => out += "\\r",
                    _ => out += &format!("\\{byte:03o}"),
                }
            }
        }
    }
    out.push('\'');
    out
}

/// Text from an image or a library for one line of a terminal: control characters are escaped.
pub fn printable(text: &str) -> Cow<'_, str> {
    let dangerous = |c: char| c.is_control() || is_invisible(c);
    if !text.contains(dangerous) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if dangerous(c) {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// A name for JSON. If it is not UTF-8, the text has U+FFFD for the invalid bytes.
pub fn text(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// All bytes of a name in hexadecimal, for JSON, if [`text`] does not have them.
pub fn text_hex(name: &[u8]) -> Option<String> {
    std::str::from_utf8(name).is_err().then(|| hex(name))
}

#[derive(Clone, Copy)]
enum Piece {
    Char(char),
    Byte(u8),
}

fn close(out: &mut String, in_escape: &mut bool) {
    if *in_escape {
        out.push_str("''");
        *in_escape = false;
    }
}

fn is_plain(c: char) -> bool {
    c.is_alphanumeric() || "_-./+,:@%^~#=]{}".contains(c) || (!c.is_ascii() && !c.is_whitespace())
}

/// Bidirectional controls, zero-width characters and the like.
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_as_gnu_ls_quotes_them() {
        for (name, text) in [
            (&b"plain.txt"[..], "plain.txt"),
            (b"two words", "'two words'"),
            (b"it's", "'it'\\''s'"),
            (b"new\nline", "'new'$'\\n''line'"),
            (b"\x1b[31m", "''$'\\033''[31m'"),
            (b"\xff\xfe", "''$'\\377\\376'"),
            (b"~root", "'~root'"),
            (b"", "''"),
            ("grün".as_bytes(), "grün"),
            ("a\u{202e}b".as_bytes(), "'a'$'\\342\\200\\256''b'"),
        ] {
            assert_eq!(quoted(name), text);
        }
    }

    #[test]
    fn a_shell_reads_quoted_names_back() {
        for name in [
            &b"a b'c\n\xff\x01x"[..],
            b"$(id)`x`\\n",
            b"*?[",
            b"\"",
            b"'",
            b"\n'\n",
        ] {
            let script = format!("printf %s {}", quoted(name));
            let output = std::process::Command::new("bash")
                .args(["-c", &script])
                .output()
                .expect("bash runs");
            assert_eq!(output.stdout, name, "{script}");
        }
    }

    #[test]
    fn json_keeps_bytes_that_are_no_text() {
        assert_eq!((text(b"ok\\"), text_hex(b"ok\\")), ("ok\\".into(), None));
        assert_eq!(text(b"a\xff"), "a\u{fffd}");
        assert_eq!(text_hex(b"a\xff"), Some("61ff".into()));
    }
}
