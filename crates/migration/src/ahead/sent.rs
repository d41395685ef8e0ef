//! What this node has sent ahead of the files of its services, and to whom. Nothing is open of what is not being sent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use godwit_engine::tree::{Item, Round, TreeError, TreeSender};

use super::OLDEST;
use crate::machine::available_memory;
use crate::service::Service;

/// Most memory for what is known of all that was sent, bytes: hashes of 64 GiB of files.
const MOST_MEMORY: u64 = 256 << 20;

/// Of which service, and to which node.
type Key = (String, String);

/// All that was sent ahead.
#[derive(Debug, Default)]
pub struct SentFiles(Mutex<HashMap<Key, Sent>>);

#[derive(Debug)]
struct Sent {
    epoch: u64,
    token: Vec<u8>,
    tree: TreeSender,
    since: Instant,
}

impl SentFiles {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Sent>> {
        // Nothing can panic while the map is changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was sent of the files that `of` is of into the directory that `destination` has under this token; none where this
    /// node does not know. No one else has it until what is returned is dropped.
    pub(crate) fn lend(
        self: &Arc<Self>,
        service: &Service,
        destination: &str,
        token: &[u8],
        of: &TreeSender,
    ) -> Option<Lent> {
        if token.is_empty() {
            // Perhaps it has one that is in use.
            return None;
        }
        let key = (service.id.clone(), destination.to_owned());
        let mut all = self.lock();
        let sent = all.get(&key)?;
        if sent.token == token && sent.epoch == service.epoch && !sent.tree.is_of_same(of) {
            // Another move, with other directories, may be about to come.
            return None;
        }
        // Whatever is not of this directory is of none any more.
        let Sent { epoch, token: known, tree, since } = all.remove(&key)?;
        let since = Some(since);
        if known != token || epoch != service.epoch {
            return None;
        }
        let tree = match tree.reopened(of) {
            Ok(tree) => tree,
            Err(error) => {
                tracing::info!(service = %service.name, %error, "a directory that was sent ahead cannot be opened again");
                return None;
            }
        };
        Some(Lent { store: Arc::clone(self), key, epoch, token: known, tree, sends: false, since })
    }

    /// Nothing has been sent yet.
    pub(crate) fn begin(self: &Arc<Self>, service: &Service, destination: &str, tree: TreeSender) -> Lent {
        let key = (service.id.clone(), destination.to_owned());
        let (store, token) = (Arc::clone(self), Vec::new());
        Lent { store, key, epoch: service.epoch, token, tree, sends: false, since: None }
    }

    fn put(&self, key: Key, sent: Sent) {
        let mut all = self.lock();
        if all.contains_key(&key) {
            // A preparation has begun anew meanwhile, in another directory there.
            return;
        }
        all.insert(key, sent);
        while all.values().map(|sent| sent.tree.memory()).fold(0, u64::saturating_add) > MOST_MEMORY {
            let oldest = all.iter().min_by_key(|(_, sent)| sent.since).map(|(key, _)| key.clone());
            let Some(oldest) = oldest else { return };
            all.remove(&oldest);
        }
    }

    /// The service has left, or is no more.
    pub fn forget(&self, service: &str) {
        self.lock().retain(|(id, _), _| id != service);
    }

    /// Forgets what is old, and all of it when the machine has less than a tenth of its memory free.
    pub fn relieve(&self, total_memory: u64) {
        let mut all = self.lock();
        all.retain(|_, sent| sent.since.elapsed() < OLDEST);
        if !all.is_empty() && available_memory() < total_memory / 10 {
            tracing::info!("low memory: forgetting which files were sent ahead; they are sent again");
            all.clear();
        }
    }
}

/// What one has in use of it. It goes back when this is dropped, as far as it is known what has come.
#[derive(Debug)]
pub(crate) struct Lent {
    store: Arc<SentFiles>,
    key: Key,
    epoch: u64,
    token: Vec<u8>,
    tree: TreeSender,
    /// Whether a round is on its way.
    sends: bool,
    /// When the last one has come; none where it came to this.
    since: Option<Instant>,
}

impl Lent {
    /// What it has: names, and bytes of files.
    pub(crate) fn there(&self) -> (u64, u64) {
        self.tree.there()
    }

    /// Finds what it lacks, and how much of it where that is asked for ([`TreeSender::next_round`]).
    pub(crate) fn find(&self, counts: bool) -> Result<Round, TreeError> {
        if counts { self.tree.next_round(false) } else { self.tree.find_round(false) }
    }

    /// Sends a round.
    pub(crate) fn send<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        &mut self,
        round: Round,
        sink: &mut impl FnMut(Item) -> Result<(), E>,
    ) -> Result<(), TreeError> {
        self.sends = true;
        self.tree.send(round, sink).map(drop)
    }

    /// The round has come, into the directory that has this token.
    pub(crate) fn settle(&mut self, token: Vec<u8>) {
        (self.token, self.sends, self.since) = (token, false, None);
        self.tree.settle();
    }

    /// The directory becomes the service's, and nothing goes back.
    pub(crate) fn moves(mut self) -> TreeSender {
        self.token.clear();
        self.take().lasting(false)
    }

