//! The flows of one bridge: the connection on which they are changed, what they must be, and the ports'
//! numbers that they go by.
//!
//! What was written is remembered. When the connection has ended, as it does with ovs-vswitchd, another one
//! is made, and before anything else is done on it what is missing is written again: so nobody meets a
//! bridge that has lost its flows, and services go on as soon as Open vSwitch does.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::{Mutex, Notify};

use super::channel::{Channel, ChannelError, LIMIT};
use super::control::{Control, LOOKED_THROUGH, PURGE, VERSION};
use super::flows;
use super::openflow::{Change, Flow, LOCAL};
use super::table::{Difference, Table};
use crate::NetworkError;

/// Between two attempts to connect to a switch that is not there: nothing tells when a socket that may exist
/// is listened at. They get rarer up to the second one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// How a datapath comes to go by changed flows. It remembers what it was told of the old ones until it is looked
/// through, some milliseconds later: it would carry frames where they must not go any more, or drop them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// ovs-vswitchd's own: it forgets all, and learns it again with the next frame, before it looks at another.
    Forgotten,
    /// The kernel's: it is looked through now. If it forgot, the frames that come while it asks ovs-vswitchd would be
    /// overtaken by those that come when it has been told.
    Corrected,
}

/// A bridge that is there, as far as is known.
#[derive(Debug)]
pub(super) struct Bridge {
    name: String,
    memory: Memory,
    socket: PathBuf,
    state: Mutex<State>,
    /// Told when the connection has ended.
    ended: Arc<Notify>,
}

#[derive(Debug)]
struct State {
    channel: Option<Channel>,
    control: Control,
    /// Whether flows of an earlier life were taken over.
    adopted: bool,
    table: Table,
    /// OpenFlow's numbers of the ports, by name.
    numbers: HashMap<String, u32>,
    /// What was lost and written again, and has not been told.
    restored: Option<String>,
}

impl Bridge {
    /// Connects to a bridge that exists, and takes over what flows of ours it has.
    pub(super) async fn connect(name: &str, memory: Memory, run: PathBuf) -> Result<Self, NetworkError> {
        let bridge = Self {
            name: name.to_owned(),
            memory,
            socket: run.join(format!("{name}.mgmt")),
            state: Mutex::new(State {
                channel: None,
                control: Control::new(run),
                adopted: false,
                table: Table::default(),
                numbers: HashMap::new(),
                restored: None,
            }),
            ended: Arc::default(),
        };
        let action = format!("list the flows of {name}");
        bridge.connected(&action, &mut *bridge.state.lock().await).await?;
        Ok(bridge)
    }

    /// Whether it had the flows by which the node itself takes part, when it was connected to.
    pub(super) async fn has_base(&self) -> bool {
        self.state.lock().await.table.flows().any(|flow| flows::is_base(&flow))
    }

