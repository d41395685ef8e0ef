//! The Quadlet unit of docs/podman.md: what Podman is called with for it is adopted, and moves. Needs root and Podman.

use std::net::Ipv4Addr;

use godwit_lab::workload::{RedisClient, Workload};
use godwit_tests::podman::Podmans;
use godwit_tests::{Bed, CLIENT, PATIENCE};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
const IMAGE: &str = "localhost/redis:1";

/// What Quadlet calls Podman with for any container (Podman 4.4 to 5.2), before what the unit says.
const ALWAYS: [&str; 5] = ["--replace", "--rm", "--cgroups=split", "--sdnotify=conmon", "--detach"];

/// The settings of the unit in the documentation.
fn unit() -> Vec<(String, String)> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/podman.md")).unwrap();
    let (_, text) = page.split_once("```ini\n").unwrap();
    let (text, _) = text.split_once("```").unwrap();
    let (_, container) = text.split_once("[Container]\n").unwrap();
    assert!(!container.contains('['), "another section: {container}");
    container
        .lines()
        .map(|line| line.split_once('=').unwrap())
        .map(|(key, value)| (key.into(), value.into()))
        .collect()
}

/// The words of `podman run` that Quadlet makes of settings, but for the image: those of `PodmanArgs` come last.
fn words(settings: &[(String, String)]) -> Vec<String> {
    let mut words: Vec<_> = ALWAYS.map(str::to_owned).into();
    let (own, others): (Vec<_>, Vec<_>) = settings.iter().partition(|(key, _)| key == "PodmanArgs");
    for (key, value) in others {
        let flag = match key.as_str() {
            "ContainerName" => "--name",
            "Network" => "--network",
            "Volume" => "-v",
            "Image" => continue,
            other => panic!("this test does not know {other}"),
        };
        words.extend([flag.to_owned(), value.clone()]);
    }
    words.extend(own.iter().flat_map(|(_, value)| value.split(' ')).map(str::to_owned));
    words
}

#[test]
fn the_container_of_the_documented_unit_is_adopted_and_moves() {
    let podmans = Podmans::new();
    let bed = Bed::up_with("quadlet", |config| podmans.equip(config));
    let preset = bed.build(Workload::Redis);
    podmans.image(&bed, &["a", "b"], &preset, IMAGE);
    let settings = unit();
    assert!(settings.contains(&("Image".into(), "docker.io/library/redis:7".into())), "{settings:?}");
    // Where there is no registry the image has another name, and no command of its own.
    let own = words(&settings);
    let user = preset.user.iter().flat_map(|user| ["--user", user]);
    let started = ["run"].into_iter().chain(own.iter().map(String::as_str)).chain(user).chain([IMAGE]);
    let started: Vec<_> = started.chain(preset.command.iter().map(String::as_str)).collect();
    let id = podmans.done(&bed, "a", &started);
    bed.done("a", &["adopt", "podman:cache", "--ip", &ADDRESS.to_string()]);
    let at = preset.at(ADDRESS);
    let mut lasting = RedisClient::connect(bed.lab(), CLIENT, at, PATIENCE).unwrap();
    lasting.fill(1 << 20).unwrap();
    bed.migrate("cache", "a", "b");
    lasting.check_fill(1 << 20).unwrap();
    let listed = podmans.done(&bed, "b", &["ps", "--no-trunc", "--format", "json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((listed[0]["Names"][0].as_str(), listed[0]["Id"].as_str()), (Some("cache"), Some(id.trim())));
    // What the unit does on a when its container has ended.
    assert_eq!(podmans.done(&bed, "a", &["rm", "-v", "-f", "-i", id.trim()]), "");
    lasting.call(&["PING"]).unwrap();
    bed.done("b", &["rm", "--force", "cache"]);
}