    fn take(&mut self) -> TreeSender {
        std::mem::replace(&mut self.tree, TreeSender::of_parts())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.token.is_empty() {
            return;
        }
        let tree = self.take();
        let tree = if self.sends { tree.doubted() } else { Some(tree) };
        if let Some(tree) = tree {
            let (epoch, token) = (self.epoch, std::mem::take(&mut self.token));
            // Nobody unmounts what is open.
            let tree = tree.at_rest();
            self.store.put(
                self.key.clone(),
                Sent { epoch, token, tree, since: self.since.unwrap_or_else(Instant::now) },
            );
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::path::Path;

    use godwit_engine::tree::BlockHash;
    use xxhash_rust::xxh3::xxh3_128;

    use super::*;
    use crate::service::tests::service;

    /// Sends a round, of which nothing but what is sent matters.
    fn send(lent: &mut Lent) -> u64 {
        let (round, mut bytes) = (lent.find(false).unwrap(), 0);
        lent.send(round, &mut |item: Item| {
            bytes += item.encode().len() as u64;
            Ok::<_, String>(())
        })
        .unwrap();
        bytes
    }

    #[test]
    fn what_was_sent_is_known_for_one_directory_of_one_incarnation_and_as_far_as_it_has_come() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("large"), vec![7; 1 << 20]).unwrap();
        let (all, service) = (Arc::new(SentFiles::default()), service());
        let begin = |token: &[u8]| {
            let tree = TreeSender::new(root.path()).by_blocks(BlockHash::new(xxh3_128)).lasting(true);
            let mut lent = all.begin(&service, "b", tree);
            assert!(send(&mut lent) > 1 << 20);
            lent.settle(token.to_vec());
            // Until it is certain that nothing has changed since.
            while !lent.find(false).unwrap().changes.is_empty() {
                send(&mut lent);
                lent.settle(token.to_vec());
            }
        };
        let of = TreeSender::new(root.path());
        let lend = |token: &[u8]| all.lend(&service, "b", token, &of);
        begin(b"one");
        // What is not sent to its end, or not at all, changes nothing of that.
        drop(lend(b"one").unwrap());
        fs::write(root.path().join("new"), vec![8; 1 << 18]).unwrap();
        let mut lent = lend(b"one").unwrap();
        assert!(lend(b"one").is_none(), "it is in use");
        assert!((1 << 18..1 << 19).contains(&send(&mut lent)));
        drop(lent);
        let mut lent = lend(b"one").unwrap();
        assert!((1 << 18..1 << 19).contains(&send(&mut lent)), "it may not have come");
        lent.settle(b"one".to_vec());
        assert!(send(&mut lent) < 1 << 18, "it has come");
        lent.settle(b"one".to_vec());
        assert!(lent.there().1 > 1 << 20);
        drop(lent);

        assert!(lend(b"").is_none(), "the destination has none that is free");
        assert!(lend(b"two").is_none());
        assert!(lend(b"one").is_none(), "what the destination does not have is of no use any more");
        begin(b"one");
        let next = Service { epoch: service.epoch + 1, ..service.clone() };
        assert!(all.lend(&next, "b", b"one", &of).is_none());
        begin(b"one");
        assert!(all.lend(&service, "c", b"one", &of).is_none());
        assert!(all.lend(&service, "b", b"one", &TreeSender::new(Path::new("/elsewhere"))).is_none());
        begin(b"one");
        all.forget(&service.id);
        assert!(lend(b"one").is_none());
        begin(b"one");
        drop(lend(b"one").unwrap().moves());
        assert!(lend(b"one").is_none(), "the directory is the service's");
    }

    #[test]
    fn a_directory_whose_files_were_sent_can_be_unmounted() {
        let scratch = tempfile::tempdir().unwrap();
        let (own, mounted) = (scratch.path().join("own"), scratch.path().join("mounted"));
        fs::create_dir(&own).unwrap();
        fs::create_dir(&mounted).unwrap();
        let mount = || {
            let flags = nix::mount::MsFlags::empty();
            nix::mount::mount(None::<&str>, &mounted, Some("tmpfs"), flags, None::<&str>).unwrap();
            fs::write(mounted.join("large"), vec![7; 1 << 20]).unwrap();
        };
        let of = || {
            let tree = TreeSender::of_parts().make("").make("volumes").put("diff", &own);
            tree.put_open("volumes/data", &mounted, fs::File::open(&mounted).unwrap().into()).lasting(true)
        };
        let (all, service) = (Arc::new(SentFiles::default()), service());
        mount();
        let mut lent = all.begin(&service, "b", of());
        assert!(send(&mut lent) > 1 << 20);
        lent.settle(b"one".to_vec());
        drop(lent);
        // It is found again while it is there.
        let mut lent = all.lend(&service, "b", b"one", &of()).unwrap();
        fs::write(mounted.join("new"), vec![8; 1 << 10]).unwrap();
        assert!(send(&mut lent) > 1 << 10);
        lent.settle(b"one".to_vec());
        drop(lent);
        nix::mount::umount(&mounted).unwrap();
        assert!(all.lend(&service, "b", b"one", &of()).is_none(), "what is at the path now");
        // Another filesystem, perhaps under the same number.
        mount();
        let lent = all.lend(&service, "b", b"one", &of());
        assert!(lent.is_none_or(|mut lent| send(&mut lent) > 1 << 20));
        nix::mount::umount(&mounted).unwrap();
    }

    #[test]
    fn a_first_round_that_did_not_come_leaves_nothing() {
        let root = tempfile::tempdir().unwrap();
        let (all, service) = (Arc::new(SentFiles::default()), service());
        let mut lent = all.begin(&service, "b", TreeSender::new(root.path()).lasting(true));
        send(&mut lent);
        drop(lent);
        assert!(all.lock().is_empty());
    }
}
