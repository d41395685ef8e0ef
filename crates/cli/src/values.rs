//! Text from the user to values: sizes, CPUs, mounts, ports, environment, times.
//!
//! Strict on purpose: what could mean two things is refused with what to write instead.

use std::{
    env, io,
    net::IpAddr,
    path::{Component, Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use godwit_api::v1::{Entrypoint, Mount, PublishedPort, Ulimit};

/// Why a value is not taken. Clap puts the flag and the value in front.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum ValueError {
    #[error("a size is a whole number with a unit: 512k, 256m, 2g, or 512KiB, 256MiB, 2GiB")]
    Size,
    #[error(
        "'{unit}' could mean 1000 or 1024: write k, m, g, t or KiB, MiB, GiB, TiB, which all count in 1024"
    )]
    AmbiguousUnit { unit: String },
    #[error("the size is zero; for no limit, leave the flag out")]
    ZeroSize,
    #[error("the size is more than 64 bits can hold")]
    HugeSize,
    #[error("a number of CPUs is decimal, above zero, and has at most three places: 2, 1.5, 0.125")]
    Cpus,
    #[error("write HOST:CONTAINER or HOST:CONTAINER/udp with ports from 1 to 65535, for example 8080:80")]
    Publish,
    #[error(
        "a port is published on all addresses of a node, since the service moves to others: write {ports}, and keep others away by a firewall"
    )]
    PublishAddress { ports: String },
    #[error(
        "godwit chooses no port of a node, since it is to be free on each: write {port}:{port}{protocol}, or another port in front"
    )]
    PublishAny { port: u16, protocol: String },
    #[error("each port is published by itself: write -p for each of the range")]
    PublishRange,
    #[error("write NAME=VALUE, or NAME to take the value from your own environment")]
    Env,
    #[error("{file}: line {line}: {reason}", reason = ValueError::Env)]
    EnvLine { file: String, line: usize },
    #[error("{file} cannot be read: {reason}")]
    EnvFile { file: String, reason: String },
    #[error("write a program, or its words as a JSON array: [\"sh\", \"-c\"]")]
    Entrypoint,
    #[error("write how many processes there may be, or 0 or -1 for no limit")]
    Pids,
    #[error("write a signal's name, with or without SIG, or its number: TERM, SIGHUP, 10")]
    Signal,
    #[error("write NAME=SOFT or NAME=SOFT:HARD with numbers, or -1 or unlimited for no limit")]
    Ulimit,
    #[error("write NAME=VALUE")]
    Label,
    #[error("write POINT=NAME, for example post-resume=announce")]
    Hook,
    #[error("a mount needs type=bind, type=volume or type=tmpfs")]
    MountType,
    #[error("'{key}' is not a field of a {kind} mount; the fields are {known}")]
    MountKey { kind: &'static str, key: String, known: &'static str },
    #[error("a {kind} mount needs {missing}")]
    MountPart { kind: &'static str, missing: &'static str },
    #[error("'{path}' must be an absolute path inside the container, without '..'")]
    Target { path: String },
    #[error("tmpfs size: {0}")]
    MountSize(Box<ValueError>),
    #[error(
        "write SOURCE:TARGET, or SOURCE:TARGET:ro; of a path also SOURCE:TARGET:move=skip, move=shared or move=copy"
    )]
    Volume,
    #[error("a volume needs a name, by which it is found later: write NAME:{path}")]
    VolumeName { path: String },
    #[error("leave {word} out: godwit gives files no label of SELinux")]
    VolumeLabel { word: String },
    #[error("godwit has no {word} for a mount: write it without")]
    VolumeWord { word: String },
    #[error(
        "what becomes of a bind mount in a move is skip, shared or copy: skip for what the destination has under the same path, shared for storage that both nodes have, copy for the files to go with the service"
    )]
    OnMove,
    #[error("this may be a file or an image of a registry; write ./{text} or docker://{text}")]
    Ambiguous { text: String },
    #[error("write a time as 10m, 2h, 1d ago, as seconds since 1970, or as 2026-01-31T12:00:00Z")]
    Time,
    #[error("write a duration with its unit: 90s, 15m, 2h, 1d")]
    Duration,
    #[error("write a time with its unit: 500ms, 30s, 1m30s")]
    HealthTime,
    #[error("a health check needs a command; --no-healthcheck is for none at all")]
    NoHealthCommand,
    #[error(
        "a health check is a line for the image's shell, not a JSON array: write --health-cmd 'PROGRAM ARGUMENT'"
    )]
    HealthWords,
    #[error("write a latency with its unit: 20ms, 500us")]
    Latency,
    #[error("a rate is a whole number with a unit: 400mbit, 1gbit, 50MB/s or 50MiB/s")]
    Rate,
    #[error("the path cannot be made absolute: the current directory is gone")]
    NoDirectory,
}

