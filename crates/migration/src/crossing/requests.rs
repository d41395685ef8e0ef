//! What processes are asked for (`isa/ABI.md`, section 7): to come to rest, and to go on in place.

use godwit_crossing::{Record, RecordError, Request};
use godwit_isa_plan::RECORD;
use godwit_memory::process::{Process as Handle, ProcessError};

/// What a process says about rest, with the bytes in its memory; without any where there are none.
pub(crate) fn record_of(process: &Handle) -> Result<(Result<Record, RecordError>, Vec<u8>), ProcessError> {
    let mut bytes = [0; Record::BYTES];
    // In a program of another kind nothing is there, or something else.
    if process.read(RECORD, &mut bytes)? < bytes.len() {
        return Ok((Err(RecordError::Foreign), Vec::new()));
    }
    let record = Record::decode(&bytes);
    let bytes = if record == Err(RecordError::Foreign) { Vec::new() } else { bytes.to_vec() };
    Ok((record, bytes))
}

/// Whether a request waits for it in the kernel. One that is at rest has heard all of them a moment after they came.
pub(crate) fn has_unheard(process: &Handle) -> Result<bool, ProcessError> {
    process.is_pending(Request::SIGNAL)
}

/// What a frozen process needs to come to rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToRest {
    /// Nothing: it is.
    AtRest,
    /// To be asked for the rest of this number.
    Ask(u32),
    /// It is asked, or does not listen yet.
    Wait,
    /// There is no number left.
    Never,
}

impl ToRest {
    pub(crate) fn of(record: &Record, has_unheard: bool) -> Self {
        match record {
            Record { rest: Some(_), .. } if !has_unheard => Self::AtRest,
            // What is in its queue may be that request, and once more would need more room there.
            _ if has_unheard || record.is_asked() || !record.ready => Self::Wait,
            record => record.next().map_or(Self::Never, Self::Ask),
        }
    }
}

/// What a process needs to go on in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToGoOn {
    /// Nothing: no rest is under way.
    Goes,
    /// To be told to go on from the rest of this number. Whether it does is seen later.
    Tell(u32),
    /// It does not listen yet, and will hear a request then.
    Wait,
}

impl ToGoOn {
    pub(crate) fn of(record: &Record, has_unheard: bool) -> Self {
        let number = match record {
            record if record.is_asked() => u32::try_from(record.asked).ok(),
            // It may be the next rest that waits to be heard; a higher one is told of when that is heard.
            Record { ready: true, .. } if has_unheard => record.next(),
            _ if has_unheard => return Self::Wait,
            _ => return Self::Goes,
        };
        number.map_or(Self::Goes, Self::Tell)
    }
}

/// Asks a process to come to rest. The kernel may have no room for a further signal (EAGAIN).
pub(crate) fn ask_to_rest(process: &Handle, number: u32) -> Result<(), ProcessError> {
    process.queue(Request::SIGNAL, Request::CODE, Request::Rest(number).value())
}

/// Has a process go on in place. Whether nothing is left to do for that.
pub(crate) fn tell_to_go_on(process: &Handle) -> Result<bool, ProcessError> {
    let (Ok(record), _) = record_of(process)? else { return Ok(true) };
    match ToGoOn::of(&record, has_unheard(process)?) {
        ToGoOn::Goes => Ok(true),
        ToGoOn::Wait => Ok(false),
        ToGoOn::Tell(number) => {
            let told = process.queue(Request::SIGNAL, Request::CODE, Request::GoOn(number).value());
            match told {
                // Its user has too many signals queued. One without a value needs no room, and says the same.
                Err(ProcessError::Io { source, .. }) if source.raw_os_error() == Some(libc::EAGAIN) => {
                    process.signal(Request::SIGNAL)?;
                }
                told => told?,
            }
            Ok(false)
        }
    }
}

#[cfg(test)]
mod tests {
    use godwit_crossing::Rest;
    use std::time::Duration;

    use super::*;

    fn record(asked: u64, over: u64) -> Record {
        Record { identity: [0; 32], ready: true, rest: None, asked, over }
    }

    fn at_rest(number: u64, over: u64) -> Record {
        let rest = Rest { number, threads: 1, park_time: Duration::ZERO };
        Record { rest: Some(rest), ..record(number, over) }
    }

    #[test]
    fn a_process_is_asked_once_for_the_next_rest() {
        let early = Record { ready: false, ..record(0, 0) };
        for (record, has_unheard, due) in [
            (record(0, 0), false, ToRest::Ask(1)),
            (record(3, 3), false, ToRest::Ask(4)),
            (record(4, 3), false, ToRest::Wait),
            (record(3, 3), true, ToRest::Wait),
            (at_rest(4, 3), false, ToRest::AtRest),
            // What it has not heard may have it go on.
            (at_rest(4, 3), true, ToRest::Wait),
            (early, false, ToRest::Wait),
            (record(u64::MAX, u64::MAX), false, ToRest::Never),
        ] {
            assert_eq!(ToRest::of(&record, has_unheard), due, "{record:?} {has_unheard}");
        }
    }

    #[test]
    fn whatever_was_asked_for_is_taken_back() {
        let early = Record { ready: false, ..record(0, 0) };
        for (record, has_unheard, due) in [
            (record(3, 3), false, ToGoOn::Goes),
            (early, false, ToGoOn::Goes),
            // Asked, and not heard yet; by a former program of another count, too.
            (record(3, 3), true, ToGoOn::Tell(4)),
            (early, true, ToGoOn::Wait),
            // On its way, and there.
            (record(5, 0), false, ToGoOn::Tell(5)),
            (at_rest(5, 4), false, ToGoOn::Tell(5)),
            (at_rest(5, 4), true, ToGoOn::Tell(5)),
        ] {
            assert_eq!(ToGoOn::of(&record, has_unheard), due, "{record:?} {has_unheard}");
        }
    }
}
