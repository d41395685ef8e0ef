//! Users and commands of a root filesystem, looked up without leaving it: links are resolved as
//! if the root filesystem were `/`.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use rustix::fs::{FileType, OFlags};

use super::RootfsError;
use crate::beneath::{Links, Root};
use crate::confinement::User;

/// Most bytes of `/etc/passwd` and `/etc/group` that are read: a hundred thousand accounts.
const MAX_ACCOUNTS: u64 = 8 << 20;
/// Where commands are searched when the container's environment has no `PATH`, as runc does.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The numeric ids for `user[:group]`, both names or numbers; root for an empty text. Without a
/// group, the user's own group and the groups that list the user. A number that has no account is
/// taken as it is, with group 0.
pub fn resolve_user(root: &Path, user: &str) -> Result<User, RootfsError> {
    let (name, group) = user.split_once(':').map_or((user, None), |(name, group)| (name, Some(group)));
    let accounts = lines(root, "/etc/passwd")?;
    let account = accounts.iter().map(|line| fields(line)).find(|account| match account[..] {
        [login, _, uid, _, ..] => is_meant(login, uid, if name.is_empty() { "0" } else { name }),
        _ => false,
    });
    let number = |at: usize| account.as_ref().and_then(|account| account.get(at)?.parse::<u32>().ok());
    let uid = match (number(2), name) {
        (Some(uid), _) => uid,
        (None, "") => 0,
        (None, name) => name.parse().map_err(|_| no_user(root, name))?,
    };
    if uid == u32::MAX {
        return Err(no_user(root, name));
    }
    let own_group = number(3).unwrap_or(0);
    let groups = lines(root, "/etc/group")?;
    let groups: Vec<Vec<&str>> = groups.iter().map(|line| fields(line)).collect();
    if let Some(wanted) = group.filter(|group| !group.is_empty()) {
        let listed = groups
            .iter()
            .find(|group| matches!(group[..], [name, _, gid, ..] if is_meant(name, gid, wanted)));
        let gid = listed.and_then(|group| group[2].parse().ok()).or_else(|| wanted.parse().ok());
        return match gid.filter(|gid| *gid != u32::MAX) {
            Some(gid) => Ok(User { uid, gid, groups: Vec::new() }),
            None => Err(RootfsError::NoGroup { root: root.to_path_buf(), group: wanted.to_owned() }),
        };
    }
    let login = account.as_ref().map_or("", |account| account[0]);
    let mut further: Vec<u32> = groups
        .iter()
        .filter_map(|group| match group[..] {
            [_, _, gid, members, ..]
                if !login.is_empty() && members.split(',').any(|member| member == login) =>
            {
                gid.parse().ok()
            }
            _ => None,
        })
        .filter(|gid| *gid != own_group)
        .collect();
    further.sort_unstable();
    further.dedup();
    Ok(User { uid, gid: own_group, groups: further })
}

/// Finds the command a container shall run, and checks that it can be run: the path within the
/// root filesystem. A command with a `/` is taken as it is, relative to the root; any other is
/// searched in `path_env`, the value of the container's `PATH` (empty for the usual directories).
pub fn find_command(root: &Path, path_env: &str, command: &str) -> Result<String, RootfsError> {
    let opened = open(root).map_err(|source| RootfsError::Read { root: root.into(), file: "/", source })?;
    let searched = if path_env.is_empty() { DEFAULT_PATH } else { path_env };
    let no_command = |searched: &str| RootfsError::NoCommand {
        root: root.to_path_buf(),
        command: command.to_owned(),
        searched: searched.to_owned(),
    };
    if command.is_empty() || command.contains('\0') {
        return Err(no_command(searched));
    }
    let candidates: Vec<String> = if command.contains('/') {
        vec![format!("/{}", command.trim_start_matches('/'))]
    } else {
        searched.split(':').filter(|part| !part.is_empty()).map(|part| format!("{part}/{command}")).collect()
    };
    let mut present = None;
    for candidate in &candidates {
        match reason_not_to_run(&opened, candidate) {
            Ok(None) => return Ok(candidate.clone()),
            Ok(Some(reason)) => {
                present.get_or_insert((candidate, reason));
            }
            Err(_) => {}
        }
    }
    match present {
        Some((candidate, reason)) => {
            Err(RootfsError::NotExecutable { root: root.to_path_buf(), command: candidate.clone(), reason })
        }
        None if command.contains('/') => Err(no_command(command)),
        None => Err(no_command(searched)),
    }
}

fn reason_not_to_run(root: &Root, path: &str) -> io::Result<Option<&'static str>> {
    let file = root.open_at(path.as_bytes(), OFlags::PATH)?;
    let stat = rustix::fs::fstat(&file)?;
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => Some("a directory"),
        FileType::RegularFile if stat.st_mode & 0o111 == 0 => Some("not executable"),
        FileType::RegularFile => None,
        _ => Some("not a program"),
    })
}

fn open(root: &Path) -> io::Result<Root> {
    Root::open(root, Links::InRoot)
}

/// Lines of a file of accounts; none when there is no such file.
fn lines(root: &Path, file: &'static str) -> Result<Vec<String>, RootfsError> {
    let read = || -> io::Result<String> {
        let opened = open(root)?.open_at(file.as_bytes(), OFlags::RDONLY | OFlags::NONBLOCK)?;
        let opened = File::from(opened);
        if !opened.metadata()?.is_file() {
            return Ok(String::new());
        }
        let mut bytes = Vec::new();
        opened.take(MAX_ACCOUNTS).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match read() {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(RootfsError::Read { root: root.to_path_buf(), file, source }),
    }
}

fn fields(line: &str) -> Vec<&str> {
    line.trim().split(':').collect()
}

/// Whether both are the same number.
/// Whether a line with this name and number is wanted. A number is a number, whoever may have it for a name: else an image could
/// make root of it.
fn is_meant(name: &str, number: &str, wanted: &str) -> bool {
    match wanted.parse::<u32>() {
        Ok(wanted) => number.parse() == Ok(wanted),
        Err(_) => name == wanted,
    }
}

fn no_user(root: &Path, user: &str) -> RootfsError {
    RootfsError::NoUser { root: root.to_path_buf(), user: user.to_owned() }
}