/// `256m`, `256MiB`, `1073741824`: bytes.
///
/// # Errors
/// If it is no size, is zero, or has a unit that could mean two things.
pub fn size(text: &str) -> Result<u64, ValueError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(ValueError::Size);
    }
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "kb" | "mb" | "gb" | "tb" => return Err(ValueError::AmbiguousUnit { unit: unit.to_owned() }),
        _ => return Err(ValueError::Size),
    };
    let number: u64 = number.parse().map_err(|_| ValueError::HugeSize)?;
    match number.checked_mul(1 << shift) {
        Some(0) => Err(ValueError::ZeroSize),
        Some(bytes) => Ok(bytes),
        None => Err(ValueError::HugeSize),
    }
}

/// `400mbit`, `50MB/s`: bytes per second.
pub(crate) fn rate(text: &str) -> Result<u64, ValueError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| ValueError::Rate)?;
    // What one unit is in bits.
    let bits: u64 = match unit.to_ascii_lowercase().as_str() {
        "kbit" => 1_000,
        "mbit" => 1_000_000,
        "gbit" => 1_000_000_000,
        "kb/s" => 8_000,
        "mb/s" => 8_000_000,
        "gb/s" => 8_000_000_000,
        "kib/s" => 8 << 10,
        "mib/s" => 8 << 20,
        "gib/s" => 8 << 30,
        _ => return Err(ValueError::Rate),
    };
    match number.checked_mul(bits).map(|bits| bits / 8) {
        Some(0) | None => Err(ValueError::Rate),
        Some(bytes) => Ok(bytes),
    }
}

/// `1.5`: thousandths of a CPU.
pub(crate) fn cpus(text: &str) -> Result<u32, ValueError> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(part) || part.len() > 3 {
        return Err(ValueError::Cpus);
    }
    let thousands = format!("{whole}{part:0<3}").parse().map_err(|_| ValueError::Cpus)?;
    if thousands == 0 { Err(ValueError::Cpus) } else { Ok(thousands) }
}

/// `256m`, or `0` for no limit.
pub(crate) fn size_or_none(text: &str) -> Result<u64, ValueError> {
    if text == "0" { Ok(0) } else { size(text) }
}

/// `1.5`, or `0` for no limit.
pub(crate) fn cpus_or_none(text: &str) -> Result<u32, ValueError> {
    if text == "0" { Ok(0) } else { cpus(text) }
}

/// `TERM`, `SIGTERM` or `15`.
pub(crate) fn signal(text: &str) -> Result<u32, ValueError> {
    if let Ok(number) = text.parse() {
        // Those for real-time programs have numbers only.
        return if (1..=64).contains(&number) { Ok(number) } else { Err(ValueError::Signal) };
    }
    let name = text.to_ascii_uppercase();
    let name = if name.starts_with("SIG") { name } else { format!("SIG{name}") };
    let signal: nix::sys::signal::Signal = name.parse().map_err(|_| ValueError::Signal)?;
    u32::try_from(signal as i32).map_err(|_| ValueError::Signal)
}

