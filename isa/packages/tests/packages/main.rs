//! Real programs under capture: their own tests with captures in place, journeys through both sets, and what they serve
//! and write while they move. `make test-isa-full` runs them, since building them takes minutes.

mod aria2;
mod busybox;
mod compress;
mod debugger;
mod gocr;
mod installed;
mod lua;
mod lua_suite;
mod redis;
mod served;
mod sqlite;
mod support;
mod threads;
