//! What Open vSwitch says, as any bytes: messages are the same however the stream is cut into reads, and a
//! flow that was read is the same when it is written and read again.
#![no_main]

use godwit_network::read_any_openflow;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u8, &[u8])| {
    let (piece, bytes) = input;
    read_any_openflow(bytes, usize::from(piece));
});