/// `8080:80/udp`.
pub(crate) fn publish(text: &str) -> Result<PublishedPort, ValueError> {
    let (ports, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    let is_range = |part: &str| {
        part.split_once('-')
            .is_some_and(|(from, to)| from.parse::<u16>().is_ok() && to.parse::<u16>().is_ok())
    };
    if ports.split(':').any(is_range) {
        return Err(ValueError::PublishRange);
    }
    let behind = text.strip_prefix(ports).unwrap_or_default();
    let Some((host, container)) = ports.split_once(':') else {
        return Err(match ports.parse::<u16>() {
            Ok(port) if port > 0 => ValueError::PublishAny { port, protocol: behind.to_owned() },
            _ => ValueError::Publish,
        });
    };
    // An address stands in front; one of IPv6 in brackets.
    if let Some((before, container)) = ports.rsplit_once(':')
        && let Some((address, host)) = before.rsplit_once(':')
        && address.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
    {
        let host = if host.is_empty() { container } else { host };
        return Err(ValueError::PublishAddress { ports: format!("{host}:{container}{behind}") });
    }
    let port = |text: &str| match text.parse::<u16>() {
        Ok(port) if port > 0 && !text.starts_with('+') => Ok(u32::from(port)),
        _ => Err(ValueError::Publish),
    };
    if !matches!(protocol, "tcp" | "udp") {
        return Err(ValueError::Publish);
    }
    Ok(PublishedPort {
        host_port: port(host)?,
        container_port: port(container)?,
        protocol: protocol.to_owned(),
    })
}

/// `POINT=NAME`; the daemon knows the hook points.
pub(crate) fn hook(text: &str) -> Result<(String, String), ValueError> {
    match text.split_once('=') {
        Some((moment, name)) if !moment.is_empty() && !name.is_empty() => {
            Ok((moment.to_owned(), name.to_owned()))
        }
        _ => Err(ValueError::Hook),
    }
}

/// `NAME=VALUE`, or `NAME` with the value of godwit's own environment (none: an empty text).
pub(crate) fn env(text: &str) -> Result<String, ValueError> {
    match text.split_once('=') {
        Some(("", _)) => Err(ValueError::Env),
        Some(_) => Ok(text.to_owned()),
        None if text.is_empty() => Err(ValueError::Env),
        None => env::var(text).map(|value| format!("{text}={value}")).or(Ok(String::new())),
    }
}

/// The entries of a file with an environment: a line each, as [`env`] reads them.
pub(crate) fn env_file(path: &Path) -> Result<Vec<String>, ValueError> {
    let file = path.display().to_string();
    let text = std::fs::read_to_string(path)
        .map_err(|error| ValueError::EnvFile { file: file.clone(), reason: error.to_string() })?;
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim_start()));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(line, text)| env(text).map_err(|_| ValueError::EnvLine { file: file.clone(), line }))
        .collect()
}

/// `PROGRAM`, `["PROGRAM","ARGUMENT"]`, or nothing.
pub(crate) fn entrypoint(text: &str) -> Result<Entrypoint, ValueError> {
    let words = match text {
        "" => Vec::new(),
        array if array.starts_with('[') => serde_json::from_str(array).map_err(|_| ValueError::Entrypoint)?,
        program => vec![program.to_owned()],
    };
    Ok(Entrypoint { words })
}

/// Most processes; 0 for no limit.
pub(crate) fn pids(text: &str) -> Result<u64, ValueError> {
    if text == "-1" { Ok(0) } else { text.parse().map_err(|_| ValueError::Pids) }
}

/// `NAME=SOFT[:HARD]`; the daemon knows the names.
pub(crate) fn ulimit(text: &str) -> Result<Ulimit, ValueError> {
    let (name, limits) = text.split_once('=').ok_or(ValueError::Ulimit)?;
    let (soft, hard) = limits.split_once(':').unwrap_or((limits, limits));
    let number = |text: &str| match text {
        "-1" | "unlimited" => Ok(u64::MAX),
        number => number.parse().map_err(|_| ValueError::Ulimit),
    };
    if name.is_empty() {
        return Err(ValueError::Ulimit);
    }
    Ok(Ulimit { name: name.to_owned(), soft: number(soft)?, hard: number(hard)? })
}

/// `NAME=VALUE`.
pub(crate) fn label(text: &str) -> Result<String, ValueError> {
    match text.split_once('=') {
        Some((name, _)) if !name.is_empty() => Ok(text.to_owned()),
        _ => Err(ValueError::Label),
    }
}

