//! The text of `bcow inspect`.

use std::fmt::Display;

use bcow_images::inspect::{
    DiskFacts, ImageFacts, LayerFacts, NamedBytes, StackFacts, StorageClass,
};
use serde_json::Value;

use crate::error::CommandError;
use crate::names::printable;
use crate::size::{Count, Human, plural};
use crate::ui::Output;

pub fn print(facts: &ImageFacts, out: &mut Output) -> Result<(), CommandError> {
    let (format, geometry) = (&facts.format, &facts.geometry);
    let sealed = if format.sealed { "sealed" } else { "writable" };
    let (name, purpose) = (&facts.name, format.purpose);
    writeln!(out, "{name}: {sealed} BCoW {purpose}, version 1")?;
    line(out, "features", list(&format.features))?;
    line(out, "file", exact(geometry.file_bytes))?;
    line(out, "address space", exact(geometry.size))?;
    let (regions, bytes) = (Count(geometry.regions), Human(geometry.region_bytes));
    line(out, "regions", format_args!("{regions} of {bytes}"))?;
    if let Some(list) = &facts.prefetch {
        let (bytes, ranges) = (exact(list.bytes), plural(list.ranges as u64, "range"));
        line(out, "start reads", format_args!("{bytes} in {ranges}"))?;
    }
    if let Some(tree) = &facts.merkle {
        line(out, "merkle root", &tree.root)?;
    }
    for (index, backing) in facts.backings.iter().enumerate() {
        let (name, size) = (printable(&backing.name), Human(backing.size));
        line(
            out,
            &format!("backing {index}"),
            format_args!("{name} ({size})"),
        )?;
    }
    if let Some(disk) = &facts.disk {
        print_disk(disk, out)?;
    }
    print_source(facts, out)?;
    if let Some(stack) = &facts.stack {
        print_stack(stack, out)?;
    }
    print_storage(facts, out)?;
    print_filesystem(facts, out)
}

fn print_source(facts: &ImageFacts, out: &mut Output) -> Result<(), CommandError> {
    let metadata = &facts.metadata;
    if metadata.is_null() {
        return Ok(());
    }
    writeln!(out, "\nSource")?;
    let platform = platform(&metadata["config"]);
    for (name, value) in [
        ("made by", &metadata["tool"]),
        ("created", &metadata["created"]),
        ("image ID", &metadata["config_digest"]),
        ("platform", &platform),
    ] {
        if let Some(text) = text(value) {
            line(out, name, text)?;
        }
    }
    if !facts.other_platforms.is_empty() {
        line(out, "other platforms", facts.other_platforms.join(", "))?;
    }
    print_start(&metadata["config"]["config"], out)?;
    let layers = metadata["layers"].as_array().map_or(&[][..], Vec::as_slice);
    if !layers.is_empty() {
        writeln!(out, "\nLayers, lowest first")?;
    }
    for layer in layers {
        let name = text(&layer["diff_id"])
            .or_else(|| text(&layer["digest"]))
            .unwrap_or_else(|| "(no digest)".into());
        let sizes: Vec<String> = [("stored_bytes", "as stored"), ("tar_bytes", "as tar")]
            .iter()
            .filter_map(|(key, what)| {
                // A stack shows its layers and their sources separately.
                let bytes = layer[key]
                    .as_u64()
                    .or_else(|| layer["source"][key].as_u64());
                Some(format!("{} {what}", Human(bytes?)))
            })
            .collect();
        writeln!(out, "  {name}  {}", sizes.join(", "))?;
    }
    Ok(())
}

/// What a container of the image starts, from the image's configuration.
fn print_start(config: &Value, out: &mut Output) -> Result<(), CommandError> {
    for (name, key) in [
        ("entrypoint", "Entrypoint"),
        ("command", "Cmd"),
        ("user", "User"),
        ("directory", "WorkingDir"),
    ] {
        if let Some(text) = text(&config[key]).filter(|text| !matches!(&**text, "" | "[]")) {
            line(out, name, text)?;
        }
    }
    let variables = config["Env"].as_array().into_iter().flatten();
    for (number, variable) in variables.filter_map(text).enumerate() {
        line(out, if number == 0 { "environment" } else { "" }, variable)?;
    }
    Ok(())
}

