//! scratch
use bcow_oci::*;
struct P;
impl Progress for P {
    fn warning(&self, m: &str) {
        eprintln!("warning: {m}")
    }
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let mut o = ConvertOptions::default();
    for x in &a[3..] {
        match x.as_str() {
            "--plain" => o.plain = true,
            "--no-verify" => o.verify = false,
            x if x.starts_with("-j") => o.threads = x[2..].parse().unwrap(),
            x if x.starts_with("--platform=") => o.platform = Some(x[11..].parse().unwrap()),
            _ => panic!(),
        }
    }
    let s: Source = match a[1].parse() {
        Ok(s) => s,
        Err(e) => {
            eprintln!("error: {e}");
            std::process::exit(2)
        }
    };
    match convert(&s, a[2].as_ref(), &o, &P) {
        Ok(r) => eprintln!(
            "entries {} content {} dedup {} hidden {} size {} file {}",
            r.entries, r.content_bytes, r.deduplicated_bytes, r.hidden_bytes, r.size, r.file_bytes
        ),
        Err(e) => {
            let mut t: &dyn std::error::Error = &e;
            eprint!("error: {t}");
            while let Some(s) = t.source() {
                eprint!(": {s}");
                t = s;
            }
            eprintln!();
            if let Some(h) = e.hint() {
                eprintln!("hint: {h}")
            }
            std::process::exit(1)
        }
    }
}
