//! Each fuzz target with random bytes of all lengths: less than a fuzzer finds (`make fuzz`), and in seconds. `GODWIT_FUZZ_SEED`
//! makes them others, `GODWIT_FUZZ_INPUTS` more or fewer.
#![allow(clippy::unwrap_used, missing_docs)]
// Of inputs: their shape is what they are.
#![allow(clippy::large_enum_variant, clippy::type_complexity)]

// The targets take its macro from here.
extern crate godwit_fuzz as libfuzzer_sys;

use std::sync::{Mutex, PoisonError};

/// Inputs for each target.
const INPUTS: usize = 2000;

/// Longest input in bytes.
const LONGEST: usize = 4096;

/// Targets work in directories of their own, and a process has one at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn give(target: &str, run: fn(&[u8])) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let number = |name: &str| std::env::var(name).ok().map(|number| number.parse().unwrap());
    let seed = number("GODWIT_FUZZ_SEED").unwrap_or(1);
    let inputs = number("GODWIT_FUZZ_INPUTS").map_or(INPUTS, |inputs| usize::try_from(inputs).unwrap());
    println!("{target}: to repeat: GODWIT_FUZZ_SEED={seed} GODWIT_FUZZ_INPUTS={inputs}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..inputs {
        // As many short ones as long ones.
        let bits = random.u32(..=LONGEST.ilog2());
        let length = random.usize(..=1 << bits);
        let bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(length).collect();
        run(&bytes);
    }
}

macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        /// The names of all of them.
        const NAMES: &[&str] = &[$(stringify!($name)),*];
        mod random {
            $( #[test] fn $name() { super::give(stringify!($name), super::$name::run); } )*
        }
    };
}

tests! {
    checkpoint,
    cluster_records,
    copied_in,
    copied_out,
    criu_images,
    crossing,
    crossing_images,
    dns,
    docker,
    frames,
    image_archive,
    images,
    isa_state,
    join_messages,
    join_token,
    layer,
    message,
    oci_archive,
    openflow,
    pages,
    podman,
    small_tar,
    tree,
    tree_item,
}

#[test]
fn no_target_is_left_out() {
    let all = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/fuzz_targets")).unwrap();
    let mut all: Vec<_> = all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    assert_eq!(all, NAMES.iter().map(|name| format!("{name}.rs")).collect::<Vec<_>>());
}

#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/checkpoint.rs"]
mod checkpoint;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/cluster_records.rs"]
mod cluster_records;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/copied_in.rs"]
mod copied_in;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/copied_out.rs"]
mod copied_out;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/criu_images.rs"]
mod criu_images;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/crossing.rs"]
mod crossing;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/crossing_images.rs"]
mod crossing_images;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/dns.rs"]
mod dns;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/docker.rs"]
mod docker;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/frames.rs"]
mod frames;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/image_archive.rs"]
mod image_archive;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/images.rs"]
mod images;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/isa_state.rs"]
mod isa_state;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/join_messages.rs"]
mod join_messages;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/join_token.rs"]
mod join_token;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/layer.rs"]
mod layer;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/message.rs"]
mod message;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/oci_archive.rs"]
mod oci_archive;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/openflow.rs"]
mod openflow;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/pages.rs"]
mod pages;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/podman.rs"]
mod podman;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/small_tar.rs"]
mod small_tar;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/tree.rs"]
mod tree;
#[allow(unused_attributes)]
#[path = "../../../fuzz/fuzz_targets/tree_item.rs"]
mod tree_item;
