//! What the user may write, and what is refused.
#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn sizes_count_in_1024() {
    for (text, bytes) in [
        ("1", 1),
        ("4096b", 4096),
        ("512k", 512 << 10),
        ("256m", 256 << 20),
        ("256MiB", 256 << 20),
        ("2G", 2 << 30),
        ("1TiB", 1 << 40),
    ] {
        assert_eq!(size(text), Ok(bytes), "{text}");
    }
}

#[test]
fn sizes_that_could_mean_two_things_are_refused() {
    for text in ["", "m", "1.5g", "-1m", "+1m", "1 m", "1x", "256mi", "0x10", "1e3"] {
        assert_eq!(size(text), Err(ValueError::Size), "{text}");
    }
    assert_eq!(size("256MB"), Err(ValueError::AmbiguousUnit { unit: "MB".to_owned() }));
    assert_eq!(size("0m"), Err(ValueError::ZeroSize));
    assert_eq!(size("99999999999999999999"), Err(ValueError::HugeSize));
    assert_eq!(size("16777216t"), Err(ValueError::HugeSize));
}

#[test]
fn cpus_are_thousandths() {
    for (text, millis) in [("1", 1000), ("1.5", 1500), ("0.125", 125), ("0.05", 50), ("16", 16_000)] {
        assert_eq!(cpus(text), Ok(millis), "{text}");
    }
    for text in ["", "0", "0.0", "-1", "1.", ".5", "1.2345", "1,5", "one", "+1", "99999999"] {
        assert_eq!(cpus(text), Err(ValueError::Cpus), "{text}");
    }
}

#[test]
fn ports_name_the_host_first() {
    let port = publish("8080:80").unwrap();
    assert_eq!((port.host_port, port.container_port, port.protocol.as_str()), (8080, 80, "tcp"));
    assert_eq!(publish("53:53/udp").unwrap().protocol, "udp");
    for text in ["0:80", "80:0", "65536:80", "a:b", "80:80/sctp", "my-name:80:80", "+1:80", "0", "x"] {
        assert_eq!(publish(text), Err(ValueError::Publish), "{text}");
    }
    for (text, words) in [
        ("127.0.0.1:8080:80/udp", "write 8080:80/udp, and keep others away by a firewall"),
        ("127.0.0.1::80", "write 80:80, and"),
        ("[::1]:8080:80", "write 8080:80, and"),
        ("80", "write 80:80, or another port in front"),
        ("53/udp", "write 53:53/udp, or"),
        ("80-81:80-81", "write -p for each of the range"),
    ] {
        let said = publish(text).unwrap_err().to_string();
        assert!(said.contains(words), "{text}: {said}");
    }
}

#[test]
fn environment_without_a_value_takes_the_users_own() {
    assert_eq!(env("A=b=c"), Ok("A=b=c".to_owned()));
    assert_eq!(env("A="), Ok("A=".to_owned()));
    assert_eq!(env("PATH"), Ok(format!("PATH={}", std::env::var("PATH").unwrap())));
    assert_eq!(env("GODWIT_TEST_NOT_SET"), Ok(String::new()));
    assert_eq!(env("=x"), Err(ValueError::Env));
    assert_eq!(label("only-a-name"), Err(ValueError::Label));
}

#[test]
fn mounts_read_like_podmans() {
    let bind = mount("type=bind,src=/data,dst=/var/lib,ro").unwrap();
    assert_eq!(
        (bind.kind.as_str(), bind.source.as_str(), bind.target.as_str()),
        ("bind", "/data", "/var/lib")
    );
    assert!(bind.read_only);
    assert!(!mount("type=bind,source=/data,target=/x,readonly=false").unwrap().read_only);
    let tmpfs = mount("dst=/tmp,type=tmpfs,size=64m").unwrap();
    assert_eq!((tmpfs.kind.as_str(), tmpfs.size_bytes), ("tmpfs", 64 << 20));
    let volume = volume("./data:/data:ro").unwrap();
    assert_eq!(volume.source, std::env::current_dir().unwrap().join("data").to_str().unwrap());
    assert!(volume.read_only);
}

