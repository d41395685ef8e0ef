//! What a program in a container may make of a `godwit-exec`, and what becomes of sessions whose users have not come.

#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::os::fd::AsFd as _;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::{self, OpenptFlags};
use rustix::termios::OptionalActions;
use tokio::process::{Child, Command};

use super::*;
use crate::exec::inherit;

/// A process with the descriptors of a `godwit-exec`, which is a container by itself.
struct Container {
    process: Child,
    user: OwnedFd,
    end: OwnedFd,
    /// The ends that `godwit-exec` keeps.
    kept: Option<(OwnedFd, OwnedFd)>,
}

fn name() -> ServiceName {
    "shell".parse().unwrap()
}

impl Container {
    fn new() -> Self {
        let user = pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        pty::unlockpt(&user).unwrap();
        let end = typed::programs_end(user.as_fd()).unwrap();
        let mut settings = termios::tcgetattr(&end).unwrap();
        settings.make_raw();
        termios::tcsetattr(&end, OptionalActions::Now, &settings).unwrap();
        let (orders, orders_in) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let (news_out, news) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let master = user.try_clone().unwrap();
        let process = with([(master, MASTER), (orders_in, ORDERS_IN), (news_out, NEWS_OUT)]);
        Self { process, user, end, kept: Some((orders, news)) }
    }

    fn pid(&self) -> u32 {
        self.process.id().unwrap()
    }

    fn session(&self, token: &str) -> Session {
        Session::open((self.pid(), self.pid()), Ok, token.to_owned(), 0).unwrap()
    }

    fn writes(&self, text: &[u8]) {
        std::fs::File::from(self.end.try_clone().unwrap()).write_all(text).unwrap();
    }

    /// Its sessions after a move that brings this.
    async fn arrives(&self, (file, content): (String, Vec<u8>)) -> Sessions {
        let (images, there) = (tempfile::tempdir().unwrap(), Sessions::default());
        std::fs::write(images.path().join(file), content).unwrap();
        there.arrive(&name(), images.path(), (self.pid(), vec![(self.pid(), self.pid())]), Ok).await.unwrap();
        there
    }
}