/// The classes that the output shows: a disk has only one.
fn classes(facts: &ImageFacts) -> Vec<(&'static str, &StorageClass)> {
    match facts.disk {
        Some(_) => vec![("content", &facts.storage.content)],
        None => vec![
            ("file content", &facts.storage.content),
            ("file system", &facts.storage.metadata),
        ],
    }
}

fn print_storage(facts: &ImageFacts, out: &mut Output) -> Result<(), CommandError> {
    writeln!(
        out,
        "\n{:<18} {:>12} {:>12} {:>12} {:>7} {:>10} {:>10}",
        "Storage", "size", "of it zero", "stored", "ratio", "zstd", "raw"
    )?;
    for (name, class) in classes(facts) {
        writeln!(
            out,
            "  {name:<16} {:>12} {:>12} {:>12} {:>7} {:>10} {:>10}",
            Human(class.bytes),
            Human(class.zero_bytes),
            Human(class.stored_bytes),
            class
                .ratio()
                .map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            Count(class.zstd_blocks),
            Count(class.raw_blocks),
        )?;
    }
    let window_bytes = facts.storage.content.backing_bytes + facts.storage.metadata.backing_bytes;
    if window_bytes > 0 {
        let name = if facts.disk.is_some() { "backing" } else { "windows" };
        writeln!(out, "  {name:<16} {:>12}", Human(window_bytes))?;
    }
    for (name, bytes) in [
        ("Merkle tree", facts.storage.merkle_tree_bytes),
        ("metadata", facts.storage.json_bytes.into()),
    ] {
        if bytes > 0 {
            writeln!(out, "  {name:<16} {:>38}", Human(bytes))?;
        }
    }
    writeln!(
        out,
        "\n{:<18} {:>12} {:>12}",
        "Block sizes", "blocks", "stored"
    )?;
    for (name, class) in classes(facts) {
        for size in class.block_sizes.values() {
            writeln!(
                out,
                "  {:<16} {:>12} {:>12}  {name}",
                Human(size.block_bytes),
                Count(size.blocks),
                Human(size.stored_bytes)
            )?;
        }
    }
    Ok(())
}

fn print_filesystem(facts: &ImageFacts, out: &mut Output) -> Result<(), CommandError> {
    let Some(erofs) = &facts.erofs else {
        return Ok(());
    };
    writeln!(out, "\nEROFS")?;
    line(out, "inodes", Count(erofs.inodes))?;
    let (blocks, bytes) = (Count(erofs.blocks), Human(erofs.block_bytes.into()));
    line(out, "blocks", format_args!("{blocks} of {bytes}"))?;
    line(out, "features", list(&erofs.features))?;
    line(out, "uuid", &erofs.uuid)?;
    let content = &facts.metadata["content"];
    if let Some(bytes) = content["file_bytes"].as_u64() {
        line(out, "file content", exact(bytes))?;
    }
    if let Some(bytes) = content["deduplicated_bytes"].as_u64() {
        line(out, "deduplicated", format_args!("{} of it", exact(bytes)))?;
    }
    Ok(())
}

fn print_disk(disk: &DiskFacts, out: &mut Output) -> Result<(), CommandError> {
    if let Some(layout) = &disk.layout {
        line(out, "layout", printable(layout))?;
    }
    if disk.log_bytes > 0 {
        line(
            out,
            "record log",
            format_args!("room for {}", Human(disk.log_bytes)),
        )?;
    }
    if let Some(bytes) = disk.free_bytes.filter(|_| disk.log_bytes > 0) {
        line(out, "free in the file", Human(bytes))?;
    }
    if let Some(text) = &disk.in_use {
        line(out, "in use", printable(text))?;
    }
    if disk.chain.len() < 2 {
        return Ok(());
    }
    writeln!(out, "\nChain, the disk first")?;
    for (index, link) in disk.chain.iter().enumerate() {
        let state = if link.sealed { "sealed" } else { "writable" };
        writeln!(
            out,
            "  {index:>2} {}: {state}, {} ({} bytes), file of {}",
            printable(link.path.as_ref().unwrap_or(&link.name)),
            Human(link.size),
            Count(link.size),
            Human(link.file_bytes)
        )?;
    }
    Ok(())
}

