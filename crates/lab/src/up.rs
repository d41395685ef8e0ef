//! Making a lab.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader},
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    thread,
};

use crate::{
    config::{LabConfig, Paths, RUN_ROOT, STATE_ROOT, SWITCH, UPLINK},
    daemon, down,
    error::{Context, LabError},
    handle::{Lab, need_root},
    host,
    machine::node,
    netns, programs,
    registry::{Lock, Record},
};

/// Name of the link program's pid record.
pub(crate) const LINK_ROLE: &str = "link";
const LINK_PROGRAM: &str = "godwit-lab-link";

pub(crate) fn up(config: &LabConfig) -> Result<Lab, LabError> {
    config.validate()?;
    need_root()?;
    let lab = Lab { config: config.clone(), paths: Paths::new(&config.name) };
    if Lab::list().contains(&config.name) {
        return Err(LabError::Exists(config.name.clone()));
    }
    let lock = claim(&lab.paths, &config.name)?;
    let made = build(&lab);
    if made.is_err() {
        // The error that matters is the first one; what cannot be removed is for `lab down`.
        let _ = down::clear(&config.name, &lab.paths);
    }
    drop(lock);
    made.map(|()| lab)
}

/// Makes the state directory, which is what takes the name.
fn claim(paths: &Paths, name: &str) -> Result<Lock, LabError> {
    let state = paths.state();
    for _ in 0..16 {
        fs::create_dir_all(STATE_ROOT).context("creating", STATE_ROOT)?;
        match fs::create_dir(&state) {
            Ok(()) => return Lock::take(paths, name)?.ok_or_else(|| LabError::Busy(name.to_owned())),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(LabError::Exists(name.to_owned()));
            }
            // Another lab that came down has removed the empty root.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).context("creating", state.display()),
        }
    }
    Err(LabError::Busy(name.to_owned()))
}

fn build(lab: &Lab) -> Result<(), LabError> {
    let Lab { config, paths } = lab;
    let mut record = Record::new(config);
    record.write(paths)?;
    netns::prepare_root()?;
    let hosts = config.hosts();
    netns::create(&paths.netns(SWITCH))?;
    for (host, _) in &hosts {
        netns::create(&paths.netns(host))?;
    }
    make_run(paths)?;
    start_links(lab)?;
    for (host, address) in &hosts {
        match config.machines.get(host) {
            Some(_) => host::configure_machine(paths, host, config.link)?,
            None => host::configure(paths, host, *address, config.link)?,
        }
    }
    start_machines(lab)?;
    if config.daemons {
        daemon::start_cluster(lab)?;
    }
    record.complete = true;
    record.write(paths)
}

/// Starts all machines at once: each waits most of the time.
fn start_machines(lab: &Lab) -> Result<(), LabError> {
    thread::scope(|scope| {
        let starting: Vec<_> = lab
            .config
            .machines
            .iter()
            .map(|(name, machine)| scope.spawn(move || node::start(lab, name, machine)))
            .collect();
        let ended: Vec<_> = starting.into_iter().map(thread::ScopedJoinHandle::join).collect();
        ended.into_iter().try_for_each(|ended| ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

fn make_run(paths: &Paths) -> Result<(), LabError> {
    for _ in 0..16 {
        fs::create_dir_all(RUN_ROOT).context("creating", RUN_ROOT)?;
        match fs::create_dir(paths.run()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => return other.context("creating", paths.run().display()),
        }
    }
    Err(io::Error::from(io::ErrorKind::NotFound)).context("creating", paths.run().display())
}

fn start_links(lab: &Lab) -> Result<(), LabError> {
    let Lab { config, paths } = lab;
    let mut command = inside_switch(lab)?;
    command.arg("--control").arg(paths.link_socket());
    if let Some(link) = config.link {
        command.arg("--link").arg(link.to_string());
    }
    for (host, _) in config.hosts() {
        let mut argument = std::ffi::OsString::from(format!("{host}="));
        argument.push(paths.netns(&host));
        command.arg("--host").arg(argument);
    }
    command.stdout(Stdio::piped());
    let mut child = programs::start(lab, LINK_ROLE, command, &paths.link_log())?;
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output).read_line(&mut line).context("reading from", LINK_PROGRAM)?;
    }
    if line.trim() == "ready" {
        return Ok(());
    }
    let status = child.wait().context("waiting for", LINK_PROGRAM)?;
    Err(LabError::Program {
        program: format!("{LINK_PROGRAM} (which makes {UPLINK} of every host)"),
        lab: config.name.clone(),
        status,
        output: programs::tail(&paths.link_log()),
    })
}

fn inside_switch(lab: &Lab) -> Result<Command, LabError> {
    use nix::sched::{CloneFlags, setns};
    use std::os::fd::AsFd;
    let path = lab.paths.netns(SWITCH);
    let namespace = File::open(&path).context("opening network namespace", path.display())?;
    let mut command = Command::new(programs::path(&lab.config, LINK_PROGRAM)?);
    // SAFETY: setns is a bare system call, safe between fork and exec.
    unsafe {
        command.pre_exec(move || Ok(setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET)?));
    }
    Ok(command)
}
