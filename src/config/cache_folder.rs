//! The folder where TensorRT's engines are kept if the configuration names none.
//!
//! An engine is code that the server runs, so only the server's user may write to the folder.

use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Its name in the user's cache folder.
const NAME: &str = "triton-stateful";

/// Write permission of the group and of all users.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Returns the folder, which is made if it is missing, or why it cannot be used.
pub fn private() -> Result<PathBuf, String> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let parent = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    make_private(&parent.ok_or("neither XDG_CACHE_HOME nor HOME names a folder")?)
}

fn make_private(parent: &Path) -> Result<PathBuf, String> {
    let folder = parent.join(NAME);
    let failed = |why: String| format!("{} {why}", folder.display());
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    let metadata = made.and_then(|()| folder.metadata());
    let metadata = metadata.map_err(|error| failed(format!("cannot be made: {error}")))?;
    let user = rustix::process::geteuid().as_raw();
    if metadata.uid() != user {
        return Err(failed(format!("belongs to user {}, and the server runs as user {user}", metadata.uid())));
    }
    if metadata.mode() & WRITABLE_BY_OTHERS != 0 {
        return Err(failed(format!("can be written by others (mode {:o})", metadata.mode() & 0o777)));
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn the_folder_is_the_servers_alone_or_not_used() {
        let users = std::env::temp_dir().join(format!("triton-stateful-cache-folder-{}", std::process::id()));
        let folder = users.join("cache").join(NAME);
        for _ in 0..2 {
            assert_eq!(make_private(&users.join("cache")).unwrap(), folder);
            assert_eq!(folder.metadata().unwrap().mode() & 0o777, 0o700);
        }
        for mode in [0o770, 0o707] {
            fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
            let error = make_private(&users.join("cache")).unwrap_err();
            assert!(error.contains(folder.to_str().unwrap()) && error.contains(&format!("{mode:o}")), "{error}");
        }
        fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
        // Only root can give a folder away.
        if rustix::process::geteuid().is_root() {
            chown(&folder, Some(12345), None).unwrap();
            let error = make_private(&users.join("cache")).unwrap_err();
            assert!(error.contains("12345"), "{error}");
        }
        fs::write(users.join("file"), "").unwrap();
        let error = make_private(&users.join("file")).unwrap_err();
        assert!(error.contains("cannot be made"), "{error}");
        fs::remove_dir_all(users).unwrap();
    }
}
