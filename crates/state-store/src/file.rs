//! A store in a folder of this machine, for one server.
//!
//! The database is [redb](https://docs.rs/redb): pure Rust, one file, and only libc as a dependency. A commit is on the
//! disk when it returns, so a sequence survives a killed server and a power failure. Each call of [`Store::apply`]
//! costs one sync of the disk, whatever the number of its operations. Stores that write a log and sync later are
//! faster, but lose the last steps in a power failure, against the promise of `durability: step`.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};
use redb::backends::FileBackend;
use redb::{AccessGuard, Builder, Database, DatabaseError, ReadableTable, StorageError, Table, TableDefinition};

use crate::record::{Effect, Op, Record, Reply, Settings, Store, StoreError, Token};

const FILE: &str = "sequences.redb";
const CACHE_BYTES: usize = 64 << 20;
/// redb's limit is 3 GiB.
const MOST_BYTES: usize = 1 << 30;
/// Expired records that one call removes, so that no call takes long.
const SWEPT_AT_ONCE: usize = 256;

/// Key → token (none: ended), and when the record expires.
const OWNERS: TableDefinition<'_, &[u8], (Option<[u8; Token::BYTES]>, u64)> = TableDefinition::new("owners");
const BLOBS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("blobs");

/// The folders that are open in this process: the models of a server may share one. A folder stays in the list until
/// its database is closed.
static OPEN: Mutex<BTreeMap<PathBuf, Weak<Shared>>> = Mutex::new(BTreeMap::new());
static CLOSED: Condvar = Condvar::new();

/// A view of a folder, with settings of its own.
pub struct FileStore {
    shared: Arc<Shared>,
    ttl: Duration,
}

struct Shared {
    folder: PathBuf,
    /// `None` when it is closed.
    database: Option<Database>,
    /// Where and when the next search for expired records begins.
    sweep: Mutex<Sweep>,
}

#[derive(Default)]
struct Sweep {
    from: Vec<u8>,
    due_ms: u64,
}

impl FileStore {
    /// Opens the folder. Creates it if it doesn't exist.
    pub fn open(folder: &Path, settings: Settings) -> Result<Self, StoreError> {
        let io = |error: std::io::Error| StoreError::Unreachable(format!("{}: {error}", folder.display()));
        // A state can contain what a person said, so no other user may read it.
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(io)?;
        let folder = folder.canonicalize().map_err(io)?;
        let mut open = OPEN.lock();
        let shared = loop {
            match open.get(&folder).map(Weak::upgrade) {
                Some(Some(shared)) => break shared,
                // A model that was unloaded is closing it.
                Some(None) => CLOSED.wait(&mut open),
                None => {
                    let database = Some(open_database(&folder)?);
                    let shared = Arc::new(Shared { folder: folder.clone(), database, sweep: Mutex::default() });
                    open.insert(folder, Arc::downgrade(&shared));
                    break shared;
                }
            }
        };
        Ok(Self { shared, ttl: settings.ttl })
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.database = None;
        OPEN.lock().remove(&self.folder);
        CLOSED.notify_all();
    }
}

fn open_database(folder: &Path) -> Result<Database, StoreError> {
    let path = folder.join(FILE);
    let io = |error: std::io::Error| StoreError::Unreachable(format!("{}: {error}", path.display()));
    // redb's own way to make a file would let other users read it.
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(io)?;
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    let backend = FileBackend::new(file).and_then(|backend| builder.create_with_backend(backend));
    let database = backend.map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => StoreError::InUse(format!(
            "{} is in use by another server: give each server a folder of its own, or use Valkey or Redis",
            path.display()
        )),
        error => damaged(format!("{}: {error}", path.display())),
    })?;
    // So that reading never meets a missing table.
    let made = database.begin_write().map_err(damaged)?;
    made.open_table(OWNERS).map_err(damaged)?;
    made.open_table(BLOBS).map_err(damaged)?;
    made.commit().map_err(damaged)?;
    Ok(database)
}

