//! What was decided for a service, as sentences: for those who ask (`place`) and those who look (`policy show`).

use std::time::Duration;

use godwit_api::v1::place_reason::{self, Kind as Reason};
use godwit_api::v1::place_refusal::Kind as Refusal;
use godwit_api::v1::{Latency, Losses, PlaceClient, PlaceMove, PlaceOther, PlaceRefusal, PlaceResponse};

use crate::output::{self, Table};

/// Clients that are shown, of those who lose most.
const SHOWN: usize = 4;

/// Prints a decision, and on demand what it rests on.
pub(crate) fn print(answer: &PlaceResponse, explain: bool) -> anyhow::Result<()> {
    output::line(&verdict(answer))?;
    for objection in &answer.objections {
        output::line(&format!("  {objection}"))?;
    }
    for found in &answer.obstacles {
        output::line(&format!("  process {} ({}) {}, {}", found.pid, found.name, found.what, found.why))?;
    }
    if explain {
        let mut table = Table::plain();
        for (what, words) in explained(answer) {
            table.row([format!("  {what}"), words]);
        }
        table.print()?;
        for warning in &answer.warnings {
            output::line(&format!("warning: {warning}"))?;
        }
    }
    Ok(())
}

fn verdict(answer: &PlaceResponse) -> String {
    let PlaceResponse { name, node, to, .. } = answer;
    if !(answer.objections.is_empty() && answer.obstacles.is_empty()) {
        return format!("{name} cannot leave {node}:");
    }
    if !to.is_empty() {
        return format!("{name} is better on {to} than on {node}");
    }
    let best = answer.best.as_ref().map(|best| best.name.as_str()).unwrap_or_default();
    let reasons: Vec<_> =
        answer.reasons.iter().filter_map(|why| why.kind.as_ref()).map(|why| reason(why, best)).collect();
    format!("{name} stays on {node}: {}", reasons.join("; "))
}

fn reason(why: &Reason, best: &str) -> String {
    match why {
        Reason::NoClients(_) => "no client has sent anything lately".to_owned(),
        Reason::NoCandidate(_) => "no other node can take it".to_owned(),
        Reason::NoBetter(_) => "no node is better".to_owned(),
        Reason::Uncertain(_) => {
            format!("{best} may be no better, as latencies there are not known well enough")
        }
        Reason::TooLittle(found) => {
            format!("the move to {best} gains {}, and has to gain {}", lcs(found.gain), lcs(found.needed))
        }
        Reason::Sending(found) => {
            format!("its node sends {} other services, and {} at once is the most", found.now, found.most)
        }
        Reason::NotArmed(found) => not_armed(found),
        Reason::Unpaid(found) => {
            let suffered = if found.suffered == 0.0 { "none".to_owned() } else { lcs(found.suffered) };
            format!(
                "the move is not paid for yet: {suffered} of {} client-seconds were lost so far, {}",
                lcs(found.needed),
                more("about ", found.left_ms)
            )
        }
        Reason::Moves(found) => format!(
            "it has moved {} in an hour, and {} is the most: {}",
            times(found.made),
            found.most,
            more("", found.left_ms)
        ),
        Reason::Frozen(found) => format!(
            "it was frozen for {} in an hour, the move takes {} more, and {} is the most",
            output::millis(found.spent_ms),
            output::millis(found.needed_ms),
            output::millis(found.most_ms)
        ),
        Reason::Rests(found) => format!("it has moved lately, and rests: {}", more("", found.left_ms)),
    }
}

fn not_armed(found: &place_reason::NotArmed) -> String {
    let (part, threshold) = (percent(found.part), percent(found.threshold));
    match found.left_ms {
        None => {
            format!("its clients lose {part} of their time; it moves when they lose more than {threshold}")
        }
        Some(left) => format!(
            "its clients lose {part} of their time, which is above {threshold}, but not for long enough: {}",
            more("", left)
        ),
    }
}

/// A part of 1, with a decimal place where it says something.
fn percent(part: f64) -> String {
    let rounded = format!("{:.1}", part * 100.0);
    format!("{} %", rounded.strip_suffix(".0").unwrap_or(&rounded))
}

