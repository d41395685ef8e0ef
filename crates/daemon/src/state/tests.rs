//! Tests of the state.

use godwit_api::v1::PublishedPort;

use super::*;

fn placement(id: &str, node: &str, epoch: u64, removed: bool) -> Placement {
    Placement {
        service: "redis".into(),
        address: "10.88.0.10".into(),
        node: node.into(),
        epoch,
        removed,
        id: id.into(),
        publish: vec![PublishedPort { host_port: 80, container_port: 8080, protocol: "tcp".into() }],
        more: vec!["10.89.0.10".into()],
        aliases: vec!["store".into()],
    }
}

#[test]
fn the_database_is_closed_to_other_users_even_where_its_file_was_open_to_them() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.db");
    let open = || {
        let _state = State::open(&path).unwrap();
        let found: Vec<_> = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .map(|entry| (entry.file_name(), entry.metadata().unwrap().permissions().mode() & 0o777))
            .collect();
        assert!(found.len() > 1, "SQLite has further files while it is open: {found:?}");
        assert!(found.iter().all(|(_, mode)| *mode == 0o600), "{found:?}");
    };
    open();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    open();
}

#[test]
fn only_a_newer_placement_replaces_what_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("node.db")).unwrap();
    assert!(state.put_placement(&placement("1", "a", 1, false)).unwrap());
    assert!(state.put_placement(&placement("1", "b", 2, false)).unwrap());
    assert!(!state.put_placement(&placement("1", "a", 1, false)).unwrap(), "an older owner");
    assert!(!state.put_placement(&placement("2", "c", 9, false)).unwrap(), "a second service of that name");
    assert!(state.put_placement(&placement("2", "b", 3, false)).unwrap(), "its node has another one now");
    assert!(!state.put_placement(&placement("1", "b", 2, true)).unwrap(), "it is known to be gone");
    assert!(state.put_placement(&placement("2", "b", 3, true)).unwrap());
    assert!(!state.put_placement(&placement("0", "c", 1, false)).unwrap(), "one made before the removal");
    assert!(state.put_placement(&placement("3", "c", 1, false)).unwrap(), "the name is free again");
    assert_eq!(state.placements().unwrap(), [placement("3", "c", 1, false)]);
}

fn service(id: &str, epoch: u64) -> Service {
    serde_json::from_value(serde_json::json!({
        "id": id, "name": "redis", "address": "10.88.0.10", "epoch": epoch, "image": "", "layers": [],
        "command": ["redis-server"], "env": [], "mounts": [], "memory_bytes": 0, "cpu_millis": 0,
        "publish": [], "hostname": "redis", "user": {"uid": 0, "gid": 0, "groups": []}, "workdir": "/",
        "labels": [], "created_ms": 0, "started_ms": 0,
    }))
    .unwrap()
}

#[test]
fn a_service_that_a_user_stopped_is_stopped_until_it_is_started_or_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("node.db")).unwrap();
    let owned = || state.service(&"redis".parse().unwrap()).unwrap().unwrap();
    state.put_service(&service("1", 3)).unwrap();
    state.set_stopped(&service("2", 3)).unwrap();
    assert!(!owned().stopped, "another one");
    state.set_stopped(&service("1", 3)).unwrap();
    // Its migration to this node was not over when the daemon was restarted.
    state.put_service(&service("1", 3)).unwrap();
    assert!(owned().stopped);
    assert!(!state.set_started(&service("1", 3), 0).unwrap(), "it has not ended");
    state.set_exit(&service("1", 3), 143, "").unwrap();
    assert!(!state.set_started(&service("1", 2), 0).unwrap(), "an earlier life");
    assert!(!state.set_started(&service("1", 4), 0).unwrap(), "a later one, which is not here");
    assert!(state.set_started(&service("1", 3), 7).unwrap());
    assert_eq!((owned().stopped, owned().exit_code, owned().restarts), (false, None, 7));
    state.set_stopped(&service("1", 3)).unwrap();
    state.put_service(&service("1", 5)).unwrap();
    assert_eq!((owned().stopped, owned().restarts), (false, 0));
}

