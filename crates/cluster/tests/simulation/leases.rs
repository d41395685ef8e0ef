//! A node's lease, and what it sees of the others'.

use std::rc::Rc;
use std::time::Duration;

use godwit_cluster::cluster::{ChangeError, Held};
use godwit_cluster::promise::Silence;
use godwit_cluster::record::NodeRecord;
use godwit_cluster::rules::LeaseRequest;
use godwit_cluster::specification::{Answer, Asked};
use godwit_cluster::store::Revision;
use godwit_names::ServiceName;
use ulid::Ulid;

use super::{Node, answer};
use crate::broken::Broken;
use crate::world::LIMIT;

impl Node {
    /// Begins and renews the lease, for as long as the node lives.
    pub(crate) async fn keep_lease(self: Rc<Self>) {
        let life = self.life();
        while self.lease(&LeaseRequest::Begin { life }).await.is_err() {
            self.sleep(LIMIT / 10).await;
        }
        loop {
            let sent = self.clock();
            if self.lease(&LeaseRequest::Renew { life }).await.is_ok() {
                let counted = if self.is(Broken::LeaseFromAnswer) { self.clock() } else { sent };
                let now = self.clock();
                self.life.borrow_mut().lease.renewed(counted, now);
            }
            self.sleep(LIMIT / 5).await;
        }
    }

    /// An earlier life that has not noticed that it ended renews its lease a few times more.
    pub(crate) async fn linger(self: Rc<Self>, life: Ulid) {
        for _ in 0..4 {
            let _ = self.lease(&LeaseRequest::Renew { life }).await;
            self.sleep(LIMIT / 5).await;
        }
    }

    async fn lease(&self, request: &LeaseRequest) -> Result<Held<NodeRecord>, ChangeError> {
        let (world, asked, at) = (&self.world, Asked::Change(request.clone()), self.world.now());
        let number = world.history(|history| history.ask_lease(&self.name, &self.name, asked, at));
        let result = self.cluster.lease(&self.name, request).await;
        if let Some(answer) = answer(&result) {
            let at = world.now();
            world.history(|history| history.answer_lease(&self.name, number, answer, at));
        }
        result
    }

    /// Freezes what must not run without a lease, when it lapses.
    pub(crate) async fn watch_lapse(self: Rc<Self>) {
        loop {
            let (now, lapses) = (self.clock(), self.life.borrow().lease.lapses());
            match lapses {
                Some(at) if now < at => self.sleep(at.since(now)).await,
                _ => {
                    self.lapse();
                    self.sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    fn lapse(&self) {
        let disk = self.disk.borrow();
        let waits = |service: &ServiceName| {
            disk.get(service).is_some_and(|local| local.settings.promise().lapse == Silence::Wait)
        };
        let mut life = self.life.borrow_mut();
        if self.is(Broken::RunsOnAfterLapse) {
            return;
        }
        let now = self.world.now();
        life.running.retain(|service| {
            let freezes = waits(service);
            if freezes {
                self.world.history(|history| history.stops(service, &self.name, now));
            }
            !freezes
        });
    }

    /// Looks at the others' leases.
    pub(crate) async fn observe(self: Rc<Self>) {
        loop {
            self.sleep(LIMIT / 8).await;
            let at = self.world.now();
            let numbers: Vec<_> = self.world.history(|history| {
                let ask = |of| history.ask_lease(of, &self.name, Asked::Look, at);
                self.others.iter().map(ask).collect()
            });
            let listed = self.cluster.nodes(None, 100).await;
            let (now, at) = (self.clock(), self.world.now());
            for (node, number) in self.others.iter().zip(numbers) {
                let Ok(list) = &listed else {
                    self.world.history(|history| history.answer_lease(node, number, Answer::NotDone, at));
                    continue;
                };
                let found = list.listed.iter().find(|listed| listed.key.name() == node.as_str());
                let record = found.map(|listed| listed.record.clone().expect("a record of this version"));
                self.world
                    .history(|history| history.answer_lease(node, number, Answer::Is(record.clone()), at));
                let revision = found.map_or(Revision::NONE, |listed| listed.revision);
                self.life.borrow_mut().observed.see(node, record, revision, now);
            }
        }
    }
}