fn times(count: u32) -> String {
    if count == 1 { "once".to_owned() } else { format!("{count} times") }
}

/// How much longer something takes. Never less than a second: what is left is not over.
fn more(about: &str, left_ms: u64) -> String {
    match left_ms.div_ceil(1000) {
        // What is lost slowly takes up to forever.
        86_400.. => "at least a day more".to_owned(),
        seconds => format!("{about}{} more", output::span(seconds.max(1))),
    }
}

/// Lost client-seconds.
fn lcs(number: f64) -> String {
    match number.abs() {
        size if size >= 10.0 => format!("{number:.0}"),
        size if size >= 0.1 => format!("{number:.1}"),
        0.0 => "nothing".to_owned(),
        _ => format!("{number:.3}"),
    }
}

/// A round trip.
pub(crate) fn ms(us: u64) -> String {
    output::millis(us as f64 / 1e3)
}

/// What the decision rests on: names and sentences.
fn explained(answer: &PlaceResponse) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    if answer.active > 0 {
        lines.push(("clients".to_owned(), clients(answer)));
    }
    if let Some(best) = &answer.best {
        let there = answer.clients.iter().filter_map(|client| client.there.as_ref());
        let losses = best.losses.unwrap_or_default();
        let worst = there.max_by_key(|there| there.expected_us);
        let whose = if answer.clients.len() > 1 { " at most" } else { "" };
        let expected = worst.map(|there| format!("{}{whose}: ", latency(there))).unwrap_or_default();
        lines.push((best.name.clone(), format!("{expected}{}", lost(&losses))));
        if let Some(found) = &best.r#move {
            lines.push(("move".to_owned(), moved(found)));
        }
        let stay = Duration::from_millis(answer.stay_ms).as_secs();
        lines.push(("gain".to_owned(), format!("{}, if they stay for {stay} s", lcs(best.gain))));
    }
    for (index, other) in answer.others.iter().enumerate() {
        let what = if index == 0 { "others" } else { "" };
        lines.push((what.to_owned(), self::other(other)));
    }
    lines
}

fn clients(answer: &PlaceResponse) -> String {
    let limit = ms(answer.latency_us);
    let here = |client: &PlaceClient| client.here.as_ref().map(|here| ms(here.expected_us));
    let all: Vec<_> = answer.clients.iter().filter_map(here).collect();
    let mut shown: Vec<_> = all.iter().take(SHOWN).cloned().collect();
    if all.len() > SHOWN {
        shown.push("…".to_owned());
    }
    if answer.unmeasured > 0 {
        shown.push(format!("{} not measured", answer.unmeasured));
    }
    format!(
        "{} of {} over {limit} ({}): {}",
        answer.over,
        answer.active,
        shown.join(", "),
        lost(&answer.losses.unwrap_or_default())
    )
}

fn lost(losses: &Losses) -> String {
    match losses.clients {
        0.0 => "none lost".to_owned(),
        clients => format!("{} client-seconds lost a second", lcs(clients)),
    }
}

fn latency(of: &Latency) -> String {
    let from = match of.from.as_str() {
        "probe" => "by echoes from both nodes",
        "bounds" => "by the way between the nodes alone, as the client answers no echo",
        "own" => "by its own connections",
        "prefix" => "by other clients of its network",
        "entry" => "by the way from where it enters",
        other => other,
    };
    let least = of.expected_us.saturating_sub(of.deviation_us);
    let most = of.expected_us.saturating_add(of.deviation_us);
    format!("{} expected ({} to {}, {from})", ms(of.expected_us), ms(least), ms(most))
}

fn moved(found: &PlaceMove) -> String {
    let rounds = match found.rounds {
        0 => String::new(),
        1 => ", 1 round".to_owned(),
        rounds => format!(", {rounds} rounds"),
    };
    let mode = match found.mode == found.becomes {
        true => found.mode.clone(),
        false => format!("{}, which becomes {}", found.mode, found.becomes),
    };
    format!(
        "{mode}{rounds}, {}, frozen for {} (at most {}), {}: costs {}",
        output::millis(found.total_ms),
        output::millis(found.frozen_ms),
        output::millis(found.most_frozen_ms),
        output::bytes(found.bytes),
        lcs(found.cost)
    )
}