#[test]
fn only_the_life_of_a_service_that_is_meant_is_forgotten_or_ends() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("node.db")).unwrap();
    state.put_service(&service("1", 3)).unwrap();
    for other in [service("2", 3), service("1", 2)] {
        assert!(!state.remove_service(&other).unwrap(), "{other:?}");
        assert!(matches!(state.put_service(&other), Err(StateError::Another(_))), "{other:?}");
        state.set_exit(&other, 1, "").unwrap();
    }
    let owned = state.service(&"redis".parse().unwrap()).unwrap().unwrap();
    assert_eq!((owned.service, owned.exit_code), (service("1", 3), None));
    state.put_service(&service("1", 5)).unwrap();
    state.set_exit(&service("1", 5), 7, "why").unwrap();
    assert_eq!(state.service(&"redis".parse().unwrap()).unwrap().unwrap().exit_code, Some(7));
    assert!(state.remove_service(&service("1", 5)).unwrap());
    assert!(state.services().unwrap().is_empty());
}

#[test]
fn a_service_with_a_name_that_is_a_path_is_not_read_and_the_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.db");
    let state = State::open(&path).unwrap();
    state.put_service(&service("1", 3)).unwrap();
    let other = Connection::open(&path).unwrap();
    other.execute("UPDATE service SET service = replace(service, '\"redis\"', '\"../x\"')", []).unwrap();
    let error = godwit_migration::error_chain(&state.services().unwrap_err());
    assert!(error.contains("node.db") && error.contains("\"../x\" cannot be a service's name"), "{error}");
}

#[test]
fn a_database_of_before_versions_were_counted_is_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.db");
    let old = Connection::open(&path).unwrap();
    old.execute_batch(STEPS[0].sql).unwrap();
    let text = serde_json::to_string(&service("1", 3)).unwrap();
    old.execute("INSERT INTO service (name, service) VALUES ('redis', ?1)", params![text]).unwrap();
    drop(old);
    let owned = State::open(&path).unwrap().services().unwrap();
    assert_eq!(owned.len(), 1);
    assert_eq!((owned[0].stopped, owned[0].restarts), (false, 0));
}

#[test]
fn the_database_of_release_0_2_0_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.db");
    Connection::open(&path).unwrap().execute_batch(include_str!("fixtures/0.2.0.sql")).unwrap();
    let state = State::open(&path).unwrap();
    let owned: Vec<_> = state
        .services()
        .unwrap()
        .into_iter()
        .map(|owned| (owned.service.name.to_string(), owned.service.epoch, owned.exit_code, owned.stopped))
        .collect();
    let is = |name: &str, epoch, exit_code, stopped| (name.to_owned(), epoch, exit_code, stopped);
    assert_eq!(
        owned,
        [is("ended", 1, Some(3), false), is("moves", 3, Some(137), true), is("stays", 1, None, false)]
    );
    let moves = state.service(&"moves".parse().unwrap()).unwrap().unwrap();
    assert_eq!(moves.reason, "stopped by `godwit stop`");
    assert_eq!(moves.service.memory_bytes, 64 << 20);
    let placements = state.placements().unwrap();
    let places: Vec<_> =
        placements.iter().map(|at| (at.service.as_str(), at.node.as_str(), at.removed)).collect();
    assert_eq!(
        places,
        [
            ("big", "b", false),
            ("ended", "a", false),
            ("gone", "a", true),
            ("moves", "a", false),
            ("stays", "a", false)
        ]
    );
    assert_eq!(
        placements[3].publish,
        [PublishedPort { host_port: 8080, container_port: 80, protocol: "tcp".into() }]
    );
    let networks: Vec<_> = state.networks().unwrap().into_iter().map(|one| (one.name, one.removed)).collect();
    assert_eq!(networks, [("back".to_owned(), false), ("front".to_owned(), true)]);
    let members: Vec<_> = state.members().unwrap().into_iter().map(|member| member.name).collect();
    assert_eq!(members, ["a", "b"]);
    let removals: Vec<_> =
        state.removals().unwrap().into_iter().map(|removal| removal.node.to_string()).collect();
    assert_eq!(removals, ["c"]);
}

