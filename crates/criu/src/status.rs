//! The text of `/proc/PID/status`.

/// A field of the text, without the white space around it.
pub(crate) fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
}

/// Whether a filter of system calls (seccomp) restricts the process with this text.
pub(crate) fn has_filter(text: &str) -> bool {
    field(text, "Seccomp").is_some_and(|mode| mode != "0")
}

/// The last number of a field that has one for each PID namespace: that of the innermost.
pub(crate) fn innermost(text: &str, name: &str) -> Option<u32> {
    field(text, name)?.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "Name:\tx\nNSpid:\t4711\t12\t3\nNSsid:\t\n";
        assert_eq!((field(text, "Name"), field(text, "NSp")), (Some("x"), None));
        assert!(
            has_filter("Name:\tx\nSeccomp:\t2\n") && !has_filter("Seccomp:\t0") && !has_filter("Name:\tx")
        );
        assert_eq!((innermost(text, "NSpid"), innermost(text, "NSsid")), (Some(3), None));
    }
}
