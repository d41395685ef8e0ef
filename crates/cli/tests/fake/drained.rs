//! What the fake tells of nodes that are drained, by their names.

use godwit_api::v1::drain_event::Kind;
use godwit_api::v1::{
    CordonResponse, DrainEvent, Drained, MigrationEvent, PlaceOther, PlaceReason, PlaceRefusal,
    PlaceResponse, migration_event, place_reason, place_refusal,
};
use tonic::Status;

use super::{progress, report};

fn event(name: &str, kind: Kind) -> Result<DrainEvent, Status> {
    Ok(DrainEvent { name: name.into(), kind: Some(kind) })
}

fn of_move(name: &str, event: MigrationEvent) -> Result<DrainEvent, Status> {
    self::event(
        name,
        match event.kind.unwrap() {
            migration_event::Kind::Progress(step) => Kind::Progress(step),
            migration_event::Kind::Report(report) => Kind::Report(report),
        },
    )
}

fn placed(name: &str, to: &str) -> Result<DrainEvent, Status> {
    let words = place_refusal::Kind::Cordoned(true);
    let other = PlaceOther {
        name: "c".into(),
        refusals: vec![PlaceRefusal { kind: Some(words) }],
        ..Default::default()
    };
    let reason = PlaceReason { kind: Some(place_reason::Kind::NoCandidate(true)) };
    let stays = to.is_empty();
    event(
        name,
        Kind::Placed(PlaceResponse {
            name: name.into(),
            node: "a".into(),
            to: to.into(),
            reasons: if stays { vec![reason] } else { Vec::new() },
            others: vec![other],
            ..Default::default()
        }),
    )
}

/// `a`: one service moves, one cannot, one is refused, one does not run; `lost`: one is lost; `ends`: its daemon does; `lifted`:
/// it is uncordoned; `slow`: never ends; all others are empty.
pub fn events(node: &str) -> Vec<Result<DrainEvent, Status>> {
    let names = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let cordoned = |services: &[&str]| {
        let services = names(services);
        event(
            "",
            Kind::Cordoned(CordonResponse { node: node.into(), cordoned: true, changed: true, services }),
        )
    };
    let drained = |moved: &[&str], stay: &[&str], stopped: &[&str]| {
        let (moved, stay, stopped) = (names(moved), names(stay), names(stopped));
        let lost = names(if node == "lost" { &["redis"] } else { &[] });
        let drained = Drained { node: node.into(), moved, stay, stopped, lost, uncordoned: node == "lifted" };
        event("", Kind::Drained(drained))
    };
    match node {
        "a" => vec![
            cordoned(&["redis", "alone", "busy", "old"]),
            event("redis", Kind::Waits("something else is being done with it".into())),
            placed("redis", "b"),
            of_move("redis", progress("dump", 10 << 20, 0)),
            of_move("redis", report("redis", "moved", "")),
            placed("alone", ""),
            event("busy", Kind::Stays("service busy is being checked".into())),
            drained(&["redis"], &["alone", "busy"], &["old"]),
        ],
        "lost" => vec![
            cordoned(&["redis"]),
            placed("redis", "b"),
            of_move("redis", report("redis", "lost", "its pages are gone")),
            drained(&[], &[], &[]),
        ],
        "ends" => vec![cordoned(&["redis"]), Err(Status::aborted("godwitd ends"))],
        "slow" => vec![cordoned(&["redis"])],
        _ => vec![cordoned(&[]), drained(&[], &[], &[])],
    }
}