/// Podman's `--mount`: `type=bind,src=DIR,dst=DIR[,ro]`, `type=volume,src=NAME,dst=DIR[,ro]` or
/// `type=tmpfs,dst=DIR[,size=64m]`.
pub(crate) fn mount(text: &str) -> Result<Mount, ValueError> {
    let parts: Vec<(&str, Option<&str>)> = text
        .split(',')
        .map(|part| part.split_once('=').map_or((part, None), |(key, value)| (key, Some(value))))
        .collect();
    let kind = match parts.iter().find(|(key, _)| *key == "type") {
        Some((_, Some("bind"))) => "bind",
        Some((_, Some("tmpfs"))) => "tmpfs",
        Some((_, Some("volume"))) => "volume",
        _ => return Err(ValueError::MountType),
    };
    let known = match kind {
        "tmpfs" => "type, dst, size, ro",
        "bind" => "type, src, dst, ro, move",
        _ => "type, src, dst, ro",
    };
    let mut mount = Mount { kind: kind.to_owned(), ..Mount::default() };
    for (key, value) in parts {
        match (key, value, kind) {
            ("type", ..) => {}
            ("src" | "source", Some(path), "bind") if !path.is_empty() => mount.source = absolute_text(path)?,
            ("src" | "source", Some(name), "volume") if !name.is_empty() => mount.source = name.to_owned(),
            ("dst" | "destination" | "target", Some(path), _) => mount.target = target(path)?,
            ("ro" | "readonly", None | Some("true"), _) => mount.read_only = true,
            ("ro" | "readonly", Some("false"), _) | ("rw", None | Some("true"), _) => mount.read_only = false,
            ("move", Some(what), "bind") if ON_MOVE.contains(&what) => mount.on_move = what.to_owned(),
            ("move", _, "bind") => return Err(ValueError::OnMove),
            ("size" | "tmpfs-size", Some(text), "tmpfs") => {
                mount.size_bytes = size(text).map_err(|error| ValueError::MountSize(Box::new(error)))?;
            }
            _ => return Err(ValueError::MountKey { kind, key: key.to_owned(), known }),
        }
    }
    if mount.target.is_empty() {
        return Err(ValueError::MountPart { kind, missing: "dst=PATH, where it goes in the container" });
    }
    if kind == "bind" && mount.source.is_empty() {
        return Err(ValueError::MountPart { kind, missing: "src=PATH, what to mount" });
    }
    if kind == "volume" && mount.source.is_empty() {
        return Err(ValueError::MountPart { kind, missing: "src=NAME, the volume" });
    }
    Ok(mount)
}

/// What can become of a bind mount in a move.
const ON_MOVE: [&str; 3] = ["skip", "shared", "copy"];

/// `TARGET=skip`, `TARGET=shared` or `TARGET=copy`.
pub(crate) fn on_move(text: &str) -> Result<(String, String), ValueError> {
    match text.split_once('=') {
        Some((path, what)) if ON_MOVE.contains(&what) => Ok((target(path)?, what.to_owned())),
        _ => Err(ValueError::OnMove),
    }
}

/// Words of Podman's and Docker's for a mount that godwit does not have.
const OF_PODMAN: [&str; 22] = [
    "U",
    "O",
    "exec",
    "noexec",
    "suid",
    "nosuid",
    "dev",
    "nodev",
    "bind",
    "rbind",
    "shared",
    "rshared",
    "slave",
    "rslave",
    "private",
    "rprivate",
    "unbindable",
    "runbindable",
    "copy",
    "nocopy",
    "cached",
    "delegated",
];

