//! Text from the user to types.

use std::time::Duration;

use godwit_isa_state::Set;
use nix::sys::signal::Signal;

/// A word on the command line that cannot be understood.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ValueError {
    #[error("a time is a number and one of us, ms, s, m, such as 250ms")]
    Time,
    #[error("there is no such signal; name one such as USR1, SIGTERM or 10")]
    Signal,
    #[error("{0} cannot be used, since the kernel or the program's runtime needs it; take USR1 or USR2")]
    ReservedSignal(Signal),
    #[error("a set is one of x86_64, aarch64")]
    Set,
}

/// `250us`, `10ms`, `2s`, `5m`.
pub(crate) fn time(text: &str) -> Result<Duration, ValueError> {
    let split = text.find(|c: char| !c.is_ascii_digit()).ok_or(ValueError::Time)?;
    let (number, unit) = text.split_at(split);
    let microseconds = match unit {
        "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        _ => return Err(ValueError::Time),
    };
    let number: u64 = number.parse().map_err(|_| ValueError::Time)?;
    number.checked_mul(microseconds).map(Duration::from_micros).ok_or(ValueError::Time)
}

/// A signal by its name, with or without SIG, or by its number.
pub(crate) fn signal(text: &str) -> Result<Signal, ValueError> {
    let signal = match text.parse::<i32>() {
        Ok(number) => Signal::try_from(number).ok(),
        Err(_) => {
            let name = text.to_ascii_uppercase();
            let name = if name.starts_with("SIG") { name } else { format!("SIG{name}") };
            name.parse().ok()
        }
    };
    match signal.ok_or(ValueError::Signal)? {
        // They cannot be caught, or tell of a fault of whoever gets them.
        signal @ (Signal::SIGKILL
        | Signal::SIGSTOP
        | Signal::SIGILL
        | Signal::SIGFPE
        | Signal::SIGSEGV
        | Signal::SIGBUS
        | Signal::SIGTRAP
        | Signal::SIGABRT
        | Signal::SIGSYS
        | Signal::SIGCHLD) => Err(ValueError::ReservedSignal(signal)),
        signal => Ok(signal),
    }
}

/// An instruction set by its name.
pub(crate) fn set(text: &str) -> Result<Set, ValueError> {
    Set::ALL.into_iter().find(|set| set.name() == text).ok_or(ValueError::Set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        assert_eq!(time("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(time("10ms"), Ok(Duration::from_millis(10)));
        assert_eq!(time("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(time("5m"), Ok(Duration::from_secs(300)));
        for text in ["", "5", "s", "-1s", "1.5s", "1h", "99999999999999999999s", "18446744073709551615m"] {
            assert_eq!(time(text), Err(ValueError::Time), "{text}");
        }
    }

    #[test]
    fn signals_are_names_or_numbers_that_can_be_caught() {
        for text in ["USR1", "usr1", "SIGUSR1", "10"] {
            assert_eq!(signal(text), Ok(Signal::SIGUSR1), "{text}");
        }
        assert_eq!(signal("KILL"), Err(ValueError::ReservedSignal(Signal::SIGKILL)));
        assert_eq!(signal("11"), Err(ValueError::ReservedSignal(Signal::SIGSEGV)));
        for text in ["", "SIG", "0", "64", "-1", "USR3"] {
            assert_eq!(signal(text), Err(ValueError::Signal), "{text}");
        }
    }

    #[test]
    fn sets_have_the_names_of_uname() {
        assert_eq!(set("aarch64"), Ok(Set::Aarch64));
        assert_eq!(set("x86_64"), Ok(Set::X86_64));
        assert_eq!(set("arm64"), Err(ValueError::Set));
    }
}
