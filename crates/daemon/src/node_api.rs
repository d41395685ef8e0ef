//! The node's API on its unix socket: thin, every verb's work is in the module of its name.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use godwit_api::v1 as api;
use godwit_api::v1::node_server::Node as NodeApi;
use tokio_stream::wrappers::{BroadcastStream, ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use crate::convert::service_name;
use crate::follow::policy;
use crate::network::{cluster_networks, inspect};
use crate::node::Node;
use crate::services;
use crate::status::internal;
use crate::{
    add_platform, adopt, candidate, capture, checkpoint, connections, copy, cordon, directory, doctor, drain,
    exec, images, join, layers, logs, made_by, migrate, network_changes, place, prepare, removals, restart,
    restore, stats, update, volumes, wait,
};

/// Time between SIGTERM and SIGKILL when the user gives none; as Podman's.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves one node's API.
pub(crate) struct NodeService(pub Arc<Node>);

type Out<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn stop_timeout(request: &api::StopRequest) -> Duration {
    match request.timeout_ms {
        0 => STOP_TIMEOUT,
        ms => Duration::from_millis(ms.into()),
    }
}

#[tonic::async_trait]
impl NodeApi for NodeService {
    type CaptureStream = Out<api::CaptureEvent>;
    type LogsStream = Out<api::LogEntry>;
    type ExecStream = Out<api::ExecOutput>;
    type CopyOutStream = Out<api::CopyOutput>;
    type CheckpointStream = Out<api::CheckpointOutput>;
    type MigrateStream = Out<api::MigrationEvent>;
    type DrainStream = Out<api::DrainEvent>;
    type EventsStream = Out<api::Event>;

    async fn run(&self, request: Request<api::RunRequest>) -> Result<Response<api::Service>, Status> {
        // In a task of its own: a client that goes away must not leave a service half made.
        let node = Arc::clone(&self.0);
        let made = tokio::spawn(async move {
            let request = request.into_inner();
            match made_by::keeper(&request)? {
                Some(keeper) => made_by::run(&node, keeper, request).await,
                None => services::run(&node, request).await,
            }
        });
        Ok(Response::new(made.await.map_err(internal)??))
    }

    async fn run_by_engine(
        &self,
        request: Request<api::RunRequest>,
    ) -> Result<Response<api::Service>, Status> {
        self.run(request).await
    }

    async fn adopt(&self, request: Request<api::AdoptRequest>) -> Result<Response<api::Service>, Status> {
        // As above.
        let node = Arc::clone(&self.0);
        let adopted = tokio::spawn(async move { adopt::adopt(&node, request.into_inner()).await });
        Ok(Response::new(adopted.await.map_err(internal)??))
    }

    async fn list(&self, request: Request<api::ListRequest>) -> Result<Response<api::ListResponse>, Status> {
        let services = services::list(&self.0, request.into_inner().all).await?;
        Ok(Response::new(api::ListResponse { services }))
    }

    async fn inspect(&self, request: Request<api::ServiceRequest>) -> Result<Response<api::Service>, Status> {
        let name = service_name(&request.into_inner().name)?;
        Ok(Response::new(services::inspect(&self.0, &name).await?))
    }

    async fn connections(
        &self,
        request: Request<api::ServiceRequest>,
    ) -> Result<Response<api::ConnectionsResponse>, Status> {
        let name = service_name(&request.into_inner().name)?;
        Ok(Response::new(connections::anywhere(&self.0, &name).await?))
    }

    async fn capture(
        &self,
        request: Request<api::CaptureRequest>,
    ) -> Result<Response<Self::CaptureStream>, Status> {
        let events = capture::everywhere(&self.0, request.into_inner()).await?;
        Ok(Response::new(ReceiverStream::new(events).boxed()))
    }

    async fn logs(&self, request: Request<api::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        Ok(Response::new(logs::stream(&self.0, request.into_inner()).await?))
    }

    async fn exec(
        &self,
        request: Request<Streaming<api::ExecInput>>,
    ) -> Result<Response<Self::ExecStream>, Status> {
        Ok(Response::new(exec::start(&self.0, request.into_inner()).await?))
    }

    async fn stop(&self, request: Request<api::StopRequest>) -> Result<Response<api::Service>, Status> {
        let request = request.into_inner();
        let (name, timeout) = (service_name(&request.name)?, stop_timeout(&request));
        let node = Arc::clone(&self.0);
        let ended = tokio::spawn(async move { services::stop(&node, &name, timeout).await });
        Ok(Response::new(ended.await.map_err(internal)??))
    }

    async fn start(&self, request: Request<api::ServiceRequest>) -> Result<Response<api::Service>, Status> {
        let name = service_name(&request.into_inner().name)?;
        let node = Arc::clone(&self.0);
        let started = tokio::spawn(async move { restart::start(&node, &name).await });
        Ok(Response::new(started.await.map_err(internal)??))
    }

    async fn restart(&self, request: Request<api::StopRequest>) -> Result<Response<api::Service>, Status> {
        let request = request.into_inner();
        let (name, timeout) = (service_name(&request.name)?, stop_timeout(&request));
        let node = Arc::clone(&self.0);
        let started = tokio::spawn(async move { restart::restart(&node, &name, timeout).await });
        Ok(Response::new(started.await.map_err(internal)??))
    }

    async fn kill(&self, request: Request<api::KillRequest>) -> Result<Response<api::Service>, Status> {
        let api::KillRequest { name, signal } = request.into_inner();
        Ok(Response::new(services::kill(&self.0, &service_name(&name)?, signal).await?))
    }

    async fn wait(&self, request: Request<api::WaitRequest>) -> Result<Response<api::WaitResponse>, Status> {
        let name = service_name(&request.into_inner().name)?;
        Ok(Response::new(wait::anywhere(&self.0, &name).await?))
    }

    async fn copy_in(
        &self,
        request: Request<Streaming<api::CopyInput>>,
    ) -> Result<Response<api::CopyInResponse>, Status> {
        Ok(Response::new(copy::into(&self.0, request.into_inner()).await?))
    }

    async fn copy_out(
        &self,
        request: Request<api::CopyOutRequest>,
    ) -> Result<Response<Self::CopyOutStream>, Status> {
        Ok(Response::new(copy::out(&self.0, request.into_inner()).await?))
    }

    async fn checkpoint(
        &self,
        request: Request<Streaming<api::CheckpointInput>>,
    ) -> Result<Response<Self::CheckpointStream>, Status> {
        Ok(Response::new(checkpoint::checkpoint(&self.0, request.into_inner()).await?))
    }

    async fn restore(
        &self,
        request: Request<Streaming<api::RestoreInput>>,
    ) -> Result<Response<api::Service>, Status> {
        // As above.
        let node = Arc::clone(&self.0);
        let restored = tokio::spawn(async move { restore::restore(&node, request.into_inner()).await });
        Ok(Response::new(restored.await.map_err(internal)??))
    }

    async fn stats(
        &self,
        request: Request<api::StatsRequest>,
    ) -> Result<Response<api::StatsResponse>, Status> {
        Ok(Response::new(stats::stats(&self.0, request.into_inner()).await?))
    }

    async fn update(&self, request: Request<api::UpdateRequest>) -> Result<Response<api::Service>, Status> {
        // In a task of its own: a client that goes away must not leave limits that nobody has recorded.
        let node = Arc::clone(&self.0);
        let updated = tokio::spawn(async move { update::update(&node, request.into_inner()).await });
        Ok(Response::new(updated.await.map_err(internal)??))
    }

    async fn remove(
        &self,
        request: Request<api::RemoveRequest>,
    ) -> Result<Response<api::RemoveResponse>, Status> {
        let api::RemoveRequest { name, force } = request.into_inner();
        let name = service_name(&name)?;
        let node = Arc::clone(&self.0);
        let removed = tokio::spawn(async move { services::remove(&node, &name, force).await });
        removed.await.map_err(internal)??;
        Ok(Response::new(api::RemoveResponse {}))
    }

    type PrepareStream = Out<api::MigrationEvent>;
    async fn prepare(
        &self,
        request: Request<api::MigrateRequest>,
    ) -> Result<Response<Self::PrepareStream>, Status> {
        let events = prepare::start_anywhere(&self.0, request.into_inner()).await?;
        Ok(Response::new(ReceiverStream::new(events).boxed()))
    }

    async fn migrate(
        &self,
        request: Request<api::MigrateRequest>,
    ) -> Result<Response<Self::MigrateStream>, Status> {
        let events = migrate::start_anywhere(&self.0, request.into_inner()).await?;
        Ok(Response::new(ReceiverStream::new(events).boxed()))
    }

    async fn check_move(
        &self,
        request: Request<api::CheckMoveRequest>,
    ) -> Result<Response<api::CheckMoveResponse>, Status> {
        Ok(Response::new(candidate::or_service(&self.0, request.into_inner()).await?))
    }

    async fn place(
        &self,
        request: Request<api::PlaceRequest>,
    ) -> Result<Response<api::PlaceResponse>, Status> {
        Ok(Response::new(place::anywhere(&self.0, request.into_inner()).await?))
    }

    async fn policy(
        &self,
        request: Request<api::PolicyRequest>,
    ) -> Result<Response<api::PolicyResponse>, Status> {
        Ok(Response::new(policy::anywhere(&self.0, request.into_inner()).await?))
    }

    async fn cancel(
        &self,
        request: Request<api::ServiceRequest>,
    ) -> Result<Response<api::CancelResponse>, Status> {
        let name = service_name(&request.into_inner().name)?;
        Ok(Response::new(migrate::cancel_anywhere(&self.0, &name).await?))
    }

    async fn resolve(
        &self,
        request: Request<api::ResolveRequest>,
    ) -> Result<Response<api::ResolveResponse>, Status> {
        let request = request.into_inner();
        services::resolve(&self.0, &service_name(&request.name)?, request.own)?;
        Ok(Response::new(api::ResolveResponse {}))
    }

    async fn nodes(&self, _: Request<api::NodesRequest>) -> Result<Response<api::NodesResponse>, Status> {
        let nodes = directory::nodes(&self.0).map_err(internal)?;
        Ok(Response::new(api::NodesResponse { nodes }))
    }

    async fn events(
        &self,
        request: Request<api::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let request = request.into_inner();
        // Listening starts before the past is read, so that no event is missed.
        let live = self.0.events.listen();
        let past = self.0.state.events(request.since_ms).map_err(internal)?;
        let newest = past.last().map_or(0, |event| event.time_ms);
        let seen: Vec<api::Event> = past.iter().filter(|event| event.time_ms == newest).cloned().collect();
        let past = futures::stream::iter(past.into_iter().map(Ok));
        if !request.follow {
            return Ok(Response::new(past.boxed()));
        }
        let live = BroadcastStream::new(live).filter_map(move |event| {
            let event = match event {
                Ok(event) if event.time_ms < newest || seen.contains(&event) => None,
                Ok(event) => Some(Ok(event)),
                Err(lost) => Some(Err(Status::data_loss(format!("this listener is too slow: {lost}")))),
            };
            futures::future::ready(event)
        });
        Ok(Response::new(past.chain(live).boxed()))
    }

    async fn doctor(&self, _: Request<api::DoctorRequest>) -> Result<Response<api::DoctorResponse>, Status> {
        let checks = doctor::examine(&self.0).await;
        Ok(Response::new(api::DoctorResponse { node: self.0.name.clone(), checks }))
    }

    async fn network_inspect(
        &self,
        request: Request<api::NetworkInspectRequest>,
    ) -> Result<Response<api::NetworkInfo>, Status> {
        Ok(Response::new(inspect::inspect(&self.0, &request.into_inner().name).await?))
    }

    async fn network_create(
        &self,
        request: Request<api::NetworkCreateRequest>,
    ) -> Result<Response<api::Network>, Status> {
        // In a task of its own: a client that goes away must not leave a network half made.
        let node = Arc::clone(&self.0);
        let made = tokio::spawn(async move { network_changes::create(&node, request.into_inner()).await });
        Ok(Response::new(made.await.map_err(internal)??))
    }

    async fn network_list(
        &self,
        _: Request<api::NetworkListRequest>,
    ) -> Result<Response<api::NetworkListResponse>, Status> {
        Ok(Response::new(api::NetworkListResponse { networks: cluster_networks::list(&self.0)? }))
    }

    async fn network_remove(
        &self,
        request: Request<api::NetworkRemoveRequest>,
    ) -> Result<Response<api::NetworkRemoveResponse>, Status> {
        let node = Arc::clone(&self.0);
        let removed =
            tokio::spawn(async move { network_changes::remove(&node, &request.into_inner().name).await });
        removed.await.map_err(internal)??;
        Ok(Response::new(api::NetworkRemoveResponse {}))
    }

    async fn image_list(
        &self,
        _: Request<api::ImageListRequest>,
    ) -> Result<Response<api::ImageListResponse>, Status> {
        let (layers, images) = (layers::list(&self.0).await?, images::list(&self.0).await?);
        Ok(Response::new(api::ImageListResponse { layers, images }))
    }

    async fn image_add(
        &self,
        request: Request<api::ImageAddRequest>,
    ) -> Result<Response<api::Image>, Status> {
        Ok(Response::new(images::add(&self.0, request.into_inner()).await?))
    }

    async fn image_add_platform(
        &self,
        request: Request<api::ImageAddPlatformRequest>,
    ) -> Result<Response<api::ImageAddPlatformResponse>, Status> {
        Ok(Response::new(add_platform::add_platform(&self.0, request.into_inner()).await?))
    }

    async fn image_remove(
        &self,
        request: Request<api::ImageRemoveRequest>,
    ) -> Result<Response<api::ImageRemoveResponse>, Status> {
        Ok(Response::new(layers::remove(&self.0, &request.into_inner().layers).await?))
    }

    async fn volume_create(
        &self,
        request: Request<api::VolumeCreateRequest>,
    ) -> Result<Response<api::Volume>, Status> {
        Ok(Response::new(volumes::create(&self.0, &request.into_inner().name).await?))
    }

    async fn volume_list(
        &self,
        _: Request<api::VolumeListRequest>,
    ) -> Result<Response<api::VolumeListResponse>, Status> {
        Ok(Response::new(api::VolumeListResponse { volumes: volumes::list(&self.0).await? }))
    }

    async fn volume_remove(
        &self,
        request: Request<api::VolumeRemoveRequest>,
    ) -> Result<Response<api::VolumeRemoveResponse>, Status> {
        volumes::remove(&self.0, &request.into_inner().name).await?;
        Ok(Response::new(api::VolumeRemoveResponse {}))
    }

    async fn cordon(
        &self,
        request: Request<api::CordonRequest>,
    ) -> Result<Response<api::CordonResponse>, Status> {
        Ok(Response::new(cordon::anywhere(&self.0, request.into_inner()).await?))
    }

    async fn drain(
        &self,
        request: Request<api::DrainRequest>,
    ) -> Result<Response<Self::DrainStream>, Status> {
        let events = drain::anywhere(&self.0, request.into_inner()).await?;
        Ok(Response::new(ReceiverStream::new(events).boxed()))
    }

    async fn create_token(
        &self,
        request: Request<api::CreateTokenRequest>,
    ) -> Result<Response<api::CreateTokenResponse>, Status> {
        let token = join::create_token(&self.0, &request.into_inner())?;
        Ok(Response::new(api::CreateTokenResponse { token }))
    }

    async fn remove_node(
        &self,
        request: Request<api::RemoveNodeRequest>,
    ) -> Result<Response<api::RemoveNodeResponse>, Status> {
        // In a task of its own: a client that goes away must not leave a node half removed.
        let node = Arc::clone(&self.0);
        let removed = tokio::spawn(async move { removals::remove(&node, &request.into_inner().node).await });
        let services = removed.await.map_err(internal)??;
        Ok(Response::new(api::RemoveNodeResponse { services }))
    }
}