#[test]
fn what_becomes_of_a_bind_mount_in_a_move_is_said_with_it_or_at_the_move() {
    assert_eq!(mount("type=bind,src=/a,dst=/b,move=shared").unwrap().on_move, "shared");
    let bound = volume("/a:/b:ro,move=skip").unwrap();
    assert!(bound.read_only && bound.on_move == "skip");
    assert_eq!(volume("/a:/b").unwrap().on_move, "");
    assert_eq!(on_move("/data=skip"), Ok(("/data".into(), "skip".into())));
    assert_eq!(on_move("/data=copy"), Ok(("/data".into(), "copy".into())));
    for text in ["/data", "/data=", "/data=move"] {
        assert_eq!(on_move(text), Err(ValueError::OnMove), "{text}");
    }
    assert_eq!(mount("type=bind,src=/a,dst=/b,move=all"), Err(ValueError::OnMove));
}

#[test]
fn a_wrong_mount_is_told_what_is_wrong() {
    for (text, expected) in [
        ("src=/a,dst=/b", "a mount needs type=bind, type=volume or type=tmpfs"),
        ("type=bind,dst=/b", "a bind mount needs src=PATH, what to mount"),
        ("type=bind,src=/a", "a bind mount needs dst=PATH, where it goes in the container"),
        ("type=bind,src=/a,dst=b", "'b' must be an absolute path inside the container, without '..'"),
        (
            "type=bind,src=/a,dst=/b/../c",
            "'/b/../c' must be an absolute path inside the container, without '..'",
        ),
        (
            "type=tmpfs,dst=/b,src=/a",
            "'src' is not a field of a tmpfs mount; the fields are type, dst, size, ro",
        ),
        (
            "type=bind,src=/a,dst=/b,size=1m",
            "'size' is not a field of a bind mount; the fields are type, src, dst, ro, move",
        ),
        ("type=tmpfs,dst=/b,size=0", "tmpfs size: the size is zero; for no limit, leave the flag out"),
    ] {
        assert_eq!(mount(text).unwrap_err().to_string(), expected);
    }
    assert_eq!(
        mount("type=volume,dst=/b").unwrap_err().to_string(),
        "a volume mount needs src=NAME, the volume"
    );
    for (text, words) in [
        ("/data", "write NAME:/data"),
        ("data:/data:Z", "leave Z out"),
        ("/a:/b:ro,z", "leave z out"),
        ("/a:/b:rslave", "godwit has no rslave for a mount"),
        ("data:/b:nocopy", "godwit has no nocopy"),
    ] {
        let said = volume(text).unwrap_err().to_string();
        assert!(said.contains(words), "{text}: {said}");
    }
    for text in [
        "a",
        "/a:/b:rx",
        ":/b",
        "/a:/b:ro:z",
        "/a:/b:",
        "/a:/b:move=all",
        "/a:/b,move=copy",
        "a:/b:move=skip",
    ] {
        assert_eq!(volume(text), Err(ValueError::Volume), "{text}");
    }
}

#[test]
fn moments_are_ages_seconds_or_rfc_3339() {
    assert_eq!(moment("1700000000"), Ok(1_700_000_000_000));
    assert_eq!(moment("2024-02-29T12:34:56.789Z"), Ok(1_709_210_096_789));
    assert_eq!(moment("1970-01-01 00:00:01Z"), Ok(1000));
    let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap();
    let hour_ago = moment("1h").unwrap();
    assert!((now - 3_600_000 - hour_ago).abs() < 10_000);
    for text in ["", "yesterday", "2024-02-29", "2024-13-01T00:00:00Z", "2024-02-29T12:34:56", "1w", "-5m"] {
        assert_eq!(moment(text), Err(ValueError::Time), "{text}");
    }
}

#[test]
fn an_invented_name_comes_from_the_command() {
    let name = invented_name("/usr/bin/Redis-Server").unwrap();
    let (base, digits) = name.rsplit_once('-').unwrap();
    assert_eq!(base, "redisserver");
    assert_eq!(digits.len(), 4);
    assert!(invented_name("").unwrap().starts_with("service-"));
}

#[test]
fn a_rate_is_in_bits_or_bytes_and_says_which() {
    for (text, bytes) in
        [("400mbit", 50_000_000), ("1gbit", 125_000_000), ("50MB/s", 50_000_000), ("1MiB/s", 1 << 20)]
    {
        assert_eq!(rate(text), Ok(bytes), "{text}");
    }
    for text in ["", "50", "50m", "mbit", "0mbit", "99999999999999999999gbit", "9999999999999gbit", "1.5gbit"]
    {
        assert_eq!(rate(text), Err(ValueError::Rate), "{text}");
    }
}

