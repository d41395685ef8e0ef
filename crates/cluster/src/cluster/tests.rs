//! Changes over a store that loses requests and answers, delivers twice, and lets others come in between.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use tempfile::TempDir;
use ulid::Ulid;

use super::*;
use crate::clock::BootTime;
use crate::lease::Observed;
use crate::promise::{Fence, RestartFrom, Settings};
use crate::record::State;
use crate::sqlite::SqliteStore;
use crate::store::{Page, Watch, WatchError};

/// What happens to a swap.
enum Fault {
    /// It does not leave the node.
    NotSent,
    /// It is lost on its way.
    Lost,
    /// It is done, and the answer is lost.
    Unanswered,
    /// It is delivered twice, and the second answer arrives.
    Twice,
    /// Another node's change comes before it.
    After(Request),
    /// Another node renews its lease before it.
    AfterLease(&'static str, LeaseRequest),
    /// It is done, another node's change comes after it, and the answer is lost.
    Before(Request),
}

struct Faulty {
    _directory: TempDir,
    store: SqliteStore,
    swaps: Mutex<VecDeque<Fault>>,
    silent: Mutex<bool>,
}

fn silence() -> Cause {
    std::io::Error::from(std::io::ErrorKind::TimedOut).into()
}

#[async_trait]
impl Store for Faulty {
    async fn get(&self, key: &Key) -> Result<Option<Entry>, ReadError> {
        if *self.silent.lock().unwrap() {
            return Err(ReadError::Unavailable(silence()));
        }
        self.store.get(key).await
    }

    async fn range(&self, folder: Folder, after: Option<&str>, limit: usize) -> Result<Page, ReadError> {
        self.store.range(folder, after, limit).await
    }

    async fn swap(&self, swap: &Swap) -> Result<Swapped, SwapError> {
        let fault = self.swaps.lock().unwrap().pop_front();
        let others = Cluster::new(self.store.clone());
        match fault {
            None => return self.store.swap(swap).await,
            Some(Fault::NotSent) => return Err(SwapError::NotDone(silence())),
            Some(Fault::Lost) => {}
            Some(Fault::Unanswered) => drop(self.store.swap(swap).await.unwrap()),
            Some(Fault::Twice) => {
                self.store.swap(swap).await.unwrap();
                return self.store.swap(swap).await;
            }
            Some(Fault::After(request)) => {
                others.change(&web(), &request, Earlier::None).await.unwrap();
                return self.store.swap(swap).await;
            }
            Some(Fault::AfterLease(node, request)) => {
                others.lease(&node.parse().unwrap(), &request).await.unwrap();
                return self.store.swap(swap).await;
            }
            Some(Fault::Before(request)) => {
                self.store.swap(swap).await.unwrap();
                others.change(&web(), &request, Earlier::None).await.unwrap();
            }
        }
        Err(SwapError::Unknown(silence()))
    }

    async fn watch(&self, folder: Folder, after: Revision) -> Result<Box<dyn Watch>, WatchError> {
        self.store.watch(folder, after).await
    }
}

fn web() -> ServiceName {
    "web".parse().unwrap()
}

fn claim(by: &str, id: u128) -> Request {
    let settings = Settings { fence: Fence::Strict, restart_from: RestartFrom::Image };
    Request::Claim { by: by.parse().unwrap(), service: Ulid(1), id: Ulid(id), settings }
}

fn release(by: &str, epoch: u64) -> Request {
    Request::Release { by: by.parse().unwrap(), epoch }
}

/// A cluster whose next swaps have these faults.
fn faulty(swaps: impl IntoIterator<Item = Fault>) -> Cluster<Faulty> {
    let directory = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&directory.path().join("cluster.db")).unwrap();
    let swaps = Mutex::new(swaps.into_iter().collect());
    Cluster::new(Faulty { _directory: directory, store, swaps, silent: Mutex::new(false) })
}

#[tokio::test]
async fn a_change_is_made_once_whatever_becomes_of_its_swaps() {
    for faults in [
        vec![],
        vec![Fault::Unanswered],
        vec![Fault::Lost],
        vec![Fault::Lost, Fault::NotSent],
        vec![Fault::Lost, Fault::Unanswered],
        vec![Fault::Twice],
        vec![Fault::Lost, Fault::Lost, Fault::Twice],
    ] {
        let cluster = faulty(faults);
        let held = cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap();
        assert_eq!((held.record.epoch, held.revision), (1, Revision(1)));
        let again = cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap();
        assert_eq!(again, held, "a repetition finds it done");
        assert_eq!(cluster.service(&web()).await.unwrap(), Some(held));
    }
}

#[tokio::test]
async fn who_comes_second_is_refused_for_certain_even_without_an_answer() {
    for faults in [vec![Fault::After(claim("b", 20))], vec![Fault::Lost, Fault::After(claim("b", 20))]] {
        let error = faulty(faults).change(&web(), &claim("a", 10), Earlier::None).await.unwrap_err();
        let owner: NodeName = "b".parse().unwrap();
        assert!(error.is_certain(), "{error}");
        assert!(
            matches!(&error, ChangeError::Refused { refusal: Refusal::Exists { owner: found, .. }, .. } if *found == owner),
            "{error}"
        );
    }
}