    /// Connects again whenever the connection has ended. Does not return.
    pub(super) async fn keep_connected(self: Arc<Self>) {
        loop {
            self.ended.notified().await;
            let mut pause = FIRST_PAUSE;
            while let Err(error) = self.look_at_connection().await {
                tracing::debug!(bridge = self.name, %error, "Open vSwitch is not there");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    async fn look_at_connection(&self) -> Result<(), NetworkError> {
        let mut state = self.state.lock().await;
        if state.channel.as_ref().is_some_and(Channel::is_alive) {
            return Ok(());
        }
        state.channel = None;
        self.connected("write the flows again", &mut state).await
    }

    /// Forgets all of a bridge that is to be made again: its ports will be others.
    pub(super) async fn start_over(&self) {
        let state = &mut *self.state.lock().await;
        (state.channel, state.table, state.restored) = (None, Table::default(), None);
        state.numbers.clear();
        self.ended.notify_one();
    }

    /// Makes changes of the flows; what holds when this returns. `action` completes "Open vSwitch could
    /// not …".
    pub(super) async fn change(&self, action: &str, changes: Vec<Change>) -> Result<(), NetworkError> {
        self.change_in(&mut *self.state.lock().await, action, changes).await
    }

    async fn change_in(
        &self,
        state: &mut State,
        action: &str,
        changes: Vec<Change>,
    ) -> Result<(), NetworkError> {
        let changes: Arc<[Change]> = changes.into();
        self.talk(state, action, |channel| {
            let changes = Arc::clone(&changes);
            async move { channel.change(&changes).await }.boxed()
        })
        .await?;
        changes.iter().for_each(|change| state.table.apply(change.clone()));
        // A service that moves waits for this.
        self.tell_datapath(state).await.map_err(|error| NetworkError::OpenVswitch {
            action: action.to_owned(),
            message: format!("cannot tell its datapath of it: {error}"),
        })
    }

    /// Has the datapath go by the flows as they are.
    async fn tell_datapath(&self, state: &mut State) -> io::Result<()> {
        if self.memory == Memory::Corrected {
            match state.look_through().await {
                Ok(()) => return Ok(()),
                // It cannot tell when that is done where it has datapaths of two kinds.
                Err(error) => tracing::debug!(bridge = self.name, %error, "the datapath is to forget all"),
            }
        }
        state.control.ask(PURGE).await
    }

    /// The number of a port, if it is one that is set up.
    pub(super) async fn number(&self, port: &str) -> Result<Option<u32>, NetworkError> {
        let state = &mut *self.state.lock().await;
        if let Some(number) = state.numbers.get(port) {
            return Ok(Some(*number));
        }
        self.read_numbers(state).await?;
        Ok(state.numbers.get(port).copied())
    }

    /// The number of a port that was just made, or corrected.
    pub(super) async fn new_number(&self, port: &str) -> Result<Option<u32>, NetworkError> {
        let state = &mut *self.state.lock().await;
        self.read_numbers(state).await?;
        Ok(state.numbers.get(port).copied())
    }

    /// Forgets the number of a port that is gone.
    pub(super) async fn forget_number(&self, port: &str) {
        self.state.lock().await.numbers.remove(port);
    }

    /// The names of the ports by which frames may come in.
    pub(super) async fn open_ports(&self) -> Result<HashSet<String>, NetworkError> {
        let state = &mut *self.state.lock().await;
        // Asked for what it has at the same time, so that nobody counts upon a bridge that is gone.
        self.read_numbers(state).await?;
        let open: HashSet<u32> = state.table.flows().filter_map(|flow| flows::opens(&flow)).collect();
        let names = state.numbers.iter().filter(|(_, number)| open.contains(number));
        Ok(names.map(|(name, _)| name.clone()).collect())
    }

    /// Removes flows of ports that there are no more: their numbers will be others'.
    pub(super) async fn forget_all_but(&self, ports: &HashSet<String>) -> Result<(), NetworkError> {
        let state = &mut *self.state.lock().await;
        self.read_numbers(state).await?;
        let there: HashSet<u32> = ports.iter().filter_map(|port| state.numbers.get(port)).copied().collect();
        let gone: HashSet<u32> = state
            .table
            .flows()
            .flat_map(|flow| flows::ports_of(&flow))
            .filter(|number| *number != LOCAL && !there.contains(number))
            .collect();
        let changes: Vec<_> = gone.into_iter().flat_map(flows::forget).collect();
        if changes.is_empty() {
            return Ok(());
        }
        self.change_in(state, "remove the flows of ports that are gone", changes).await
    }

    /// What flows somebody has removed or added, if any, or what was made again since [`Bridge::mend`].
    pub(super) async fn damage(&self) -> Result<Option<String>, NetworkError> {
        let state = &mut *self.state.lock().await;
        let difference = self.difference(state).await?;
        let differs = (!difference.is_none()).then(|| format!("{difference} in the bridge {}", self.name));
        let restored = state.restored.clone();
        let told: Vec<_> = restored.into_iter().chain(differs).collect();
        Ok((!told.is_empty()).then(|| told.join(", ")))
    }

    /// Undoes what [`Bridge::damage`] found.
    pub(super) async fn mend(&self) -> Result<(), NetworkError> {
        let state = &mut *self.state.lock().await;
        let difference = self.difference(state).await?;
        if !difference.is_none() {
            self.change_in(state, "write the flows again", difference.changes()).await?;
        }
        state.restored = None;
        Ok(())
    }

    async fn difference(&self, state: &mut State) -> Result<Difference, NetworkError> {
        let seen = self.talk(state, "list the flows", |channel| channel.flows().boxed()).await?;
        Ok(state.table.compare(&seen))
    }

    async fn read_numbers(&self, state: &mut State) -> Result<(), NetworkError> {
        let ports = self.talk(state, "list the ports", |channel| channel.ports().boxed()).await?;
        state.renumber(ports.into_iter().map(|port| (port.name, port.number)).collect());
        Ok(())
    }

    /// Does something on the connection; on another one if it has ended, since all that is done here may be
    /// done twice.
    async fn talk<T>(
        &self,
        state: &mut State,
        action: &str,
        what: impl for<'c> Fn(&'c mut Channel) -> BoxFuture<'c, Result<T, ChannelError>>,
    ) -> Result<T, NetworkError> {
        let mut was_connected = state.channel.is_some();
        loop {
            self.connected(action, state).await?;
            let Some(channel) = &mut state.channel else { continue };
            match what(channel).await {
                Err(ChannelError::Ended | ChannelError::Io(_)) if was_connected => state.channel = None,
                Err(error) => {
                    if !matches!(error, ChannelError::Refused(..)) {
                        state.channel = None;
                        self.ended.notify_one();
                    }
                    return Err(self.failed(action, error));
                }
                Ok(done) => return Ok(done),
            }
            was_connected = false;
        }
    }

    /// Sees to it that there is a connection, and that the bridge on a new one has the flows that it must
    /// have.
    async fn connected(&self, action: &str, state: &mut State) -> Result<(), NetworkError> {
        if state.channel.is_some() {
            return Ok(());
        }
        let mut channel = match Channel::connect(&self.socket, Arc::clone(&self.ended)).await {
            Ok(channel) => channel,
            Err(ChannelError::Io(error)) => return Err(self.unreachable(state, &error).await),
            Err(error) => return Err(self.failed(action, error)),
        };
        let listed = async { Ok((channel.ports().await?, channel.flows().await?)) };
        let (ports, seen): (_, Vec<Flow>) = listed.await.map_err(|error| self.failed(action, error))?;
        state.renumber(ports.into_iter().map(|port| (port.name, port.number)).collect());
        if !state.adopted {
            state.table = Table::adopt(seen);
            state.adopted = true;
        } else {
            let difference = state.table.compare(&seen);
            if !difference.is_none() {
                let restored =
                    format!("{difference} in the bridge {} as Open vSwitch was restarted", self.name);
                channel.change(&difference.changes()).await.map_err(|error| self.failed(action, error))?;
                // After a restart the datapath remembers nothing, or what is wrong.
                state.control.ask(PURGE).await.map_err(|error| self.failed(action, error.into()))?;
                tracing::warn!(damage = restored, "the flows were written again");
                state.restored = Some(restored);
            }
        }
        state.channel = Some(channel);
        Ok(())
    }

    /// Why there is no connection: the bridge is gone, or all of Open vSwitch.
    async fn unreachable(&self, state: &mut State, error: &std::io::Error) -> NetworkError {
        match state.control.ask(VERSION).await {
            Ok(()) => NetworkError::SwitchGone { bridge: self.name.clone() },
            Err(_) => NetworkError::OpenVswitchStopped {
                server: "ovs-vswitchd",
                message: format!("{}: {error}", self.socket.display()),
            },
        }
    }

    fn failed(&self, action: &str, error: ChannelError) -> NetworkError {
        let action = action.to_owned();
        match error {
            ChannelError::Late => {
                NetworkError::OpenVswitchLate { action, program: "ovs-vswitchd", seconds: LIMIT.as_secs() }
            }
            error => NetworkError::OpenVswitch { action, message: error.to_string() },
        }
    }
}

impl State {
    /// Returns when all that the datapath remembers was compared with the flows as they are.
    ///
    /// ovs-vswitchd looks through it twice a second and when flows have changed, and tells only that it has come to
    /// an end, perhaps with what it began before the change. What begins after such an end is new. In its main loop
    /// it notes changes of flows, has them looked at, and answers on this socket, in this order.
    async fn look_through(&mut self) -> io::Result<()> {
        let Self { channel: Some(channel), control, table, .. } = self else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        // Written again, it changes nothing, and has everything looked at.
        let Some(again) = table.flows().find(flows::is_base).map(Change::Add) else {
            return Err(io::Error::other("the bridge has no flow yet"));
        };
        // When the second has been answered its loop has been through all once, and the change was noted.
        control.ask(VERSION).await?;
        channel.change(&[]).await.map_err(io::Error::other)?;
        for _ in 0..2 {
            let noted = control.ask_during(LOOKED_THROUGH, channel.change(std::slice::from_ref(&again)));
            noted.await?.map_err(io::Error::other)?;
        }
        Ok(())
    }

    /// Takes over the ports' numbers. One that has got another number, as one may that was made anew, is
    /// another port: it has no flows.
    fn renumber(&mut self, now: HashMap<String, u32>) {
        let was = std::mem::replace(&mut self.numbers, now);
        for (port, number) in was {
            if self.numbers.get(&port).is_some_and(|now| *now != number) {
                flows::forget(number).into_iter().for_each(|change| self.table.apply(change));
            }
        }
    }
}
