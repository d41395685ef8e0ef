//! An item of a tree from any bytes; what is read has the same bytes when it is read again.
#![no_main]

use godwit_engine::tree::Item;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(item) = Item::decode(bytes) {
        assert_eq!(Item::decode(&item.clone().encode()).expect("its own bytes"), item);
    }
});
