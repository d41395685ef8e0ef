//! The health check of an image (HEALTHCHECK of a Dockerfile). Docker's configurations have it, skopeo leaves it out of a
//! layout, and godwit has no health checks of its own: so whoever pulls the image is told.

use oci_spec::distribution::Reference;
use serde::Deserialize;

use super::skopeo::plain;

/// Of the command so much is shown, characters.
const MOST_SHOWN: usize = 200;

#[derive(Deserialize)]
struct Configuration {
    config: Option<Container>,
}

#[derive(Deserialize)]
struct Container {
    #[serde(rename = "Healthcheck")]
    check: Option<Check>,
}

#[derive(Deserialize)]
struct Check {
    #[serde(rename = "Test")]
    test: Option<Vec<String>>,
}

/// The command of the health check in an image's configuration, as it is typed; none where there is none, or where one of an
/// image below is switched off.
pub(super) fn command(document: &[u8]) -> Result<Option<String>, serde_json::Error> {
    let Configuration { config } = serde_json::from_slice(document)?;
    let test = config.and_then(|config| config.check?.test).unwrap_or_default();
    let Some(("CMD" | "CMD-SHELL", words)) = test.split_first().map(|(kind, words)| (kind.as_str(), words))
    else {
        return Ok(None);
    };
    Ok(Some(plain(&words.join(" ")).chars().take(MOST_SHOWN).collect()))
}

/// What is said of it.
pub(super) fn warning(reference: &Reference, command: &str) -> String {
    format!(
        "Warning: {reference} has a health check ({command}), which godwit does not apply. An engine does: `godwit run --engine podman` or `--engine docker`, and the container moves with it"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::command;

    #[test]
    fn a_health_check_is_found_unless_it_is_switched_off() {
        let of = |config: &str| command(format!("{{\"os\":\"linux\",\"config\":{config}}}").as_bytes());
        let with = |test: &str| {
            of(&format!("{{\"Cmd\":[\"x\"],\"Healthcheck\":{{\"Interval\":7,\"Test\":{test}}}}}"))
        };
        assert_eq!(
            with(r#"["CMD-SHELL","wget -q localhost || exit 1"]"#).unwrap().unwrap(),
            "wget -q localhost || exit 1"
        );
        assert_eq!(with(r#"["CMD","/check","--all"]"#).unwrap().unwrap(), "/check --all");
        let hostile = format!(r#"["CMD","\u001b[2J{}"]"#, "x".repeat(5000));
        let shown = with(&hostile).unwrap().unwrap();
        assert!(shown.starts_with(" [2Jx") && shown.len() == 200, "{shown}");
        for none in [with(r#"["NONE"]"#), with("[]"), with("null"), of("{}"), of("null"), command(b"{}")] {
            assert_eq!(none.unwrap(), None);
        }
        for broken in [with(r#"["CMD",7]"#), with("7"), command(b"{")] {
            assert!(broken.is_err());
        }
    }
}
