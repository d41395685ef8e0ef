//! A container comes to this node's Docker: Docker creates it anew and starts it ([`landing`]).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::Value;
use tokio::task::JoinHandle;

use super::api::ApiError;
use super::{Docker, RUNTIME, filtered};
use crate::container::{
    BegunRestore, ContainerConfig, ContainerState, EngineError, Keeper, LogFiles, OutputPipes,
    RestoreRequest, io_error,
};
use crate::foreign::landing::{self, Landing, Prepared};
use crate::foreign::log;
use crate::foreign::record::Record;
use crate::foreign::{ARRIVAL_LABEL, Keeps, instructions, is_id};

/// How often a start is told that there is nothing to wait for.
const START_LOOK: Duration = Duration::from_millis(20);

/// How long dockerd may take to create a container on a busy disk.
const CREATION: Duration = Duration::from_secs(600);

/// A container that dockerd names.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Named {
    pub(super) id: String,
}

/// A start that waits for its inventory.
struct Begun {
    docker: Docker,
    starting: JoinHandle<Result<(), ApiError>>,
    landing: Landing,
    /// Docker's log of it, if that is in files.
    log: Option<LogFiles>,
}

impl Docker {
    /// Has Docker begin the start.
    pub(super) async fn begin(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        let config = &request.config;
        let (_, definition) = self.kept(config)?;
        self.end_start(config, &Record::of(config)?).await?;
        let (volumes, token) = (self.volumes_in(&config.name).await?, Record::of(config)?.token);
        let document = definition.to_create(
            (&self.image_name(config).await?, config.name_server),
            (RUNTIME, &token),
            &volumes,
        );
        let id = self.create(config, &definition.name, document).await?;
        let place = self.care.place(&id);
        let task = Prepared::task(&place, &request, Some(&config.network_namespace));
        instructions::instruct(&place, (&self.config.runc, &self.path_variable), &id, &task)
            .map_err(request.io("prepare Docker's start in", &place))?;
        let prepared = Prepared::new(&self.care, &place, &request, pipes)?;
        let (api, path) = (self.api.clone(), format!("/containers/{id}/start"));
        // It ends by itself once the gate is closed.
        let mut starting = tokio::spawn(async move { api.post_patiently(&path).await });
        let failed = self.failed(&config.name, "start");
        let ended = async {
            let reason = match (&mut starting).await {
                Ok(Err(error)) => error,
                Ok(Ok(())) => ApiError::Broken("it has started it without godwit-runtime".into()),
                Err(error) => ApiError::Broken(error.to_string()),
            };
            landing::failed(&request, failed(reason))
        };
        let storage = self.storage_of(&config.name).await?;
        let volumes = definition.volumes_and_targets();
        let landing =
            prepared.opened((&self.care, &request, &storage), (&volumes, &definition.files), ended).await?;
        let log = log::of(Keeper::Docker, &id, &storage);
        Ok(Box::new(Begun { docker: self.clone(), starting, landing, log }))
    }

    /// Has Docker create a container, whoever waits for that; its ID.
    async fn create(
        &self,
        config: &ContainerConfig,
        name: &str,
        document: Value,
    ) -> Result<String, EngineError> {
        let failed = self.failed(&config.name, "create");
        let alone = Arc::clone(&self.creating).lock_owned().await;
        Record::change(config, |record| record.id.clear())?;
        let (docker, config, path) =
            (self.clone(), config.clone(), format!("/containers/create?name={name}"));
        let creating = tokio::spawn(async move {
            let _alone = alone;
            let failed = docker.failed(&config.name, "create");
            let created = docker.api.post(&path, Some(&document), CREATION).await.map_err(&failed)?;
            let Named { id } = serde_json::from_slice(&created).map_err(|error| failed(error.into()))?;
            if !is_id(&id) {
                return Err(failed(ApiError::Broken(format!("its ID is {id:?}"))));
            }
            Record::change(&config, |record| (record.id, record.owes_policy) = (id.clone(), true))?;
            Ok(id)
        });
        creating.await.unwrap_or_else(|error| Err(failed(ApiError::Broken(error.to_string()))))
    }

    /// Ends a start that is under way, and removes what was created for it.
    pub(super) async fn end_start(
        &self,
        config: &ContainerConfig,
        record: &Record,
    ) -> Result<(), EngineError> {
        if record.waiting.is_none() || record.token.is_empty() {
            return Ok(());
        }
        // One that is being created is known then.
        drop(self.creating.lock().await);
        let label =
            filtered("/containers/json?all=1&", "label", &format!("{ARRIVAL_LABEL}={}", record.token));
        let found: Vec<Named> = self.api.get(&label).await.map_err(self.failed(&config.name, "look for"))?;
        let known = Record::of(config)?.id;
        let created: BTreeSet<_> =
            found.into_iter().map(|found| found.id).chain([known]).filter(|id| is_id(id)).collect();
        for id in created {
            let place = self.care.place(&id);
            let removing = self.remove_it(config, &id);
            tokio::pin!(removing);
            loop {
                tokio::select! {
                    removed = &mut removing => {
                        removed?;
                        break;
                    }
                    // Docker does nothing else with a container while it starts.
                    () = tokio::time::sleep(START_LOOK) => {
                        landing::end_waiting(&place)
                            .map_err(|source| io_error(&config.name, "end its start".into(), source))?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[async_trait]
impl BegunRestore for Begun {
    fn charge(&self, pid: u32) -> Result<(), EngineError> {
        self.landing.charge(pid)
    }

    async fn finish(self: Box<Self>) -> Result<ContainerState, EngineError> {
        let Self { docker, starting, landing, log } = *self;
        let request = landing.request().clone();
        if starting.is_finished() {
            return Err(request.refused(
                "Docker has not waited for it; if dockerd was restarted meanwhile, begin the move again",
            ));
        }
        // Docker might rotate what the container writes from here on into its place.
        drop(landing.put_log(log).await);
        let landed = landing.go_on(None)?;
        let started = starting.await.unwrap_or_else(|error| Err(ApiError::Broken(error.to_string())));
        landed.put_away()?;
        let failed = docker.failed(&request.config.name, "start");
        started.map_err(|error| landing::failed(&request, failed(error)))?;
        landed.done().await
    }
}