fn print_stack(stack: &StackFacts, out: &mut Output) -> Result<(), CommandError> {
    writeln!(
        out,
        "\n{:<24} {:>10} {:>19} {:>19} {:>19} {:>10}",
        "Stack, top layer first", "file", "adds", "hides", "hidden", "shares"
    )?;
    let digits = stack.layers.len().to_string().len();
    for (index, layer) in stack.layers.iter().enumerate().rev() {
        let name = format!("{:>digits$} {}", index + 1, layer.short);
        let amounts = layer
            .path
            .as_ref()
            .map(|_| [layer.adds, layer.hides, layer.hidden]);
        row(out, &name, layer.file_bytes, amounts, layer.shared_bytes)?;
    }
    let total = |of: fn(&LayerFacts) -> Option<NamedBytes>| stack.layers.iter().map(of).sum();
    let totals = [
        total(|layer| layer.adds),
        total(|layer| layer.hides),
        total(|layer| layer.hidden),
    ];
    row(
        out,
        "all",
        stack.layers_bytes,
        Some(totals),
        stack.shared_bytes,
    )?;
    let source = match stack.source_bytes {
        0 => String::new(),
        bytes => format!("; {} at the source", Human(bytes)),
    };
    writeln!(
        out,
        "  {} in {}, {}; with the stack {}{source}",
        plural(stack.layers.len() as u64, "layer"),
        plural(stack.files, "file"),
        Human(stack.layers_bytes),
        Human(stack.layers_bytes.saturating_add(stack.stack_bytes)),
    )?;
    if stack.shared_bytes > 0 {
        writeln!(
            out,
            "  {} of content are shared with lower layers, which saves about {}",
            Human(stack.shared_bytes),
            Human(stack.saved_bytes_estimate)
        )?;
    }
    Ok(())
}

/// Prints a layer, without `amounts` a missing one.
fn row(
    out: &mut Output,
    name: &str,
    file_bytes: u64,
    amounts: Option<[Option<NamedBytes>; 3]>,
    shared_bytes: u64,
) -> Result<(), CommandError> {
    write!(out, "  {name:<22} {:>10}", Human(file_bytes))?;
    let Some(amounts) = amounts else {
        return writeln!(out, "  missing");
    };
    for amount in amounts {
        match amount {
            Some(NamedBytes { entries, bytes }) => {
                write!(out, " {:>8} {:>10}", Count(entries), Human(bytes))?;
            }
            None => write!(out, " {:>19}", "?")?,
        }
    }
    writeln!(out, " {:>10}", Human(shared_bytes))
}

fn line(out: &mut Output, name: &str, value: impl Display) -> Result<(), CommandError> {
    writeln!(out, "  {name:<16} {value}")
}

/// The platform in an image's configuration: OS/ARCH[/VARIANT].
fn platform(config: &Value) -> Value {
    let field = |name: &str| config[name].as_str().filter(|text| !text.is_empty());
    match (field("os"), field("architecture")) {
        (Some(os), Some(architecture)) => {
            let parts = [Some(os), Some(architecture), field("variant")];
            let parts: Vec<&str> = parts.into_iter().flatten().collect();
            parts.join("/").into()
        }
        _ => Value::Null,
    }
}

/// A JSON value from the file, for the terminal.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(printable(text).into_owned()),
        other => Some(printable(&other.to_string()).into_owned()),
    }
}

fn list(items: &[String]) -> String {
    match items {
        [] => "none".to_owned(),
        items => items.join(", "),
    }
}

fn exact(bytes: u64) -> String {
    match bytes {
        0..1024 => plural(bytes, "byte"),
        _ => format!("{} ({} bytes)", Human(bytes), Count(bytes)),
    }
}