fn with<const N: usize>(descriptors: [(OwnedFd, i32); N]) -> Child {
    let mut command = Command::new("sleep");
    command.arg("100000").kill_on_drop(true);
    inherit(&mut command, descriptors).unwrap();
    command.spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_that_is_kept_from_godwitd_keeps_no_service_frozen() {
    let container = Container::new();
    let here = Sessions::default();
    let session = here.add(&name(), container.session("kept"), true);
    // A read that does not return.
    let (never, end) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (begun, has_begun) = oneshot::channel();
    let reading = Arc::clone(&session);
    let stuck = tokio::spawn(async move {
        let read = move |_: &Session, _: &mut Kept| {
            begun.send(()).unwrap();
            Ok(rustix::io::read(&never, &mut [0])?)
        };
        reading.in_turn(read).await
    });
    has_begun.await.unwrap();
    assert_eq!(here.hold(&name()).await.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!((session.typed(), here.of(&name()).len()), (0, 1));
    here.release(&name()).await;
    assert!(session.is_open());
    drop(end);
    assert_eq!(stuck.await.unwrap().unwrap(), 0);
    assert!(here.hold(&name()).await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminal_that_a_program_has_made_block_is_held() {
    let container = Container::new();
    let here = Sessions::default();
    let session = here.add(&name(), container.session("blocks"), true);
    container.writes(b"written");
    rustix::io::ioctl_fionbio(&container.user, false).unwrap();
    assert!(here.hold(&name()).await.unwrap().is_some());
    // It is the user's who is there, also while the container is frozen.
    assert_eq!(session.next().await.unwrap(), News::Output(b"written".to_vec()));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_user_has_seen_goes_along_and_is_shown_once() {
    let container = Container::new();
    let here = Sessions::default();
    here.add(&name(), container.session("seen"), false);
    container.writes(b"first");
    let held = here.hold(&name()).await.unwrap().unwrap();
    // Who comes now is told where it is.
    let late = here.attach(&name(), "seen").unwrap();
    here.leave(&name(), "b");
    assert_eq!(late.next().await.unwrap(), News::Left("b".to_owned()));
    let there = container.arrives(held).await;
    container.writes(b"second");
    let held = there.hold(&name()).await.unwrap().unwrap();
    // The move ends in vain, and is tried again.
    there.release(&name()).await;
    let again = container.arrives(held).await;
    for sessions in [there, again] {
        let session = sessions.attach(&name(), "seen").unwrap();
        assert_eq!(session.next().await.unwrap(), News::Output(b"firstsecond".to_vec()));
        assert!(sessions.attach(&name(), "seen").is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_typed_and_not_read_goes_along() {
    let container = Container::new();
    let here = Sessions::default();
    let session = here.add(&name(), container.session("typed"), true);
    assert_eq!(session.type_some(b"keys\xff").await.unwrap(), Some(5));
    let held = here.hold(&name()).await.unwrap().unwrap();
    let there = container.arrives(held).await;
    assert_eq!(there.attach(&name(), "typed").unwrap().typed(), 5);
    let mut read = [0; 16];
    let length = rustix::io::read(&container.end, &mut read).unwrap();
    assert_eq!(&read[..length], b"keys\xff");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_at_a_frozen_terminal_hears_of_its_end() {
    let mut container = Container::new();
    let here = Sessions::default();
    let session = here.add(&name(), container.session("ends"), true);
    assert!(here.hold(&name()).await.unwrap().is_some());
    container.kept = None;
    container.process.kill().await.unwrap();
    // Nothing of it is known any more.
    assert!(here.of(&name()).is_empty());
    let session_too = Arc::clone(&session);
    here.lock().entry(name()).or_default().push(session_too);
    here.release(&name()).await;
    drop((container.user, container.end));
    assert_eq!(session.next().await.unwrap(), News::Lost);
    session.container_ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn only_those_whose_users_were_expected_and_have_not_come_are_given_up() {
    let container = Container::new();
    let here = Sessions::default();
    let late = here.add(&name(), container.session("late"), false);
    let there = here.add(&name(), container.session("there"), true);
    here.add(&name(), container.session("new"), false);
    let expected = [&late, &there].map(Arc::downgrade).to_vec();
    drop(late);
    here.clone().expect_users_within(Duration::ZERO, name(), expected).await;
    assert!(here.attach(&name(), "late").is_none());
    assert!(here.attach(&name(), "new").is_some());
    assert_eq!(here.of(&name()).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_is_expected_hears_of_an_end_that_comes_first() {
    let mut container = Container::new();
    let here = Sessions::default();
    here.add(&name(), container.session("expected"), false);
    here.begin(&name());
    here.add(&name(), container.session("has not run"), false);
    container.kept = None;
    container.process.kill().await.unwrap();
    assert!(here.of(&name()).is_empty());
    assert!(here.attach(&name(), "has not run").is_none());
    let session = here.attach(&name(), "expected").unwrap();
    assert!(here.attach(&name(), "expected").is_none());
    drop((container.user, container.end));
    assert_eq!(session.next().await.unwrap(), News::Lost);
    session.container_ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_more_than_can_move_is_refused() {
    let container = Container::new();
    let here = Sessions::default();
    for token in ["one", "two", "three", "four"] {
        here.add(&name(), container.session(token), false).lock().shown = vec![0; SHOWN_LIMIT - 1];
    }
    let error = here.hold(&name()).await.unwrap_err();
    assert!(error.to_string().contains("more than can move"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_that_cannot_be_is_not_believed() {
    let container = Container::new();
    for (typed, is_taken) in [(TYPED_LIMIT, true), (u64::MAX, false)] {
        let (pid, input, shown) = (container.pid(), Vec::new(), Vec::new());
        let record = Record { pid, token: "counts".to_owned(), typed, input, shown };
        let there = container.arrives((FILE.to_owned(), serde_json::to_vec(&[record]).unwrap())).await;
        assert_eq!(there.attach(&name(), "counts").is_some(), is_taken, "{typed}");
    }
}

#[tokio::test]
async fn what_has_something_else_in_place_of_a_terminal_or_a_pipe_is_not_taken() {
    let open = |path: &str| {
        rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, rustix::fs::Mode::empty()).unwrap()
    };
    let opened = |process: &Child| {
        let pid = process.id().unwrap();
        Session::open((pid, pid), Ok, String::new(), 0).map(drop).map_err(|error| error.to_string())
    };
    let (read, write) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let pipes = || [(write.try_clone().unwrap(), ORDERS_IN), (read.try_clone().unwrap(), NEWS_OUT)];
    let terminal = || {
        let user = pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        pty::unlockpt(&user).unwrap();
        (user, MASTER)
    };
    let [orders, news] = pipes();
    assert_eq!(opened(&with([terminal(), orders, news])), Ok(()));
    for other in
        [open("/dev/zero"), read.try_clone().unwrap(), typed::programs_end(terminal().0.as_fd()).unwrap()]
    {
        let [orders, news] = pipes();
        let why = opened(&with([(other, MASTER), orders, news])).unwrap_err();
        assert_eq!(why, format!("its descriptor {MASTER} is not a terminal's"));
    }
    let [orders, _] = pipes();
    let why = opened(&with([terminal(), orders, (open("/dev/zero"), NEWS_OUT)])).unwrap_err();
    assert_eq!(why, format!("its descriptor {NEWS_OUT} is not a pipe"));
    // A process that is none of the container's.
    let process = with([terminal()]);
    let pid = process.id().unwrap();
    let refuse = |_| Err(io::Error::other("somebody else"));
    assert_eq!(Session::open((pid, pid), refuse, String::new(), 0).unwrap_err().to_string(), "somebody else");
}