#[test]
fn an_environment_file_is_read_line_by_line() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("env");
    std::fs::write(&file, "# comment\n\nA=1\n  B=two words\nPATH\n").unwrap();
    let read = env_file(&file).unwrap();
    assert_eq!(read[..2], ["A=1", "B=two words"]);
    assert!(read[2].starts_with("PATH="), "{read:?}");
    std::fs::write(&file, "A=1\n=2\n").unwrap();
    assert!(env_file(&file).unwrap_err().to_string().contains("env: line 2: write NAME=VALUE"));
    assert!(env_file(Path::new("/nowhere")).unwrap_err().to_string().starts_with("/nowhere cannot be read"));
}

#[test]
fn limits_of_processes_and_entrypoints_are_read_strictly() {
    let limit = |soft, hard| Ulimit { name: "nofile".into(), soft, hard };
    assert_eq!(ulimit("nofile=5"), Ok(limit(5, 5)));
    assert_eq!(ulimit("nofile=5:unlimited"), Ok(limit(5, u64::MAX)));
    assert_eq!(ulimit("nofile=-1"), Ok(limit(u64::MAX, u64::MAX)));
    for text in ["nofile", "=5", "nofile=", "nofile=5:", "nofile=-2", "nofile=1k"] {
        assert_eq!(ulimit(text), Err(ValueError::Ulimit), "{text}");
    }
    assert_eq!((pids("-1"), pids("0"), pids("7")), (Ok(0), Ok(0), Ok(7)));
    assert_eq!(pids("-7"), Err(ValueError::Pids));
    assert_eq!(entrypoint("").unwrap().words, Vec::<String>::new());
    assert_eq!(entrypoint("/bin/sh").unwrap().words, ["/bin/sh"]);
    assert_eq!(entrypoint(r#"["sh","-c"]"#).unwrap().words, ["sh", "-c"]);
    assert_eq!(entrypoint("[sh]"), Err(ValueError::Entrypoint));
}

#[test]
fn what_podman_takes_for_the_name_of_a_volume_or_of_an_image_is_told_from_a_path() {
    let named = volume("data:/data:ro").unwrap();
    assert_eq!((named.kind.as_str(), named.source.as_str(), named.read_only), ("volume", "data", true));
    assert_eq!(mount("type=volume,src=data,dst=/data,ro").unwrap(), named);
    for path in ["../data:/data", "a/b:/data"] {
        assert_eq!(volume(path).unwrap().kind, "bind");
    }
    for reference in ["redis", "docker.io/library/redis:7", "quay.io/x/y"] {
        assert_eq!(image(reference), Ok(Image::Reference(reference.to_owned())));
        assert_eq!(image(&format!("docker://{reference}")), Ok(Image::Reference(reference.to_owned())));
    }
    assert_eq!(image_or_file("src"), Err(ValueError::Ambiguous { text: "src".into() }));
    assert_eq!(image_or_file("docker://src"), Ok(Image::Reference("src".into())));
    assert_eq!(image_or_file("redis"), Ok(Image::Reference("redis".into())));
    for path in
        ["/no/such/archive", "./src", "../x:latest", "x.tar", "x.tar:latest", "oci:no-such", "oci-archive:x"]
    {
        assert!(matches!(image(path), Ok(Image::Path(path)) if path.starts_with('/')), "{path}");
    }
}

#[test]
fn signals_have_names_and_numbers() {
    for (text, number) in [("TERM", 15), ("SIGTERM", 15), ("sigkill", 9), ("hup", 1), ("10", 10), ("34", 34)]
    {
        assert_eq!(signal(text), Ok(number), "{text}");
    }
    for text in ["", "SIG", "0", "65", "-9", "KILLED", "9 "] {
        assert_eq!(signal(text), Err(ValueError::Signal), "{text}");
    }
}

#[test]
fn no_limit_of_cpus_is_zero() {
    assert_eq!((cpus_or_none("0"), cpus_or_none("1.5")), (Ok(0), Ok(1500)));
    assert_eq!(cpus_or_none("-1"), Err(ValueError::Cpus));
    assert_eq!((size_or_none("0"), size_or_none("1k")), (Ok(0), Ok(1024)));
}