#[tokio::test]
async fn what_others_may_have_followed_is_not_refused_for_certain() {
    let cluster = faulty([]);
    cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap();
    cluster.store().swaps.lock().unwrap().push_back(Fault::Before(claim("b", 20)));
    let error = cluster.change(&web(), &release("a", 1), Earlier::None).await.unwrap_err();
    assert!(matches!(&error, ChangeError::Superseded { .. }), "{error}");
    assert!(!error.is_certain());
}

#[tokio::test]
async fn a_silent_store_leaves_the_outcome_unknown_only_when_a_swap_was_sent() {
    let cluster = faulty([Fault::NotSent]);
    let error = cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap_err();
    assert!(matches!(error, ChangeError::NotDone { .. }) && error.is_certain());
    *cluster.store().silent.lock().unwrap() = true;
    let error = cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap_err();
    assert!(matches!(error, ChangeError::NotDone { .. }) && error.is_certain());

    let endless = std::iter::repeat_with(|| Fault::Lost).take(ATTEMPTS);
    let error = faulty(endless).change(&web(), &claim("a", 10), Earlier::None).await.unwrap_err();
    assert!(matches!(error, ChangeError::Unknown { .. }) && !error.is_certain());
}

#[tokio::test]
async fn a_hand_over_that_is_on_its_way_is_void_once_its_move_is_withdrawn() {
    let cluster = faulty([]);
    let owned = cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap();
    let (by, to) = ("a".parse::<NodeName>().unwrap(), "b".parse().unwrap());
    let hand_over = Request::HandOver { by: by.clone(), epoch: 1, to, id: Ulid(20) };
    let Ok(Step::Write(moving)) = rules::service(Some(&owned.record), &hand_over) else { panic!() };
    let compare = Compare { key: Key::service(&web()), revision: owned.revision };
    let late = Swap::new(vec![compare.clone()], vec![Write::Put(compare.key, moving.encode())]).unwrap();
    let withdraw = Request::Withdraw { by, epoch: 1, id: Ulid(20) };
    let held = cluster.change(&web(), &withdraw, Earlier::None).await.unwrap();
    assert!(matches!(cluster.store().store.swap(&late).await.unwrap(), Swapped::Differs(_)));
    assert_eq!(held.record, owned.record);
    assert_eq!(cluster.service(&web()).await.unwrap(), Some(held));
}

#[tokio::test]
async fn nothing_follows_from_the_answer_of_a_store_that_was_put_back_from_an_older_copy() {
    let cluster = faulty([]);
    cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap();
    for earlier in [Earlier::None, Earlier::Unknown] {
        let error = cluster.change(&web(), &release("a", 2), earlier).await.unwrap_err();
        assert!(matches!(&error, ChangeError::Behind { .. }) && !error.is_certain(), "{error}");
    }
}

#[tokio::test]
async fn what_sends_nothing_leaves_an_earlier_call_without_an_answer_as_uncertain_as_it_was() {
    let endless = || std::iter::repeat_with(|| Fault::Lost).take(ATTEMPTS);
    let cluster = faulty(endless());
    let first = cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap_err();
    assert!(matches!(first, ChangeError::Unknown { .. }), "{first}");
    // Neither the read nor the swap of the repetition reaches the store.
    cluster.store().swaps.lock().unwrap().push_back(Fault::NotSent);
    *cluster.store().silent.lock().unwrap() = true;
    let again = cluster.change(&web(), &claim("a", 10), Earlier::Unknown).await.unwrap_err();
    assert!(matches!(again, ChangeError::Unknown { .. }) && !again.is_certain(), "{again}");
    *cluster.store().silent.lock().unwrap() = false;
    cluster.store().swaps.lock().unwrap().extend(std::iter::repeat_with(|| Fault::NotSent).take(ATTEMPTS));
    let again = cluster.change(&web(), &claim("a", 10), Earlier::Unknown).await.unwrap_err();
    assert!(matches!(again, ChangeError::Unknown { .. }) && !again.is_certain(), "{again}");
    // A record that cannot be read says nothing of it either.
    let key = Key::service(&web());
    let compare = Compare { key: key.clone(), revision: Revision::NONE };
    let damage = Swap::new(vec![compare], vec![Write::Put(key, vec![0xff])]).unwrap();
    cluster.store().store.swap(&damage).await.unwrap();
    let again = cluster.change(&web(), &claim("a", 10), Earlier::Unknown).await.unwrap_err();
    assert!(matches!(again, ChangeError::Unknown { .. }), "{again}");
}

