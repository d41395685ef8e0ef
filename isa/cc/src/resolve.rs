//! Which objects and members make the program: every object, and of the archives what is wanted.
//!
//! As lld does it, the order of archives does not matter, except that the first which defines a name is
//! taken for it. The C library comes last.

use crate::symbols::{Role, Unit};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The objects do not make a whole program.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// Names that nobody defines.
    #[error("{}", list_missing(.0))]
    Missing(Vec<Missing>),
    /// A name with two definitions.
    #[error("{name} is defined in {first} and in {second}")]
    Twice {
        /// The name.
        name: String,
        /// One that defines it.
        first: String,
        /// The other.
        second: String,
    },
    /// A name that is not the program's to define.
    #[error("{by} defines {name}: {why}")]
    Reserved {
        /// The name.
        name: String,
        /// Who defines it.
        by: String,
        /// What to do.
        why: &'static str,
    },
}

/// What the program may not define, since godwit's runtime does, under names that lead everybody there.
const RESERVED: &str = "__gw_";
/// Of the C library, yet part of the runtime: they are native code, which a program cannot replace.
const NATIVE: [&str; 5] = ["memcpy", "memmove", "memset", "memcmp", "bcmp"];

/// What is godwit's own among the units, and what it needs of them.
#[derive(Debug, Clone, Copy)]
pub struct Own<'a> {
    /// Units from this number on are the runtime and the C library.
    pub first: usize,
    /// The program can move: the native functions of the C library come with the runtime.
    pub moves: bool,
    /// Names that the runtime has besides.
    pub externals: &'a HashSet<&'a str>,
}

impl Own<'_> {
    /// Why the program may not define this name, if it may not.
    fn refuses(&self, name: &str) -> Option<&'static str> {
        if name.starts_with(RESERVED) {
            Some("names that begin with __gw_ are those of godwit's runtime: give it another one")
        } else if self.moves && NATIVE.contains(&name) {
            Some("godwit's runtime has this function for each instruction set: build without this one")
        } else {
            None
        }
    }
}

/// A name that is wanted and not there.
#[derive(Debug, PartialEq, Eq)]
pub struct Missing {
    /// The name.
    pub name: String,
    /// Who wants it.
    pub by: String,
}

/// A part that belongs to the program: the unit's number and the part's.
pub type Chosen = (usize, usize);

/// Names that no neutral program can have, and what to do.
const REFUSED: &[(&[&str], &str)] = &[
    (
        &["dlopen", "dlsym", "dlclose", "dlerror", "dladdr", "dlinfo", "dl_iterate_phdr"],
        "code that is loaded while a program runs has no neutral form: build without loadable modules, or link them in; or with -lgodwit-nodl, where it fails when it is called",
    ),
    (
        &[
            "__gxx_personality_v0",
            "__cxa_begin_catch",
            "__cxa_pure_virtual",
            "_Znwm",
            "_ZdlPvm",
            "_ZTVN10__cxxabiv117__class_type_infoE",
        ],
        "this is of the C++ library: link with godwit-cxx",
    ),
    (&["clone"], "a thread on a stack of the caller's own has no neutral form: use pthread_create"),
    (
        &["getcontext", "setcontext", "makecontext", "swapcontext"],
        "a saved set of registers has no neutral form (musl has none of these functions either)",
    ),
];

fn list_missing(missing: &[Missing]) -> String {
    let lines: Vec<String> = missing
        .iter()
        .map(|Missing { name, by }| match REFUSED.iter().find(|(names, _)| names.contains(&name.as_str())) {
            Some((_, reason)) => format!("{by} uses {name}: {reason}"),
            None => format!("undefined reference to '{name}', in {by}"),
        })
        .collect();
    lines.join("\n  ")
}