#[test]
fn a_file_of_every_version_ends_up_with_the_same_tables() {
    let tables = |database: &Connection| -> Vec<String> {
        let mut all = database
            .prepare(
                "SELECT t.name || '.' || c.name FROM sqlite_master t, pragma_table_info(t.name) c
                 WHERE t.type = 'table' AND t.name <> 'schema_step' ORDER BY 1",
            )
            .unwrap();
        all.query_map([], |row| row.get(0)).unwrap().collect::<Result<_, _>>().unwrap()
    };
    let mut new = Connection::open_in_memory().unwrap();
    schema::upgrade(&mut new, &STEPS, None).unwrap();
    let mut old = Connection::open_in_memory().unwrap();
    old.execute_batch(include_str!("fixtures/0.2.0.sql")).unwrap();
    schema::upgrade(&mut old, &STEPS, None).unwrap();
    assert_eq!(tables(&old), tables(&new));
}

#[test]
fn every_change_of_a_placement_makes_another_version() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("node.db")).unwrap();
    let mut last = state.version_of_placements();
    let mut changed = || {
        let now = state.version_of_placements();
        std::mem::replace(&mut last, now) != now
    };
    assert!(!changed());
    state.put_placement(&placement("1", "a", 1, false)).unwrap();
    assert!(changed());
    state.put_placement(&placement("1", "a", 1, false)).unwrap();
    assert!(!changed(), "nothing was new");
    state.placements().unwrap();
    assert!(!changed());
    state.replace_placement(&placement("1", "b", 2, false)).unwrap();
    assert!(changed());
    state.forget_hearsay("a").unwrap();
    assert!(changed());
    assert_eq!(state.placements().unwrap(), []);
}

#[test]
fn further_names_that_an_older_release_did_not_note_are_learned() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("node.db")).unwrap();
    let full = placement("1", "b", 3, false);
    let lacking = Placement { aliases: Vec::new(), ..full.clone() };
    assert!(state.put_placement(&lacking).unwrap());
    assert!(state.put_placement(&full).unwrap());
    assert!(!state.put_placement(&full).unwrap(), "that is no news");
    assert_eq!(state.placements().unwrap(), std::slice::from_ref(&full));
    // Of another node, or of before it was removed, they say nothing.
    assert!(!state.put_placement(&Placement { node: "c".into(), ..lacking.clone() }).unwrap());
    let removed = Placement { removed: true, ..full.clone() };
    assert!(state.put_placement(&removed).unwrap());
    assert!(!state.put_placement(&lacking).unwrap());
    assert_eq!(state.placements().unwrap(), [removed]);
}

#[test]
fn who_has_an_address_is_found_the_first_before_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("node.db")).unwrap();
    let placement = |service: &str, id: &str, address: &str, more: &[&str]| Placement {
        service: service.into(),
        address: address.into(),
        more: more.iter().copied().map(str::to_owned).collect(),
        ..placement(id, "a", 1, false)
    };
    let later = placement("a", "2", "10.88.0.10", &[]);
    let first = placement("b", "1", "10.89.0.5", &["10.90.0.5", "10.88.0.10"]);
    let others = [placement("c", "0", "10.88.0.1", &["10.88.0.100"]), placement("d", "3", "10.88.0.11", &[])];
    let gone = Placement { removed: true, ..placement("e", "0", "10.88.0.10", &[]) };
    for one in [&later, &first, &gone].into_iter().chain(&others) {
        assert!(state.put_placement(one).unwrap());
    }
    assert_eq!(state.placements_at("10.88.0.10".parse().unwrap()).unwrap(), [first, later]);
    assert_eq!(state.placements_at("10.88.0.12".parse().unwrap()).unwrap(), []);
}

