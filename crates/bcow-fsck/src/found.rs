//! The image to which a name leads, before its header is checked.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::{OpenOptions, Storage};
use bcow_images::args::WHOLE_IMAGE;
use bcow_images::error::CommandError;
use bcow_images::image::{cannot_open, refuse_what_is_no_file};
use bcow_images::remote::{self, Pinned, RemoteArgs, RemoteImage};
use bcow_images::{Name, NameParts};
use bcow_oci::LocalImage;
use bcow_oci::store::{self, Located, Opened, Places, RemoteFiles, StoreError};

pub enum Found {
    /// On this machine.
    Here {
        shown: PathBuf,
        name: LocalImage,
        located: Located,
    },
    /// On another machine. It can be read, but not repaired.
    There(Box<RemoteImage>),
}

impl Found {
    pub fn of(name: &Name, args: &RemoteArgs, pinned: Pinned) -> Result<Self, CommandError> {
        refuse_what_is_no_file(name)?;
        match (name.parts(), name.local()) {
            (NameParts::Url(url), _) => {
                remote::open(url, args, pinned).map(|image| Found::There(Box::new(image)))
            }
            (_, Some(local)) => match store::locate(&local) {
                Ok(located) => Ok(Found::Here {
                    shown: name.shown().to_owned(),
                    name: local,
                    located,
                }),
                Err(error) => Err(cannot_open(name.shown(), &error)),
            },
            (_, None) => Err(WHOLE_IMAGE.refuse(name).into()),
        }
    }

    /// The name for messages: without the query of a URL.
    pub fn shown(&self) -> &Path {
        match self {
            Found::Here { shown, .. } => shown,
            Found::There(image) => image.name.shown(),
        }
    }

    /// Its file: of a stack, the stack alone.
    pub fn storage(&self) -> Arc<dyn Storage> {
        match self {
            Found::Here { located, .. } => located.file.clone(),
            Found::There(image) => image.storage.clone(),
        }
    }

    /// Finds the files below an image on another machine.
    pub fn remote_files(&self) -> Option<&Arc<dyn RemoteFiles>> {
        match self {
            Found::Here { .. } => None,
            Found::There(image) => image.files.as_ref(),
        }
    }

    /// Opens the image with the files below it. `storage` reads the file of an image on another
    /// machine.
    pub fn open(
        &self,
        storage: Arc<dyn Storage>,
        places: Places<'_>,
    ) -> Result<Opened, StoreError> {
        let options = OpenOptions::default();
        match self {
            Found::Here { name, .. } => store::open(name, places, &options),
            Found::There(_) => {
                store::open_remote(self.shown().to_owned(), storage, places, &options)
            }
        }
    }
}
