//! A client's host that does not hear the service for a while: what that says meanwhile is in doubt at its freeze.

use std::time::Instant;

use anyhow::bail;
use godwit_lab::Lab;

use crate::trial::blocking;

/// A packet filter on the client's host.
#[derive(Debug)]
pub(super) struct Deafness {
    lab: Lab,
    /// The service's.
    port: u16,
    begun: Option<Instant>,
}

impl Deafness {
    pub(super) fn of(lab: &Lab, port: u16) -> Self {
        Self { lab: lab.clone(), port, begun: None }
    }

    /// From here on nothing that the service says arrives. Only the first time counts.
    pub(super) async fn begin(&mut self) -> anyhow::Result<()> {
        if self.begun.is_some() {
            return Ok(());
        }
        self.filter(format!(
            "add table inet deaf; add chain inet deaf in {{ type filter hook input priority 0; }}; \
             add rule inet deaf in tcp sport {} drop",
            self.port
        ))
        .await?;
        self.begun = Some(Instant::now());
        Ok(())
    }

    /// For how long it has lasted, in milliseconds.
    pub(super) fn lasts_ms(&self) -> f64 {
        self.begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64() * 1e3)
    }

    /// It arrives again.
    pub(super) async fn end(&mut self) -> anyhow::Result<()> {
        match self.begun.take() {
            Some(_) => self.filter("delete table inet deaf".to_owned()).await,
            None => Ok(()),
        }
    }

    async fn filter(&self, script: String) -> anyhow::Result<()> {
        let mut nft = self.lab.command("client", "nft")?;
        let output = blocking(move || Ok(nft.arg(script).output()?)).await?;
        if !output.status.success() {
            bail!("nft on the client's host: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }
}