/// Chooses. `wanted` are names to begin with.
///
/// # Errors
/// When a name is missing, is defined twice, or is reserved.
pub fn resolve(
    units: &[Unit],
    whole: &HashSet<usize>,
    wanted: &[&str],
    own: Own<'_>,
) -> Result<Vec<Chosen>, ResolveError> {
    let mut state = State {
        units,
        own,
        defined: HashMap::new(),
        lazy: HashMap::new(),
        queue: Vec::new(),
        chosen: Vec::new(),
        taken: HashSet::new(),
    };
    for (number, unit) in units.iter().enumerate() {
        let take_all = !unit.is_archive || whole.contains(&number);
        for (part, contents) in unit.parts.iter().enumerate() {
            if take_all {
                state.take((number, part))?;
                continue;
            }
            for (name, role) in &contents.names {
                if matches!(role, Role::Defined | Role::WeaklyDefined) {
                    state.lazy.entry(name).or_insert((number, part));
                }
            }
        }
    }
    let by_godwit = "godwit's runtime".to_owned();
    for name in wanted {
        state.queue.push(((*name).to_owned(), by_godwit.clone()));
    }
    // The first one that wants a name is told; in the order of names, so that messages do not vary.
    let mut missing: BTreeMap<String, String> = BTreeMap::new();
    while let Some((name, by)) = state.queue.pop() {
        if state.defined.contains_key(name.as_str()) {
            continue;
        }
        match state.lazy.get(name.as_str()) {
            Some(part) => state.take(*part)?,
            // Only where no library has it: a function of the program's can be suspended.
            None if own.externals.contains(name.as_str()) => {}
            None => {
                missing.entry(name).or_insert(by);
            }
        }
    }
    if missing.is_empty() {
        state.chosen.sort_unstable();
        return Ok(state.chosen);
    }
    Err(ResolveError::Missing(missing.into_iter().map(|(name, by)| Missing { name, by }).collect()))
}

struct State<'units> {
    units: &'units [Unit],
    own: Own<'units>,
    /// Who defines a name, and whether nobody else may.
    defined: HashMap<&'units str, (Chosen, Role)>,
    /// The first member that would define it.
    lazy: HashMap<&'units str, Chosen>,
    /// Names to be found, and who wants them.
    queue: Vec<(String, String)>,
    chosen: Vec<Chosen>,
    taken: HashSet<Chosen>,
}