/// Podman's `-v`, and what becomes of it in a move: `SOURCE:TARGET[:ro|rw|move=skip|move=shared|move=copy,…]`.
pub(crate) fn volume(text: &str) -> Result<Mount, ValueError> {
    let parts: Vec<_> = text.split(':').collect();
    let (source, path, words) = match parts.as_slice() {
        [source, path] => (source, path, ""),
        [source, path, words] if !words.is_empty() => (source, path, *words),
        [path] if path.starts_with('/') => {
            return Err(ValueError::VolumeName { path: (*path).to_owned() });
        }
        _ => return Err(ValueError::Volume),
    };
    // Words behind a comma that follow no colon would become a part of the path.
    if source.is_empty() || path.contains(",move=") {
        return Err(ValueError::Volume);
    }
    // As Podman and Docker tell them apart.
    let (kind, source) = match source.contains('/') || source.starts_with('.') {
        true => ("bind", absolute_text(source)?),
        false => ("volume", (*source).to_owned()),
    };
    let mut mount = Mount { kind: kind.to_owned(), source, target: target(path)?, ..Mount::default() };
    for word in words.split(',').filter(|word| !word.is_empty()) {
        match word.split_once('=') {
            None if word == "rw" => mount.read_only = false,
            None if word == "ro" => mount.read_only = true,
            Some(("move", what)) if kind == "bind" && ON_MOVE.contains(&what) => {
                mount.on_move = what.to_owned();
            }
            None if matches!(word, "z" | "Z") => {
                return Err(ValueError::VolumeLabel { word: word.to_owned() });
            }
            None if OF_PODMAN.contains(&word) => {
                return Err(ValueError::VolumeWord { word: word.to_owned() });
            }
            _ => return Err(ValueError::Volume),
        }
    }
    Ok(mount)
}

/// Where an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Image {
    /// The absolute path of an archive or an image layout directory.
    Path(String),
    /// In a registry, or on the node, as the user has written it.
    Reference(String),
}

/// An image. A file is written as a path, or has the name of an archive: what lies about in the current directory does not
/// take the place of a registry's image.
pub(crate) fn image(text: &str) -> Result<Image, ValueError> {
    if let Some(reference) = text.strip_prefix("docker://") {
        return Ok(Image::Reference(reference.to_owned()));
    }
    let transport = ["oci-archive:", "oci:"].into_iter().find_map(|transport| text.strip_prefix(transport));
    // `ARCHIVE:NAME` names one of several images.
    let file = text.rsplit_once(':').map_or(text, |(file, _)| file);
    let is_path = transport.is_some()
        || text.starts_with(['/', '.'])
        || [text, file].iter().any(|name| name.ends_with(".tar"));
    Ok(if is_path {
        Image::Path(absolute_text(transport.unwrap_or(text))?)
    } else {
        Image::Reference(text.to_owned())
    })
}

/// The same for `--image`, which has taken any file: what could be both is refused.
pub(crate) fn image_or_file(text: &str) -> Result<Image, ValueError> {
    match image(text)? {
        Image::Reference(reference) if reference == text && Path::new(text).exists() => {
            Err(ValueError::Ambiguous { text: reference })
        }
        image => Ok(image),
    }
}

/// A path inside the container.
fn target(text: &str) -> Result<String, ValueError> {
    let path = Path::new(text);
    if !path.is_absolute() || path.components().any(|part| part == Component::ParentDir) {
        return Err(ValueError::Target { path: text.to_owned() });
    }
    Ok(text.to_owned())
}

/// A path on this machine as the daemon, which has another current directory, must get it.
///
/// # Errors
/// If the path is relative and there is no current directory.
pub fn absolute(text: &str) -> Result<PathBuf, ValueError> {
    std::path::absolute(text).map_err(|_| ValueError::NoDirectory)
}

/// The same as text, for the API.
pub(crate) fn absolute_text(text: &str) -> Result<String, ValueError> {
    Ok(absolute(text)?.to_string_lossy().into_owned())
}

/// `90s`, `15m`, `2h`, `1d`.
pub(crate) fn duration(text: &str) -> Result<Duration, ValueError> {
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or(ValueError::Duration)?;
    let (number, unit) = text.split_at(split);
    let unit = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(ValueError::Duration),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    seconds.map(Duration::from_secs).ok_or(ValueError::Duration)
}

/// A round trip: `20ms`, `500us`, or a longer time such as `2s`.
///
/// # Errors
/// If it is no time, or 0.
pub fn latency(text: &str) -> Result<Duration, ValueError> {
    let number = |unit: &str| text.strip_suffix(unit).and_then(|number| number.parse::<u32>().ok());
    let found = match (number("ms"), number("us")) {
        (Some(ms), _) => Duration::from_millis(ms.into()),
        (_, Some(us)) => Duration::from_micros(us.into()),
        _ => duration(text).map_err(|_| ValueError::Latency)?,
    };
    if found.is_zero() { Err(ValueError::Latency) } else { Ok(found) }
}

