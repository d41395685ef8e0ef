//! A preparation: layers, files and pages are sent ahead, and the service stays. Nothing of it is in a journal: whatever
//! breaks, a destination that lacks some is sent them with the move.

use std::sync::PoisonError;
use std::time::Instant;

use super::layers::Lacking;
use super::pages::{Pages, State};
use super::recorder::Recorder;
use super::streams::Streams;
use super::{LAST_WORDS, Source, SourceError};
use crate::link::Link;
use crate::message::{Message, RetainEnd};
use crate::page_hash::EarlierVisit;
use crate::report::{Outcome, Report, ms_since};

impl Source {
    /// Sends ahead what makes the move shorter.
    pub async fn prepare(self) -> Report {
        let mut report = Report::begin(&self.id, &self.service.name, &self.local.node, &self.destination);
        report.mode = self.options.mode.name().into();
        let mut recorder = Recorder::new(report, self.timeline.clone());
        let mut link = None;
        let ended = self.unless_cancelled(self.send_ahead(&mut link, &mut recorder)).await;
        // What still works on its memory must not meet another migration of it.
        self.jobs.end().await;
        match ended {
            Ok(()) => recorder.report.outcome = Outcome::Prepared,
            Err(error) => {
                recorder.report.reason = crate::error_chain(&error);
                if error.is_of_closing()
                    && let Some(link) = &mut link
                    && let Some(why) = link.last_words(LAST_WORDS).await
                {
                    recorder.report.reason = crate::error_chain(&why);
                }
            }
        }
        if let Some(link) = link {
            recorder.report.memory_wire_bytes = self.streams_sent();
            recorder.report.wire_bytes = link.bytes_sent() + recorder.report.memory_wire_bytes;
            link.close().await;
        }
        recorder.finish()
    }

    async fn send_ahead(&self, place: &mut Option<Link>, recorder: &mut Recorder) -> Result<(), SourceError> {
        let link = place.insert(self.connect(recorder).await?);
        let report = &mut recorder.report;
        let config = self.local.config(&self.service);
        let memory = self.memory(&config).await?;
        let plan = self.plan(memory)?;
        plan.tell(report);
        report.memory_bytes = memory;
        let _marks = self.put_marks().await?;
        let files = self.find_files().await?;
        let open = self.offer(&config, memory, files.size()).await?;
        let offered: Vec<_> = open.all_layers().cloned().collect();
        link.send(Message::Ask(open)).await?;
        let accepted = match self.accepted(link, &config).await {
            Err(SourceError::Link(error)) if error.is_of_closing() => {
                return Err(SourceError::NotEligible(vec![format!(
                    "node {} ({}) closed the connection without an answer, as an older godwit does, which cannot be prepared for: upgrade it",
                    self.destination,
                    self.godwit_there()
                )]));
            }
            accepted => accepted?,
        };
        let layers = Lacking::of(&self.destination, &accepted, &offered)?;
        self.tell_lacking(&layers);
        link.send(Message::Prepare).await?;
        let accepted = self.accepted(link, &config).await?;
        let visit = match accepted.retained {
            true => self.learn_retained(link, &accepted.key).await?,
            false => EarlierVisit::none(),
        };

        let sending = Instant::now();
        let total = layers.bytes();
        self.step("layers", 0, total);
        self.send_layers(link, layers, total, report).await?;

        self.send_files_ahead(link, files, &accepted, report).await?;
        let pages = self.pages(&plan, visit);
        let mut streams =
            Streams::open(self.local.cluster.as_ref(), &self.destination, &self.id, self.options.streams)
                .await?;
        *self.stream_traffic.lock().unwrap_or_else(PoisonError::into_inner) = streams.traffic().clone();
        if let Err(error) = self.send_pages(&mut streams, pages, report).await {
            return Err(streams.explain(error).await);
        }
        report.pre_dump_transfer_ms = ms_since(sending);
        self.step("retain", 0, 0);
        link.send(Message::Retain).await?;
        match link.receive().await? {
            Message::RetainEnd(RetainEnd { bytes: 0, left: 1.. }) => {
                Err(SourceError::NoRoom { node: self.destination.clone() })
            }
            Message::RetainEnd(RetainEnd { bytes, left }) => {
                (report.retained_bytes, report.not_retained_bytes) = (bytes, left);
                Ok(())
            }
            other => Err(link.unexpected(&other, "RetainEnd").into()),
        }
    }

    /// Sends all pages once.
    async fn send_pages(
        &self,
        streams: &mut Streams,
        pages: Pages,
        report: &mut Report,
    ) -> Result<(), SourceError> {
        let (pages, found) = self.scan(pages, false).await?;
        self.progress.send_modify(|progress| {
            (progress.phase, progress.round) = ("copy", 1);
            (progress.bytes_done, progress.bytes_total) = (0, found.pages * 4096);
        });
        let (_pages, sent) = self.send(pages, streams, State::Running).await?;
        streams.arrived().await?;
        report.rounds = 1;
        report.pre_dump_bytes += sent.bytes;
        report.page_bytes = sent.found * 4096;
        Ok(())
    }
}