impl State<'_> {
    fn take(&mut self, part: Chosen) -> Result<(), ResolveError> {
        if !self.taken.insert(part) {
            return Ok(());
        }
        self.chosen.push(part);
        let unit = &self.units[part.0];
        for (name, role) in &unit.parts[part.1].names {
            if part.0 < self.own.first
                && matches!(role, Role::Defined | Role::WeaklyDefined)
                && let Some(why) = self.own.refuses(name)
            {
                return Err(ResolveError::Reserved { name: name.clone(), by: unit.label(part.1), why });
            }
            match role {
                Role::Wanted => self.queue.push((name.clone(), unit.label(part.1))),
                Role::WeaklyWanted => {}
                Role::Defined => {
                    if let Some((other, Role::Defined)) = self.defined.insert(name, (part, Role::Defined)) {
                        return Err(ResolveError::Twice {
                            name: name.clone(),
                            first: self.units[other.0].label(other.1),
                            second: unit.label(part.1),
                        });
                    }
                }
                Role::WeaklyDefined => {
                    self.defined.entry(name).or_insert((part, Role::WeaklyDefined));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive::Member;
    use crate::symbols::Part;

    fn part(member: Option<&str>, names: &[(&str, Role)]) -> Part {
        Part {
            member: member.map(|name| Member { name: name.to_owned(), range: 0..0 }),
            names: names.iter().map(|(name, role)| ((*name).to_owned(), *role)).collect(),
        }
    }

    fn object(path: &str, names: &[(&str, Role)]) -> Unit {
        Unit { path: path.into(), source: None, parts: vec![part(None, names)], is_archive: false }
    }

    fn archive(path: &str, members: &[(&str, &[(&str, Role)])]) -> Unit {
        let parts = members.iter().map(|(name, names)| part(Some(name), names)).collect();
        Unit { path: path.into(), source: None, parts, is_archive: true }
    }

    fn run(units: &[Unit], whole: &[usize], externals: &[&str]) -> Result<Vec<Chosen>, String> {
        run_before(units.len(), true, units, whole, externals)
    }

    /// Units from number `first` on are godwit's.
    fn run_before(
        first: usize,
        moves: bool,
        units: &[Unit],
        whole: &[usize],
        externals: &[&str],
    ) -> Result<Vec<Chosen>, String> {
        let own = Own { first, moves, externals: &externals.iter().copied().collect() };
        resolve(units, &whole.iter().copied().collect(), &["main"], own).map_err(|error| error.to_string())
    }

    use Role::{Defined, Wanted, WeaklyDefined, WeaklyWanted};

    #[test]
    fn members_are_taken_when_they_are_wanted_in_any_order_of_archives() {
        let units = [
            archive("b.a", &[("b1.o", &[("b", Defined)]), ("b2.o", &[("unused", Defined)])]),
            object("main.o", &[("main", Defined), ("a", Wanted)]),
            archive("a.a", &[("a1.o", &[("a", Defined), ("b", Wanted), ("kernel", Wanted)])]),
        ];
        assert_eq!(run(&units, &[], &["kernel"]), Ok(vec![(0, 0), (1, 0), (2, 0)]));
    }

    #[test]
    fn a_weak_reference_takes_nothing_and_a_whole_archive_takes_all() {
        let units = [
            object("main.o", &[("main", Defined), ("a", WeaklyWanted)]),
            archive("a.a", &[("a.o", &[("a", Defined)])]),
        ];
        assert_eq!(run(&units, &[], &[]), Ok(vec![(0, 0)]));
        assert_eq!(run(&units, &[1], &[]), Ok(vec![(0, 0), (1, 0)]));
    }

    #[test]
    fn the_program_s_own_definition_stands_before_the_library_s() {
        let units = [
            object("main.o", &[("main", Defined), ("malloc", Defined), ("free", Wanted)]),
            archive(
                "libc.a",
                &[("malloc.o", &[("malloc", Defined)]), ("free.o", &[("free", Defined), ("malloc", Wanted)])],
            ),
        ];
        assert_eq!(run(&units, &[], &[]), Ok(vec![(0, 0), (1, 1)]));
    }

    #[test]
    fn weak_definitions_give_way_and_two_strong_ones_are_an_error() {
        let mut units = vec![
            object("main.o", &[("main", Defined), ("hook", WeaklyDefined)]),
            object("hook.o", &[("hook", Defined)]),
        ];
        assert_eq!(run(&units, &[], &[]), Ok(vec![(0, 0), (1, 0)]));
        units.push(object("other.o", &[("hook", Defined)]));
        assert_eq!(run(&units, &[], &[]), Err("hook is defined in hook.o and in other.o".to_owned()));
    }

    #[test]
    fn names_of_the_runtime_are_refused_with_the_file_and_only_where_they_count() {
        let units = [
            object("main.o", &[("main", Defined), ("f", Wanted), ("__gw_syscall", Wanted)]),
            archive(
                "l.a",
                &[("f.o", &[("f", Defined), ("__gw_x", WeaklyDefined)]), ("g.o", &[("__gw_y", Defined)])],
            ),
            object("own.o", &[("__gw_syscall", Defined)]),
        ];
        let said = |first, moves, units: &[Unit]| run_before(first, moves, units, &[], &[]);
        let refused = "l.a(f.o) defines __gw_x: names that begin with __gw_ are those of godwit's runtime: give it another one";
        assert_eq!(said(2, true, &units[..3]), Err(refused.to_owned()));
        assert_eq!(said(1, true, &units[..3]), Ok(vec![(0, 0), (1, 0), (2, 0)]));
        let copy = [object("main.o", &[("main", Defined)]), object("copy.o", &[("memcpy", Defined)])];
        assert!(
            said(2, true, &copy)
                .is_err_and(|said| said.starts_with("copy.o defines memcpy: godwit's runtime has"))
        );
        // A plain program has them from an archive.
        assert_eq!(said(2, false, &copy), Ok(vec![(0, 0), (1, 0)]));
    }

    #[test]
    fn what_is_missing_is_told_with_who_wants_it_and_why_it_cannot_be() {
        let units = [
            object("main.o", &[("main", Defined), ("nowhere", Wanted), ("f", Wanted)]),
            archive("lib.a", &[("f.o", &[("f", Defined), ("dlopen", Wanted)])]),
        ];
        let message = run(&units, &[], &[]).err().unwrap_or_default();
        assert!(message.contains("undefined reference to 'nowhere', in main.o"), "{message}");
        assert!(message.contains("lib.a(f.o) uses dlopen: code that is loaded"), "{message}");
    }
}