/// A time of a health check, such as `500ms` or `1m30s`, in whole numbers, or 0; in milliseconds.
pub(crate) fn health_time(text: &str) -> Result<u64, ValueError> {
    if text == "0" {
        return Ok(0);
    }
    let (mut left, mut sum) = (text, None::<u64>);
    while !left.is_empty() {
        let number = left.bytes().take_while(u8::is_ascii_digit).count();
        let (number, rest) = left.split_at(number);
        let unit = rest.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (unit, rest) = rest.split_at(unit);
        let unit = match unit {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(ValueError::HealthTime),
        };
        let part = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
        let more = part.and_then(|part| part.checked_add(sum.unwrap_or(0)));
        (left, sum) = (rest, Some(more.ok_or(ValueError::HealthTime)?));
    }
    sum.ok_or(ValueError::HealthTime)
}

/// A line for a shell. To Podman `none` is no check at all, and a JSON array a program with its arguments; to Docker neither is.
pub(crate) fn health_command(text: &str) -> Result<String, ValueError> {
    match text.trim() {
        "" | "none" => Err(ValueError::NoHealthCommand),
        line if serde_json::from_str::<Vec<String>>(line).is_ok() => Err(ValueError::HealthWords),
        _ => Ok(text.to_owned()),
    }
}

/// A time that is not 0: `90s`, `15m`.
///
/// # Errors
/// If it is no time, or 0.
pub fn some_time(text: &str) -> Result<Duration, ValueError> {
    duration(text).and_then(|found| if found.is_zero() { Err(ValueError::Duration) } else { Ok(found) })
}

/// A moment in the past: an age, seconds since 1970, or RFC 3339 in UTC; as milliseconds.
pub(crate) fn moment(text: &str) -> Result<i64, ValueError> {
    if let Ok(age) = duration(text) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        return i64::try_from(now.saturating_sub(age).as_millis()).map_err(|_| ValueError::Time);
    }
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        let seconds: i64 = text.parse().map_err(|_| ValueError::Time)?;
        return seconds.checked_mul(1000).ok_or(ValueError::Time);
    }
    rfc3339(text).ok_or(ValueError::Time)
}

/// `2026-01-31T12:00:00[.123]Z` as milliseconds since 1970.
fn rfc3339(text: &str) -> Option<i64> {
    let (date, time) = text.strip_suffix(['Z', 'z'])?.split_once(['T', ' '])?;
    let field = |text: &str, length: usize| -> Option<i64> {
        (text.len() == length && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok())?
    };
    let mut date = date.split('-');
    let (year, month, day) = (field(date.next()?, 4)?, field(date.next()?, 2)?, field(date.next()?, 2)?);
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut time = time.split(':');
    let (hour, minute, second) = (field(time.next()?, 2)?, field(time.next()?, 2)?, field(time.next()?, 2)?);
    let fraction_digits = fraction.bytes().all(|byte| byte.is_ascii_digit()) && !fraction.is_empty();
    let in_range = (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && (0..24).contains(&hour)
        && (0..60).contains(&minute)
        && (0..=60).contains(&second);
    if date.next().is_some() || time.next().is_some() || !fraction_digits || !in_range {
        return None;
    }
    let millis: i64 = format!("{fraction:0<3}")[..3].parse().ok()?;
    let seconds = days_from_civil(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    Some(seconds * 1000 + millis)
}

/// Days since 1970-01-01 of a Gregorian date (H. Hinnant, "chrono-compatible low-level date algorithms").
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// A name for a service that the user did not name: from its image's or its program's, with four random digits.
pub(crate) fn invented_name(from: &str) -> io::Result<String> {
    let mut random = [0; 2];
    io::Read::read_exact(&mut std::fs::File::open("/dev/urandom")?, &mut random)?;
    let base: String = Path::new(from)
        .file_name()
        .map(|name| name.to_string_lossy().to_ascii_lowercase())
        .unwrap_or_default()
        .chars()
        .filter(|c| c.is_ascii_alphanumeric())
        .take(20)
        .collect();
    let base = if base.is_empty() { "service" } else { base.as_str() };
    Ok(format!("{base}-{:04x}", u16::from_be_bytes(random)))
}

#[cfg(test)]
#[path = "values_tests.rs"]
mod tests;