fn other(other: &PlaceOther) -> String {
    let refusals: Vec<_> = other.refusals.iter().map(refusal).collect();
    match refusals.is_empty() {
        true if other.worth < 0.0 => {
            format!("{}: the move costs {} more than it gains", other.name, lcs(-other.worth))
        }
        true => format!("{}: the move gains {} more than it costs", other.name, lcs(other.worth)),
        false => format!("{}: {}", other.name, refusals.join("; ")),
    }
}

fn refusal(why: &PlaceRefusal) -> String {
    match &why.kind {
        Some(Refusal::InstructionSet(found)) => {
            format!("it is {}, and the service is built for {}", found.has, found.built.join(" and "))
        }
        Some(Refusal::Memory(found)) => {
            format!(
                "{} of memory are free, {} are needed",
                output::bytes(found.free),
                output::bytes(found.needed)
            )
        }
        Some(Refusal::Cpu(found)) => format!(
            "its processors would be busy for {:.0} % of the time, and {:.0} % is the most",
            found.after * 100.0,
            found.most * 100.0
        ),
        Some(Refusal::Silent(found)) => match found.heard_ms {
            // It was never heard of.
            u64::MAX => "it does not answer".to_owned(),
            heard => format!("it was last heard from {} s ago", heard / 1000),
        },
        Some(Refusal::Cordoned(_)) => "it is cordoned".to_owned(),
        Some(Refusal::Frozen(found)) => format!(
            "the service might be frozen for {}, and {} is the most",
            output::millis(found.most_ms),
            output::millis(found.limit_ms)
        ),
        Some(Refusal::Words(words)) => words.clone(),
        None => "it refuses for a reason that this version does not know".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use godwit_api::v1::{PlaceNode, PlaceReason, place_refusal};

    use super::*;

    fn latency_of(us: u64, from: &str) -> Latency {
        Latency { expected_us: us, deviation_us: us / 10, age_ms: 0, from: from.into() }
    }

    fn example() -> PlaceResponse {
        let client = |here, there| PlaceClient {
            address: "192.0.2.1".into(),
            here: Some(latency_of(here, "own")),
            there: Some(latency_of(there, "probe")),
        };
        let words = |kind| vec![PlaceRefusal { kind: Some(kind) }];
        PlaceResponse {
            name: "web".into(),
            node: "a".into(),
            to: "b".into(),
            mode: "precopy".into(),
            clients: vec![client(31_000, 12_000), client(10_000, 30_000)],
            active: 2,
            over: 1,
            latency_us: 20_000,
            stay_ms: 60_000,
            losses: Some(Losses { clients: 0.55, residence: 0.0 }),
            best: Some(PlaceNode {
                name: "b".into(),
                losses: Some(Losses::default()),
                r#move: Some(PlaceMove {
                    mode: "precopy".into(),
                    becomes: "precopy".into(),
                    rounds: 2,
                    bytes: 262 << 20,
                    total_ms: 2900.0,
                    frozen_ms: 95.0,
                    most_frozen_ms: 130.0,
                    cost: 3.1,
                }),
                gain: 33.0,
                ..Default::default()
            }),
            others: vec![
                PlaceOther {
                    name: "c".into(),
                    refusals: words(place_refusal::Kind::InstructionSet(place_refusal::InstructionSet {
                        has: "aarch64".into(),
                        built: vec!["x86_64".into()],
                    })),
                    ..Default::default()
                },
                PlaceOther {
                    name: "d".into(),
                    refusals: words(place_refusal::Kind::Memory(place_refusal::Memory {
                        free: 200 << 20,
                        needed: 310 << 20,
                    })),
                    ..Default::default()
                },
            ],
            ..Default::default()
        }
    }

    #[test]
    fn the_example_is_explained_with_its_figures() {
        let answer = example();
        assert_eq!(verdict(&answer), "web is better on b than on a");
        let lines: Vec<_> =
            explained(&answer).into_iter().map(|(what, words)| format!("{what} {words}")).collect();
        assert_eq!(
            lines,
            [
                "clients 1 of 2 over 20.0 ms (31.0 ms, 10.0 ms): 0.6 client-seconds lost a second",
                "b 30.0 ms expected (27.0 ms to 33.0 ms, by echoes from both nodes) at most: none lost",
                "move precopy, 2 rounds, 2.90 s, frozen for 95.0 ms (at most 130.0 ms), 262.0 MiB: costs 3.1",
                "gain 33, if they stay for 60 s",
                "others c: it is aarch64, and the service is built for x86_64",
                " d: 200.0 MiB of memory are free, 310.0 MiB are needed",
            ]
        );
    }

    #[test]
    fn a_node_that_is_not_the_best_has_what_it_is_worth() {
        let of = |worth| other(&PlaceOther { name: "c".into(), worth, ..Default::default() });
        assert_eq!(of(-0.26), "c: the move costs 0.3 more than it gains");
        assert_eq!(of(12.0), "c: the move gains 12 more than it costs");
    }

    #[test]
    fn each_reason_to_stay_is_a_sentence() {
        let stays = |kinds: Vec<Reason>| {
            let reasons = kinds.into_iter().map(|kind| PlaceReason { kind: Some(kind) }).collect();
            verdict(&PlaceResponse { to: String::new(), reasons, ..example() })
        };
        assert_eq!(
            stays(vec![Reason::NoClients(true), Reason::NoCandidate(true)]),
            "web stays on a: no client has sent anything lately; no other node can take it"
        );
        let little = Reason::TooLittle(place_reason::TooLittle { gain: 0.02, needed: 12.3 });
        assert_eq!(stays(vec![little]), "web stays on a: the move to b gains 0.020, and has to gain 12");
        let stuck = PlaceResponse { objections: vec!["it has a pipe".into()], ..example() };
        assert_eq!(verdict(&stuck), "web cannot leave a:");
    }

    #[test]
    fn a_service_that_follows_says_what_it_waits_for() {
        let not_armed =
            |part, left_ms| Reason::NotArmed(place_reason::NotArmed { part, threshold: 0.05, left_ms });
        let unpaid =
            |suffered, left_ms| Reason::Unpaid(place_reason::Unpaid { suffered, needed: 1.6, left_ms });
        let moves = |made, left_ms| Reason::Moves(place_reason::Moves { made, most: 6, left_ms });
        let frozen = place_reason::Frozen { spent_ms: 3400.0, needed_ms: 300.0, most_ms: 3600.0 };
        for (kind, expected) in [
            (
                not_armed(0.02, None),
                "its clients lose 2 % of their time; it moves when they lose more than 5 %",
            ),
            (
                not_armed(0.0, None),
                "its clients lose 0 % of their time; it moves when they lose more than 5 %",
            ),
            (
                not_armed(0.084, Some(2001)),
                "its clients lose 8.4 % of their time, which is above 5 %, but not for long enough: 3 s more",
            ),
            (
                not_armed(0.5, Some(0)),
                "its clients lose 50 % of their time, which is above 5 %, but not for long enough: 1 s more",
            ),
            (
                unpaid(0.8, 900),
                "the move is not paid for yet: 0.8 of 1.6 client-seconds were lost so far, about 1 s more",
            ),
            (
                unpaid(0.0, u64::MAX),
                "the move is not paid for yet: none of 1.6 client-seconds were lost so far, at least a day more",
            ),
            (moves(6, 720_000), "it has moved 6 times in an hour, and 6 is the most: 12 min more"),
            (moves(1, 3_600_000), "it has moved once in an hour, and 6 is the most: 1 h more"),
            (
                Reason::Frozen(frozen),
                "it was frozen for 3.40 s in an hour, the move takes 300.0 ms more, and 3.60 s is the most",
            ),
            (
                Reason::Rests(place_reason::Rests { left_ms: 29_500 }),
                "it has moved lately, and rests: 30 s more",
            ),
        ] {
            assert_eq!(reason(&kind, "b"), expected);
        }
    }
}