impl Store for FileStore {
    fn apply(&self, operations: &[(&[u8], Op<'_>)]) -> Result<Vec<Reply>, StoreError> {
        let now = now_ms();
        let ttl = u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX);
        let database = self.shared.database.as_ref().ok_or_else(|| damaged("it is closed"))?;
        let write = database.begin_write().map_err(damaged)?;
        let replies = {
            let mut tables = Tables {
                owners: write.open_table(OWNERS).map_err(damaged)?,
                blobs: write.open_table(BLOBS).map_err(damaged)?,
                now,
                expires: now.saturating_add(ttl),
            };
            let replies = operations.iter().map(|(key, operation)| tables.apply(key, operation));
            let replies = replies.collect::<Result<Vec<_>, _>>()?;
            // In the same transaction, because each commit costs a sync of the disk.
            self.shared.sweep(&mut tables, ttl)?;
            replies
        };
        write.commit().map_err(damaged)?;
        Ok(replies)
    }

    fn is_shared(&self) -> bool {
        false
    }
}

struct Tables<'a> {
    owners: Table<'a, &'static [u8], (Option<[u8; Token::BYTES]>, u64)>,
    blobs: Table<'a, &'static [u8], &'static [u8]>,
    now: u64,
    expires: u64,
}

impl Tables<'_> {
    fn apply(&mut self, key: &[u8], operation: &Op<'_>) -> Result<Reply, StoreError> {
        let owner = self.owners.get(key).map_err(failed)?.map(|owner| owner.value());
        // Expired records are removed later, and must not be found until then.
        let live = owner.filter(|(_, expires)| *expires > self.now);
        let (effect, reply) = {
            let found = self.blobs.get(key).map_err(failed)?;
            let blob = found.as_ref().map_or(&[][..], AccessGuard::value);
            let record = match live {
                None => None,
                Some((None, _)) => Some(Record::Ended(blob)),
                // Both tables are written together, so only a damaged file has one without the other.
                Some((Some(_), _)) if found.is_none() => None,
                Some((Some(token), _)) => Some(Record::Live { token: Token::from_bytes(token), blob }),
            };
            operation.apply(record.as_ref())
        };
        match effect {
            Effect::Keep => {}
            Effect::Write(token, blob) => {
                self.put(key, blob)?;
                self.own(key, Some(token))?;
            }
            Effect::Give(token) => self.own(key, Some(token))?,
            Effect::End(answer) => {
                if answer.is_empty() {
                    self.blobs.remove(key).map_err(failed)?;
                } else {
                    self.put(key, answer)?;
                }
                self.own(key, None)?;
            }
        }
        Ok(reply)
    }

    fn put(&mut self, key: &[u8], blob: &[u8]) -> Result<(), StoreError> {
        if blob.len() > MOST_BYTES {
            return Err(StoreError::TooLarge { bytes: blob.len(), most: MOST_BYTES });
        }
        self.blobs.insert(key, blob).map_err(failed)?;
        Ok(())
    }

    fn own(&mut self, key: &[u8], token: Option<Token>) -> Result<(), StoreError> {
        self.owners.insert(key, (token.map(|token| *token.bytes()), self.expires)).map_err(failed)?;
        Ok(())
    }
}

impl Shared {
    /// Removes some expired records. Each is looked at about once in a quarter of `ttl`.
    fn sweep(&self, tables: &mut Tables<'_>, ttl: u64) -> Result<(), StoreError> {
        let mut sweep = self.sweep.lock();
        if sweep.from.is_empty() && tables.now < sweep.due_ms {
            return Ok(());
        }
        let mut expired = Vec::new();
        let mut next = Vec::new();
        for (seen, entry) in tables.owners.range(sweep.from.as_slice()..).map_err(failed)?.enumerate() {
            let (key, owner) = entry.map_err(failed)?;
            if seen == SWEPT_AT_ONCE {
                next = key.value().to_vec();
                break;
            }
            if owner.value().1 <= tables.now {
                expired.push(key.value().to_vec());
            }
        }
        for key in expired {
            tables.owners.remove(key.as_slice()).map_err(failed)?;
            tables.blobs.remove(key.as_slice()).map_err(failed)?;
        }
        if next.is_empty() {
            sweep.due_ms = tables.now.saturating_add(ttl / 4);
        }
        sweep.from = next;
        Ok(())
    }
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn failed(error: StorageError) -> StoreError {
    match error {
        StorageError::Io(error) if error.kind() == std::io::ErrorKind::StorageFull => {
            StoreError::Refuses(format!("the disk is full: {error}"))
        }
        StorageError::Io(error) => StoreError::Unreachable(error.to_string()),
        error => StoreError::Damaged(error.to_string()),
    }
}

fn damaged(error: impl std::fmt::Display) -> StoreError {
    StoreError::Damaged(error.to_string())
}

#[cfg(test)]
mod tests {
    use redb::{ReadableDatabase, ReadableTableMetadata};

