//! The credentials of a thread in the images, beside those that its container's definition lets it have.
//!
//! Whether a thread may have changed its user depends on what it could ever hold. Root of a container begins with
//! the bounding set; another user begins with nothing, and gains by set-id files and capabilities of files. Such
//! files come with the service, so whoever sends it chooses them: only where `no_new_privs` forbids their effect
//! says the definition what a user id can be. Supplementary groups change by CAP_SETGID alone.

use prost::Message;

use super::rights::Allowed;

/// Bits of `linux/capability.h`.
const SETGID: u32 = 6;
const SETUID: u32 = 7;
const SETPCAP: u32 = 8;

/// Securebits that take no capability: SECBIT_KEEP_CAPS, and those that forbid the caller to run files.
const FREE_SECUREBITS: u32 = 1 << 4 | 0xf00;

/// `creds_entry`.
#[derive(Clone, PartialEq, Eq, Message)]
pub(super) struct Credentials {
    #[prost(uint32, required, tag = "1")]
    pub(super) uid: u32,
    #[prost(uint32, required, tag = "2")]
    pub(super) gid: u32,
    #[prost(uint32, required, tag = "3")]
    pub(super) euid: u32,
    #[prost(uint32, required, tag = "4")]
    pub(super) egid: u32,
    #[prost(uint32, required, tag = "5")]
    pub(super) suid: u32,
    #[prost(uint32, required, tag = "6")]
    pub(super) sgid: u32,
    #[prost(uint32, required, tag = "7")]
    pub(super) fsuid: u32,
    #[prost(uint32, required, tag = "8")]
    pub(super) fsgid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    pub(super) inheritable: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    pub(super) permitted: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub(super) effective: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub(super) bounding: Vec<u32>,
    #[prost(uint32, required, tag = "13")]
    pub(super) securebits: u32,
    #[prost(uint32, repeated, packed = "false", tag = "14")]
    pub(super) groups: Vec<u32>,
    #[prost(uint32, optional, tag = "18")]
    pub(super) no_new_privileges: Option<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "19")]
    pub(super) ambient: Vec<u32>,
}

impl Allowed {
    /// Whether a process of the container can come to hold a capability.
    fn may_hold(&self, capability: u32) -> bool {
        let gains_nothing = self.no_new_privileges && self.uid != 0;
        self.capabilities >> capability & 1 != 0 && !gains_nothing
    }
}

/// What is more than allowed: verbs with their objects.
pub(super) fn excess(credentials: Option<&Credentials>, allowed: &Allowed) -> Vec<String> {
    let Some(credentials) = credentials else { return vec!["has no credentials in its image".into()] };
    let mut found: Vec<_> = capabilities(credentials, allowed).into_iter().collect();
    let Credentials { uid, gid, euid, egid, suid, sgid, fsuid, fsgid, securebits, .. } = *credentials;
    if allowed.no_new_privileges && !allowed.may_hold(SETUID) {
        let other = [uid, euid, suid, fsuid].into_iter().find(|id| *id != allowed.uid);
        found.extend(other.map(|id| {
            format!(
                "has the user id {id}, to which a process with the service's, {}, could never change",
                allowed.uid
            )
        }));
    }
    if allowed.no_new_privileges && !allowed.may_hold(SETGID) {
        let other = [gid, egid, sgid, fsgid].into_iter().find(|id| *id != allowed.gid);
        found.extend(other.map(|id| {
            format!(
                "has the group id {id}, to which a process with the service's, {}, could never change",
                allowed.gid
            )
        }));
    }
    if !allowed.may_hold(SETGID) {
        let other = credentials.groups.iter().find(|id| !allowed.groups.contains(id));
        found.extend(
            other.map(|id| format!("has the supplementary group {id} that the service was not given")),
        );
    }
    if securebits & !FREE_SECUREBITS != 0 && !allowed.may_hold(SETPCAP) {
        found.push(format!("has securebits {securebits:#x}, which need CAP_SETPCAP"));
    }
    if allowed.no_new_privileges && credentials.no_new_privileges.unwrap_or(0) == 0 {
        found.push("may gain privileges (no_new_privs is not set), which the service may not".into());
    }
    found
}

