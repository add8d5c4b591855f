//! The mounts of a snapshot, in the form in which containerd gets them.

use std::path::Path;

use crate::protocol::Mount;
use crate::record::Labels;

/// The labels of a container's snapshot with the mappings of its user namespace, and the options of
/// a mount for these.
const MAPPINGS: [(&str, &str); 2] = [
    ("containerd.io/snapshot/uidmapping", "uidmap"),
    ("containerd.io/snapshot/gidmapping", "gidmap"),
];

/// Whether a mount can be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access<'p> {
    /// Read-only.
    Read,
    /// Changes go to this directory.
    Write(&'p Path),
}

/// The mount of a directory of the host.
pub fn of_directory(directory: &Path, is_writable: bool) -> Mount {
    let access = if is_writable { "rw" } else { "ro" };
    Mount {
        kind: "bind".to_owned(),
        source: text(directory),
        options: vec![access.to_owned(), "rbind".to_owned()],
    }
}

/// The mount of layers, the lowest first, by the helper `mount.bcow`, which keeps their merged
/// metadata in the file `merged`. `None` if there are no layers.
pub fn of_layers(
    layers: &[String],
    access: Access<'_>,
    merged: Option<&Path>,
    extra: &[String],
) -> Option<Mount> {
    let (lowest, rest) = layers.split_first()?;
    let mut options = vec!["allow_other".to_owned()];
    match access {
        Access::Read => options.push("ro".to_owned()),
        Access::Write(upper) => {
            options.push(format!("upper={}", text(upper)));
            // A container can still use the file system of a mount that was ended here.
            options.push("if_mounted=bind".to_owned());
        }
    }
    options.extend(rest.iter().map(|layer| format!("layer={layer}")));
    if let (Some(merged), [_, ..]) = (merged, rest) {
        options.push(format!("merged={}", text(merged)));
    }
    options.extend_from_slice(extra);
    Some(Mount {
        // mount.fuse3(8) runs the helper.
        kind: "fuse3.mount.bcow".to_owned(),
        source: lowest.clone(),
        options,
    })
}

/// The options of a mount that shows the owners of files to the user namespace in these labels. The
/// error says which label is invalid.
pub fn options_of_mapping(labels: &Labels) -> Result<Vec<String>, String> {
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    let is_range = |range: &&str| range.split(':').count() == 3 && range.split(':').all(is_number);
    let mut options = Vec::new();
    for (label, option) in MAPPINGS {
        for range in labels
            .get(label)
            .iter()
            .flat_map(|ranges| ranges.split(','))
        {
            if !is_range(&range) {
                return Err(format!(
                    "label {label}: {range:?} is not CONTAINER:HOST:COUNT"
                ));
            }
            options.push(format!("{option}={range}"));
        }
    }
    Ok(options)
}

/// The mounts for the unpacking of a layer, one on top of the other: the layers below, and
/// overlayfs on them. If overlayfs were alone, containerd would write to the upper itself, where a
/// hard link to a file of the layers below fails.
pub fn of_unpacking(lower: &Path, upper: &Path, work: &Path) -> Vec<Mount> {
    let overlay = Mount {
        kind: "overlay".to_owned(),
        source: "overlay".to_owned(),
        options: options_of_overlay(lower, upper, work),
    };
    vec![of_directory(lower, false), overlay]
}

/// The options of overlayfs, so that an upper has whole files and no redirects. `volatile`: the
/// commit of a layer makes the layer durable, and an upper is not used after a crash.
pub fn options_of_overlay(lower: &Path, upper: &Path, work: &Path) -> Vec<String> {
    let mut options = vec![
        format!("lowerdir={}", text(lower)),
        format!("upperdir={}", text(upper)),
        format!("workdir={}", text(work)),
    ];
    let others = [
        "index=off",
        "metacopy=off",
        "redirect_dir=nofollow",
        "volatile",
    ];
    options.extend(others.map(str::to_owned));
    options
}

/// Paths are in UTF-8: `SnapshotterRoot` refuses a root that is not.
pub fn text(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_mounted_from_the_lowest() {
        let layers = ["/r/layers/1.bcow", "/r/layers/4.bcow"].map(str::to_owned);
        let upper = Path::new("/r/5/upper");
        let extra = ["writeback".to_owned()];
        let merged = Some(Path::new("/r/merged/4.bcow"));
        let mount = of_layers(&layers, Access::Write(upper), merged, &extra).unwrap();
        assert_eq!(mount.source, "/r/layers/1.bcow");
        assert_eq!(
            mount.options.join(","),
            "allow_other,upper=/r/5/upper,if_mounted=bind,layer=/r/layers/4.bcow,\
             merged=/r/merged/4.bcow,writeback"
        );
        let view = of_layers(&layers[..1], Access::Read, merged, &[]).unwrap();
        assert_eq!(view.options.join(","), "allow_other,ro");
        assert_eq!(of_layers(&[], Access::Read, merged, &[]), None);
    }
    #[test]
    fn a_user_namespace_is_an_option_for_each_range() {
        let labels = |users: &str| {
            let pairs = [
                (MAPPINGS[0].0, users),
                (MAPPINGS[1].0, "0:5:1"),
                ("other", "x"),
            ];
            pairs
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into()
        };
        let options = options_of_mapping(&labels("0:1000:1,1:100000:65535")).unwrap();
        assert_eq!(
            options.join(","),
            "uidmap=0:1000:1,uidmap=1:100000:65535,gidmap=0:5:1"
        );
        assert_eq!(options_of_mapping(&Labels::new()).unwrap(), [""; 0]);
        for bad in ["", "0:1", "0:1:2:3", "0:1:2,suid", "0:1:-2"] {
            let error = options_of_mapping(&labels(bad)).unwrap_err();
            assert!(error.contains("uidmapping"), "{bad}: {error}");
        }
    }
}
