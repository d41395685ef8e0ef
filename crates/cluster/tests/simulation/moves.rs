//! The two sides of a move: source and destination, each with its journal on disk.

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;
use futures::future::{Either, select};
use godwit_cluster::cluster::Earlier;
use godwit_cluster::promise::{Settings, Silence};
use godwit_cluster::record::{ServiceRecord, State};
use godwit_cluster::rules::Request;
use godwit_names::{NodeName, ServiceName};
use ulid::Ulid;

use super::{Change, Local, Node, Phase};
use crate::broken::Broken;
use crate::world::{Message, TIMEOUT};

impl Node {
    /// The source of a move: beginning, freeze, copy, commit.
    pub(super) async fn move_it(
        &self,
        service: &ServiceName,
        record: &ServiceRecord,
        inbox: &mut UnboundedReceiver<Message>,
    ) {
        let to = self.others[self.world.random(|random| random.usize(..self.others.len()))].clone();
        let (by, id, epoch, settings) = (self.name.clone(), self.world.id(), record.epoch, record.settings);
        let begin = Request::HandOver { by, epoch, to: to.clone(), id };
        match self.change(service, begin).await.1 {
            Ok(_) => {}
            Err(Change::Refused) => return self.resolve(service, epoch, settings).await,
            Err(Change::NotDone | Change::Silent) => return,
        }
        self.sleep(self.pause(10..3000)).await;
        self.stop(service);
        self.put(service, epoch, settings, Phase::Source { to: to.clone(), id, decided: false });
        self.world.say(&to, service, Message::Restore { id, epoch, settings, source: self.name.clone() });
        if self.is_restored(id, inbox).await {
            self.put(service, epoch, settings, Phase::Source { to: to.clone(), id, decided: true });
            self.commit(service, (epoch, settings), &to, id, Earlier::None).await;
        } else {
            self.roll_back(service, epoch, settings, id).await;
        }
    }

    /// The commit was not asked for, and will not be: the service runs on here.
    async fn roll_back(&self, service: &ServiceName, epoch: u64, settings: Settings, id: Ulid) {
        self.put(service, epoch, settings, Phase::Owner);
        self.run(service);
        self.withdraw(service, epoch, id).await;
    }

    async fn is_restored(&self, id: Ulid, inbox: &mut UnboundedReceiver<Message>) -> bool {
        let mut over = Box::pin(self.sleep(TIMEOUT));
        loop {
            match select(inbox.next(), over).await {
                Either::Left((Some(Message::Restored { id: restored }), _)) if restored == id => return true,
                Either::Left((Some(_), waits)) => over = waits,
                _ => return false,
            }
        }
    }

    /// The commit. On silence a default service goes forward by this journal, and a strict one stays frozen.
    pub(super) async fn commit(
        &self,
        service: &ServiceName,
        (epoch, settings): (u64, Settings),
        to: &NodeName,
        id: Ulid,
        earlier: Earlier,
    ) {
        let request = Request::Confirm { by: self.name.clone(), epoch, id };
        let earlier = if self.is(Broken::RollsBackOnNotDone) { Earlier::None } else { earlier };
        let (_, confirmed) = self.ask(service, request, earlier).await;
        let mut forward = settings.promise().commit == Silence::GoOn;
        forward |= self.is(Broken::StrictGoesForward);
        match confirmed {
            Ok(_) => {
                self.forget(service);
                self.world.say(to, service, Message::Commit { id, forward: false });
            }
            Err(Change::Refused) => self.resolve(service, epoch, settings).await,
            Err(Change::NotDone) => self.roll_back(service, epoch, settings, id).await,
            Err(Change::Silent) if self.is(Broken::RollsBackOnSilence) => {
                self.put(service, epoch, settings, Phase::Owner);
                self.run(service);
            }
            Err(Change::Silent) if forward => {
                self.world.say(to, service, Message::Commit { id, forward: true })
            }
            Err(Change::Silent) => {}
        }
    }

    /// The source takes its service back, which is certain only when the store says so.
    pub(super) async fn withdraw(&self, service: &ServiceName, epoch: u64, id: Ulid) {
        let Some(local) = self.local(service) else { return };
        let request = Request::Withdraw { by: self.name.clone(), epoch, id };
        match self.change(service, request).await {
            (since, Ok(record)) => self.own(service, &record, since),
            (_, Err(Change::Refused)) => self.resolve(service, epoch, local.settings).await,
            (_, Err(Change::NotDone | Change::Silent)) => {}
        }
    }

    /// The destination.
    pub(super) async fn hear(&self, service: &ServiceName, message: Message) {
        let local = self.local(service);
        match (message, local.as_ref().map(|local| &local.phase)) {
            (Message::Restore { id, epoch, settings, source }, None | Some(Phase::Arrived { .. }))
                if self.is_new(service, epoch) =>
            {
                self.put(service, epoch, settings, Phase::Arrived { id });
                self.world.say(&source, service, Message::Restored { id });
            }
            (Message::Commit { id, forward }, Some(Phase::Arrived { id: arrived })) if id == *arrived => {
                let Some(Local { epoch, settings, .. }) = local else { return };
                if forward {
                    self.put(service, epoch + 1, settings, Phase::Forward { id });
                    // The source's word, as far as this life of the node.
                    let since = self.since();
                    self.life.borrow_mut().verified.insert(service.clone(), since);
                    self.confirm_forward(service, epoch + 1, id).await;
                } else {
                    self.put(service, epoch + 1, settings, Phase::Owner);
                    self.run(service);
                }
            }
            _ => {}
        }
    }

    /// The source went forward by its journal: this node tells the store, and runs the copy if the store is silent.
    pub(super) async fn confirm_forward(&self, service: &ServiceName, epoch: u64, id: Ulid) {
        let request = Request::Confirm { by: self.name.clone(), epoch: epoch - 1, id };
        match self.change(service, request).await {
            (since, Ok(record)) => {
                if record.owner == self.name && record.epoch == epoch {
                    self.own_moved(service, &record, since);
                } else {
                    self.forget(service);
                }
            }
            (_, Err(Change::Refused)) => {
                self.forget(service);
            }
            (_, Err(Change::NotDone | Change::Silent)) => self.run(service),
        }
    }

    /// The source's message may be lost: the store has what became of the move.
    pub(super) async fn wait_for_commit(&self, service: &ServiceName, epoch: u64, id: Ulid) {
        let (since, found) = self.look(service).await;
        let Some(found) = found else { return };
        match found {
            Some(record) if record.begun == id && record.owner == self.name => {
                self.own_moved(service, &record, since);
            }
            Some(record)
                if record.epoch == epoch
                    && matches!(&record.state, State::Moving { id: moving, .. } if *moving == id) =>
            {
                self.take_over(service, &record).await;
            }
            _ => self.forget(service),
        }
    }
}
