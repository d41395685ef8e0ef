//! What source and destination say: any payload of any kind. What is understood keeps its meaning
//! when it is said again. And the service's description inside.
#![no_main]

use bytes::Bytes;
use godwit_migration::Service;
use godwit_migration::message::Message;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &[u8])| {
    let (kind, payload) = (u16::from(input.0), Bytes::copy_from_slice(input.1));
    if let Ok(message) = Message::decode(kind, payload) {
        assert_eq!(message.kind(), kind);
        assert_eq!(Message::decode(kind, message.payload()).expect("its own bytes"), message);
        if let Message::Open(open) = message {
            let _ = serde_json::from_str::<Service>(&open.service);
        }
    }
    if let Ok(service) = serde_json::from_slice::<Service>(input.1) {
        let text = serde_json::to_string(&service).expect("JSON");
        assert_eq!(serde_json::from_str::<Service>(&text).expect("its own JSON"), service);
        let _ = service.endpoints();
    }
});
