//! What users change of a container in godwit's care by its engine's own commands (`docker rename`, `docker update`): a move
//! takes it along, as the engine has it when the move begins.

use godwit_engine::{EngineError, Kept};
use godwit_migration::Service;
use tonic::Status;

use crate::adopt::refused;
use crate::node::Node;

/// The service as its engine has it now.
pub(crate) async fn taken_over(node: &Node, service: Service) -> Result<Service, Status> {
    let Some(kept) = &service.kept else { return Ok(service) };
    let renewed = match node.keeper(kept).renewed(&node.local().config(&service)).await {
        Ok(renewed) => renewed,
        // What has become of it is said where its processes are looked at.
        Err(EngineError::NotFound(_)) => return Ok(service),
        Err(error) => return Err(refused(error)),
    };
    Ok(Service {
        memory_bytes: renewed.memory_bytes,
        cpu_millis: renewed.cpu_millis,
        kept: Some(Kept { definition: renewed.definition, ..kept.clone() }),
        ..service
    })
}
