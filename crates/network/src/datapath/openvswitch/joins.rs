//! The rules of nftables that join each port of the switch's own with its device: every frame that comes in
//! at one of the two goes out at the other.
//!
//! For each pair there is a table `netdev` with the name of the switch's end, with a chain for each way.
//! A chain goes with its device.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::{NetworkError, nft};

/// A pair: the switch's end, and the device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Join {
    pub(super) end: String,
    pub(super) device: String,
}

impl Join {
    pub(super) fn new(end: impl Into<String>, device: impl Into<String>) -> Self {
        Self { end: end.into(), device: device.into() }
    }

    /// Joins the two, in place of what there is: in one transaction, in which no frame is lost. Chains
    /// are made anew, since they may be those of devices that had the same names.
    pub(super) fn script(&self) -> String {
        let Self { end, device } = self;
        let chains = format!(
            r#"add chain netdev {end} in {{ type filter hook ingress device "{device}" priority 0; }}
add chain netdev {end} out {{ type filter hook ingress device "{end}" priority 0; }}
"#
        );
        format!(
            r#"add table netdev {end}
{chains}flush table netdev {end}
delete chain netdev {end} in
delete chain netdev {end} out
{chains}add rule netdev {end} in fwd to "{end}"
add rule netdev {end} out fwd to "{device}"
"#
        )
    }

    /// Undoes it, and does nothing where it was not done.
    pub(super) fn undo(end: &str) -> String {
        format!("add table netdev {end}\ndelete table netdev {end}\n")
    }

    /// Its two ways, each with its chain and from and to which interface it goes.
    fn ways(&self) -> [Way<'_>; 2] {
        let (end, device) = (self.end.as_str(), self.device.as_str());
        [(end, "in", device, end), (end, "out", end, device)]
    }
}

/// Table, chain, from, to.
type Way<'a> = (&'a str, &'a str, &'a str, &'a str);

/// Which of these joins are not in force.
///
/// # Errors
/// When there is no nft, or it does not tell.
pub(super) async fn lost(wanted: Vec<Join>) -> Result<Vec<Join>, NetworkError> {
    let action = "list the rules that join Open vSwitch with its devices";
    let output = nft::call(&["--json", "list", "ruleset", "netdev"], "").await?;
    if !output.status.success() {
        return Err(nft::refused(action, &output.stderr));
    }
    let json: Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| NetworkError::Nft { action: action.into(), message: error.to_string() })?;
    let rules = Rules::of(&json);
    Ok(wanted.into_iter().filter(|join| !join.ways().iter().all(|way| rules.lead(*way))).collect())
}

/// What nft tells of tables `netdev` in its JSON (libnftables-json(5)).
#[derive(Debug)]
struct Rules<'a> {
    /// The devices of each table's chains, where it tells them: version 1.0.6 does not.
    chains: HashMap<(&'a str, &'a str), Option<Vec<&'a str>>>,
    /// Table, chain, and the device that frames are handed on to.
    forward: HashSet<(&'a str, &'a str, &'a str)>,
}

impl<'a> Rules<'a> {
    fn of(json: &'a Value) -> Self {
        let objects = |kind: &'static str| {
            json["nftables"].as_array().into_iter().flatten().map(move |object| &object[kind])
        };
        let ingress = objects("chain").filter(|chain| chain["hook"] == "ingress");
        let chains = ingress.filter_map(|chain| {
            let devices = match &chain["dev"] {
                Value::String(device) => Some(vec![device.as_str()]),
                Value::Array(devices) => Some(devices.iter().filter_map(Value::as_str).collect()),
                _ => None,
            };
            Some(((chain["table"].as_str()?, chain["name"].as_str()?), devices))
        });
        let forward = objects("rule").filter_map(|rule| {
            let to = rule["expr"][0]["fwd"]["dev"].as_str()?;
            Some((rule["table"].as_str()?, rule["chain"].as_str()?, to))
        });
        Self { chains: chains.collect(), forward: forward.collect() }
    }

    fn lead(&self, (table, chain, from, to): Way<'_>) -> bool {
        let chain_is_there = self
            .chains
            .get(&(table, chain))
            .is_some_and(|devices| devices.as_ref().is_none_or(|devices| devices.contains(&from)));
        chain_is_there && self.forward.contains(&(table, chain, to))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// As nft 1.0.6 printed it, but for the handles and the chain's device.
    fn listed(device: &str, rule: &str) -> Value {
        let text = format!(
            r#"{{"nftables": [{{"metainfo": {{"version": "1.0.6", "json_schema_version": 1}}}},
            {{"table": {{"family": "netdev", "name": "gwt1"}}}},
            {{"chain": {{"family": "netdev", "table": "gwt1", "name": "in", {device} "type": "filter",
              "hook": "ingress", "prio": 0, "policy": "accept"}}}},
            {{"chain": {{"family": "netdev", "table": "gwt1", "name": "out", "type": "filter",
              "hook": "ingress", "prio": 0, "policy": "accept"}}}},
            {{"rule": {{"family": "netdev", "table": "gwt1", "chain": "in", "expr": [{{"fwd": {{"dev": "gwt1"}}}}]}}}},
            {{"rule": {{"family": "netdev", "table": "gwt1", "chain": "out", "expr": [{rule}]}}}}]}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn is_whole(json: &Value) -> bool {
        let rules = Rules::of(json);
        Join::new("gwt1", "gws1").ways().iter().all(|way| rules.lead(*way))
    }

    #[test]
    fn a_join_is_whole_only_with_both_chains_and_rules() {
        let rule = r#"{"fwd": {"dev": "gws1"}}"#;
        assert!(is_whole(&listed("", rule)), "it does not tell the device");
        assert!(is_whole(&listed(r#""dev": "gws1","#, rule)));
        assert!(is_whole(&listed(r#""dev": ["gws1"],"#, rule)));
        assert!(!is_whole(&listed(r#""dev": "gws2","#, rule)), "the chain is of another device");
        assert!(!is_whole(&listed(r#""dev": [],"#, rule)), "the chain has lost its device");
        assert!(!is_whole(&listed("", r#"{"drop": null}"#)));
        // As it is told when the device has gone.
        assert!(!is_whole(&listed("", r#"{"fwd": {"dev": 3}}"#)));
        assert!(!is_whole(&serde_json::json!({"nftables": []})));
    }
}