    use super::*;

    fn token(number: u8) -> Token {
        Token::from_bytes([number; Token::BYTES])
    }

    fn settings(ttl: Duration) -> Settings {
        Settings { ttl, timeout: Duration::from_secs(1), server: None, replicas: 0 }
    }

    #[test]
    fn a_record_is_there_when_the_folder_is_opened_again() {
        let folder = tempfile::tempdir().unwrap();
        let open = || FileStore::open(&folder.path().join("a/b"), settings(Duration::from_secs(60))).unwrap();
        let start = Op::Restore { token: token(1), blob: b"one" };
        assert_eq!(open().apply(&[(b"k", start)]).unwrap(), [Reply::Done]);
        let again = open();
        assert_eq!(
            again.apply(&[(b"k", Op::Resume { token: token(2), asks: false })]).unwrap(),
            [Reply::Taken(b"one".to_vec())]
        );
        assert_eq!(again.apply(&[(b"k", Op::Check { token: token(1) })]).unwrap(), [Reply::Moved]);
    }

    #[test]
    fn models_of_a_process_share_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let open = || FileStore::open(folder.path(), settings(Duration::from_secs(60))).unwrap();
        let (one, other) = (open(), open());
        one.apply(&[(b"k", Op::Start { token: token(1), asks: false })]).unwrap();
        assert_eq!(other.apply(&[(b"k", Op::Check { token: token(1) })]).unwrap(), [Reply::Done]);
    }

    #[test]
    fn a_folder_is_closed_and_opened_again_at_the_same_moment() {
        let folder = tempfile::tempdir().unwrap();
        let open = || FileStore::open(folder.path(), settings(Duration::from_secs(60))).unwrap();
        std::thread::scope(|scope| {
            for number in 0..4 {
                scope.spawn(move || {
                    for _ in 0..20 {
                        let start = Op::Start { token: token(number), asks: false };
                        assert_eq!(open().apply(&[(&[number], start)]).unwrap(), [Reply::Done]);
                    }
                });
            }
        });
    }

    #[test]
    fn expired_records_are_not_found_and_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let short = FileStore::open(folder.path(), settings(Duration::ZERO)).unwrap();
        let keys: Vec<_> = (0..600_u32).map(u32::to_be_bytes).collect();
        let start = Op::Start { token: token(1), asks: false };
        let starts: Vec<_> = keys.iter().map(|key| (key.as_slice(), start)).collect();
        short.apply(&starts).unwrap();
        assert_eq!(short.apply(&[(&[0; 4], Op::Check { token: token(1) })]).unwrap(), [Reply::Absent]);
        for _ in 0..4 {
            short.apply(&[(b"k", Op::Start { token: token(1), asks: false })]).unwrap();
        }
        let read = short.shared.database.as_ref().unwrap().begin_read().unwrap();
        let records = read.open_table(OWNERS).unwrap().len().unwrap();
        assert!(records < 10, "{records}");
    }

    #[test]
    fn a_file_that_is_no_database_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(FILE), "something else").unwrap();
        let error = FileStore::open(folder.path(), settings(Duration::from_secs(1))).err().unwrap().to_string();
        assert!(error.contains("damaged") && error.contains(FILE), "{error}");
    }
}