fn capabilities(credentials: &Credentials, allowed: &Allowed) -> Option<String> {
    let Credentials { inheritable, permitted, effective, bounding, ambient, .. } = credentials;
    let sets = [
        ("bounding", bounding),
        ("permitted", permitted),
        ("effective", effective),
        ("inheritable", inheritable),
        ("ambient", ambient),
    ];
    sets.into_iter().find_map(|(name, words)| {
        let low = words.first().copied().map_or(0, u64::from);
        let high = words.get(1).copied().map_or(0, u64::from);
        let more = (low | high << 32) & !allowed.capabilities;
        let beyond = words.iter().skip(2).any(|word| *word != 0);
        (more != 0 || beyond)
            .then(|| format!("has capabilities in its {name} set that the service was not given ({more:#x})"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A service of user 1000 in groups 1000 and 4, without any capability.
    fn bound() -> Allowed {
        Allowed { uid: 1000, gid: 1000, groups: vec![4], no_new_privileges: true, ..Allowed::default() }
    }

    fn of(id: u32) -> Credentials {
        Credentials {
            uid: id,
            gid: id,
            euid: id,
            egid: id,
            suid: id,
            sgid: id,
            fsuid: id,
            fsgid: id,
            groups: vec![4],
            no_new_privileges: Some(1),
            ..Credentials::default()
        }
    }

    #[test]
    fn who_can_gain_nothing_stays_who_it_was() {
        assert_eq!(excess(Some(&of(1000)), &bound()), Vec::<String>::new());
        type Spoil = fn(&mut Credentials);
        let spoilt: [(&str, Spoil); 14] = [
            ("the user id 0", |c| c.uid = 0),
            ("the user id 0", |c| c.euid = 0),
            ("the user id 0", |c| c.suid = 0),
            ("the user id 0", |c| c.fsuid = 0),
            ("the group id 0", |c| c.gid = 0),
            ("the group id 0", |c| c.egid = 0),
            ("the group id 0", |c| c.sgid = 0),
            ("the group id 0", |c| c.fsgid = 0),
            ("the supplementary group 6", |c| c.groups.push(6)),
            ("securebits 0x1,", |c| c.securebits = 1),
            ("securebits 0x1010,", |c| c.securebits = 0x1010),
            ("no_new_privs is not set", |c| c.no_new_privileges = None),
            ("no_new_privs is not set", |c| c.no_new_privileges = Some(0)),
            ("its ambient set", |c| c.ambient = vec![0x80]),
        ];
        for (words, spoil) in spoilt {
            let mut credentials = of(1000);
            spoil(&mut credentials);
            let found = excess(Some(&credentials), &bound());
            assert!(matches!(&found[..], [one] if one.contains(words)), "{words}: {found:?}");
        }
        assert_eq!(excess(None, &bound()), ["has no credentials in its image"]);
    }

    #[test]
    fn who_could_change_its_user_may_have_done_so() {
        let all = 1 << SETUID | 1 << SETGID | 1 << SETPCAP;
        let changed = || Credentials { groups: vec![7, 8], securebits: 0x2f, ..of(33) };
        // Root that was given the capabilities, also where files add nothing; another user by a set-user-ID file.
        let root = Allowed { uid: 0, gid: 0, groups: vec![], capabilities: all, ..bound() };
        assert_eq!(excess(Some(&changed()), &root), Vec::<String>::new());
        let user = Allowed { capabilities: all, no_new_privileges: false, ..bound() };
        let credentials = Credentials { no_new_privileges: None, ..changed() };
        assert_eq!(excess(Some(&credentials), &user), Vec::<String>::new());
        // Such a file changes the user without any capability, but gives no groups and no securebits.
        let user = Allowed { no_new_privileges: false, ..bound() };
        assert_eq!(excess(Some(&of(0)), &user), Vec::<String>::new());
        let found = excess(Some(&changed()), &user);
        assert!(found[0].contains("group 7") && found[1].contains("securebits"), "{found:?}");
        // A capability in a set does not help a process that can never gain it.
        let user = Allowed { capabilities: all, ..bound() };
        assert_eq!(excess(Some(&changed()), &user).len(), 4);
        // What takes no capability.
        let free = Credentials { securebits: 0x510, ..of(1000) };
        assert_eq!(excess(Some(&free), &bound()), Vec::<String>::new());
    }
}