#[tokio::test]
async fn a_repetition_that_is_refused_is_certain_only_where_the_first_call_cannot_have_been_followed() {
    let settings = Settings { fence: Fence::Strict, restart_from: RestartFrom::Image };
    let [a, b, c] = ["a", "b", "c"].map(|name| name.parse::<NodeName>().unwrap());
    let confirm = Request::Confirm { by: a.clone(), epoch: 1, id: Ulid(20) };
    let hand_over = Request::HandOver { by: a.clone(), epoch: 1, to: b.clone(), id: Ulid(20) };
    let mut observed = Observed::default();
    let still: Vec<_> = [&a, &b]
        .map(|node| {
            observed.see(node, None, Revision::NONE, BootTime::since_boot(Duration::ZERO));
            observed.stood_still(node, Duration::ZERO).unwrap()
        })
        .into();
    let take_over = Request::TakeOver { by: c.clone(), epoch: 1, id: Ulid(30), still };
    let claim = Request::Claim { by: a, service: Ulid(1), id: Ulid(10), settings };
    // Another one began the epoch that the confirmation would have begun: it was not done.
    let cluster = faulty([]);
    for request in [&claim, &hand_over, &take_over] {
        cluster.change(&web(), request, Earlier::None).await.unwrap();
    }
    let refused = cluster.change(&web(), &confirm, Earlier::Unknown).await.unwrap_err();
    assert!(matches!(refused, ChangeError::Refused { .. }) && refused.is_certain(), "{refused}");
    // A later epoch hides which one it was.
    let next = Request::HandOver { by: c.clone(), epoch: 2, to: b, id: Ulid(40) };
    for request in [&next, &Request::Confirm { by: c, epoch: 2, id: Ulid(40) }] {
        cluster.change(&web(), request, Earlier::None).await.unwrap();
    }
    for (earlier, is_certain) in [(Earlier::None, true), (Earlier::Unknown, false)] {
        let refused = cluster.change(&web(), &confirm, earlier).await.unwrap_err();
        assert_eq!(refused.is_certain(), is_certain, "{refused}");
    }
}

#[tokio::test]
async fn a_take_over_is_refused_when_the_lease_moves_at_the_last_moment() {
    let (owner, life) = ("a".parse().unwrap(), Ulid(7));
    let renew = || LeaseRequest::Renew { life };
    let cluster = faulty([]);
    cluster.lease(&owner, &LeaseRequest::Begin { life }).await.unwrap();
    cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap();
    let take_over = async || {
        let (mut observed, seen) = (Observed::default(), cluster.node(&owner).await.unwrap().unwrap());
        observed.see(&owner, Some(seen.record), seen.revision, BootTime::since_boot(Duration::ZERO));
        let still = observed.stood_still(&owner, Duration::ZERO).into_iter().collect();
        Request::TakeOver { by: "b".parse().unwrap(), epoch: 1, id: Ulid(30), still }
    };
    for before in [None, Some(Fault::Lost)] {
        let request = take_over().await;
        let moves = Fault::AfterLease("a", renew());
        cluster.store().swaps.lock().unwrap().extend(before.into_iter().chain([moves]));
        let error = cluster.change(&web(), &request, Earlier::None).await.unwrap_err();
        assert!(
            matches!(&error, ChangeError::Refused { refusal: Refusal::Alive(node), .. } if *node == owner),
            "{error}"
        );
    }
    let request = take_over().await;
    let taken = cluster.change(&web(), &request, Earlier::None).await.unwrap().record;
    assert_eq!((taken.owner.as_str(), taken.epoch, taken.state), ("b", 2, State::Owned));
}

#[tokio::test]
async fn a_lease_is_renewed_by_a_swap_of_its_own_call_not_by_what_a_look_finds() {
    let (node, life) = ("a".parse().unwrap(), Ulid(7));
    let cluster = faulty([]);
    cluster.lease(&node, &LeaseRequest::Begin { life }).await.unwrap();
    cluster.store().swaps.lock().unwrap().push_back(Fault::Unanswered);
    let renewed = cluster.lease(&node, &LeaseRequest::Renew { life }).await.unwrap();
    assert_eq!(renewed.record.counter, 3, "the first one was done, and raised again");
}

#[tokio::test]
async fn a_record_that_cannot_be_read_is_named_and_does_not_hide_the_others() {
    let cluster = faulty([]);
    cluster.change(&web(), &claim("a", 10), Earlier::None).await.unwrap();
    let key = Key::service(&"bad".parse().unwrap());
    let compare = Compare { key: key.clone(), revision: Revision::NONE };
    let swap = Swap::new(vec![compare], vec![Write::Put(key.clone(), vec![0xff])]).unwrap();
    cluster.store().swap(&swap).await.unwrap();
    let list = cluster.services(None, 10).await.unwrap();
    let read: Vec<_> = list.listed.iter().map(|listed| (listed.key.name(), listed.record.is_ok())).collect();
    assert_eq!(read, [("bad", false), ("web", true)]);
    let error = cluster.change(&"bad".parse().unwrap(), &release("a", 1), Earlier::None).await.unwrap_err();
    assert!(matches!(&error, ChangeError::Record(_)) && error.to_string().contains("service/bad"), "{error}");
}