#[test]
fn a_service_that_comes_where_a_newer_one_of_its_name_was_is_there_on_every_node() {
    // Both were started while their nodes did not see each other; then the newer one was removed.
    let (newer, removed) = (placement("2", "b", 1, false), placement("2", "b", 1, true));
    let (older, moved) = (placement("1", "a", 1, false), placement("1", "b", 2, false));
    let told = [
        vec![&newer, &removed, &moved, &older],
        vec![&older, &moved, &newer, &removed],
        vec![&older, &newer, &removed, &moved],
        vec![&removed, &older, &moved],
    ];
    for order in told {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(&dir.path().join("node.db")).unwrap();
        for one in &order {
            state.put_placement(one).unwrap();
        }
        assert_eq!(state.placements().unwrap(), std::slice::from_ref(&moved), "{order:?}");
    }
}

#[test]
fn of_two_networks_of_a_name_every_node_keeps_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let network = |id: &str, removed| Network {
        name: "back".into(),
        id: id.into(),
        subnet: format!("10.89.{}.0/24", id.len()),
        subnet6: String::new(),
        vni: 7,
        removed,
    };
    let told = [network("1", false), network("22", false)];
    for (number, order) in [[0, 1], [1, 0]].into_iter().enumerate() {
        let state = State::open(&dir.path().join(format!("{number}.db"))).unwrap();
        for which in order {
            state.put_network(&told[which]).unwrap();
        }
        assert_eq!(state.networks().unwrap(), [network("1", false)]);
        assert!(!state.put_network(&network("22", true)).unwrap(), "it was not that one");
        assert!(state.put_network(&network("1", true)).unwrap());
        assert!(!state.put_network(&network("1", false)).unwrap(), "it is gone");
        assert!(state.put_network(&network("333", false)).unwrap(), "the name is free again");
        assert_eq!(state.networks().unwrap(), [network("333", false)]);
    }
}

#[test]
fn a_node_stays_cordoned_until_that_is_lifted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("node.db");
    let state = State::open(&path).unwrap();
    assert!(!state.is_cordoned().unwrap());
    assert!(state.set_cordoned(true).unwrap() && !state.set_cordoned(true).unwrap());
    drop(state);
    let state = State::open(&path).unwrap();
    assert!(state.is_cordoned().unwrap());
    assert!(state.set_cordoned(false).unwrap() && !state.set_cordoned(false).unwrap());
    assert!(!state.is_cordoned().unwrap());
}

#[test]
fn settings_are_kept_and_replaced_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("node.db")).unwrap();
    assert!(state.settings().unwrap().is_empty());
    let pair = |name: &str, value: &str| [(name.to_owned(), value.to_owned())];
    state.put_settings(&pair("encrypt", "off").into()).unwrap();
    state.put_settings(&pair("other", "1").into()).unwrap();
    state.put_settings(&pair("encrypt", "auto").into()).unwrap();
    let expected = [pair("encrypt", "auto"), pair("other", "1")].concat().into_iter().collect();
    assert_eq!(state.settings().unwrap(), expected);
}

#[test]
fn a_token_works_once_and_not_after_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let state = State::open(&dir.path().join("node.db")).unwrap();
    state.put_token(b"one", "b", now_ms() + 60_000).unwrap();
    state.put_token(b"old", "c", now_ms() - 1).unwrap();
    assert!(!state.take_token(b"one", "c").unwrap(), "a wrong name must not use it up");
    assert!(state.take_token(b"one", "b").unwrap());
    assert!(!state.take_token(b"one", "b").unwrap());
    assert!(!state.take_token(b"old", "b").unwrap());
}
