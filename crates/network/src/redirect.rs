//! Services ask their gateway for names at port 53, and godwitd serves them at another one: port 53 of the node's addresses may
//! be a name server's that listens on all of them, or a published one.
//!
//! The table `inet godwit_names` changes the port of questions that come in by a bridge to the gateway's address there, and of
//! answers from that, packet by packet. It has no NAT, which would have the kernel track every connection: questions are
//! changed before those are tracked, and answers after.
//!
//! Each rule has a comment with what it is for, by which a table is known to be whole.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use serde_json::Value;

use crate::{NetworkError, nft};

const TABLE: &str = "godwit_names";
const PROTOCOLS: [&str; 2] = ["udp", "tcp"];
/// Port of DNS (RFC 1035, section 4.2).
const ASKED: u16 = 53;

/// The rules for these bridges and the gateways' addresses on them, by their comments.
fn rules(port: u16, gateways: &[(String, Ipv4Addr)]) -> Vec<(String, String)> {
    let pairs = gateways.iter().flat_map(|gateway| PROTOCOLS.map(|protocol| (gateway, protocol)));
    let rules = pairs.flat_map(|((bridge, gateway), protocol)| {
        let comment = |way: &str| format!("{way} {bridge} {gateway} {protocol} {port}");
        [
            (
                comment("to"),
                format!(
                    "questions iifname \"{bridge}\" ip daddr {gateway} {protocol} dport {ASKED} {protocol} dport set {port}"
                ),
            ),
            (
                comment("from"),
                format!(
                    "answers oifname \"{bridge}\" ip saddr {gateway} {protocol} sport {port} {protocol} sport set {ASKED}"
                ),
            ),
        ]
    });
    rules.collect()
}

fn script(rules: &[(String, String)]) -> String {
    let mut script = format!(
        "add table inet {TABLE}
add chain inet {TABLE} questions {{ type filter hook prerouting priority -300; policy accept; }}
add chain inet {TABLE} answers {{ type filter hook postrouting priority 300; policy accept; }}
flush table inet {TABLE}
"
    );
    for (comment, rule) in rules {
        script += &format!("add rule inet {TABLE} {rule} comment \"{comment}\"\n");
    }
    script
}

/// Leads questions for names that come by these bridges to these addresses, the gateways', to a port of this node, where they
/// are not led there yet; with none of them nowhere.
///
/// # Errors
/// When there is no nft, or it refuses.
pub async fn redirect_names(port: u16, gateways: &[(String, Ipv4Addr)]) -> Result<(), NetworkError> {
    let action = "lead questions for names to godwitd";
    let wanted = rules(port, gateways);
    let output = nft::call(&["--json", "list", "table", "inet", TABLE], "").await?;
    if output.status.success() {
        let json: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| NetworkError::Nft { action: action.into(), message: error.to_string() })?;
        if is_whole(&json, &wanted) {
            return Ok(());
        }
    } else if wanted.is_empty() {
        return Ok(());
    }
    match wanted.is_empty() {
        true => nft::run(action, &format!("add table inet {TABLE}\ndelete table inet {TABLE}\n")).await,
        false => nft::run(action, &script(&wanted)).await,
    }
}

/// Whether nft's JSON (libnftables-json(5)) has these rules, and no others.
fn is_whole(json: &Value, wanted: &[(String, String)]) -> bool {
    let rules = json["nftables"].as_array().into_iter().flatten().map(|object| &object["rule"]);
    let ours = rules.filter(|rule| rule["table"] == TABLE);
    let found: Vec<_> = ours.map(|rule| rule["comment"].as_str().unwrap_or_default()).collect();
    let distinct: BTreeSet<_> = found.iter().copied().collect();
    let expected: BTreeSet<_> = wanted.iter().map(|(comment, _)| comment.as_str()).collect();
    !wanted.is_empty() && distinct == expected && found.len() == wanted.len()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn two() -> Vec<(String, Ipv4Addr)> {
        vec![("gw0".into(), Ipv4Addr::new(10, 88, 0, 1)), ("gw9".into(), Ipv4Addr::new(10, 89, 0, 1))]
    }

    #[test]
    fn only_a_table_with_these_rules_is_whole() {
        let wanted = rules(7120, &two());
        let listed = |rules: &[(String, String)]| {
            let rule =
                |(comment, _): &(String, String)| json!({ "rule": { "table": TABLE, "comment": comment } });
            json!({ "nftables": rules.iter().map(rule).collect::<Vec<_>>() })
        };
        assert!(is_whole(&listed(&wanted), &wanted));
        assert!(!is_whole(&listed(&wanted[1..]), &wanted));
        assert!(!is_whole(&listed(&[wanted.clone(), wanted[..1].to_vec()].concat()), &wanted));
        assert!(!is_whole(&listed(&rules(17120, &two())), &wanted));
        assert!(!is_whole(&listed(&rules(7120, &two()[..1])), &wanted));
        assert!(!is_whole(&json!({}), &wanted));
        assert!(!is_whole(&listed(&[]), &[]), "it is to go");
    }

    #[test]
    fn questions_to_a_gateway_and_answers_from_it_are_changed_and_nothing_else() {
        let script = script(&rules(7120, &two()));
        for protocol in PROTOCOLS {
            for (bridge, gateway) in two() {
                for rule in [
                    format!(
                        "iifname \"{bridge}\" ip daddr {gateway} {protocol} dport 53 {protocol} dport set 7120"
                    ),
                    format!(
                        "oifname \"{bridge}\" ip saddr {gateway} {protocol} sport 7120 {protocol} sport set 53"
                    ),
                ] {
                    assert!(script.contains(&rule), "{rule}: {script}");
                }
            }
        }
        assert_eq!(script.matches("add rule").count(), 8);
    }
}
