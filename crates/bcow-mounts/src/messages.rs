//! Messages for the user of a command.

use std::fmt::Display;

use bcow_images::image::Warnings;

/// Takes messages for the user.
pub trait Messages: Warnings {
    /// A message that is neither an error nor a warning.
    fn status(&self, text: &dyn Display);
}
